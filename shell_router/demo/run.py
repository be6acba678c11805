"""The demo from start to end: everything embedded, a few questions, a table and timelines."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import orjson
from rich.console import Console
from rich.live import Live
from rich.text import Text

from shell_router.config import Config
from shell_router.demo.client import Client
from shell_router.demo.comparison import Asked, as_report, as_table, compare
from shell_router.demo.drawing import Picture
from shell_router.demo.scene import deployment, questions, shared_cache, topologies
from shell_router.demo.timeline import draw_timeline
from shell_router.evaluation import client as evaluation
from shell_router.evaluation.dataset import Item
from shell_router.evaluation.run import WARM_UP
from shell_router.topology import Topology
from shell_router.wiring import running_server

ENGINE = "embedded pair, CPU, tiny models"
HONESTY = "The models are tiny, but they really solve the questions; everything is real, the times included."
COMPARED = "Compared: all-to-all with no incremental prefill and no early exit; the tree with both."


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """`rounds` questions per topology; `seed` fixes what the agents draw, and the early exits."""

    rounds: int = 3
    seed: int = 0
    as_json: bool = False


async def run_demo(settings: DemoSettings) -> None:
    """Run it and print; with `as_json` the last line is one JSON object. Nothing is left running."""
    console = Console(stderr=settings.as_json)
    begun_s = time.monotonic()
    with shared_cache() as (cache, name):
        config = deployment(cache)
        models = len(config.models)
        console.print(f"Starting a prefill and a decode engine for each of {models} models; agents share {name}.")
        asked = await _ask_all(config, settings, console)
    rows = compare(asked)
    console.print(COMPARED)
    console.print(as_table(rows))
    for one in _last_of_each(asked):
        _print_timeline(one, console)
    console.print(f"The whole took {time.monotonic() - begun_s:.0f} s.", style="dim")
    if settings.as_json:
        report = as_report(rows, engine=ENGINE, title="Demo: all-to-all and tree over HTTP")
        sys.stdout.write(orjson.dumps(report).decode() + "\n")


async def _ask_all(config: Config, settings: DemoSettings, console: Console) -> list[Asked]:
    compared = topologies()
    async with (
        running_server(config, tell=lambda step: console.print(f"  {step}", style="dim")) as url,
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, url)
        console.print("  loading the early exit's embedding model", style="dim")
        await evaluation.Client(session, url).wait_until_ready()
        console.print(f"Serving on {url}\n{HONESTY}")
        # an engine's first batches pay for what torch does only once
        for topology in compared:
            await client.ask(topology.name, WARM_UP, seed=settings.seed, tell=lambda _chunk: None)
        return [
            await _ask(client, topology, item, settings.seed + number, console)
            for number, item in enumerate(questions(settings.rounds))
            for topology in compared
        ]


async def _ask(client: Client, topology: Topology, item: Item, seed: int, console: Console) -> Asked:
    picture = Picture(topology, item)
    if console.is_terminal:
        with Live(picture, console=console, refresh_per_second=12):
            return await client.ask(topology.name, item, seed=seed, tell=picture.take)
    asked = await client.ask(topology.name, item, seed=seed, tell=picture.take)
    told = f"{topology.name}: {item.question}\n  {asked.answer} ({asked.verdict}, {asked.end_to_end_s:.2f} s)"
    console.print(told, markup=False, soft_wrap=True)
    return asked


def _last_of_each(asked: Sequence[Asked]) -> list[Asked]:
    return list({one.topology: one for one in asked}.values())


def _print_timeline(one: Asked, console: Console) -> None:
    console.print(Text(f"\n{one.topology}: {one.question}", "bold"))
    for line in draw_timeline(one.trace, columns=min(console.width, 140)):
        console.print(line, no_wrap=True, crop=True)
