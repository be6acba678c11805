"""One request's agents on a time axis, a panel per simulation: a small SVG, for a light page or a dark one."""

from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, ROW, BAR, PANEL, TOP = 960, 150, 24, 16, 11, 40, 64
STYLE = """
  text { font: 11px system-ui, sans-serif; fill: #333 }
  .title { font-size: 14px; font-weight: 600 } .panel { font-weight: 600 }
  .axis { stroke: #999 } .grid { stroke: #9994 }
  .queue { fill: #9993 } .prefill_increment { fill: #35a7c4 } .prefill { fill: #e0912f } .decode { fill: #7ab87a }
  .passed { fill: #7ab87a; font-weight: 600 }
  .cut { fill: none; stroke: #c33; stroke-width: 1.5 } .exit { stroke: #c33; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } .decode { fill: #4f8f4f } .cut, .exit { stroke: #f77 } }
"""
LEGEND = (
    ("decode", "decodes"),
    ("prefill_increment", "prefilled while precursors still write"),
    ("prefill", "prefilled, with everybody waiting"),
    ("queue", "nothing to do yet"),
)
CUT = ("early_exit", "unneeded")

Trace = Mapping[str, Any]


def draw_traces(traces: Mapping[str, Trace]) -> str:
    """The SVG's text. All panels have one scale, so that what ends earlier was faster."""
    longest_s = max(trace["duration_s"] for trace in traces.values())
    scale = (WIDTH - LEFT - RIGHT) / longest_s if longest_s else 0.0
    drawn, y = [], TOP
    for name, trace in traces.items():
        drawn.append("\n".join(_panel(name, trace, y, scale)))
        y += PANEL + ROW * len(trace["agents"])
    drawn.append("\n".join(_axis(longest_s, scale, TOP, y)))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 30}" role="img">',
            f"<style>{STYLE}</style>",
            '<text class="title" x="16" y="22">One request (simulated)</text>',
            *_legend(),
            *drawn,
            "</svg>\n",
        )
    )


def _legend() -> Iterator[str]:
    x = 16
    for kind, words in LEGEND:
        yield f'<rect class="{kind}" x="{x}" y="34" width="14" height="{BAR}"/><text x="{x + 19}" y="44">{words}</text>'
        x += 44 + 6 * len(words)
    yield f'<rect class="cut" x="{x}" y="34" width="14" height="{BAR}"/><text x="{x + 19}" y="44">cut off early</text>'
    yield f'<text class="passed" x="{x + 108}" y="44">»</text><text x="{x + 119}" y="44">passes on</text>'


def _panel(name: str, trace: Trace, y: int, scale: float) -> Iterator[str]:
    yield f'<text class="panel" x="16" y="{y + 18}">{escape(name)}: {trace["duration_s"]:.2f} s</text>'
    for row, (agent, record) in enumerate(trace["agents"].items()):
        yield from _row(agent, record, y + 26 + ROW * row, scale)


def _row(agent: str, record: Mapping[str, Any], y: int, scale: float) -> Iterator[str]:
    label = f"{agent} ({record['model']})"
    yield f'<text x="{LEFT - 6}" y="{y + 9}" text-anchor="end">{escape(label)}</text>'
    ends = [LEFT]
    for kind in ("queue", "prefill_increment", "prefill", "decode"):
        for span in record["spans"]:
            if span["name"] == kind and span["end_s"] is not None:
                x, width = LEFT + scale * span["start_s"], max(0.6, scale * (span["end_s"] - span["start_s"]))
                ends.append(x + width)
                told = f"{label}: {kind.replace('_', ' ')} from {span['start_s']:.3f} to {span['end_s']:.3f} s"
                place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
                yield f'<rect class="{kind}" {place}><title>{escape(told)}</title></rect>'
    if record["state"] == "passed_on":
        x = LEFT + scale * record["ended_s"]
        yield f'<text class="passed" x="{x:.1f}" y="{y + 9}">»</text>'
    if record["state"] in CUT:
        yield f'<line class="cut" x1="{max(ends):.1f}" y1="{y - 2}" x2="{max(ends):.1f}" y2="{y + BAR + 2}"/>'


def _axis(longest_s: float, scale: float, top: int, bottom: int) -> Iterator[str]:
    yield f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>'
    for part in range(6):
        at_s = longest_s * part / 5
        x = LEFT + scale * at_s
        yield f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{at_s:.2f} s</text>'
