"""The demo from start to end: everything embedded, a few questions streamed, a table and timelines."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from shell_router.app import load_config, running_server
from shell_router.batch.questions import is_right
from shell_router.config import CacheSettings, Config, Listen
from shell_router.errors import ConfigError
from shell_router.lab.demo.drawing import Picture, delta
from shell_router.lab.evaluation.client import Client
from shell_router.lab.evaluation.dataset import Item, read_items
from shell_router.lab.evaluation.report import CUT_OFF
from shell_router.lab.evaluation.run import WARM_UP
from shell_router.lab.timeline import draw_timeline
from shell_router.topology import Topology, load_topology

REPOSITORY = Path(__file__).parents[3]
DEPLOYMENT = REPOSITORY / "configs" / "evaluation.yaml"
QUESTIONS = REPOSITORY / "models" / "data" / "test.jsonl"
TOPOLOGIES = tuple(REPOSITORY / "topologies" / "evaluation" / f"{name}.yaml" for name in ("all-to-all", "full"))
"""The baseline is served as a layered client would: no prefill before all inputs have ended, no early exit."""
TITLE = "Demo: all-to-all and tree over HTTP"
ENGINE = "embedded pair, CPU, tiny models"
HONESTY = "The models are tiny, but they really solve the questions; everything is real, the times included."
COMPARED = "Compared: all-to-all with no incremental prefill and no early exit; the tree with both."


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """`rounds` questions per topology; `seed` fixes what the agents draw, and the early exits."""

    rounds: int = 3
    seed: int = 0
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """One question's answer, as a client saw it, its grade and its trace. Times are seconds since the request began."""

    topology: str
    question: str
    answer: str
    right: bool
    first_token_s: float
    end_to_end_s: float
    usage: Mapping[str, Any]
    trace: Mapping[str, Any]


async def run_demo(settings: DemoSettings) -> None:
    """Run it and print; with `as_json` the last line is one JSON object. Nothing is left running."""
    console = Console(stderr=settings.as_json)
    begun_s = time.monotonic()
    config = deployment()
    console.print(f"Starting a prefill and a decode engine for each of {len(config.models)} models.")
    asked = await _ask_all(config, settings, console)
    rows = compare(asked)
    console.print(COMPARED)
    console.print(as_table(rows))
    for one in {one.topology: one for one in asked}.values():  # the last of each
        console.print(Text(f"\n{one.topology}: {one.question}", "bold"))
        for line in draw_timeline(one.trace, columns=min(console.width, 140)):
            console.print(line, no_wrap=True, crop=True)
    console.print(f"The whole took {time.monotonic() - begun_s:.0f} s.", style="dim")
    if settings.as_json:
        report = {"title": TITLE, "engine": ENGINE, "simulated": False, "rows": rows}
        sys.stdout.write(orjson.dumps(report).decode() + "\n")


def deployment() -> Config:
    """The tiny models on embedded pairs and the two topologies, on a free port of this machine.

    Raises ConfigError where the package was installed without its repository.
    """
    if not DEPLOYMENT.exists():
        raise ConfigError(
            f"the demo's models are not there: it looked for {DEPLOYMENT}.",
            remedy="Run it in a clone of the repository, installed with pip install -e.",
        )
    config = load_config(DEPLOYMENT, os.environ)
    return replace(config, topologies=TOPOLOGIES, listen=Listen(port=0), cache=CacheSettings())


async def _ask_all(config: Config, settings: DemoSettings, console: Console) -> list[Asked]:
    compared = [load_topology(file) for file in TOPOLOGIES]
    # those of the test set that need several steps; over again where they are too few
    hard = [item for item in read_items(QUESTIONS) if item.facts["steps"] > 2]
    async with (
        running_server(config, on_progress=lambda step: console.print(f"  {step}", style="dim")) as url,
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, url)
        await client.wait_until_ready()
        console.print(f"Serving on {url}\n{HONESTY}")
        # an engine's first batches pay for what torch does only once
        for topology in compared:
            await ask(client, topology.name, WARM_UP, seed=settings.seed, on_chunk=lambda _chunk: None)
        return [
            await _ask(client, topology, hard[number % len(hard)], settings.seed + number, console)
            for number in range(settings.rounds)
            for topology in compared
        ]


async def _ask(client: Client, topology: Topology, item: Item, seed: int, console: Console) -> Asked:
    picture = Picture(topology, item)
    if console.is_terminal:
        with Live(picture, console=console, refresh_per_second=12):
            return await ask(client, topology.name, item, seed=seed, on_chunk=picture.take)
    asked = await ask(client, topology.name, item, seed=seed, on_chunk=picture.take)
    grade = "right" if asked.right else "wrong"
    line = f"{topology.name}: {item.question}\n  {asked.answer} ({grade}, {asked.end_to_end_s:.2f} s)"
    console.print(line, markup=False, soft_wrap=True)
    return asked


async def ask(
    client: Client, model: str, item: Item, *, seed: int, on_chunk: Callable[[Mapping[str, Any]], None]
) -> Asked:
    """Stream the answer of `model`, every chunk handed to `on_chunk`, and grade it."""
    begun_s = time.monotonic()
    pieces: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}

    def take(chunk: Mapping[str, Any]) -> None:
        on_chunk(chunk)
        usage.update(chunk.get("usage") or {})
        pieces.append((time.monotonic() - begun_s, delta(chunk)))

    body = {"model": model, "messages": [{"role": "user", "content": item.question}], "seed": seed}
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "include_agents": True}
    trace = await client.stream(body | streamed, take)
    text = "".join(piece for _, piece in pieces)
    ended_s = pieces[-1][0] if pieces else 0.0
    first_token_s = next((at_s for at_s, piece in pieces if piece), ended_s)
    right = is_right(text, item.answer, item.grader)
    return Asked(model, item.question, text, right, first_token_s, ended_s, usage, trace)


Row = Mapping[str, Any]
LABELS = {
    "questions": "questions",
    "right": "right answers",
    "agents": "agents",
    "end_to_end_s": "end to end, s (median)",
    "first_token_s": "root's first token, s (median)",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "new tokens",
    "cached_share": "prompt tokens found cached",
    "hidden_prefill_share": "prefill hidden behind precursors",
    "agents_cut_off": "agents cut off early",
    "latency_ratio": "latency relative to the first",
}
"""Of a row's keys. Times are medians over a topology's questions, counts and shares are over all of them."""


def compare(asked: Sequence[Asked]) -> list[Row]:
    """A row per topology, in the order of their first questions; the first is what the others are compared with."""
    grouped: dict[str, list[Asked]] = {}
    for one in asked:
        grouped.setdefault(one.topology, []).append(one)
    rows = [{"topology": name} | _row(group) for name, group in grouped.items()]
    return [row | {"latency_ratio": round(row["end_to_end_s"] / rows[0]["end_to_end_s"], 3)} for row in rows]


def _row(group: Sequence[Asked]) -> dict[str, Any]:
    records = [record for one in group for record in one.trace["agents"].values()]
    finished = [record for record in records if record["state"] == "finished"]
    hidden_s, exposed_s = (
        sum(one.trace["overlap"].get(f"{kind}_prefill_s", 0.0) for one in group) for kind in ("hidden", "exposed")
    )
    cached, prompts = (sum(record[f"{kind}_tokens"] for record in finished) for kind in ("cached", "prompt"))
    return {
        "questions": len(group),
        "right": sum(one.right for one in group),
        "agents": max(len(one.trace["agents"]) for one in group),
        "end_to_end_s": round(median(one.end_to_end_s for one in group), 3),
        "first_token_s": round(median(one.first_token_s for one in group), 3),
        "prompt_tokens": sum(one.usage["prompt_tokens"] for one in group),
        "completion_tokens": sum(one.usage["completion_tokens"] for one in group),
        "cached_share": round(cached / (prompts or 1), 4),
        "hidden_prefill_share": round(hidden_s / (hidden_s + exposed_s or 1.0), 4),
        "agents_cut_off": sum(record["state"] in CUT_OFF for record in records),
    }


def as_table(rows: Sequence[Row]) -> Table:
    """The same for people, a column per topology."""
    table = Table("", *(Column(row["topology"], justify="right") for row in rows))
    for key, label in LABELS.items():
        form = ".0%" if key.endswith("_share") else ".2f" if isinstance(rows[0][key], float) else ""
        table.add_row(label, *(format(row[key], form) for row in rows))
    return table
