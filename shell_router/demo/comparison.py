"""What the demo measured, per topology: rows for machines and a table for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Column, Table

from shell_router.evaluation.activity import CUT_OFF


@dataclass(frozen=True, slots=True)
class Asked:
    """One question's answer, as a client saw it, its grade and its trace. Times are seconds since the request began."""

    topology: str
    question: str
    answer: str
    right: bool
    first_token_s: float
    end_to_end_s: float
    usage: Mapping[str, Any]
    trace: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """The grade in a word."""
        return "right" if self.right else "wrong"


@dataclass(frozen=True, slots=True)
class Row:
    """One topology. Times are medians over its questions, counts and shares are over all of them.

    `cached_share` is the part of the prompts that the agents' final requests found cached; `hidden_prefill_share` the
    part of the prefill time of agents with precursors that passed while those still wrote; `latency_ratio` the
    end-to-end latency relative to the first row's.
    """

    topology: str
    questions: int
    right: int
    agents: int
    end_to_end_s: float
    first_token_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_share: float
    hidden_prefill_share: float
    agents_cut_off: int
    latency_ratio: float


def compare(asked: Sequence[Asked]) -> list[Row]:
    """A row per topology, in the order of their first questions; the first is what the others are compared with."""
    names = list(dict.fromkeys(one.topology for one in asked))
    grouped = [[one for one in asked if one.topology == name] for name in names]
    baseline_s = median(one.end_to_end_s for one in grouped[0]) if grouped else 1.0
    return [_row(group, baseline_s) for group in grouped]


def _row(group: Sequence[Asked], baseline_s: float) -> Row:
    records = [record for one in group for record in one.trace["agents"].values()]
    finished = [record for record in records if record["state"] == "finished"]
    hidden_s = sum(one.trace["overlap"].get("hidden_prefill_s", 0.0) for one in group)
    exposed_s = sum(one.trace["overlap"].get("exposed_prefill_s", 0.0) for one in group)
    end_to_end_s = median(one.end_to_end_s for one in group)
    return Row(
        topology=group[0].topology,
        questions=len(group),
        right=sum(one.right for one in group),
        agents=max(len(one.trace["agents"]) for one in group),
        end_to_end_s=round(end_to_end_s, 3),
        first_token_s=round(median(one.first_token_s for one in group), 3),
        prompt_tokens=sum(one.usage["prompt_tokens"] for one in group),
        completion_tokens=sum(one.usage["completion_tokens"] for one in group),
        cached_share=_share(
            sum(record["cached_tokens"] for record in finished), sum(record["prompt_tokens"] for record in finished)
        ),
        hidden_prefill_share=_share(hidden_s, hidden_s + exposed_s),
        agents_cut_off=sum(record["state"] in CUT_OFF for record in records),
        latency_ratio=round(end_to_end_s / baseline_s, 3),
    )


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def as_report(rows: Sequence[Row], *, engine: str, title: str) -> dict[str, Any]:
    """The object that `--json` ends with."""
    return {"title": title, "engine": engine, "simulated": False, "rows": [asdict(row) for row in rows]}


LABELS: Mapping[str, str] = {
    "questions": "questions",
    "right": "right answers",
    "agents": "agents",
    "end_to_end_s": "end to end, s (median)",
    "first_token_s": "root's first token, s (median)",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "new tokens",
    "cached_share": "prompt tokens found cached",
    "hidden_prefill_share": "prefill hidden behind precursors",
    "agents_cut_off": "agents cut off early",
    "latency_ratio": "latency relative to the first",
}
"""Per key of a row what people read."""


def as_table(rows: Sequence[Row]) -> Table:
    """The same for people, a column per topology."""
    table = Table("", *(Column(row.topology, justify="right") for row in rows))
    cells = [asdict(row) for row in rows]
    for key, label in LABELS.items():
        table.add_row(label, *(_cell(key, row[key]) for row in cells))
    return table


def _cell(key: str, value: float) -> str:
    if key.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
