"""A simulation's report as tables for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from shell_router.lab.simulation.run import EngineUse
from shell_router.lab.simulation.summary import Summary

BUSY = 0.9
Row = Mapping[str, str]


def report(summaries: Mapping[str, Summary]) -> list[RenderableType]:
    """Tables, and a sentence per simulation that says what bounds it. Ratios are to the first."""
    first = next(iter(summaries.values()))
    models = list(dict.fromkeys(model for one in summaries.values() for model in one.agents))
    kinds = sorted({kind for one in summaries.values() for kind in one.path})
    named = summaries.items()
    return [
        _table("Simulated", [{"simulation": name, **_latency(one, first)} for name, one in named]),
        _table("What an answer takes, in the mean", [{"simulation": name, **_overlap(one)} for name, one in named]),
        _table(
            "Agents that were not cut off, in the mean",
            [
                {"simulation": name}
                | {m: f"{one.completed[m]:.2f} of {one.agents[m]}" if m in one.agents else "-" for m in models}
                for name, one in named
            ],
        ),
        _table(
            "Where the time of an answer goes: along its critical path",
            [{"simulation": name} | {kind: _spent(one, kind) for kind in kinds} for name, one in named],
        ),
        _table("Engine pairs", [{"simulation": name, **_use(pair)} for name, one in named for pair in one.engines]),
        *(_bound(name, one) for name, one in named),
    ]


def _table(title: str, rows: Sequence[Row]) -> Table:
    """A column per key, the first one's cells at the left."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row.values())
    return table


def _seconds(found: float | None) -> str:
    return "-" if found is None else f"{found:.3g}"


def _latency(one: Summary, first: Summary) -> Row:
    return {
        "answered": str(one.requests - one.failed),
        "failed": str(one.failed),
        "mean s": _seconds(one.mean_s),
        "p50 s": _seconds(one.p50_s),
        "p95 s": _seconds(one.p95_s),
        "p99 s": _seconds(one.p99_s),
        "p50 ratio": f"{one.p50_s / first.p50_s:.2f}" if first.p50_s else "-",
        "per s": f"{one.per_s:.3g}",
    }


def _overlap(one: Summary) -> Row:
    return {
        "bound s": _seconds(one.bound_s),
        "over bound": f"{one.over_bound:.1%}",
        "bound s, a pass per token": _seconds(one.token_bound_s),
        "second layer s": _seconds(one.second_layer_s),
        "exposed prefill s": _seconds(one.exposed_s),
        "late": "-" if one.late is None else f"{one.late:.1%}",
        "new tokens": f"{one.new_tokens:.0f}",
    }


def _spent(one: Summary, kind: str) -> str:
    return f"{one.path.get(kind, 0.0):.3g} s, {one.path.get(kind, 0.0) / (sum(one.path.values()) or 1.0):.0%}"


def _use(pair: EngineUse) -> Row:
    return {
        "pair": pair.model,
        "prefill busy": f"{pair.prefill_busy:.0%}",
        "decode busy": f"{pair.decode_busy:.0%}",
        "mean batch": f"{pair.batch:.1f}",
        "prefilled tokens": str(pair.prefilled_tokens),
        "decoded tokens": str(pair.decoded_tokens),
        "preemptions": str(pair.preemptions),
    }


def _bound(name: str, one: Summary) -> str:
    kind, seconds = max(one.path.items(), key=lambda item: item[1])
    share = seconds / (sum(one.path.values()) or 1.0)
    full = [
        f"{role} of {pair.model}"
        for pair in one.engines
        for role, busy in (("prefill", pair.prefill_busy), ("decode", pair.decode_busy))
        if busy >= BUSY
    ]
    engines = f" Always busy: {', '.join(full)}." if full else " No engine is always busy."
    return f"{name} is bound by {kind}, {share:.0%} of an answer's time.{engines}"


def as_json(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    """All figures by simulation."""
    return {name: asdict(one) | {"per_s": one.per_s, "over_bound": one.over_bound} for name, one in summaries.items()}
