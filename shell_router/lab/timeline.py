"""Requests as bars on a time axis, for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from shell_router.lab.evaluation.report import CUT_OFF

Trace = Mapping[str, Any]
PAINT: Mapping[str, tuple[str, str]] = {
    "queue": ("·", "dim"),
    "prefill_increment": ("▒", "cyan"),
    "prefill": ("▓", "yellow"),
    "decode": ("█", "green"),
}
"""Per kind of span its character and colour, later ones painted over earlier ones."""

LEGEND = (
    "· nothing to send yet   ▒ prefill while precursors still write",
    "▓ queue and prefill on the engine, once all input is there",
    "█ decode   ✂ cut off early   » skips aggregation   ⇉ share of the output that drafts gave",
)


def draw_timeline(trace: Trace, *, columns: int, until_s: float = 0.0) -> Iterator[Text]:
    """A line per agent, precursors first, then the axis, which ends at `until_s` seconds or later, and the legend."""
    agents: Mapping[str, Mapping[str, Any]] = trace["agents"]
    ends = [span["end_s"] or 0.0 for record in agents.values() for span in record["spans"]]
    duration_s = max([until_s, trace["duration_s"] or 0.0, *ends])
    margin = max(map(len, agents), default=0) + 2
    width = max(20, columns - margin - 8)
    for agent, record in agents.items():
        line = Text(agent.ljust(margin))
        line.append_text(bar(record["spans"], duration_s, width))
        line.append(" ✂" if record["state"] in CUT_OFF else "", "red")
        line.append(" »" if record["state"] == "skipped" else "", "green")
        if accepted := record.get("accepted_tokens"):
            line.append(f" ⇉{accepted / record['completion_tokens']:.0%}", "green")
        yield line
    yield Text(" " * margin + axis(duration_s, width), "dim")
    for words in LEGEND:
        yield Text(" " * margin + words, "dim")


def bar(spans: Sequence[Mapping[str, Any]], duration_s: float, width: int) -> Text:
    """The spans painted on `width` cells that stand for `duration_s`; each known span gets at least one cell."""
    cells = [(" ", "")] * width
    for kind, paint in PAINT.items():
        for span in spans:
            if span["name"] == kind and span["end_s"] is not None:
                first, last = (_cell(span[end], duration_s, width) for end in ("start_s", "end_s"))
                cells[first : last + 1] = [paint] * (last + 1 - first)
    line = Text()
    for character, style in cells:
        line.append(character, style)
    return line


def axis(duration_s: float, width: int) -> str:
    """Five marks from 0 to `duration_s`."""
    marks = [" "] * (width + 8)
    for quarter in range(5):
        label = f"{duration_s * quarter / 4:.1f}s"
        at = quarter * (width - 1) // 4
        marks[at : at + len(label)] = label
    return "".join(marks).rstrip()


def _cell(at_s: float, duration_s: float, width: int) -> int:
    return min(width - 1, max(0, int(at_s / duration_s * width))) if duration_s > 0 else 0
