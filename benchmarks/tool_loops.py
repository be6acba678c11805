"""What it saves that a tree's agents run once a turn: loops of five steps with a tool.

    python benchmarks/tool_loops.py [--engine embedded|sglang] [--rounds N] [--new-tokens N]
    [--question-tokens N] [--markdown] [--json]

The 9-3-1 tree runs on embedded pairs of random weights in float64, or on one pair of real SGLang
with a tiny model, at temperature 0, without early exit, so that all agents run. A client's four
calls are forced by `tool_choice`; the fifth step is the answer. `turn` and `request` take turns,
each with new questions.

    runs            agent runs of a program
    program_s       from its first request to its answer
    vs_request      the median of the rounds' ratios, with its 95 % interval
    prefilled       prompt tokens of all agents that were not cached
    root_cached     of the root's prompt tokens from the second step on, the cached share
    equal_first     first steps that the other way answers alike
"""

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from report import Row

    from shell_router.config import Config
    from shell_router.topology import Topology

STEPS = 5
COMPACT_JSON = "--constrained-json-disable-any-whitespace"
"""SGLang allows any white space in JSON, so that so small a model completed no call."""
WAYS = ("turn", "request")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": list(range(10))}},
            "required": ["at"],
        },
    },
}


@dataclass
class Program:
    """What a loop took."""

    runs: int = 0
    seconds: float = 0.0
    prefilled: int = 0
    root_prompt: int = 0
    root_cached: int = 0
    first: str = ""


def main() -> int:
    """Measure and print."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    found.add_argument("--rounds", type=int, default=7)
    found.add_argument("--new-tokens", type=int, default=64, help="of each agent below the root")
    found.add_argument("--question-tokens", type=int, default=200)
    found.add_argument("--markdown", action="store_true", help="print the table for a page")
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    options = found.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    import uvloop
    from report import report

    engine, rows = uvloop.run(measured(options))
    report(
        "Loops of five steps with a tool, tree 9-3-1",
        rows,
        engine=engine,
        simulated=False,
        as_json=options.json,
        markdown=options.markdown,
    )
    return 0


async def measured(options: argparse.Namespace) -> "tuple[str, list[Row]]":
    """What ran, in words, and the rows."""
    import aiohttp

    from benchmarks.overlap.engines import engine_words, running_deployment
    from benchmarks.overlap.measure import drawn_question
    from shell_router.api import ApiSettings, create_app, serve_app
    from shell_router.http.server import bind_sockets

    config = make_deployment(options.engine)
    trees = {f"tree-{way}": make_tree(way, options.new_tokens) for way in WAYS}
    words = random.Random()
    rounds = list[dict[str, Program]]()
    equal = dict.fromkeys(WAYS, 0)
    async with running_deployment(config) as services:
        app = create_app(replace(services, topologies=trees), ApiSettings())  # type: ignore[arg-type]
        tokenizer = services.models["large"].tokenizer
        with bind_sockets() as sockets:
            async with serve_app(app, sockets) as url, aiohttp.ClientSession(url) as http:
                for number in range(options.rounds + 1):
                    programs = {}
                    for way in WAYS[:: 1 if number % 2 else -1]:
                        question = drawn_question(words, options.question_tokens, tokenizer)
                        programs[way] = await run_loop(http, way, question)
                        (other,) = set(WAYS) - {way}
                        again = await run_loop(http, other, question, steps=1)
                        equal[way] += bool(number) and again.first == programs[way].first
                    if number:  # the first round warms up
                        rounds.append(programs)
            named = await engine_words(config)
    return named, [build_row(way, rounds, equal[way]) for way in WAYS]


def make_deployment(engine: str) -> "Config":
    """The engines that the benchmark starts, and ends."""
    from benchmarks.overlap.engines import CpuPair, embedded_pairs, sglang_deployment
    from shell_router.config import EmbedderSettings
    from shell_router.standins.embedded.settings import EmbeddedSection

    if engine == "sglang":
        config = sglang_deployment(None, CpuPair("tiny", flags=COMPACT_JSON))
        return replace(config, embedder=EmbedderSettings("none"))
    config = embedded_pairs()
    section = {"embedded": EmbeddedSection(dtype="float64")}
    models = {alias: replace(model, engine=section) for alias, model in config.models.items()}
    return replace(config, models=models)


def make_tree(way: str, new_tokens: int) -> "Topology":
    """The shipped tree without early exit, whose agents below the root write `new_tokens`."""
    from benchmarks.overlap.measure import fixed_length, setting, shaped

    models = ("small", "medium", "large")
    tree = shaped("tree-9-3-1.yaml", (9, 3, 1), models)
    lengths = {key: {**fixed_length(new_tokens), "temperature": 0} for key in models}
    tree = setting(tree, lengths, incremental=True, early_exit=False)
    return replace(tree, name=f"tree-{way}", fan_out=way)


async def run_loop(http: Any, way: str, question: str, steps: int = STEPS) -> Program:
    """Run a program of one client."""
    program = Program()
    messages: list[Any] = [{"role": "user", "content": question}]
    started_s = time.monotonic()
    for step in range(steps):
        body = {
            "model": f"tree-{way}",
            "messages": messages,
            "tools": [TOOL],
            "tool_choice": "auto" if step == STEPS - 1 else "required",
            "parallel_tool_calls": False,
            "max_tokens": 64,
            "include_agents": True,
        }
        async with http.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        assert calls or step == STEPS - 1, answer
        if not step:
            program.first = repr([call["function"] for call in calls])
        count_agents(program, answer["agents"], step)
        messages.append(message)
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"Result {step}."}
            messages.append(result)
    program.seconds = time.monotonic() - started_s
    return program


def count_agents(program: Program, agents: dict[str, Any], step: int) -> None:
    """Add a step's agent runs and tokens."""
    for name, agent in agents.items():
        if agent["state"] == "kept":
            continue
        program.runs += 1
        program.prefilled += agent["prompt_tokens"] - agent["cached_tokens"]
        if name == "root" and step:
            program.root_prompt += agent["prompt_tokens"]
            program.root_cached += agent["cached_tokens"]


def build_row(way: str, rounds: list[dict[str, Program]], equal: int) -> "Row":
    """The medians of one way."""
    from benchmarks.overlap.measure import interval

    programs = [programs[way] for programs in rounds]
    ratios = [programs[way].seconds / programs["request"].seconds for programs in rounds]
    return {
        "fan_out": way,
        "runs": statistics.median(program.runs for program in programs),
        "program_s": statistics.median(program.seconds for program in programs),
        "vs_request": statistics.median(ratios),
        "95 %": interval(ratios),
        "prefilled": statistics.median(program.prefilled for program in programs),
        "root_cached": statistics.median(p.root_cached / p.root_prompt for p in programs),
        "equal_first": f"{equal} of {len(rounds)}",
    }


if __name__ == "__main__":
    sys.exit(main())
