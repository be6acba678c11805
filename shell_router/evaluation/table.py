"""The report's tables for people. What data and files name is never taken for rich's markup."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from shell_router.core.intervals import Interval
from shell_router.evaluation.report import Report
from shell_router.evaluation.rows import Row

NOTHING = "-"


def tables(report: Report) -> Iterator[Table]:
    """Accuracy and latency; agents and exits; and accuracy by a key of the data, where that was asked for."""
    yield _table(report.title, report.rows, _FIGURES)
    yield _table("Per answer: agents and early exit", report.rows, _ACTIVITY)
    if report.by_key is not None:
        yield _by_table(report.by_key, report)


def _table(title: str, rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> Table:
    table = Table("setting", title=Text(title), title_justify="left")
    for label in columns:
        table.add_column(label, justify="right")
    for row in rows:
        table.add_row(Text(row.setting), *(Text(cell(row)) for cell in columns.values()))
    return table


def _by_table(key: str, report: Report) -> Table:
    table = Table("setting", title=Text(f"Accuracy by {key}, 95 % interval"), title_justify="left")
    for value in report.by:
        table.add_column(Text(value), justify="right")
    for row in report.rows:
        cells = (found.get(row.setting) for found in report.by.values())
        table.add_row(Text(row.setting), *(NOTHING if one is None else _share(one) for one in cells))
    return table


def _share(found: Interval) -> str:
    return f"{found.value:.1%} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _points(found: Interval | None) -> str:
    """A difference in percentage points."""
    if found is None:
        return NOTHING
    return f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def _number(found: float | None, form: str) -> str:
    return NOTHING if found is None else format(found, form)


def _models(row: Row) -> str:
    """Started, completed, and how many there are."""
    uses = (f"{model} {use.started:.3g}, {use.completed:.3g} of {use.agents}" for model, use in row.models.items())
    return "\n".join(uses) or NOTHING


def _exits(figure: Callable[[Row], str]) -> Callable[[Row], str]:
    """The figure where clusters were judged."""
    return lambda row: figure(row) if row.exits else NOTHING


_FIGURES: dict[str, Callable[[Row], str]] = {
    "answers": lambda row: str(row.answers),
    "failed": lambda row: str(row.failed),
    "accuracy [95 %]": lambda row: _share(row.accuracy),
    "vs baseline, points [95 %]": lambda row: _points(row.difference),
    "p50 s": lambda row: _number(row.latency_p50_s, ".2f"),
    "p95 s": lambda row: _number(row.latency_p95_s, ".2f"),
    "latency ratio": lambda row: _number(row.latency_ratio, ".2f"),
    "prompt tokens": lambda row: _number(row.prompt_tokens, ".0f"),
    "cached": lambda row: _number(row.cached_share, ".0%"),
    "new tokens": lambda row: _number(row.completion_tokens, ".0f"),
}
"""Per column of the first table its cell."""

_ACTIVITY: dict[str, Callable[[Row], str]] = {
    "started, completed": _models,
    "cut off": lambda row: f"{row.agents_cut:.2f}",
    "clusters exited": _exits(lambda row: f"{row.exits.clusters_exited:.0%}" if row.exits else NOTHING),
    "answers with exit": _exits(lambda row: f"{row.exits.questions_with_exit:.0%}" if row.exits else NOTHING),
    "exit cost": _exits(lambda row: f"{row.exits.exposed_share:.1%}" if row.exits else NOTHING),
    "tokens saved (est.)": lambda row: f"{row.saved_tokens:.0f}",
}
"""Per column of the second table its cell."""
