"""Trace files that the router recorded, read to learn lengths from."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from shell_router.core.prediction import Prospect
from shell_router.errors import ConfigError, DataError

NUMBERS = ("system_tokens", "user_tokens", "known_tokens", "output_tokens", "started_at", "started_s")
TEXTS = ("program", "topology", "agent", "stage", "model", "state")


@dataclass(frozen=True, slots=True)
class TracedRun:
    """One agent's run: what was known before it, what it and all after it in its program wrote, and when it came."""

    program: str
    prospect: Prospect
    model: str
    own_tokens: int
    total_tokens: int
    prompt_tokens: int
    arrived_s: float
    whole: bool
    """It and all after it ran to their ends."""


def read_traces(paths: Sequence[Path]) -> list[TracedRun]:
    """The runs in files, and in all .jsonl files of folders, in the order of their arrival. Raises ConfigError."""
    programs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in _files(paths):
        for line in _lines(file):
            programs[line["program"]].append(line)
    runs = [run for lines in programs.values() for run in _runs(lines)]
    if not runs:
        raise ConfigError("The traces hold no run.", remedy="Record some: docs/model-choice.md says how.")
    return sorted(runs, key=lambda run: run.arrived_s)


def _files(paths: Sequence[Path]) -> list[Path]:
    found = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not found:
        raise ConfigError("There are no .jsonl files.", remedy="Name the folder that `record.folder` names.")
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.", remedy="Name a file of traces.") from error
    for number, line in enumerate(content.splitlines(), start=1):
        yield _checked(line, f"{file}:{number}")


def _checked(line: bytes, where: str) -> dict[str, Any]:
    remedy = "Name files that the router recorded."
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: this is not JSON ({error}).", remedy=remedy) from None
    fits = isinstance(found, dict) and all(isinstance(found.get(name), str) for name in TEXTS)
    if not fits or not all(isinstance(found.get(name), int | float) for name in NUMBERS):
        raise DataError(f"{where}: this is not a line of a trace file.", remedy=remedy)
    return dict(found)


def _runs(lines: Sequence[Mapping[str, Any]]) -> Iterator[TracedRun]:
    """The runs of one program, each with what followed it."""
    by_agent = {line["agent"]: line for line in lines}
    readers: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        for precursor in line.get("reads", ()):
            readers[precursor].append(line["agent"])
    for line in lines:
        after = [by_agent[agent] for agent in _following(line["agent"], readers)]
        yield TracedRun(
            line["program"],
            _prospect(line),
            line["model"],
            int(line["output_tokens"]),
            int(sum(one["output_tokens"] for one in after)),
            int(line.get("prompt_tokens") or line["known_tokens"]),
            line["started_at"] + line["started_s"],
            line["state"] == "finished" and all(one["state"] in ("finished", "passed_on") for one in after),
        )


def _following(agent: str, readers: Mapping[str, Sequence[str]]) -> set[str]:
    """`agent` and all that read it, directly or not."""
    found, frontier = set(), [agent]
    while frontier:
        if (one := frontier.pop()) not in found:
            found.add(one)
            frontier.extend(readers.get(one, ()))
    return found


def _prospect(line: Mapping[str, Any]) -> Prospect:
    return Prospect(
        line["topology"],
        line["stage"],
        line.get("user", ""),
        int(line["system_tokens"]),
        int(line["user_tokens"]),
        int(line["known_tokens"]),
        (line["model"],),
        scored=False,
    )
