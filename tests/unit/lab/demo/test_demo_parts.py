"""What the demo draws and counts, from events and traces as the router gives them."""

from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from shell_router.lab.demo.drawing import Picture, Progress
from shell_router.lab.demo.run import Asked, as_table, compare
from shell_router.lab.evaluation.dataset import Item
from shell_router.lab.timeline import LEGEND, PAINT, axis, bar, draw_timeline, timelines_svg
from shell_router.topology import parse_topology

TINY = parse_topology("tree: {shape: [2, 1], models: [small]}", source="tiny.yaml")


def _span(name: str, start_s: float, end_s: float | None) -> dict[str, Any]:
    return {"name": name, "start_s": start_s, "end_s": end_s}


def _trace(**states: str) -> Mapping[str, Any]:
    agents = {
        agent: {"state": state, "prompt_tokens": 100, "cached_tokens": 90, "spans": [_span("decode", 0.0, 1.0)]}
        for agent, state in states.items()
    }
    return {"duration_s": 2.0, "agents": agents, "overlap": {"hidden_prefill_s": 3.0, "exposed_prefill_s": 1.0}}


def _asked(topology: str, end_to_end_s: float, *, right: bool = True, **states: str) -> Asked:
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return Asked(topology, "why", "because", right, end_to_end_s / 2, end_to_end_s, usage, _trace(**states))


def _printed(what: Any) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


@pytest.mark.parametrize(
    ("events", "state", "tokens"),
    [
        ([], "waiting", None),
        ([{"type": "agent.started"}], "waiting", None),
        ([{"type": "agent.prefill", "prompt_tokens": 30}], "prefilling", 30),
        ([{"type": "agent.ready", "prompt_tokens": 50}], "prefilling", 50),
        ([{"type": "agent.tokens", "tokens": 2}, {"type": "agent.tokens", "tokens": 1}], "decoding", 3),
        ([{"type": "agent.tokens", "tokens": 1}, {"type": "agent.finished", "completion_tokens": 2}], "finished", 2),
        ([{"type": "agent.tokens", "tokens": 1}, {"type": "agent.stopped"}], "cut off", None),
        ([{"type": "agent.prefill", "prompt_tokens": 30}, {"type": "agent.skipped"}], "skipped", None),
        ([{"type": "agent.failed"}], "failed", None),
    ],
)
def test_an_agents_progress_follows_its_events(events: list[dict[str, Any]], state: str, tokens: int | None) -> None:
    progress = Progress()
    for event in events:
        progress.take(event)
    assert (progress.state, progress.tokens) == (state, tokens)


def test_the_picture_shows_every_agent_its_state_and_the_streaming_answer() -> None:
    picture = Picture(TINY, Item(0, "How many?", "37", "numeric", {}))
    picture.take({"choices": [], "agent_event": {"type": "agent.prefill", "agent": "root", "prompt_tokens": 77}})
    picture.take({"choices": [], "agent_event": {"type": "agent.stopped", "agent": "proposer-2"}})
    assert "▒ root small 77" in _printed(picture)
    picture.take({"choices": [{"delta": {"content": "Because"}}]})
    drawn = _printed(picture)
    assert "█ root small 1" in drawn
    assert "· proposer-1" in drawn
    assert "✂ proposer-2" in drawn
    assert "Because" in drawn
    assert "The right answer: 37" in drawn


def test_a_bar_paints_spans_in_proportion_with_decode_on_top() -> None:
    spans = [_span("queue", 0.0, 4.0), _span("prefill_increment", 4.0, 6.0), _span("decode", 6.0, 9.9)]
    assert bar(spans, 10.0, 10).plain == "····▒▒████"


def test_a_span_too_short_for_a_cell_still_gets_one_and_an_open_one_none() -> None:
    spans = [_span("prefill_increment", 5.0, 5.001), _span("decode", 7.0, None)]
    assert bar(spans, 10.0, 10).plain == "     ▒    "


def test_the_axis_ends_with_the_duration() -> None:
    assert axis(2.0, 40).startswith("0.0s")
    assert axis(2.0, 40).endswith("2.0s")


def test_the_timeline_marks_agents_that_were_cut_off() -> None:
    lines = [line.plain for line in draw_timeline(_trace(a="finished", b="early_exit"), columns=80)]
    assert "✂" not in lines[0]
    assert lines[1].startswith("b ")
    assert lines[1].endswith("✂")


def test_the_timeline_says_how_much_of_an_output_drafts_gave() -> None:
    trace = _trace(a="finished", b="finished")
    trace["agents"]["a"] |= {"completion_tokens": 40, "drafted_tokens": 60, "accepted_tokens": 30}
    trace["agents"]["b"] |= {"completion_tokens": 40, "drafted_tokens": 60, "accepted_tokens": 0}
    lines = [line.plain for line in draw_timeline(trace, columns=80)]
    assert lines[0].endswith(" ⇉75%")
    assert "⇉" not in lines[1]
    assert all(len(line) <= 80 for line in lines[:2])


def test_timelines_of_several_requests_share_one_scale_as_svg() -> None:
    short, long = _trace(a="finished"), {**_trace(a="finished"), "duration_s": 8.0}
    drawn = timelines_svg({"one": short, "other": long}, "Two")
    assert drawn.count("8.0s") == 2
    assert "2.0s" not in [
        label for line in draw_timeline(short, columns=80, until_s=9.0) for label in line.plain.split()
    ]


def test_the_legend_explains_every_mark_of_a_bar() -> None:
    assert all(character in "".join(LEGEND) for character, _ in PAINT.values())


def test_rows_compare_medians_with_the_first_topology() -> None:
    asked = [_asked("all", 4.0, a="finished"), _asked("tree", 1.0, a="finished", b="early_exit", c="unneeded")]
    rows = compare([*asked, *asked, _asked("tree", 3.0, right=False, a="finished")])
    assert [row["topology"] for row in rows] == ["all", "tree"]
    assert (rows[0]["latency_ratio"], rows[1]["latency_ratio"]) == (1.0, 0.25)
    assert (rows[1]["questions"], rows[1]["right"]) == (3, 2)
    assert rows[1]["agents"] == 3
    assert rows[1]["agents_cut_off"] == 4
    assert rows[1]["completion_tokens"] == 15
    assert rows[1]["cached_share"] == 0.9
    assert rows[1]["hidden_prefill_share"] == 0.75


def test_the_table_shows_shares_as_percentages() -> None:
    assert "90%" in _printed(as_table(compare([_asked("all", 4.0, a="finished")])))
