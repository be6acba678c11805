"""The demo from start to end: everything embedded, a few questions, a table and timelines."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
from rich.console import Console
from rich.live import Live
from rich.text import Text

from shell_router.config import CacheSettings
from shell_router.demo.client import Client
from shell_router.demo.comparison import Asked, as_report, as_table, compare
from shell_router.demo.drawing import Picture
from shell_router.demo.scene import MODELS, QUESTIONS, deployment, shared_cache, write_topologies
from shell_router.demo.timeline import draw_timeline
from shell_router.topology import Topology
from shell_router.wiring import running_server

ENGINE = "embedded pair, CPU, random weights"
HONESTY = "The models have random weights: the words mean nothing; requests, caches, engines and times are real."
COMPARED = "Compared: all-to-all with no incremental prefill and no early exit; the tree with both."
START_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """`rounds` questions per topology, `new_tokens` per agent; `seed` fixes the early exits' draws."""

    rounds: int = 2
    new_tokens: int = 64
    seed: int = 0
    as_json: bool = False


async def run_demo(settings: DemoSettings) -> None:
    """Run it and print; with `as_json` the last line is one JSON object. Nothing is left running."""
    console = Console(stderr=settings.as_json)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shell-router-demo-") as folder, shared_cache() as (cache, name):
        topologies = write_topologies(Path(folder), new_tokens=settings.new_tokens)
        console.print(f"Starting a prefill and a decode engine for each of {len(MODELS)} models; agents share {name}.")
        asked = await _ask_all(Path(folder), cache, topologies, settings, console)
    rows = compare(asked)
    console.print(COMPARED)
    console.print(as_table(rows))
    for one in _last_of_each(asked):
        _print_timeline(one, console)
    console.print(f"The whole took {time.monotonic() - begun_s:.0f} s.", style="dim")
    if settings.as_json:
        report = as_report(rows, engine=ENGINE, title="Demo: all-to-all and tree over HTTP")
        sys.stdout.write(orjson.dumps(report).decode() + "\n")


async def _ask_all(
    folder: Path, cache: CacheSettings, topologies: Sequence[Topology], settings: DemoSettings, console: Console
) -> list[Asked]:
    async with (
        running_server(deployment(folder, cache), tell=lambda step: console.print(f"  {step}", style="dim")) as url,
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, url)
        console.print("  loading the early exit's embedding model", style="dim")
        await client.wait_until_ready(limit_s=START_LIMIT_S)
        console.print(f"Serving on {url}\n{HONESTY}")
        # an engine's first batches pay for what torch does only once
        await client.ask(topologies[-1].name, "Ready?", seed=settings.seed, tell=lambda _chunk: None)
        return [
            await _ask(client, topology, QUESTIONS[number % len(QUESTIONS)], settings.seed + number, console)
            for number in range(settings.rounds)
            for topology in topologies
        ]


async def _ask(client: Client, topology: Topology, question: str, seed: int, console: Console) -> Asked:
    picture = Picture(topology, question)
    if console.is_terminal:
        with Live(picture, console=console, refresh_per_second=12):
            return await client.ask(topology.name, question, seed=seed, tell=picture.take)
    asked = await client.ask(topology.name, question, seed=seed, tell=picture.take)
    console.print(f"{topology.name}: {question} answered in {asked.end_to_end_s:.2f} s: {asked.answer[:60]}...")
    return asked


def _last_of_each(asked: Sequence[Asked]) -> list[Asked]:
    return list({one.topology: one for one in asked}.values())


def _print_timeline(one: Asked, console: Console) -> None:
    console.print(Text(f"\n{one.topology}: {one.question}", "bold"))
    for line in draw_timeline(one.trace, columns=min(console.width, 140)):
        console.print(line, no_wrap=True, crop=True)
