"""What drafts from an agent's own prompt save: the same tree with and without them, in turns.

    python benchmarks/drafts.py [--questions N] [--clients N,N] [--temperature T,T] [--width K,K]
        [--json]
    python benchmarks/drafts.py --equal [--questions N] [--temperature T,T]
    python benchmarks/drafts.py --engine sglang [--config FILE | --model smollm2] [--flags FLAGS]
        [--shape 3-1] [--equal]

Questions that no model was trained on are answered by the tree of topologies/evaluation, each once
with drafts and once without, another first each time; --clients are under way at once, all in one
setting. Nothing is seeded, so that the second of a pair finds no more of its prompts cached than
the first, but for the question. A row is one number of clients, one temperature of the agents that
read others, and one k: the most tokens of a pass per request. SmolLM2 answers the questions of
benchmarks/overlap/questions.txt.

    vs_plain       end-to-end latency by that without drafts on the same question: the median, and
                   its 95 % interval
    vs_bound       the same by the critical path of the run without drafts: its longest chain of
                   decoding, every token a pass. Below 1, drafts were faster than any schedule of
                   plain passes
    ..._decode     seconds per token from an agent's first token to its last, by those without
                   drafts: medians
    ..._per_pass   tokens that a pass gave, the one that was not drafted included

With `--equal` every request is seeded and the models run in float64: it counts the agents that
write the same tokens with and without drafts. SGLang runs in float32 and draws without seeds, so
there every agent is greedy.
"""

import argparse
import asyncio
import logging
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from report import Row

    from shell_router.api import Services
    from shell_router.config import Config
    from shell_router.topology import Topology

ROOT = Path(__file__).parents[1]
TITLE = "Drafts from what agents read: tree {shape}"
EQUAL = "Outputs with and without drafts, tree {shape}"
OFFSET = 1000
"""On questions of the test set from here on nothing was calibrated."""
WRONG_INPUT = 2

Trace = Mapping[str, Any]


def main() -> int:
    """Measure and print; 2 for an error that says what to do."""
    options = parser().parse_args()
    sys.path.insert(0, str(ROOT))  # `launch` is of this repository, not of the package
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    logging.basicConfig(
        level="INFO" if options.engine == "sglang" else "WARNING", format="%(message)s"
    )
    import uvloop
    from report import report

    from shell_router.errors import ShellRouterError

    try:
        engine, rows = uvloop.run(measured(options))
    except ShellRouterError as error:
        print(f"drafts.py: {error}", file=sys.stderr)
        return WRONG_INPUT
    title = (EQUAL if options.equal else TITLE).format(shape=options.shape)
    report(
        title, rows, engine=engine, simulated=False, as_json=options.json, markdown=options.markdown
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    found.add_argument(
        "--config", type=Path, metavar="FILE", help="a deployment, with --engine sglang"
    )
    found.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help="without it")
    found.add_argument("--flags", default="", help="further flags of the SGLang engines")
    found.add_argument("--shape", default="9-3-1", help="the tree's agents by layer")
    found.add_argument("--questions", type=int, default=48, help="of each row (default 48)")
    found.add_argument("--clients", default="1,4,16", help="questions at a time (default 1,4,16)")
    found.add_argument(
        "--temperature",
        default="shipped",
        help="of agents that read others; default the topology's",
    )
    found.add_argument(
        "--width", default="16", help="most tokens of a pass per request, up to 16 (embedded only)"
    )
    found.add_argument("--equal", action="store_true", help="compare outputs, not times")
    found.add_argument(
        "--markdown", action="store_true", help="print the table for docs/benchmarks"
    )
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    return found


async def measured(options: argparse.Namespace) -> "tuple[str, list[Row]]":
    """What ran, in words, and the rows. SIGTERM stops all that was started."""
    from benchmarks.overlap.engines import engine_words, running_deployment
    from benchmarks.overlap.measure import real_questions
    from shell_router.cli.options import split_values
    from shell_router.lab.evaluation.records import read_items

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    items = read_items(
        ROOT / "models" / "data" / "test.jsonl", offset=OFFSET, limit=options.questions
    )
    tiny = options.engine == "embedded" or options.model == "tiny"
    questions = [item.question for item in items] if tiny else real_questions()[: options.questions]
    greedy = options.equal and options.engine == "sglang"
    rows: list[Row] = []
    for width in split_values(options.width, int):
        engines = deployment(options, width)
        async with running_deployment(engines) as services:
            words = await engine_words(engines)
            for temperature in ["0"] if greedy else split_values(options.temperature):
                given = None if temperature == "shipped" else float(temperature)
                compared = settings(options.shape, given, proposers=greedy)
                head = {"temperature": temperature, "k": width}
                if options.equal:
                    rows.append(head | await equality(services, compared, questions))
                    continue
                for clients in split_values(options.clients, int):
                    rows.append(head | await row(services, compared, questions, clients))
                    print(*rows[-1].values(), sep=" | ", file=sys.stderr, flush=True)
    return words, rows


def deployment(options: argparse.Namespace, width: int) -> "Config":
    """The tiny models that were trained, on embedded pairs; or SGLang's of a file, or one CPU
    pair.
    """
    from benchmarks.overlap.engines import CpuPair, sglang_deployment, tiny_models
    from shell_router.standins.embedded.settings import EmbeddedSection

    if options.engine == "sglang":
        pair = CpuPair(options.model, "new-tokens", options.flags)
        found = sglang_deployment(options.config, pair)
        return replace(found, launch=replace(found.launch, drafts=True))
    dtype = "float64" if options.equal else "float32"
    return tiny_models(EmbeddedSection(dtype=dtype, draft_width=width))


def settings(shape: str, temperature: float | None, *, proposers: bool) -> "Mapping[str, Topology]":
    """The tree plain and with drafts for those that read others, those at this temperature; or
    `proposers` as well.
    """
    from benchmarks.overlap.measure import shaped

    tree = shaped(
        "evaluation/tree.yaml",
        [int(agents) for agents in shape.split("-")],
        {"small", "medium", "large"},
    )
    found = {}
    for name, drafts in (("plain", False), ("drafts", True)):
        agents = dict(tree.agents)
        for agent in (one for one in tree.agents.values() if one.precursors or proposers):
            sampling = (
                agent.sampling
                if temperature is None
                else {**agent.sampling, "temperature": temperature}
            )
            agents[agent.id] = replace(
                agent, drafts=drafts and bool(agent.precursors), sampling=sampling
            )
        found[name] = replace(tree, agents=agents)
    return found


async def row(
    services: "Services", compared: "Mapping[str, Topology]", questions: Sequence[str], clients: int
) -> "Row":
    """One number of clients."""
    from benchmarks.overlap.measure import interval, run
    from shell_router.lab.simulation.summary import compute_figures

    found: dict[str, list[Trace]] = {name: [] for name in compared}
    for begin in range(-clients, len(questions), clients):  # the first ones warm up
        asked, order = questions[max(0, begin) :][:clients], list(compared)
        for name in order if (begin // clients) % 2 else order[::-1]:
            runs = (
                run(services, compared[name], f"{name}-{clients}-{begin + place}", question)
                for place, question in enumerate(asked)
            )
            traces = await asyncio.gather(*runs)
            found[name] += traces if begin >= 0 else []
    tree = compared["plain"]
    figures = {
        name: [compute_figures(tree, trace) for trace in traces] for name, traces in found.items()
    }
    pairs = list(zip(figures["drafts"], figures["plain"], strict=True))
    ratios = [one.end_to_end_s / other.end_to_end_s for one, other in pairs]
    cells: Row = {
        "clients": clients,
        "plain_ms": 1e3 * statistics.median(one.end_to_end_s for one in figures["plain"]),
        "vs_plain": statistics.median(ratios),
        "95 %": interval(ratios),
        "vs_bound": statistics.median(one.end_to_end_s / other.bound_s for one, other in pairs),
    }
    roles = ("proposer", "aggregator", "root") if len(tree.layers) > 2 else ("proposer", "root")
    for role, agents in zip(roles, tree.layers, strict=True):
        per_token = {
            name: statistics.median(
                s for trace in traces for one in agents if (s := token_s(trace["agents"][one]))
            )
            for name, traces in found.items()
        }
        drafted = [trace["agents"][one] for trace in found["drafts"] for one in agents]
        cells[f"{role}_decode"] = per_token["drafts"] / per_token["plain"]
        cells[f"{role}_per_pass"] = tokens_per_pass(drafted)
    return cells


def token_s(agent: Mapping[str, Any]) -> float | None:
    """Seconds per token after the first; None where one token is all."""
    if agent["decoded_tokens"] < 2:
        return None
    (decode,) = (span for span in agent["spans"] if span["name"] == "decode")
    return float(decode["end_s"] - decode["start_s"]) / (agent["decoded_tokens"] - 1)


def tokens_per_pass(agents: Sequence[Mapping[str, Any]]) -> float:
    """Of all of them together; an accepted token saved a pass."""
    written = sum(agent["completion_tokens"] for agent in agents)
    return written / (written - sum(agent["accepted_tokens"] for agent in agents))


async def equality(
    services: "Services", compared: "Mapping[str, Topology]", questions: Sequence[str]
) -> "Row":
    """How many agents of all questions write the same tokens; sixteen questions at once, so that
    batches differ.
    """
    from shell_router.core.events import AgentTokens, Event
    from shell_router.moa.requests import MoaRequest

    limit = asyncio.Semaphore(16)

    async def written(name: str, number: int, question: str) -> Mapping[str, Sequence[int]]:
        ids: dict[str, list[int]] = {agent: [] for agent in compared[name].agents}

        def note(event: Event) -> None:
            if isinstance(event, AgentTokens):
                ids[event.agent] += event.ids

        messages = ({"role": "user", "content": question},)
        seeded = MoaRequest(
            f"{name}-{number}", "benchmark", messages, {"sampling_seed": number}, seed=number
        )
        async with limit:
            answer = await services.executor.run(compared[name], seeded, note)
        accepted.append(sum(agent.accepted_tokens for agent in answer.agents.values()))
        return ids

    accepted: list[int] = []
    asked = list(enumerate(questions))
    plain = await asyncio.gather(
        *(written("plain", number, question) for number, question in asked)
    )
    drafted = await asyncio.gather(
        *(written("drafts", number, question) for number, question in asked)
    )
    pairs = [
        (one[agent], other[agent])
        for one, other in zip(plain, drafted, strict=True)
        for agent in one
    ]
    return {
        "questions": len(questions),
        "outputs": len(pairs),
        "equal": sum(one == other for one, other in pairs),
        "tokens": sum(len(one) for one, _ in pairs),
        "accepted_drafts": sum(accepted),
    }


if __name__ == "__main__":
    sys.exit(main())
