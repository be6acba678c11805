"""Accuracy against latency as a small SVG, in colours for a light page or a dark one, as the reader prefers."""

from dataclasses import dataclass
from math import floor, log10
from xml.sax.saxutils import escape

from shell_router.evaluation.report import Report
from shell_router.evaluation.rows import Row

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
    legend = [_entry(at, row, ratio) for at, (row, ratio) in enumerate(rows, 1)]
    height = max(HEIGHT, TOP + LEGEND_LINE * len(rows))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<style>{STYLE}</style>",
            *_heading(report.title),
            *_axes(across, upward, report.baseline),
            *(_group(row, report.baseline, drawn) for (row, _), drawn in zip(rows, points, strict=True)),
            *(_group(row, report.baseline, words) for (row, _), words in zip(rows, legend, strict=True)),
            "</svg>\n",
        )
    )


def _heading(title: str) -> list[str]:
    first, *others = title.split("\n")
    lines = [f'<text class="title" x="{LEFT}" y="20">{escape(first)}</text>']
    return [*lines, f'<text x="{LEFT}" y="38">{escape(". ".join(others))}</text>']


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


def _entry(number: int, row: Row, ratio: float) -> str:
    words = f"{number}  {row.setting}: {row.accuracy.value:.0%}, ×{ratio:.2f}"
    return _text(WIDTH - RIGHT + 20, TOP + LEGEND_LINE * number - 8, words, "start")


def _group(row: Row, baseline: str, drawn: str) -> str:
    return f'<g class="baseline">{drawn}</g>' if row.setting == baseline else f"<g>{drawn}</g>"


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
