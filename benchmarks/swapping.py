"""Eight models behind the router, memory for three: what is gained by deciding whose turn it is.

    python benchmarks/swapping.py [--stream skewed|chains] [--sglang PAIRS] [--requests N] [--rounds
    N] [--json]

Each round draws a stream, which is served under each setting, in turns: another one goes first in
each round. Model k of n is wanted as often as 1/k says. Clients ask for the stream's next request
as soon as they have been answered. Every setting begins with the same three models. With --sglang
that number of real SGLang pairs hold a model each, and their weights are replaced; else embedded
pairs are started and stopped.

    first come, LRU   window_s is 0, and nothing is known of usage
    window, LRU       the window alone
    CoServe           the window, and eviction by usage and by the topologies
    sorted            (skewed) as first come, with the stream sorted by model: what an optimum could
    do that knew all
                      requests from the start. Each model is loaded once. The others' outputs have
                      to equal its outputs.

In `chains` a request is a topology of two agents, and the second model of each chain follows on the
first only. The first two settings do not know of it: their clients ask for the second themselves,
with the same prompts. Nothing is drafted, so that only turns differ.

    per_s             requests answered a second, median of the rounds
    vs_first          ratio to `first come, LRU` in the same round: median [least, most]
    p50_s, p95_s      from a request to its end, medians of the rounds
    loads             loads after the start, median
    offline           the fewest that a search found that knows the stream, for as many clients,
    median: a beam of 2,000
                      states, so that there may be fewer
    in_order          the fewest for the stream in its order, one request after the other, by
    Belady's rule, median load_ms           one load, in the mean
    unequal           outputs that differ from those of `sorted`, or of `first come, LRU`, all
    rounds
"""

import argparse
import asyncio
import logging
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp
    from report import Row

    from shell_router.config import Config, PairSettings

NAMES = [f"m{number}" for number in range(8)]
FIRST, CHAINS = "first come, LRU", 4
USAGE = {name: 1 / (number + 1) for number, name in enumerate(NAMES)}
WORDS = (
    "apple",
    "bridge",
    "castle",
    "cloud",
    "garden",
    "harbor",
    "island",
    "lantern",
    "meadow",
    "mirror",
    "ocean",
)
WIDTH = 2000
CHAIN = """
name: chain-{0}
defaults: {{sampling: {{temperature: 0, max_new_tokens: {2}}}}}
agents:
  draft: {{model: m{0}}}
  check:
    model: m{1}
    precursors: [draft]
    prompt: {{prefix: "{{question}}", slot: " {{output}}", suffix: ""}}
"""
SETTINGS = {
    "skewed": (FIRST, "window, LRU", "CoServe", "sorted"),
    "chains": (FIRST, "window, LRU", "CoServe"),
}


@dataclass(frozen=True)
class Amount:
    """How much is asked, of what."""

    stream: str
    requests: int
    clients: int
    tokens: int
    window_s: float
    places: int


@dataclass
class Served:
    """What a setting took for a stream; `outputs` by the number of the request."""

    elapsed_s: float = 0.0
    loads: float = 0.0
    load_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    outputs: dict[int, str] = field(default_factory=dict)


Asked = tuple[int, int, str]
"""The number of a request, the number of its model or chain, and its question."""


def main() -> int:
    """Measure and print."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--stream", choices=(*SETTINGS,), default="skewed")
    found.add_argument("--sglang", type=int, default=0, metavar="PAIRS")
    found.add_argument("--requests", type=int, default=192, help="of a stream (default 192)")
    found.add_argument("--clients", type=int, default=16)
    found.add_argument("--tokens", type=int, default=24, help="of each output (default 24)")
    found.add_argument("--window-s", type=float, default=10.0)
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    options = found.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    logging.basicConfig(level="ERROR", format="%(message)s")
    import uvloop
    from report import report

    places = options.sglang or 3
    amount = Amount(
        options.stream, options.requests, options.clients, options.tokens, options.window_s, places
    )
    engine = (
        f"{places} SGLang pairs, cpu" if options.sglang else f"embedded pairs, {places} at a time"
    )
    rows = uvloop.run(measured(amount, options.rounds, options.sglang))
    report("Models that take turns", rows, engine=engine, simulated=False, as_json=options.json)
    return 0


async def measured(amount: Amount, rounds: int, sglang: int) -> "list[Row]":
    """A row per setting."""
    from benchmarks.random_checkpoint import make_checkpoint

    names = SETTINGS[amount.stream]
    found: dict[str, list[Served]] = {name: [] for name in names}
    streams = [stream(amount, seed) for seed in range(rounds)]
    with tempfile.TemporaryDirectory(prefix="swapping-") as scratch:
        folder = Path(scratch)
        for seed, name in enumerate(NAMES):
            make_checkpoint(folder / name, seed=seed, context_length=1024, hidden=256, layers=4)
        for number in range(CHAINS):
            text = CHAIN.format(number, number + CHAINS, amount.tokens)
            (folder / f"chain-{number}.yaml").write_text(text, encoding="utf-8")
        async with pairs(folder, sglang) as started:
            for number, asked in enumerate(streams):
                turn = number % len(names)
                for name in (*names[turn:], *names[:turn]):
                    ordered = sorted(asked, key=lambda one: one[1]) if name == "sorted" else asked
                    found[name].append(
                        await served(
                            deployment(folder, amount, name, started), amount, name, ordered
                        )
                    )
    return [row(name, runs, found, streams, amount) for name, runs in found.items()]


def stream(amount: Amount, seed: int) -> list[Asked]:
    """Requests with their numbers."""
    draw = random.Random(seed)
    kinds = range(CHAINS if amount.stream == "chains" else len(NAMES))
    drawn = draw.choices(kinds, [1 / (kind + 1) for kind in kinds], k=amount.requests)
    return [(number, kind, " ".join(draw.choices(WORDS, k=8))) for number, kind in enumerate(drawn)]


@asynccontextmanager
async def pairs(folder: Path, count: int) -> "AsyncIterator[Sequence[PairSettings]]":
    """That number of real SGLang pairs, started with the first models."""
    from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
    from launch.sglang_cpu.pair import cpu_pair
    from shell_router.config import PairSettings

    venv = built_environment()
    if count and venv is None:
        raise SystemExit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            assert venv is not None
            one = stack.enter_context(
                cpu_pair(folder / NAMES[number], venv, folder / f"pair-{number}")
            )
            found.append(
                PairSettings(
                    one.prefill.url, one.decode.url, one.bootstrap_port, one.bootstrap_host
                )
            )
        yield found


def deployment(
    folder: Path, amount: Amount, name: str, started: "Sequence[PairSettings]"
) -> "Config":
    """The deployment under a setting."""
    from shell_router.config import (
        Config,
        EmbedderSettings,
        Listen,
        ModelSettings,
        SwappingSettings,
    )
    from shell_router.standins.embedded.settings import EmbeddedSection

    knows = name == "CoServe"
    usage = {one: share for one, share in USAGE.items() if knows}
    if knows and amount.stream == "chains":
        usage = {
            f"m{number + more}": USAGE[f"m{number}"]
            for number in range(CHAINS)
            for more in (0, CHAINS)
        }
    engine = {} if started else {"embedded": EmbeddedSection(dtype="float64")}
    return Config(
        {one: ModelSettings(folder / one, engine=engine, drafts=False) for one in NAMES},
        swapping=SwappingSettings(
            None if started else amount.places,
            pairs=tuple(started),
            usage=usage,
            window_s=0.0 if name in (FIRST, "sorted") else amount.window_s,
        ),
        topologies=tuple(sorted(folder.glob("chain-*.yaml")))
        if knows and amount.stream == "chains"
        else (),
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
    )


async def served(config: "Config", amount: Amount, name: str, asked: Sequence[Asked]) -> Served:
    """Serve the stream. All settings begin with the first models loaded, whatever they know."""
    import aiohttp

    from shell_router.app import serve_deployment

    found, waiting = Served(), iter(asked)
    by_hand = amount.stream == "chains" and name != "CoServe"
    async with (
        serve_deployment(config, on_progress=lambda _: None) as url,
        aiohttp.ClientSession(url) as http,
    ):

        async def client() -> None:
            for number, kind, question in waiting:
                begun_s = time.perf_counter()
                if amount.stream == "chains" and not by_hand:
                    said = await chat(http, f"chain-{kind}", question, amount)
                else:
                    said = await chat(http, f"m{kind}", question, amount)
                if by_hand:
                    said = await chat(http, f"m{kind + CHAINS}", f"{question} {said}", amount)
                found.latencies_s.append(time.perf_counter() - begun_s)
                found.outputs[number] = said

        for one in NAMES[: amount.places]:
            await chat(http, one, "first", amount)
        loads, load_s = await counted(http)
        begun_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(amount.clients)))
        found.elapsed_s = time.perf_counter() - begun_s
        after, after_s = await counted(http)
        found.loads, found.load_s = after - loads, after_s - load_s
    return found


async def chat(http: "aiohttp.ClientSession", model: str, question: str, amount: Amount) -> str:
    """The answer, as long as allowed."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
    }
    async with http.post(
        "/v1/chat/completions", json={**body, "max_tokens": amount.tokens}
    ) as answer:
        found = await answer.json()
        if answer.status != 200:
            raise SystemExit(f"{model}: {found}")
        text: str = found["choices"][0]["message"]["content"]
        return text


async def counted(http: "aiohttp.ClientSession") -> tuple[float, float]:
    """Loads so far, and their seconds."""
    async with http.get("/metrics") as answer:
        text = await answer.text()
    found = [
        re.search(rf"^shell_router_model_load_seconds_{part} (\S+)", text, re.M)
        for part in ("count", "sum")
    ]
    count, seconds = (float(one[1]) if one else 0.0 for one in found)
    return count, seconds


def row(
    name: str,
    runs: Sequence[Served],
    all_runs: Mapping[str, Sequence[Served]],
    streams: Sequence[list[Asked]],
    amount: Amount,
) -> "Row":
    """The medians of a setting's rounds."""
    import numpy as np

    from benchmarks.coserve.runs import fewest_switches_in_this_order

    ratios = [
        first.elapsed_s / one.elapsed_s for one, first in zip(runs, all_runs[FIRST], strict=True)
    ]
    after = (0, CHAINS) if amount.stream == "chains" else (0,)
    needed = [[tuple(f"m{kind + more}" for more in after) for _, kind, _ in one] for one in streams]
    sizes, first = dict.fromkeys(NAMES, 1), NAMES[: amount.places]
    orders = [[name for one in chains for name in one] for chains in needed]
    fewest = [fewest_switches_in_this_order(order, first, sizes, amount.places) for order in orders]
    right = all_runs.get("sorted", all_runs[FIRST])
    return {
        "setting": name,
        "per_s": amount.requests / median(one.elapsed_s for one in runs),
        "vs_first": f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
        "p50_s": median(float(np.percentile(one.latencies_s, 50)) for one in runs),
        "p95_s": median(float(np.percentile(one.latencies_s, 95)) for one in runs),
        "loads": median(one.loads for one in runs),
        "offline": median(fewest_offline(one, amount.clients, first) for one in needed),
        "in_order": median(fewest),
        "load_ms": 1e3 * sum(one.load_s for one in runs) / (sum(one.loads for one in runs) or 1),
        "unequal": sum(
            one.outputs[number] != other.outputs[number]
            for one, other in zip(runs, right, strict=True)
            for number in one.outputs
        ),
    }


Chain = tuple[str, ...]
"""The models that a request needs yet, in their order."""


def fewest_offline(needed: Sequence[Chain], clients: int, first: Sequence[str]) -> int:
    """Loads of the best schedule that was found for clients that take one request after the other.

    A state is what is loaded, what each client needs yet, and how many requests were taken. Only
    when all clients need a model that is not loaded is one loaded: to load it before spares
    nothing.
    """

    def advanced(loaded: frozenset[str], running: Sequence[Chain], taken: int) -> State:
        blocked, going = [], list(running)
        while going:
            one = going.pop()
            while one and one[0] in loaded:
                one = one[1:]
                if not one and taken < len(needed):
                    one, taken = needed[taken], taken + 1
            blocked += [one] if one else []
        return loaded, tuple(sorted(blocked)), taken

    states, loads = {advanced(frozenset(first), needed[:clients], min(clients, len(needed)))}, 0
    while all(running for _, running, _ in states):
        grown = {
            advanced(loaded - {leaving} | {coming}, running, taken)
            for loaded, running, taken in states
            for coming in {one[0] for one in running}
            for leaving in loaded
        }
        best = sorted(grown, key=lambda state: sum(map(len, state[1])) - len(needed[0]) * state[2])
        states, loads = set(best[:WIDTH]), loads + 1
    return loads


State = tuple[frozenset[str], tuple[Chain, ...], int]


if __name__ == "__main__":
    sys.exit(main())
