"""A real batch: measured costs, a plan, and its results, compared with round-robin; then the gate,
at every tau.

    python benchmarks/batch.py [--pool FILE] [--questions N] [--sizes N,N,...] [--rounds N] [--json]
                               [--live MODEL [--restarts N]]

Every round profiles the pool, on questions that are not asked again, then runs the proposers by
both plans, in turn, each in a folder of its own: engines start, answer and end as in any batch. A
machine's speed drifts, so that a profile tells most of what is run right after it. Both plans are
kept to; the third run takes and replans prompts (`moved`).

    predicted_s, measured_s   the proposers' stage, medians over the rounds
    error                     measured over predicted, less 1, median over the rounds; and the
    rounds' range speedup                   round-robin's measured stage over this one's, median
    over the rounds interval                  of that median, at least 95 %, of order statistics;
    the range for fewer than 6 rounds

At the end the aggregator answers everything and, with the same drafts, what the gate leaves to it:
in every round, and in every other one in the opposite order, as a machine's speed drifts.

    skipped      share of the questions that need no aggregator; of its output tokens: tokens_spared
    right        with the 95 % interval; lost: points against the aggregator that is always asked
    stage_s      the aggregator's stage, its engine's start included, median over the rounds; and
    the rounds' range

`--live MODEL` measures workers whose engines stay up instead. The proposers are three copies of the
folder MODEL, so that weights are swapped between them. Model k answers every k-th question: the
first is the popular one. Engines are started once. A round is a profile and both plans that are
kept to, in alternating order; before each run all workers load a fourth copy, so that none holds
what it needs. `--restarts N` adds rounds in which every load starts an engine, as for models of
several shapes, at the last profile's other costs.

    load                      what loads were, and their median
    work_per_load             what a model's prompts take over what its load takes, by the profile:
    the least of the
                              models, median over the rounds
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from math import comb
from pathlib import Path
from time import monotonic

from report import Row, report

from shell_router.batch.journal import open_journal
from shell_router.batch.planner import HEURISTICS, BatchPlan, Workload, plan
from shell_router.batch.pool import ALWAYS, Pool, PoolModel, load_pool
from shell_router.batch.pool_run import profile_pool, run_pool
from shell_router.batch.profile import Load, PoolProfile
from shell_router.batch.prompts import Batch
from shell_router.batch.questions import Questions, read_questions
from shell_router.batch.run import BatchReport, PoolRun
from shell_router.batch.sessions import Follow, Workers, load_on_workers, profile_model
from shell_router.batch.workers import open_workers
from shell_router.core.statistics import estimate_paired_difference, wilson

ROOT = Path(__file__).parents[1]
PLANNERS: dict[str, tuple[Callable[[Workload], BatchPlan], bool]] = {
    "ilp": (plan, False),
    "ilp, prompts move": (plan, True),
    "round-robin": (HEURISTICS["round-robin"], False),
}
"""And whether prompts may move."""
KEPT = [name for name, (_, moves) in PLANNERS.items() if not moves]
CALIBRATION = ROOT / "models/data/calibration.jsonl"
TEST = ROOT / "models/data/test.jsonl"
TAUS = (1.0, 2 / 3)
QUIET = Follow()


def main() -> None:
    """Measure, and print both tables; with `--json` each ends with one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool", type=Path, default=ROOT / "configs/pools/word-problems.yaml")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--sizes", default="16,48,96,160", help="prompts of the profile's sessions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--live", type=Path, metavar="MODEL", help="three copies of it on engines that stay up"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="rounds more in which every load starts an engine"
    )
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    if options.restarts and options.live is None:
        parser.error("--restarts repeats what --live measures, and there is no --live")
    asyncio.run(_measured(options))


async def _measured(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="batch-") as folder:
        pool = replace(load_pool(options.pool), profile=Path(folder) / "costs.yaml")
        sizes = tuple(map(int, options.sizes.split(",")))
        questions = read_questions(TEST, pool.proposer_names, options.questions)
        if options.live is not None:
            rows = await _live(copies_of(options.live, pool), sizes, questions, options)
            title = (
                f"Batch on engines that stay up: {len(questions.asked)} questions, three "
                "models of one shape"
            )
            report(title, rows, engine=_engine(pool), simulated=False, as_json=options.json)
            return
        rounds = [
            await _round(pool, sizes, questions, Path(folder), number)
            for number in range(options.rounds)
        ]
        report(
            f"Batch: {len(questions.asked)} questions, {len(pool.proposer_names)} proposers",
            [_planned_row(name, rounds) for name in PLANNERS],
            engine=_engine(pool),
            simulated=False,
            as_json=options.json,
        )
        gated = await _gated(pool, questions, Path(folder) / "0" / "ilp", options.rounds)
        report(
            "Batch: the gate", gated, engine=_engine(pool), simulated=False, as_json=options.json
        )


def _engine(pool: Pool) -> str:
    return f"{'SGLang' if pool.workers[0].pair else 'embedded pairs'}, {len(pool.workers)} workers"


def _in_turns(number: int, names: Iterable[str] = PLANNERS) -> list[str]:
    """The plans of a round: forwards in every other one."""
    return list(names)[:: -1 if number % 2 else 1]


async def _round(
    pool: Pool, sizes: Sequence[int], questions: Questions, folder: Path, number: int
) -> dict[str, BatchReport]:
    """A profile, then the proposers' stage by every plan; no aggregator."""
    await profile_pool(pool, read_questions(CALIBRATION, pool.proposer_names), sizes, QUIET)
    done = {}
    for name in _in_turns(number):
        planner, moves = PLANNERS[name]
        alone = replace(pool, aggregate=None, replan_above=pool.replan_above if moves else 0.0)
        done[name] = await run_pool(alone, questions, folder / str(number) / name, planner, QUIET)
    return done


POPULAR_FIRST, REST = ("a", "b", "c"), "rest"


def copies_of(model: Path, pool: Pool) -> Pool:
    """The pool with three copies of one model as its proposers, and one that is asked nothing; no
    aggregator.

    They lie next to its profile. No prompt moves to another worker than the plan's.
    """
    assert pool.profile is not None
    folders = {name: pool.profile.with_name(name) for name in (*POPULAR_FIRST, REST)}
    for folder in folders.values():
        shutil.copytree(model, folder)
    models = {name: PoolModel(folder) for name, folder in folders.items()}
    return replace(pool, models=models, proposers=POPULAR_FIRST, aggregate=None, replan_above=0.0)


def _every_kth(pool: Pool, questions: Questions) -> Batch:
    """Model k answers every k-th question."""
    ranks = list(enumerate(pool.proposer_names, 1))
    numbers = {one.id: number for number, one in enumerate(questions.asked)}
    return Batch(
        pool, questions, {id: [name for k, name in ranks if not n % k] for id, n in numbers.items()}
    )


class Loads(Follow):
    """Collects the seconds of loads by kind."""

    def __init__(self) -> None:
        self.seconds: dict[Load, list[float]] = {}

    def on_load(self, load: Load, seconds: float) -> None:
        """See `Follow`."""
        self.seconds.setdefault(load, []).append(seconds)


async def _live(
    pool: Pool, sizes: Sequence[int], questions: Questions, options: argparse.Namespace
) -> list[Row]:
    assert pool.profile is not None
    batch, logs, count = (
        _every_kth(pool, questions),
        pool.profile.with_name("logs"),
        len(pool.workers),
    )
    every = read_questions(CALIBRATION, pool.proposer_names)
    known = Batch(pool, every, {one.id: POPULAR_FIRST for one in every.asked}).proposer_prompts()
    swaps, profiles, rounds = Loads(), list[PoolProfile](), list[dict[str, BatchReport]]()
    async with open_workers(pool, logs) as workers:
        started_s, _ = await load_on_workers(REST, workers, count, monotonic)
        for number in range(options.rounds):
            costs = {}
            for name in POPULAR_FIRST:
                its = [one for one in known if one.model == name]
                costs[name], _, _ = await profile_model(
                    name, its, sizes, workers, count, pool.concurrency, monotonic
                )
            profiles.append(PoolProfile(costs))
            rounds.append(await _kept(batch, profiles[-1], number, swaps, workers))
    rows = _live_rows("engines kept", batch, profiles, swaps, rounds)
    if options.restarts:
        # a server has one context length, so that none serves two of them
        apart = {
            name: replace(one, context_length=2048 + n)
            for n, (name, one) in enumerate(pool.models.items())
        }
        batch = replace(batch, pool=replace(pool, models=apart))
        dear = PoolProfile(
            {name: replace(one, load_s=started_s) for name, one in profiles[-1].models.items()}
        )
        starts = Loads()
        rounds = [await _kept(batch, dear, number, starts) for number in range(options.restarts)]
        rows += _live_rows("engines restarted", batch, [dear], starts, rounds)
    return rows


async def _kept(
    batch: Batch, costs: PoolProfile, number: int, loads: Loads, workers: Workers | None = None
) -> dict[str, BatchReport]:
    """A round of both plans: on workers that are up, which first load what is asked nothing, or on
    new ones each.
    """
    done = {}
    for name in _in_turns(number, KEPT):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batch-")))
            if workers is None:
                on = await stack.enter_async_context(open_workers(batch.pool, folder / "logs"))
            else:
                on = workers
                await load_on_workers(REST, on, len(batch.pool.workers), monotonic)
            journal = stack.enter_context(open_journal(folder / "run", {}))
            done[name] = await PoolRun(
                batch, on, costs, journal, PLANNERS[name][0], loads, monotonic
            ).run()
    return done


def _live_rows(
    path: str,
    batch: Batch,
    profiles: Sequence[PoolProfile],
    loads: Loads,
    rounds: Sequence[dict[str, BatchReport]],
) -> list[Row]:
    prompts = Counter(prompt.model for prompt in batch.proposer_prompts())
    work = [
        min(one.cost(name, n).run_s(n) / one.models[name].load_s for name, n in prompts.items())
        for one in profiles
    ]
    more = {
        "load": ", ".join(
            f"{kind} in {statistics.median(took):.2f} s" for kind, took in loads.seconds.items()
        ),
        "work_per_load": statistics.median(work),
        "rounds": len(rounds),
    }
    return [{"path": path, **_planned_row(name, rounds), **more} for name in KEPT]


def _planned_row(name: str, rounds: Sequence[dict[str, BatchReport]]) -> Row:
    stages = [done[name].stages[0] for done in rounds]
    errors = [stage.measured.makespan_s / stage.plan.makespan_s - 1 for stage in stages]
    measured_s = [stage.measured.makespan_s for stage in stages]
    others_s = [done["round-robin"].stages[0].measured.makespan_s for done in rounds]
    speedups = sorted(other / own for other, own in zip(others_s, measured_s, strict=True))
    place = _place_of_interval(len(speedups))
    return {
        "plan": name,
        "predicted_s": statistics.median(stage.plan.makespan_s for stage in stages),
        "measured_s": statistics.median(measured_s),
        "error": f"{statistics.median(errors):+.1%} ({min(errors):+.1%} to {max(errors):+.1%})",
        "speedup": statistics.median(speedups),
        "interval": f"{speedups[place]:.2f} to {speedups[-1 - place]:.2f}",
        "moved": statistics.median(sum(stage.moved.values()) for stage in stages),
        "errors": sum(bool(result.error) for done in rounds for result in done[name].results),
    }


def _place_of_interval(count: int) -> int:
    """Where in `count` sorted values the 95 % interval of their median begins; at the least where
    they are few.
    """
    return max(
        (
            k
            for k in range(count // 2)
            if sum(comb(count, i) for i in range(k + 1)) <= 0.025 * 2**count
        ),
        default=0,
    )


async def _gated(pool: Pool, questions: Questions, drafts: Path, rounds: int) -> list[Row]:
    """A row per tau, each on the same drafts."""
    taus = {"always asked": ALWAYS, **{f"tau {tau:.2f}": tau for tau in TAUS}}
    done: dict[str, list[BatchReport]] = {name: [] for name in taus}
    for number in range(rounds):
        for name, tau in list(taus.items())[:: -1 if number % 2 else 1]:
            folder = drafts.with_name(f"tau-{tau:.2f}-{number}")
            folder.mkdir()
            (folder / "outputs.jsonl").write_bytes((drafts / "outputs.jsonl").read_bytes())
            done[name].append(await run_pool(pool.with_tau(tau), questions, folder, plan, QUIET))
    return [_gate_row(name, found, done["always asked"][0]) for name, found in done.items()]


def _gate_row(name: str, rounds: Sequence[BatchReport], always: BatchReport) -> Row:
    stages = [stage for done in rounds for stage in done.stages if stage.role == "aggregator"]
    measured_s = [stage.measured.makespan_s for stage in stages]
    rights, those = ([bool(result.right) for result in one.results] for one in (rounds[0], always))
    right = wilson(statistics.mean(rights), len(rights))
    lost = estimate_paired_difference(
        [other - own for other, own in zip(those, rights, strict=True)]
    )
    skipped = statistics.mean(result.by == "proposers" for result in rounds[0].results)
    return {
        "gate": name,
        "skipped": f"{skipped:.0%}",
        "tokens_spared": f"{1 - _aggregator_tokens(rounds[0]) / _aggregator_tokens(always):.0%}",
        "right": f"{right.value:.1%} [{right.low:.1%}, {right.high:.1%}]",
        "lost": f"{100 * lost.value:+.1f} [{100 * lost.low:+.1f}, {100 * lost.high:+.1f}]",
        "predicted_s": statistics.median(stage.plan.makespan_s for stage in stages),
        "stage_s": statistics.median(measured_s),
        "range": f"{min(measured_s):.1f} to {max(measured_s):.1f}",
    }


def _aggregator_tokens(done: BatchReport) -> int:
    return sum(
        result.completion_tokens - sum(proposal.tokens for proposal in result.proposals)
        for result in done.results
        if result.by == "aggregator"
    )


if __name__ == "__main__":
    main()
