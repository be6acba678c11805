"""A report's tables, its picture (accuracy against latency) and its files."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import BinaryIO
from xml.sax.saxutils import escape

import orjson
from rich.table import Table
from rich.text import Text

from shell_router.core.statistics import Interval
from shell_router.errors import ConfigError
from shell_router.lab.evaluation.records import Record
from shell_router.lab.evaluation.report import Report, Row
from shell_router.lab.evaluation.settings import Reports

NOTHING = "-"


def tables(report: Report) -> Iterator[Table]:
    """Accuracy and latency; agents and exits; and accuracy by a key of the data, where that was asked for."""
    yield _table(report.title, {row.setting: _figures(row) for row in report.rows})
    yield _table("Per answer: agents and early exit", {row.setting: _activity(row) for row in report.rows})
    if report.by_key is not None:
        shares = {
            row.setting: {
                value: _share(found[row.setting]) if row.setting in found else NOTHING
                for value, found in report.by.items()
            }
            for row in report.rows
        }
        yield _table(f"Accuracy by {report.by_key}, 95 % interval", shares)


def _table(title: str, cells: Mapping[str, Mapping[str, str]]) -> Table:
    table = Table("setting", title=Text(title), title_justify="left")
    for label in next(iter(cells.values())):
        table.add_column(Text(label), justify="right")
    for setting, row in cells.items():
        table.add_row(Text(setting), *map(Text, row.values()))
    return table


def _figures(row: Row) -> dict[str, str]:
    found = row.difference
    points = [f"{100 * one:+.1f}" for one in (found.value, found.low, found.high)] if found else []
    return {
        "answers": str(row.answers),
        "failed": str(row.failed),
        "accuracy [95 %]": _share(row.accuracy),
        "vs baseline, points [95 %]": f"{points[0]} [{points[1]}, {points[2]}]" if points else NOTHING,
        "p50 s": _number(row.latency_p50_s, ".2f"),
        "p95 s": _number(row.latency_p95_s, ".2f"),
        "latency ratio": _number(row.latency_ratio, ".2f"),
        "prompt tokens": _number(row.prompt_tokens, ".0f"),
        "cached": _number(row.cached_share, ".0%"),
        "new tokens": _number(row.completion_tokens, ".0f"),
    }


def _activity(row: Row) -> dict[str, str]:
    uses = (f"{model} {use.started:.3g}, {use.completed:.3g} of {use.agents}" for model, use in row.models.items())
    exits = row.exits
    return {
        "started, completed": "\n".join(uses) or NOTHING,
        "cut off": f"{row.agents_cut:.2f}",
        "clusters exited": _number(exits.clusters_exited if exits else None, ".0%"),
        "answers with exit": _number(exits.questions_with_exit if exits else None, ".0%"),
        "exit cost": _number(exits.exposed_share if exits else None, ".1%"),
        "tokens saved (est.)": f"{row.saved_tokens:.0f}",
    }


def _share(found: Interval) -> str:
    return f"{found.value:.1%} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _number(found: float | None, form: str) -> str:
    return NOTHING if found is None else format(found, form)


WIDTH, HEIGHT = 800, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 310, 64, 48
LEGEND_LINE = 20

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 }
  .title { font-size: 14px; font-weight: 600 }
  .axis { stroke: #999 } .grid { stroke: #9994 }
  .point { fill: #2a6fdb } .bar { stroke: #2a6fdb; stroke-width: 1.5 }
  .baseline text { font-weight: 600 }
  .baseline .point { fill: #d9662b } .baseline .bar { stroke: #d9662b }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .point { fill: #7ab0ff } .bar { stroke: #7ab0ff }
    .baseline .point { fill: #ffa46b } .baseline .bar { stroke: #ffa46b }
  }
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low`..`high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of `value`."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def draw_picture(report: Report) -> str:
    """The SVG's text: a point, an interval and a line of the legend per setting, the baseline in its own colour.

    Settings without a latency ratio are left out: those that answered nothing that the baseline answered too.
    """
    rows = [(row, row.latency_ratio) for row in report.rows if row.latency_ratio is not None]
    across = Scale(0.0, 1.1 * max([ratio for _, ratio in rows], default=1.0), LEFT, WIDTH - RIGHT)
    upward = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    points = [_point(at, row, across.at(ratio), upward) for at, (row, ratio) in enumerate(rows, 1)]
    legend = [
        _text(
            WIDTH - RIGHT + 20,
            TOP + LEGEND_LINE * at - 8,
            f"{at}  {row.setting}: {row.accuracy.value:.0%}, ×{ratio:.2f}",
            "start",
        )
        for at, (row, ratio) in enumerate(rows, 1)
    ]
    first, *others = report.title.split("\n")
    height = max(HEIGHT, TOP + LEGEND_LINE * len(rows))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<style>{STYLE}</style>",
            f'<text class="title" x="{LEFT}" y="20">{escape(first)}</text>',
            f'<text x="{LEFT}" y="38">{escape(". ".join(others))}</text>',
            *_axes(across, upward, report.baseline),
            *(_group(row, report.baseline, drawn) for (row, _), drawn in zip(rows, points, strict=True)),
            *(_group(row, report.baseline, words) for (row, _), words in zip(rows, legend, strict=True)),
            "</svg>\n",
        )
    )


def _axes(across: Scale, upward: Scale, baseline: str) -> list[str]:
    lines = [_line("axis", across.start, upward.start, across.end, upward.start)]
    for percent in range(0, 101, 20):
        y = upward.at(percent / 100)
        lines += [_line("grid", across.start, y, across.end, y), _text(LEFT - 8, y + 4, f"{percent} %", "end")]
    for ratio in _ticks(across.high):
        lines.append(_text(across.at(ratio), upward.start + 18, f"{ratio:g}", "middle"))
    middle = (across.start + across.end) / 2
    return [*lines, _text(middle, HEIGHT - 10, f"end-to-end latency, relative to {baseline}", "middle")]


def _ticks(high: float) -> list[float]:
    """Four to ten round numbers from 0 to `high`."""
    rough = high / 5
    power = 10.0 ** floor(log10(rough))
    step = next(one * power for one in (1, 2, 5, 10) if one * power >= rough)
    return [round(number * step, 10) for number in range(int(high / step) + 1)]


def _point(number: int, row: Row, x: float, upward: Scale) -> str:
    """The interval, the value, and the number that the legend explains."""
    low, middle, high = (upward.at(value) for value in (row.accuracy.low, row.accuracy.value, row.accuracy.high))
    dot = f'<circle class="point" cx="{x:.1f}" cy="{middle:.1f}" r="4"/>'
    return _line("bar", x, low, x, high) + dot + _text(x + 7, middle - 5, str(number), "start")


def _group(row: Row, baseline: str, drawn: str) -> str:
    return f'<g class="baseline">{drawn}</g>' if row.setting == baseline else f"<g>{drawn}</g>"


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def check_files(reports: Reports) -> None:
    """Raises ConfigError, which names the option, for a file that cannot be written. Writes nothing."""
    for option, file in (("--json", reports.json), ("--records", reports.records), ("--picture", reports.picture)):
        if file is None:
            continue
        wrong = ""
        if file.is_dir():
            wrong = "this is a folder"
        elif not file.parent.is_dir():
            wrong = f"there is no folder {file.parent}"
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            wrong = "it may not be written"
        if wrong:
            raise ConfigError(f"{option} {file}: {wrong}.", remedy="Name a file in a folder that you may write to.")


class RecordFile:
    """Takes each record as it is made, so that an end without warning leaves those before it.

    Without a file it takes nothing. A write that fails is the last; `trouble` then has the reason.
    """

    def __init__(self, file: Path | None) -> None:
        self._option = f"--records {file}"
        self._opened: BinaryIO | None = None
        self.trouble: list[str] = []
        try:
            self._opened = None if file is None else file.open("wb", buffering=0)
        except OSError as error:
            self.trouble.append(f"{self._option}: {error.strerror}")

    def add(self, record: Record) -> None:
        """Write one line."""
        if self._opened is not None and not self.trouble:
            self.trouble += _tried(self._option, self._opened.write, orjson.dumps(record.as_json()) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._opened is not None:
            self._opened.close()


def write_reports(report: Report, files: Reports) -> list[str]:
    """Write what is wanted of `--json` and `--picture`; what went wrong, by option."""
    trouble: list[str] = []
    if files.json is not None:
        content = orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2) + b"\n"
        trouble += _tried(f"--json {files.json}", files.json.write_bytes, content)
    if files.picture is not None:
        trouble += _tried(f"--picture {files.picture}", files.picture.write_bytes, draw_picture(report).encode())
    return trouble


def _tried(what: str, write: Callable[[bytes], object], content: bytes) -> list[str]:
    try:
        write(content)
    except OSError as error:
        return [f"{what}: {error.strerror}"]
    return []
