"""What was aimed at, and what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
STALL_MS = 30.0
OURS, QUICK = "shell-router", "sglang-router, quick ACKs"


def goals(rows: Sequence[Row]) -> Iterator[str]:
    """One line per goal."""
    found = {(row["measure"], row["setup"]): row for row in rows}
    stall_ms = max(
        found[measure, OURS]["added_p99_ms"] for measure in ("request", "first token", "chunk")
    )
    yield _line(
        "no stall: added p99 anywhere, ms", stall_ms, f"under {STALL_MS:g}", stall_ms < STALL_MS
    )
    first_ms = found["first token", OURS]["added_p50_ms"]
    yield _line("first token, added p50, ms", first_ms, "under 1", first_ms < 1)
    ratio = first_ms / found["first token", QUICK]["added_p50_ms"]
    yield _line(
        "first token, added p50 over sglang-router's with quick ACKs",
        ratio,
        "at most 1.5",
        ratio <= 1.5,
    )
    rate = found["request", OURS]["per_s"] / found["request", QUICK]["per_s"]
    yield _line("small requests per second over sglang-router's", rate, "at least 0.5", rate >= 0.5)
    trees = {
        setup: row["per_core_s"] for (measure, setup), row in found.items() if measure == "tree"
    }
    for setup, per_core_s in trees.items():
        if not setup.startswith(OURS):
            share = trees[OURS] / per_core_s
            yield _line(f"trees per core over {setup}", share, "above 1", share > 1)


def _line(what: str, value: float, goal: str, met: bool) -> str:
    return f"{'met   ' if met else 'missed'}  {what}: {value:.3g} (goal: {goal})"
