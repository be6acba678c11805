"""What `shell-router experts` does, once its options are read."""

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from shell_router.batch.questions import FORM, read_questions
from shell_router.cli.planning import write
from shell_router.engines.expert_recorder import ExpertRecorder
from shell_router.errors import ConfigError, DataError
from shell_router.placement import ALGORITHMS, ExpertRecord, Measures, Placement, PlacementSettings, measures
from shell_router.placement import place as placed
from shell_router.placement.files import placement_text, read_placement, read_record
from shell_router.placement.verdict import verdict


class Shown(NamedTuple):
    """A row of the table: how good, and in how many seconds found; None where it was read from a file."""

    measures: Measures
    seconds: float | None


async def record(chosen: argparse.Namespace) -> None:
    """Have the engine record, and write what it recorded."""
    _writable(chosen.out)
    prompts = [] if chosen.prompts is None else _prompts(chosen.prompts)
    async with _recorder(chosen) as recorder:
        await recorder.mode()
        if prompts:
            work = await recorder.asking(prompts, new_tokens=chosen.new_tokens, at_once=chosen.concurrency)
        else:
            work = _waiting(chosen.seconds)
        found = _kept(chosen.out, await recorder.record(work))
    print(f"{chosen.out}: {_said(found)}")


def place(chosen: argparse.Namespace, settings: PlacementSettings) -> None:
    """Write a placement, and say how good it is beside what SGLang has without it."""
    _writable(chosen.out)
    record = read_record(chosen.record)
    found = _timed(chosen.algorithm, record, settings)
    write(chosen.out, placement_text(found[0], record))
    rows = {name: _timed(name, record, settings, everywhere=True)[1] for name in ("contiguous", "eplb")}
    _show(record, settings, {**rows, chosen.algorithm: found[1]})
    print(f"{chosen.out}: start SGLang with --ep-size {settings.gpus} --init-expert-location {chosen.out}")


def report(chosen: argparse.Namespace, settings: PlacementSettings) -> None:
    """Show how good algorithms and files are on one record."""
    if chosen.json is not None:
        _writable(chosen.json)
    record = read_record(chosen.record)
    algorithms = tuple(ALGORITHMS) if chosen.algorithms == ("all",) else chosen.algorithms
    for name in algorithms:
        if name not in ALGORITHMS:
            raise ConfigError(f"There is no algorithm {name!r}.", remedy=f"Choose of: {', '.join(ALGORITHMS)}, or all.")
    rows = {
        str(file): Shown(measures(record, read_placement(file, record, settings.gpus)), None)
        for file in chosen.placements
    }
    rows |= {name: _timed(name, record, settings, everywhere=True)[1] for name in algorithms}
    _show(record, settings, rows)
    if chosen.json:
        figures = {name: {**asdict(row.measures), "seconds": row.seconds} for name, row in rows.items()}
        write(chosen.json, json.dumps({"gpus": settings.gpus, "placements": figures}, indent=2) + "\n")


async def watch(chosen: argparse.Namespace, settings: PlacementSettings) -> None:
    """Record what the engine serves, place, and write the file where that is worth a restart; again and again."""
    _writable(chosen.out)
    if not chosen.every_s > 0 or not chosen.margin > 0:
        raise ConfigError("--every-s and --margin must be above 0.", remedy="Correct them.")
    done = 0
    async with _recorder(chosen) as recorder:
        await recorder.mode()
        while chosen.rounds is None or done < chosen.rounds:
            archive = await recorder.record(_waiting(chosen.every_s))
            try:
                found = _kept(chosen.out.with_suffix(".npz"), archive)
            except DataError as error:
                print(f"not placed: {error}", flush=True)
            else:
                print(_round(chosen, settings, found), flush=True)
            done += 1


def _round(chosen: argparse.Namespace, settings: PlacementSettings, record: ExpertRecord) -> str:
    """Place once more; what to say of it."""
    found = placed(chosen.algorithm, record, settings)
    if chosen.out.exists():
        now = read_placement(chosen.out, record, settings.gpus)
    else:
        now = ALGORITHMS["contiguous"](record, settings)
    judged = verdict(measures(record, now), measures(record, found), chosen.margin)
    if not judged.worth_it:
        return f"not worth a restart, {judged.reason}; {_said(record)}"
    write(chosen.out, placement_text(found, record))
    return f"worth a restart with {chosen.out}, {judged.reason}; {_said(record)}"


@asynccontextmanager
async def _recorder(chosen: argparse.Namespace) -> AsyncIterator[ExpertRecorder]:
    key = None
    if chosen.api_key_env is not None:
        key = os.environ.get(chosen.api_key_env)
        if not key:
            raise ConfigError(f"{chosen.api_key_env} is not set.", remedy="Put the server's key into it.")
    async with aiohttp.ClientSession() as session:
        yield ExpertRecorder(session, chosen.url, api_key=key, limit_s=chosen.timeout_s)


def _waiting(seconds: float) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.sleep(seconds)


def _prompts(file: Path) -> list[str]:
    questions = read_questions(file, ())
    if questions.refused:
        first = questions.refused[0]
        raise DataError(f"{file}:{first.line}: {first.error}", remedy=FORM)
    return [question.text for question in questions.asked]


def _kept(file: Path, archive: bytes) -> ExpertRecord:
    """The record that an engine sent, written to `file`. Raises DataError where it holds none."""
    try:
        file.write_bytes(archive)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy="Name a file that you may write.") from error
    return read_record(file)


def _timed(
    name: str, record: ExpertRecord, settings: PlacementSettings, *, everywhere: bool = False
) -> tuple[Placement, Shown]:
    """What `name` finds; `everywhere` lets one partition mean nothing to those that have none."""
    started_s = time.perf_counter()
    found = ALGORITHMS[name](record, settings) if everywhere else placed(name, record, settings)
    return found, Shown(measures(record, found), time.perf_counter() - started_s)


def _said(record: ExpertRecord) -> str:
    followed = "with transitions" if record.has_transitions else "without transitions"
    counted = f"{record.activations.sum():,.0f} activations"
    return f"{len(record.layers)} layers of {record.experts} experts, {counted}, {followed}"


def _show(record: ExpertRecord, settings: PlacementSettings, rows: Mapping[str, Shown]) -> None:
    table = Table(title=f"{_said(record)}, on {settings.gpus} GPUs", title_justify="left")
    table.add_column("placement")
    for column in ("balance", "worst layer", "D", "traffic", "seconds"):
        table.add_column(column, justify="right")
    for name, (of, seconds) in rows.items():
        table.add_row(
            name,
            f"{of.balance:.4f}",
            f"{of.worst_balance:.4f}",
            f"{of.deviation:.2%}",
            f"{of.traffic:.2%}" if record.has_transitions else "-",
            "-" if seconds is None else f"{seconds:.2f}",
        )
    Console(width=max(100, 60 + max(map(len, rows)))).print(table)


def _writable(file: Path) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written.", remedy="Name a file in a folder that is there.")
