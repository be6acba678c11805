"""The same Mixture of Agents over one undivided server and over a pair, and beside it optillm's
`moa` and mixture-llm.

    python -m venv others && others/bin/pip install openai mixture-llm==0.1.3
    others/bin/pip install --no-deps optillm==0.4.0
    python benchmarks/servers.py --others others/bin/python [--rounds N] [--new-tokens N]
    [--shape 9-3-1] [--markdown] [--json]

SmolLM2 runs on real SGLang on the CPU: an undivided server, and a pair of the same model. A router
is in front of each, with the deployment that `shell-router serve --engine URL` writes, but for its
holdout. The other two programs ask the undivided server. In every round all ways answer one
question of benchmarks/overlap/questions.txt, in random order, with empty prefix caches.

    tree            each aggregator reads its cluster
    all-to-all      as mixture-llm asks: every agent reads the whole layer before, its own prompt
    critique        as optillm asks: three samples of one model, a critique, and the final answer

All outputs have fixed lengths, whatever ends them otherwise: small writes half of --new-tokens,
medium three quarters, large all of them; in `critique` all agents write all. The requests of a
graph have the same texts around outputs, lengths and temperatures in all its ways. Neither other
program streams, so their first token comes with the last. Medians of seconds from the request;
ratios are medians of each round's ratio to the graph's first way, with their 95 % intervals.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp

if TYPE_CHECKING:
    from report import Row

ROOT = Path(__file__).parents[1]
TITLE = "SmolLM2 over one undivided server, a pair, optillm and mixture-llm; tree {shape}"
MODELS = ("small", "medium", "large")
TEMPERATURES = (0.7, 0.3, 0)
START_S, LIMIT_S = 900, 600
FLUSHES, FLUSH_AGAIN_S = 100, 0.1
SETTINGS = {
    "plain": (False, False),
    "+ incremental prefill": (True, False),
    "+ drafts": (True, True),
}
"""Whether prompts are prefilled incrementally and agents draft, by the name of the setting."""
SYSTEM = "You are a helpful assistant."
SYNTHESIZE = {
    "system": "You have been provided with responses from various models to a query. "
    "Synthesize into a single, high-quality response.",
    "prefix": "Responses:\n",
    "slot": "{index}. {output}\n\n",
    "suffix": "Query: {question}",
}
"""The messages of mixture-llm."""
CANDIDATE = "    Candidate {index}:\n    {output}\n\n"
CRITIQUE = {
    "prefix": "\n    Original query: {question}\n\n    I will present you with three candidate "
    "responses to the original query. Please analyze and critique each response, discussing their "
    "strengths and weaknesses. Provide your analysis for each candidate separately.\n\n",
    "slot": CANDIDATE,
    "suffix": "    Please provide your critique for each candidate:\n    ",
}
FINAL = {
    "prefix": "\n    Original query: {question}\n\n    Based on the following candidate responses "
    "and their critiques, generate a final response to the original query.\n\n",
    "slot": CANDIDATE,
    "slots": {"critic": "    Critiques of all candidates:\n    {output}\n\n"},
    "suffix": "    Please provide a final, optimized response to the original query:\n    ",
}
"""The messages of optillm."""
OTHERS = '''
import asyncio, importlib.util, json, openai, sys, time, types
asked = json.loads(sys.argv[1])
given = {"base_url": asked["url"] + "/v1", "api_key": "none", "max_retries": 0, "timeout": 600}


class Completions:
    """Limits all outputs alike, and says that they ended by themselves: optillm drops others."""

    client = openai.OpenAI(**given)

    def create(self, **fields):
        fields |= {"max_tokens": asked["tokens"]["large"], "extra_body": {"ignore_eos": True}}
        answer = self.client.chat.completions.create(**fields)
        for choice in answer.choices:
            choice.finish_reason = "stop"
        return answer


def ask_optillm():
    folder = importlib.util.find_spec("optillm").submodule_search_locations[0]
    # its package imports a server with torch: only the module that asks is loaded
    sys.modules["optillm"] = package = types.ModuleType("optillm")
    package.conversation_logger = None
    spec = importlib.util.spec_from_file_location("optillm.moa", folder + "/moa.py")
    moa = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(moa)
    client = types.SimpleNamespace(chat=types.SimpleNamespace(completions=Completions()))
    ask = moa.mixture_of_agents
    return lambda: ask(asked["system"], asked["question"], client, "default")[0]


def ask_mixture():
    from mixture_llm import Aggregate, Propose, Synthesize, run

    models, prompt = asked["models"], asked["prompt"]
    layers = [[models[at % len(models)] for at in range(size)] for size in asked["shape"]]
    layers[-1] = models[-1:]
    first, second, third = asked["temperatures"]
    pipeline = [Propose(layers[0], first)]
    pipeline += [Synthesize(layer, prompt, second) for layer in layers[1:-1]]
    pipeline += [Aggregate(layers[-1][0], prompt, third)]

    client = openai.AsyncOpenAI(**given)

    async def call(*, model, messages, temp, max_tokens):
        reply = await client.chat.completions.create(
            model="default", messages=messages, temperature=temp,
            max_tokens=asked["tokens"][model], extra_body={"ignore_eos": True},
        )
        return reply.choices[0].message.content, 0, 0

    async def answer():
        text, history = await run(pipeline, asked["question"], call)
        calls = [made for step in history for made in step["llm_calls"]]
        failed = [made["error"] for made in calls if "error" in made]
        assert not failed, failed
        return text

    return lambda: asyncio.run(answer())


ask = ask_optillm() if asked["program"] == "optillm" else ask_mixture()
started_s = time.perf_counter()
assert ask()
print(time.perf_counter() - started_s)
'''

Way = tuple[str, str]
"""A graph, and what runs it."""
Times = tuple[float, float]
"""Seconds to the first token and to the last."""
Ask = Callable[[str], Awaitable[Times]]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--others", type=Path, required=True, help="the other programs' Python")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shape", default="9-3-1", help="agents by layer")
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # `launch` is of this repository, not of the package
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    import uvloop
    from report import report

    from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
    from launch.sglang_cpu.pair import free_ports, make_pair, make_server, start_servers
    from launch.sglang_cpu.smollm2 import smollm2_folder

    venv = built_environment()
    if venv is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    model = smollm2_folder(venv)
    flags = ("--max-total-tokens", "24576")
    with tempfile.TemporaryDirectory() as folder:
        server, pair = (Path(folder) / name for name in ("server", "pair"))
        undivided = make_server(
            "server", *free_ports(1), model, venv, server, options=flags, drafts=True
        )
        divided = make_pair(model, venv, pair, options=flags, drafts=True)
        engines = (undivided, divided.prefill, divided.decode)
        try:
            start_servers(*engines, limit_s=START_S, progress=say)
            rows = uvloop.run(measured(options, *(engine.url for engine in engines)))
        finally:
            for engine in engines:
                engine.stop()
    title = TITLE.format(shape=options.shape)
    report(
        title,
        rows,
        engine="SGLang on CPU, float32",
        simulated=False,
        as_json=options.json,
        markdown=options.markdown,
    )
    return 0


async def measured(options: argparse.Namespace, server: str, *pair: str) -> "list[Row]":
    """The rows, a way each; the undivided server and those of the pair are URLs."""
    from benchmarks.overlap.measure import real_questions

    async with deployed([server]) as undivided, deployed(pair) as divided:
        ways = build_ways(options, server, undivided, divided)
        runs: list[Mapping[Way, Times]] = []
        for question in real_questions()[: options.rounds + 1]:
            run = {}
            for way in random.sample(list(ways), len(ways)):
                await flush([server, *pair])
                run[way] = await ways[way](question)
                first_s, end_s = run[way]
                say(f"round {len(runs)}, {', '.join(way)}: {first_s:.2f} s, {end_s:.2f} s")
            runs.append(run)
    return [build_row(way, ways, runs[1:]) for way in ways]  # the first round warms up


def build_ways(
    options: argparse.Namespace, server: str, undivided: str, divided: str
) -> "dict[Way, Ask]":
    """What asks in each way; the servers are URLs. The first of a graph is what ratios are to."""
    shape = [int(agents) for agents in options.shape.split("-")]
    shares = zip(MODELS, (0.5, 0.75, 1), strict=True)
    tokens = {alias: int(share * options.new_tokens) for alias, share in shares}
    fields = {"url": server, "shape": shape, "tokens": tokens, "temperatures": TEMPERATURES}
    fields |= {"models": MODELS, "prompt": SYNTHESIZE["system"], "system": SYSTEM}
    graphs = {
        "tree": build_layers("tree", shape, tokens),
        "all-to-all": build_layers("all_to_all", shape, tokens, SYNTHESIZE),
        "critique": build_critique(options.new_tokens),
    }
    others = {"all-to-all": "mixture-llm", "critique": "optillm"}
    ways: dict[Way, Ask] = {}
    for graph, agents in graphs.items():
        if graph in others:
            program = {**fields, "program": others[graph]}
            ways[graph, others[graph]] = partial(ask_other, options.others, program)
        for setting, (incremental, drafts) in SETTINGS.items():
            if graph in others and incremental and not drafts:
                continue
            topology = {
                "agents": agents,
                "prefill": {"incremental": incremental},
                "defaults": {"drafts": drafts, "sampling": {"ignore_eos": True}},
            }
            ways[graph, f"undivided, {setting}"] = partial(ask_router, undivided, topology)
            if graph == "tree":
                ways[graph, f"pair, {setting}"] = partial(ask_router, divided, topology)
    return ways


def build_layers(
    form: Literal["tree", "all_to_all"],
    shape: Sequence[int],
    tokens: Mapping[str, int],
    prompt: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """The agents of layers, by name; those that read others have the `prompt`."""
    from shell_router.topology.assemble import write_out

    first, between, last = ({"temperature": temperature} for temperature in TEMPERATURES)
    layered = {
        "shape": shape,
        "models": MODELS,
        "proposer": {"sampling": first},
        "aggregator": {"sampling": between, "prompt": prompt or {}},
        "root": {"sampling": last},
    }
    agents = write_out(form, layered)
    lengths = {name: tokens[agent["model"]] for name, agent in agents.items()}
    return {
        name: {**agent, "sampling": {**agent["sampling"], "max_new_tokens": lengths[name]}}
        for name, agent in agents.items()
    }


def build_critique(new_tokens: int) -> Mapping[str, Any]:
    """Three samples, their critique, and the answer that reads all, by name."""
    samples = ["sample-1", "sample-2", "sample-3"]

    def build(temperature: float, precursors: Sequence[str], prompt: Mapping[str, Any]) -> Any:
        return {
            "model": "large",
            "precursors": precursors,
            "prompt": {"system": SYSTEM, **prompt},
            "sampling": {"temperature": temperature, "max_new_tokens": new_tokens},
        }

    return {
        **{name: build(1, [], {}) for name in samples},
        "critic": build(0.1, samples, CRITIQUE),
        "root": build(0.1, [*samples, "critic"], FINAL),
    }


@asynccontextmanager
async def deployed(engines: Sequence[str]) -> AsyncIterator[str]:
    """Serve what `shell-router serve --engine` serves, without its holdout; gives the URL."""
    from shell_router.app import load_config, serve_deployment
    from shell_router.app.discovery import ask_servers, write_deployment
    from shell_router.config import EmbedderSettings, Listen
    from shell_router.routing.holdout import HoldoutSettings

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.yaml"
        write_deployment(await ask_servers(engines), file)
        config = load_config(file, os.environ)
        config = replace(
            config,
            holdout=HoldoutSettings(share=0),
            embedder=EmbedderSettings("none"),  # nothing here exits early
            listen=Listen(port=0),
        )
        async with serve_deployment(config) as url:
            yield url


async def flush(urls: Sequence[str]) -> None:
    """Empty the prefix caches of servers as soon as they are idle."""
    async with aiohttp.ClientSession() as client:
        for url in urls:
            for _ in range(FLUSHES):
                async with client.post(f"{url}/flush_cache") as answer:
                    if answer.ok:
                        break
                await asyncio.sleep(FLUSH_AGAIN_S)
            else:
                raise RuntimeError(f"{url} does not become idle")


async def ask_router(url: str, topology: Mapping[str, Any], question: str) -> Times:
    """Ask a router, which streams."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True}
    first_s = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as client:
        started_s = time.perf_counter()
        request = client.post(f"{url}/v1/chat/completions", json={**body, "topology": topology})
        async with request as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                text = any(choice["delta"].get("content") for choice in event["choices"])
                if text and first_s is None:
                    first_s = time.perf_counter() - started_s
    assert first_s is not None
    return first_s, time.perf_counter() - started_s


async def ask_other(python: Path, fields: Mapping[str, Any], question: str) -> Times:
    """Ask one of the other programs, in a process of its own, which measures."""
    asked = json.dumps({**fields, "question": question})
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", OTHERS, asked), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{fields['program']} failed")
    seconds = float(printed.splitlines()[-1])
    return seconds, seconds


def build_row(way: Way, ways: Iterable[Way], runs: Sequence[Mapping[Way, Times]]) -> "Row":
    """Medians of a way, and its ratios to the first way of its graph."""
    from benchmarks.overlap.measure import interval

    base = next(other for other in ways if other[0] == way[0])
    row: Row = {"graph": way[0], "way": way[1]}
    for place, name in enumerate(("first token", "end")):
        ratios = [run[way][place] / run[base][place] for run in runs]
        row[f"{name}, s"] = statistics.median(run[way][place] for run in runs)
        row[f"{name}, relative"] = statistics.median(ratios)
        row[f"{name}, 95 %"] = interval(ratios)
    return row


def say(line: str) -> None:
    """Say what happens, apart from the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
