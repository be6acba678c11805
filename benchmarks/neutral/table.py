"""The table: one row for each client, workload, concurrency and server, from all rounds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.neutral.clients import Measured
from benchmarks.overlap.measure import interval
from benchmarks.report import Row

INTERVAL_ROUNDS = 6
"""The fewest whose least and largest value hold the median in 95 % of all cases."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one row of the table is about; `group` holds all but the server."""

    engines: str
    client: str
    workload: str
    at_once: int
    server: str
    one_request: bool = False

    @property
    def group(self) -> tuple[str, str, str, int]:
        return self.engines, self.client, self.workload, self.at_once


Round = Mapping[Cell, Measured]


def build_rows(cells: Sequence[Cell], rounds: Sequence[Round]) -> list[Row]:
    """The rows, in the order of `cells`; the first of a group is what its ratios are to."""
    first: dict[tuple[str, str, str, int], Cell] = {}
    for cell in cells:
        first.setdefault(cell.group, cell)
    return [_build_row(cell, first[cell.group], rounds) for cell in cells]


def _build_row(cell: Cell, base: Cell, rounds: Sequence[Round]) -> Row:
    runs = [run[cell] for run in rounds]
    sessions = [seconds for run in runs for seconds in run.session_s]
    first_tokens = [seconds for run in runs for seconds in run.first_token_s]
    wall_s = math.fsum(run.wall_s for run in runs if run.session_s)
    tokens = sum(run.output_tokens for run in runs)
    prompts = sum(run.prompt_tokens for run in runs)
    cached = sum(run.cached_tokens for run in runs)
    ratios = [
        statistics.median(run[cell].session_s) / statistics.median(run[base].session_s)
        for run in rounds
        if run[cell].session_s and run[base].session_s
    ]
    return {
        "engines": cell.engines,
        "client": cell.client,
        "workload": cell.workload,
        "at once": cell.at_once,
        "server": cell.server,
        "session p50, s": statistics.median(sessions) if sessions else None,
        "p95, s": _find_p95(sessions) if sessions else None,
        "first token p50, s": statistics.median(first_tokens) if first_tokens else None,
        "sessions/min": 60 * len(sessions) / wall_s if wall_s else None,
        # of a topology a client sees only the root's
        "tokens/s": tokens / wall_s if wall_s and not cell.one_request else None,
        "prompt tokens": round(prompts / len(sessions)) if prompts and sessions else None,
        "cached, %": 100 * cached / prompts if prompts else None,
        "failed": sum(run.failures for run in runs),
        "rounds": len(ratios),
        "relative p50": statistics.median(ratios) if ratios else None,
        "95 %": interval(ratios) if len(ratios) >= INTERVAL_ROUNDS else None,
    }


def _find_p95(values: Sequence[float]) -> float:
    """The least value that 95 % of all do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]
