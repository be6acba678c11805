"""Timelines, drawn from traces as the router gives them."""

from collections.abc import Mapping
from typing import Any

from shell_router.lab.traces import LEGEND, PAINT, draw_axis, draw_bar, draw_timeline


def _span(name: str, start_s: float, end_s: float | None) -> dict[str, Any]:
    return {"name": name, "start_s": start_s, "end_s": end_s}


def _trace(**states: str) -> Mapping[str, Any]:
    agents = {
        agent: {
            "state": state,
            "prompt_tokens": 100,
            "cached_tokens": 90,
            "spans": [_span("decode", 0.0, 1.0)],
        }
        for agent, state in states.items()
    }
    return {
        "duration_s": 2.0,
        "agents": agents,
        "overlap": {"hidden_prefill_s": 3.0, "exposed_prefill_s": 1.0},
    }


def test_a_bar_paints_spans_in_proportion_with_decode_on_top() -> None:
    spans = [
        _span("queue", 0.0, 4.0),
        _span("prefill_increment", 4.0, 6.0),
        _span("decode", 6.0, 9.9),
    ]
    assert draw_bar(spans, 10.0, 10).plain == "····▒▒████"


def test_a_span_too_short_for_a_cell_still_gets_one_and_an_open_one_none() -> None:
    spans = [_span("prefill_increment", 5.0, 5.001), _span("decode", 7.0, None)]
    assert draw_bar(spans, 10.0, 10).plain == "     ▒    "


def test_the_axis_ends_with_the_duration() -> None:
    assert draw_axis(2.0, 40).startswith("0.0s")
    assert draw_axis(2.0, 40).endswith("2.0s")


def test_marks_of_a_short_run_differ() -> None:
    assert draw_axis(0.33, 40).split() == ["0.00s", "0.08s", "0.17s", "0.25s", "0.33s"]


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


def test_the_legend_explains_every_mark_of_a_bar() -> None:
    assert all(character in "".join(LEGEND) for character, _ in PAINT.values())


def test_a_terminal_of_80_columns_shows_the_whole_legend() -> None:
    lines = [
        line.plain for line in draw_timeline(_trace(**{"aggregator-1": "finished"}), columns=80)
    ]
    assert all(len(line) <= 80 for line in lines)
