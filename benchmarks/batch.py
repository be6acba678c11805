"""A real batch: measured costs, a plan, and its results, compared with round-robin; then the gate, at every tau.

    python benchmarks/batch.py [--pool FILE] [--questions N] [--sizes N,N,...] [--rounds N] [--live MODEL] [--json]

Every round profiles the pool, on questions that are not asked again, then runs the proposers by both plans, in turn,
each in a folder of its own: engines start, answer and end as in any batch. A machine's speed drifts, so that a profile
tells most of what is run right after it. Both plans are kept to; the third run takes and replans prompts (`moved`).

    predicted_s, measured_s   the proposers' stage, medians over the rounds
    error                     measured over predicted, less 1, median over the rounds; and the rounds' range
    speedup                   round-robin's measured stage over this one's, median over the rounds

At the end the aggregator answers everything and, with the same drafts, what the gate leaves to it: in every round, and
in every other one in the opposite order, as a machine's speed drifts.

    skipped      share of the questions that need no aggregator; of its output tokens: tokens_spared
    right        with the 95 % interval; lost: points against the aggregator that is always asked
    stage_s      the aggregator's stage, its engine's start included, median over the rounds; and the rounds' range

`--live MODEL` measures workers whose engines stay up instead: the pool's proposers are three copies of the folder
MODEL, so that weights are swapped between them. After one profile the engines of all workers are started, once for
all rounds, and the order of the plans alternates. Then a table of loads:

    seconds      medians, and the range; `alone` is what the profile says of one engine that starts by itself
"""

import argparse
import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from report import Row, report

from shell_router.batch.journal import opened
from shell_router.batch.planner import WITHOUT_SOLVER, Plan, Workload, plan
from shell_router.batch.pool import ALWAYS, Pool, PoolModel, load_pool
from shell_router.batch.pool_run import profile_pool, questions_for, run_pool
from shell_router.batch.profile import Load, PoolProfile
from shell_router.batch.prompts import Batch
from shell_router.batch.questions import Questions
from shell_router.batch.run import Finished, Follow, run_batch
from shell_router.batch.sessions import Planner, load_on_all
from shell_router.batch.workers import pool_workers
from shell_router.config.read import read_file
from shell_router.core.statistics import paired_difference, wilson

ROOT = Path(__file__).parents[1]
PLANNERS: dict[str, tuple[Callable[[Workload], Plan], bool]] = {
    "ilp": (plan, False),
    "ilp, prompts move": (plan, True),
    "round-robin": (WITHOUT_SOLVER["round-robin"], False),
}
"""And whether prompts may move."""
TAUS = (1.0, 2 / 3)
QUIET = Follow()


def main() -> None:
    """Measure, and print both tables; with `--json` each ends with one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=Path, default=ROOT / "configs/pools/word-problems.yaml")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--sizes", default="16,48,96,160", help="prompts of the profile's sessions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--live", type=Path, metavar="MODEL", help="three copies of it on engines that stay up")
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    asyncio.run(_measured(parser.parse_args()))


async def _measured(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="batch-") as folder:
        pool = replace(load_pool(options.pool), profile=Path(folder) / "costs.yaml")
        sizes = tuple(map(int, options.sizes.split(",")))
        questions = questions_for(pool, ROOT / "models/data/test.jsonl", options.questions)
        if options.live is not None:
            await _live(copies_of(options.live, pool), sizes, questions, options)
            return
        rounds = [await _round(pool, sizes, questions, Path(folder), number) for number in range(options.rounds)]
        engine = f"{'SGLang' if pool.workers[0].pair else 'embedded pairs'}, {len(pool.workers)} workers"
        report(
            f"Batch: {len(questions.asked)} questions, {len(pool.proposer_names)} proposers",
            [_planned_row(name, rounds) for name in PLANNERS],
            engine=engine,
            simulated=False,
            as_json=options.json,
        )
        gated = await _gated(pool, questions, Path(folder) / "0" / "ilp", options.rounds)
        report("Batch: the gate", gated, engine=engine, simulated=False, as_json=options.json)


def _in_turns(number: int) -> Iterable[tuple[str, tuple[Planner, bool]]]:
    """The plans of a round: forwards in every other one."""
    return list(PLANNERS.items())[:: -1 if number % 2 else 1]


async def _round(
    pool: Pool, sizes: Sequence[int], questions: Questions, folder: Path, number: int
) -> dict[str, Finished]:
    """A profile, then the proposers' stage by every plan; no aggregator."""
    await profile_pool(pool, questions_for(pool, ROOT / "models/data/calibration.jsonl"), sizes, QUIET)
    done = {}
    for name, (planner, moves) in _in_turns(number):
        alone = replace(pool, aggregate=None, replan_above=pool.replan_above if moves else 0.0)
        done[name] = await run_pool(alone, questions, folder / str(number) / name, planner, QUIET)
    return done


def copies_of(model: Path, pool: Pool) -> Pool:
    """The pool with three copies of one model as its proposers, next to its profile, and no aggregator."""
    assert pool.profile is not None
    folders = {name: pool.profile.with_name(name) for name in "abc"}
    for folder in folders.values():
        shutil.copytree(model, folder)
    models = {name: PoolModel(folder) for name, folder in folders.items()}
    return replace(pool, models=models, proposers=(), aggregate=None)


class Loads(Follow):
    """Collects the seconds of loads by kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def on_load(self, load: Load, seconds: float) -> None:
        """See `Follow`."""
        self.seconds.setdefault(load, []).append(seconds)


async def _live(pool: Pool, sizes: Sequence[int], questions: Questions, options: argparse.Namespace) -> None:
    assert pool.profile is not None
    await profile_pool(pool, questions_for(pool, ROOT / "models/data/calibration.jsonl"), sizes, Follow())
    costs, _ = read_file(pool.profile, PoolProfile)
    up = replace(costs, first_s=0.0, together_s=0.0)
    batch = Batch(pool, questions, {one.id: pool.proposer_names for one in questions.asked})
    loads, rounds = Loads(), list[dict[str, Finished]]()
    async with pool_workers(pool, pool.profile.with_name("logs")) as workers:
        loads.on_load("engine started", (await load_on_all("a", workers, len(pool.workers), monotonic))[0])
        for number in range(options.rounds):
            done = {}
            for name, (planner, moves) in _in_turns(number):
                asked = replace(batch, pool=replace(pool, replan_above=pool.replan_above if moves else 0.0))
                with opened(pool.profile.with_name(f"{number}-{name}"), {}) as journal:
                    done[name] = await run_batch(asked, workers, up, journal, planner, loads, monotonic)
            rounds.append(done)
    engine = f"{'SGLang' if pool.workers[0].pair else 'embedded pairs'}, {len(pool.workers)} workers"
    title = f"Batch on engines that stay up: {len(questions.asked)} questions, three models of one shape"
    rows = [_planned_row(name, rounds) for name in PLANNERS]
    report(title, rows, engine=engine, simulated=False, as_json=options.json)
    rows = [_load_row(kind, found) for kind, found in loads.seconds.items()]
    if costs.first_s:
        swap_s = statistics.mean(one.load_s for one in costs.models.values())
        rows += [_load_row("engine started, alone", [costs.first_s + swap_s]), _load_row("swapped, profile", [swap_s])]
        together_s = costs.first_s + swap_s + costs.together_s * (len(pool.workers) - 1)
        rows.append(_load_row("engine started, all together, profile", [together_s]))
    report("Batch: loads", rows, engine=engine, simulated=False, as_json=options.json)


def _load_row(kind: str, seconds: Sequence[float]) -> Row:
    middle = statistics.median(seconds)
    return {
        "load": kind,
        "loads": len(seconds),
        "seconds": middle,
        "range": f"{min(seconds):.2f} to {max(seconds):.2f}",
    }


def _planned_row(name: str, rounds: Sequence[dict[str, Finished]]) -> Row:
    stages = [done[name].stages[0] for done in rounds]
    errors = [stage.measured.makespan_s / stage.plan.makespan_s - 1 for stage in stages]
    measured_s = [stage.measured.makespan_s for stage in stages]
    others_s = [done["round-robin"].stages[0].measured.makespan_s for done in rounds]
    speedups = [other / own for other, own in zip(others_s, measured_s, strict=True)]
    return {
        "plan": name,
        "predicted_s": statistics.median(stage.plan.makespan_s for stage in stages),
        "measured_s": statistics.median(measured_s),
        "error": f"{statistics.median(errors):+.1%} ({min(errors):+.1%} to {max(errors):+.1%})",
        "speedup": statistics.median(speedups),
        "speedup_range": f"{min(speedups):.2f} to {max(speedups):.2f}",
        "moved": statistics.median(sum(stage.moved.values()) for stage in stages),
        "errors": sum(bool(result.error) for done in rounds for result in done[name].results),
    }


async def _gated(pool: Pool, questions: Questions, drafts: Path, rounds: int) -> list[Row]:
    """A row per tau, each on the same drafts."""
    taus = {"always asked": ALWAYS, **{f"tau {tau:.2f}": tau for tau in TAUS}}
    done: dict[str, list[Finished]] = {name: [] for name in taus}
    for number in range(rounds):
        for name, tau in list(taus.items())[:: -1 if number % 2 else 1]:
            folder = drafts.with_name(f"tau-{tau:.2f}-{number}")
            folder.mkdir()
            (folder / "outputs.jsonl").write_bytes((drafts / "outputs.jsonl").read_bytes())
            done[name].append(await run_pool(pool.with_tau(tau), questions, folder, plan, QUIET))
    return [_gate_row(name, found, done["always asked"][0]) for name, found in done.items()]


def _gate_row(name: str, rounds: Sequence[Finished], always: Finished) -> Row:
    stages = [stage for done in rounds for stage in done.stages if stage.role == "aggregator"]
    measured_s = [stage.measured.makespan_s for stage in stages]
    rights, those = ([bool(result.right) for result in one.results] for one in (rounds[0], always))
    right = wilson(statistics.mean(rights), len(rights))
    lost = paired_difference([other - own for other, own in zip(those, rights, strict=True)])
    return {
        "gate": name,
        "skipped": f"{statistics.mean(result.by == 'proposers' for result in rounds[0].results):.0%}",
        "tokens_spared": f"{1 - _aggregator_tokens(rounds[0]) / _aggregator_tokens(always):.0%}",
        "right": f"{right.value:.1%} [{right.low:.1%}, {right.high:.1%}]",
        "lost": f"{100 * lost.value:+.1f} [{100 * lost.low:+.1f}, {100 * lost.high:+.1f}]",
        "predicted_s": statistics.median(stage.plan.makespan_s for stage in stages),
        "stage_s": statistics.median(measured_s),
        "range": f"{min(measured_s):.1f} to {max(measured_s):.1f}",
    }


def _aggregator_tokens(done: Finished) -> int:
    return sum(
        result.completion_tokens - sum(proposal.tokens for proposal in result.proposals)
        for result in done.results
        if result.by == "aggregator"
    )


if __name__ == "__main__":
    main()
