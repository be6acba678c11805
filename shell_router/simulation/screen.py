"""A simulation's report for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from shell_router.simulation.arrangements import Arrangement
from shell_router.simulation.run import EngineUse
from shell_router.simulation.summary import Summary

BUSY = 0.9


def report(summaries: Mapping[str, Summary]) -> list[RenderableType]:
    """Tables, and a sentence per simulation that says what bounds it. Ratios are to the first."""
    tables = [table(summaries) for table in (_latencies, _overlaps, _completed, _paths, _engines)]
    return [*tables, *map(_bounded, summaries.items())]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _latencies(summaries: Mapping[str, Summary]) -> Table:
    columns = ("simulation", "answered", "failed", "mean s", "p50 s", "p95 s", "p99 s", "p50 ratio", "per s")
    table = _table("Simulated", *columns)
    first = next(iter(summaries.values()))
    for name, one in summaries.items():
        table.add_row(
            name,
            str(one.requests - one.failed),
            str(one.failed),
            *(f"{seconds:.3g}" for seconds in (one.mean_s, one.p50_s, one.p95_s, one.p99_s)),
            f"{one.p50_s / first.p50_s:.2f}" if first.p50_s else "-",
            f"{one.per_s:.3g}",
        )
    return table


def _overlaps(summaries: Mapping[str, Summary]) -> Table:
    columns = ("bound s", "over bound", "second layer s", "exposed prefill s", "late", "new tokens")
    table = _table("What an answer takes, in the mean", "simulation", *columns)
    for name, one in summaries.items():
        table.add_row(
            name,
            f"{one.bound_s:.3g}",
            f"{one.over_bound:.1%}",
            *("-" if seconds is None else f"{seconds:.3g}" for seconds in (one.second_layer_s, one.exposed_s)),
            "-" if one.late is None else f"{one.late:.1%}",
            f"{one.new_tokens:.0f}",
        )
    return table


def _completed(summaries: Mapping[str, Summary]) -> Table:
    models = list(dict.fromkeys(model for one in summaries.values() for model in one.agents))
    table = _table("Agents that were not cut off, in the mean", "simulation", *models)
    for name, one in summaries.items():
        cells = (
            f"{one.completed[model]:.2f} of {one.agents[model]}" if model in one.agents else "-" for model in models
        )
        table.add_row(name, *cells)
    return table


def _paths(summaries: Mapping[str, Summary]) -> Table:
    kinds = sorted({kind for one in summaries.values() for kind in one.path})
    table = _table("Where the time of an answer goes: along its critical path", "simulation", *kinds)
    for name, one in summaries.items():
        total = sum(one.path.values()) or 1.0
        table.add_row(name, *(f"{one.path.get(k, 0.0):.3g} s, {one.path.get(k, 0.0) / total:.0%}" for k in kinds))
    return table


def _engines(summaries: Mapping[str, Summary]) -> Table:
    table = _table(
        "Engine pairs",
        *("simulation", "pair", "prefill busy", "decode busy", "mean batch"),
        *("prefilled tokens", "decoded tokens", "taken back"),
    )
    for name, one in summaries.items():
        for pair in one.engines:
            table.add_row(
                name,
                pair.model,
                f"{pair.prefill_busy:.0%}",
                f"{pair.decode_busy:.0%}",
                f"{pair.batch:.1f}",
                str(pair.prefilled_tokens),
                str(pair.decoded_tokens),
                str(pair.taken_back),
            )
    return table


def _bounded(named: tuple[str, Summary]) -> str:
    name, one = named
    kind, seconds = max(one.path.items(), key=lambda item: item[1])
    share = seconds / (sum(one.path.values()) or 1.0)
    full = [f"{role} of {pair.model}" for pair in one.engines for role, busy in _roles(pair) if busy >= BUSY]
    engines = f" Always busy: {', '.join(full)}." if full else " No engine is always busy."
    return f"{name} is bound by {kind}, {share:.0%} of an answer's time.{engines}"


def _roles(pair: EngineUse) -> Sequence[tuple[str, float]]:
    return [("prefill", pair.prefill_busy), ("decode", pair.decode_busy)]


def arrangement_table(tried: Sequence[Arrangement], best: Arrangement | None) -> Table:
    """What was tried, the chosen one marked."""
    models = list(tried[0].pairs)
    table = _table(
        "Arrangements (simulated)", "", *(f"{model} pairs" for model in models), "GPUs", "p50 s", "p95 s", "failed"
    )
    for one in tried:
        found = one.summary
        seconds = [f"{found.p50_s:.3g}", f"{found.p95_s:.3g}", str(found.failed)] if found else ["-", "-", "all"]
        mark = "chosen" if one is best else ""
        table.add_row(mark, *(str(one.pairs[model]) for model in models), str(one.gpus), *seconds)
    return table


def as_json(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    """All figures by simulation."""
    return {name: asdict(one) | {"per_s": one.per_s, "over_bound": one.over_bound} for name, one in summaries.items()}
