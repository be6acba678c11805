"""What a framework's program gains from lazy answers: LangGraph plain, LangGraph lazy and the same
graph as a topology.

    python benchmarks/frameworks.py [--questions N] [--context WORDS,WORDS] [--new-tokens N]
    [--chunk-tokens N]
        [--dtype DTYPE] [--simulated] [--json]

A 9-3-1 tree answers every question in three ways, in all orders by turns, with the same prompts at
temperature 0:

    plain       LangGraph asks each agent with langchain-openai and waits for its text
    lazy        the same program; the models that other agents read have `extra_body={"program":
    ..., "lazy": True}` topology    one request to the tree, a model name of the router

The program runs in a process of its own. A number stands before each question, another for each
way, so that no prompt is found cached, and --context words, so that prompts are long enough for
updates to pay. With --simulated no model
runs: engines take, by the clock, the time of configs/simulations/six-h200.yaml, and each agent,
whose prompt then names it, writes 25 to 100 % of --new-tokens, equally many in all ways; LangGraph,
HTTP and the router are real. Medians of the seconds from the first request to the answer;
`vs_plain` is the median of the ratios to plain on the same question, with its 95 % interval.
Afterwards plain is asked each prompt of the other ways: `equal` counts the same answers. In float32
a batch of another size may round otherwise; with --dtype float64 answers depend on the prompts
alone. `updates` are prefill updates of the root, the mean; `early` counts the answers whose root
had any. Without --chunk-tokens the router sends them where they pay; with it LangGraph's root,
plain and lazy, and all agents of the topology want one every N tokens.
"""

import argparse
import asyncio
import itertools
import json
import operator
import os
import random
import statistics
import sys
import time
import urllib.request
import uuid
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI
    from report import Row

    from shell_router.api import Services
    from shell_router.topology import Agent, Topology

ROOT = Path(__file__).parents[1]
TITLE = "LangGraph plain, lazy, and as a topology: 9-3-1 at temperature 0"
MODELS = ("small", "medium", "large")
MODES = ("plain", "lazy", "topology")
ORDERS = tuple(itertools.permutations(MODES))
OFFSET = 1000
"""On questions of the test set from here on nothing was calibrated."""


def main() -> int:
    """Measure and print."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--questions", type=int, default=32, help="of each row (default 32)")
    found.add_argument(
        "--context", default="0,1500", help="words before each question (default 0,1500)"
    )
    found.add_argument(
        "--new-tokens", type=int, default=96, help="at most, of each agent (default 96)"
    )
    found.add_argument(
        "--chunk-tokens", type=int, help="tokens of the root's updates (default: where they pay)"
    )
    found.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float32",
        help="that the engines compute in",
    )
    found.add_argument(
        "--simulated", action="store_true", help="engines that take an H200's time; see above"
    )
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    options = found.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    import uvloop
    from report import report

    engine, rows = uvloop.run(measured(options))
    report(TITLE, rows, engine=engine, simulated=options.simulated, as_json=options.json)
    return 0


async def measured(options: argparse.Namespace) -> "tuple[str, list[Row]]":
    """What ran, in words, and the rows."""
    from shell_router.api import ApiSettings, create_app, serve_app
    from shell_router.cli.options import split_values
    from shell_router.http.server import bind_sockets
    from shell_router.lab.evaluation.records import read_items

    items = read_items(
        ROOT / "models" / "data" / "test.jsonl", offset=OFFSET, limit=options.questions
    )
    tree, rows = asked_tree(options.new_tokens, options.chunk_tokens or "adaptive"), list["Row"]()
    tree = with_names(tree) if options.simulated else tree
    async with simulated() if options.simulated else embedded(options.dtype) as (services, engine):
        app = create_app(replace(services, topologies={tree.name: tree}), ApiSettings())
        with bind_sockets() as sockets, ProcessPoolExecutor(1, get_context("spawn")) as client:
            async with serve_app(app, sockets) as url:
                ask = partial(asyncio.get_running_loop().run_in_executor, client, asked, url, tree)
                for words in split_values(options.context, int):
                    runs, equal = list[dict[str, Asked]](), list[dict[str, bool]]()
                    for number, item in enumerate([items[0], *items]):  # the first warms up
                        asks = {
                            mode: context(words, f"{words}{number}", mode) + item.question
                            for mode in MODES
                        }
                        run = {
                            mode: await ask(mode, asks[mode])
                            for mode in ORDERS[number % len(ORDERS)]
                        }
                        again = {mode: await ask("plain", asks[mode]) for mode in MODES[1:]}
                        runs.append(run)
                        equal.append(
                            {
                                mode: run[mode].answer == reply.answer
                                for mode, reply in again.items()
                            }
                        )
                    rows += build_rows(words, runs[1:], equal[1:])
        return engine, rows


@asynccontextmanager
async def embedded(dtype: str) -> "AsyncIterator[tuple[Services, str]]":
    """The tiny models on embedded pairs, and what they are, in words."""
    from benchmarks.overlap.engines import engine_words, running_deployment, tiny_models
    from shell_router.standins.embedded.settings import EmbeddedSection

    config = tiny_models(EmbeddedSection(dtype=dtype))
    async with running_deployment(config) as services:
        yield services, await engine_words(config)


@asynccontextmanager
async def simulated() -> "AsyncIterator[tuple[Services, str]]":
    """A pair of H200s for each model, in real time, and what they are, in words."""
    from agent_cache import MemoryAgentPromptCache
    from shell_router.api import Services
    from shell_router.app.fleet_changes import FleetChanges
    from shell_router.core.engine import Generation, PrefillCost, ServedModel
    from shell_router.lab.simulation.run import SimulatedFleet
    from shell_router.lab.simulation.settings import load
    from shell_router.moa.executor import Executor
    from shell_router.moa.programs import Programs
    from shell_router.standins.simulated.costs import attended_pairs
    from shell_router.standins.simulated.pair import SimulatedPair
    from shell_router.standins.simulated.text import SimulatedTokenizer, Written
    from shell_router.telemetry import Metrics

    loaded, clock = (
        load(ROOT / "configs" / "simulations" / "six-h200.yaml"),
        asyncio.get_running_loop().time,
    )

    def write(request: Generation) -> Written:
        ids = list(request.input_ids)
        share = random.Random(f"{len(ids)} {ids[-12:]}").uniform(0.25, 1)
        tokens = max(1, round(share * request.sampling["max_new_tokens"]))
        return Written.after_filler(tokens, str(zlib.crc32(repr(ids).encode())), "", 0.0)

    def served(alias: str) -> ServedModel:
        costs = loaded.costs[alias]
        few, many = (costs.prefill.pass_s(tokens, attended_pairs(tokens, 0)) for tokens in (1, 256))
        fleet = SimulatedFleet(alias, [SimulatedPair(costs, write)], loaded.simulation.scheduling)
        probed, length = PrefillCost.through(1, few, 256, many), loaded.simulation.context_length
        return ServedModel(
            alias, fleet, SimulatedTokenizer(), length, prefill_cost=probed, prefill_servers=1
        )

    models = {alias: served(alias) for alias in MODELS}
    words = ", ".join(f"{alias}: {loaded.simulation.models[alias].profile}" for alias in MODELS)
    async with MemoryAgentPromptCache(clock=clock) as cache:
        executor = Executor(models, cache, None, clock=clock)
        yield (
            Services(
                executor=executor,
                programs=Programs(executor),
                topologies={},  # type: ignore[arg-type] # the caller's
                models=models,
                relays={},
                fleet=FleetChanges({}, {}),
                engines=dict.fromkeys(models, "simulated"),
                metrics=Metrics(),
            ),
            f"H200s by roofline, a pair each; {words}",
        )


def with_names(tree: "Topology") -> "Topology":
    """The tree with each agent's name at the end of its prompt."""
    agents = {
        name: replace(
            agent, prompt=replace(agent.prompt, suffix=f"{agent.prompt.suffix}\nYou are {name}.")
        )
        for name, agent in tree.agents.items()
    }
    return replace(tree, agents=agents)


def asked_tree(new_tokens: int, chunk_tokens: int | str = "adaptive") -> "Topology":
    """Nine proposers, three aggregators and a root, all at temperature 0."""
    from shell_router.topology import parse_topology

    text = f"""
        name: tree
        tree: {{shape: [9, 3, 1], models: [{", ".join(MODELS)}]}}
        prefill: {{chunk_tokens: {chunk_tokens}}}
        defaults: {{sampling: {{temperature: 0, max_new_tokens: {new_tokens}}}, drafts: off}}
    """
    return parse_topology(text, source="frameworks.py", models=set(MODELS))


def context(words: int, seed: str, mode: str) -> str:
    """A number of the mode's own, and words that say nothing."""
    draw, first = random.Random(seed), random.Random(f"{seed}{mode}").randrange(10**6)
    said = (
        draw.choice(("Kim", "Tom", "Mia", "pens", "has", "buys", "stamps", "now"))
        for _ in range(words)
    )
    return " ".join([f"{first:06}.", *said, ""])


def build_rows(
    words: int, runs: "Sequence[Mapping[str, Asked]]", equal: Sequence[Mapping[str, bool]]
) -> "list[Row]":
    """One per mode."""
    from benchmarks.overlap.measure import interval

    rows: list[Row] = []
    for mode in MODES:
        ratios = [run[mode].seconds / run["plain"].seconds for run in runs]
        rows.append(
            {
                "context": words,
                "mode": mode,
                "median_s": statistics.median(run[mode].seconds for run in runs),
                "vs_plain": statistics.median(ratios),
                "95 %": interval(ratios),
                "equal": f"{sum(one.get(mode, True) for one in equal)} of {len(runs)}",
                "updates": statistics.mean(run[mode].updates for run in runs),
                "early": f"{sum(run[mode].updates > 0 for run in runs)} of {len(runs)}",
            }
        )
    return rows


# --- the client's process


class State(TypedDict):
    """What LangGraph hands from node to node."""

    question: str
    outputs: Annotated[dict[str, str], operator.or_]


@dataclass(frozen=True)
class Asked:
    """One answer, what it took, and how many prefill updates the root's prompt had."""

    answer: str
    seconds: float
    updates: int


def asked(url: str, tree: "Topology", mode: str, question: str) -> Asked:
    """Ask the tree in one of MODES. Nothing is built while the clock runs."""
    from langchain_openai import ChatOpenAI

    router: dict[str, Any] = {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }
    router |= {"max_tokens": tree.root.sampling["max_new_tokens"], "include_response_headers": True}
    lazy = {"program": uuid.uuid4().hex, "lazy": True}
    workers = {
        name: ChatOpenAI(model=name, **router, extra_body=lazy if mode == "lazy" else None)
        for name in MODELS
    }
    if mode == "topology":
        run = partial(ChatOpenAI(model=tree.name, **router).invoke, question)
    else:
        prefill = {"chunk_tokens": tree.prefill.chunk_tokens}  # the same in both
        root = ChatOpenAI(model=tree.root.model, **router, extra_body={"prefill": prefill})
        graph, replies = graph_of(tree, workers, root)

        def run() -> Any:
            graph.invoke(
                {"question": question, "outputs": {}}, {"max_concurrency": len(tree.agents)}
            )
            return replies[tree.root.id]

    started_s = time.perf_counter()
    reply = run()
    seconds = time.perf_counter() - started_s
    trace = json.load(
        urllib.request.urlopen(
            f"{url}/v1/traces/{reply.response_metadata['headers']['x-trace-id']}"
        )
    )
    (judge,) = (
        agent
        for name, agent in trace["agents"].items()
        if mode != "topology" or name == tree.root.id
    )
    updates = sum(span["name"] == "prefill_increment" for span in judge["spans"])
    return Asked(reply.content, seconds, updates)


def graph_of(
    tree: "Topology", workers: "Mapping[str, ChatOpenAI]", root: "ChatOpenAI"
) -> tuple[Any, dict[str, Any]]:
    """The tree as an ordinary LangGraph program, a node per agent, and what each was answered."""
    from langgraph.graph import END, START, StateGraph

    graph, replies = StateGraph(State), dict[str, Any]()

    def answer(agent: "Agent", state: State) -> dict[str, dict[str, str]]:
        model = root if agent.id == tree.root.id else workers[agent.model]
        replies[agent.id] = reply = model.invoke(
            prompt_of(agent, state["question"], state["outputs"])
        )
        return {"outputs": {agent.id: reply.content}}

    for agent in tree.agents.values():
        graph.add_node(agent.id, partial(answer, agent))
        graph.add_edge(list(agent.precursors) or START, agent.id)
    graph.add_edge(tree.root.id, END)
    return graph.compile(), replies


def prompt_of(agent: "Agent", question: str, outputs: Mapping[str, str]) -> str:
    """What the topology asks the agent, with the outputs of its precursors in it."""
    from shell_router.topology.prompting import fill_text, slot_parts

    slots = [
        slot_parts(agent.prompt.slot, name.rpartition("/")[2], at)
        for at, name in enumerate(agent.precursors, 1)
    ]
    texts = [outputs[name].join(slot) for name, slot in zip(agent.precursors, slots, strict=True)]
    return "".join(
        [fill_text(agent.prompt.prefix, question), *texts, fill_text(agent.prompt.suffix, question)]
    )


if __name__ == "__main__":
    sys.exit(main())
