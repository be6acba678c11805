"""Traces: spans, figures, and their keeping."""

import pytest

from shell_router.core.engine import Placement
from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentPlaced,
    AgentStarted,
    AgentStopped,
    AgentTokens,
    AggregationSkipped,
    Degraded,
    ExitScored,
    PrefillIncrement,
    PromptReady,
)
from shell_router.errors import UnknownTrace
from shell_router.telemetry import Trace, TraceStore

GRAPH = {"a": (), "b": (), "root": ("a", "b")}


def trace(trace_id: str = "t", tenant: str = "me") -> Trace:
    return Trace(
        trace_id,
        tenant=tenant,
        target="duo",
        root="root",
        started_s=10.0,
        wall_s=5e8,
        precursors=GRAPH,
    )


def whole() -> Trace:
    """Leaves decode until 11 and 12; root prefills from 10.5, is ready at 12.1, speaks at 12.5,
    ends at 13.
    """
    reported = trace()
    for event in (
        AgentStarted(10.0, "a", "small"),
        AgentStarted(10.0, "b", "small"),
        AgentStarted(10.0, "root", "large"),
        PromptReady(10.1, "a", 5),
        PromptReady(10.1, "b", 5),
        AgentTokens(10.2, "a", (1, 2), "x"),
        AgentTokens(10.25, "b", (1,), "x"),
        PrefillIncrement(10.75, "root", 10.5, None, 8, 1, 0),
        AgentFinished(11.0, "a", "stop", 5, 2, 4, 0.9),
        PrefillIncrement(12.05, "root", 11.75, "a", 12, 8, 8),
        ExitScored(12.0, 11.9, "leaves", ("a",), 0.5, 0.6, 0.7, 0.8, 0.1, True, ("b",)),
        AgentStopped(12.0, "b", "early_exit"),
        PromptReady(12.1, "root", 15),
        Degraded(12.2, "leaves", "early_exit", "the embedder is gone"),
        AgentTokens(12.5, "root", (1,), "x"),
        AgentFinished(13.0, "root", "stop", 15, 1, 12, None),
    ):
        reported.add(event)
    reported.close(13.0, "finished")
    return reported


def test_every_agent_has_its_spans_in_order_with_their_tokens() -> None:
    spans = whole().as_json()["agents"]["root"]["spans"]
    assert [(span["name"], span["start_s"], span["end_s"]) for span in spans] == [
        ("queue", 0.0, 0.5),
        ("prefill_increment", 0.5, 0.75),
        ("prefill_increment", 1.75, 2.05),
        ("prefill", 2.1, 2.5),
        ("decode", 2.5, 3.0),
    ]
    assert (spans[2]["slot"], spans[2]["prompt_tokens"], spans[2]["cached_tokens"]) == ("a", 12, 8)
    assert (spans[3]["prompt_tokens"], spans[3]["cached_tokens"], spans[4]["tokens"]) == (15, 12, 1)


def test_an_agent_that_passes_on_waited_until_then_and_says_whose_output_it_is() -> None:
    reported = trace()
    reported.add(AgentStarted(10.0, "root", "large"))
    reported.add(AggregationSkipped(12.0, "root", "a", "four", 0.9))
    root = reported.as_json()["agents"]["root"]
    assert (root["state"], root["source"], root["confidence"], root["ended_s"]) == (
        "skipped",
        "a",
        0.9,
        2.0,
    )
    assert [(span["name"], span["start_s"], span["end_s"]) for span in root["spans"]] == [
        ("queue", 0.0, 2.0)
    ]


def test_states_ends_and_exits_are_reported() -> None:
    reported = whole().as_json()
    assert {agent: facts["state"] for agent, facts in reported["agents"].items()} == {
        "a": "finished",
        "b": "early_exit",
        "root": "finished",
    }
    assert reported["agents"]["a"]["confidence"] == 0.9
    (scored,) = reported["exits"]
    assert (scored["start_s"], scored["end_s"], scored["probability"]) == (1.9, 2.0, 0.8)
    assert scored["exited"] and scored["aborted"] == ("b",)
    assert reported["degraded"] == [
        {"at_s": 2.2, "agent": "leaves", "what": "early_exit", "error": "the embedder is gone"}
    ]
    assert (reported["state"], reported["duration_s"]) == ("finished", 3.0)


def test_prefill_is_hidden_until_the_last_input_ends_and_exposed_after() -> None:
    reported = whole().as_json()
    root = reported["agents"]["root"]
    assert (root["hidden_prefill_s"], root["exposed_prefill_s"]) == (0.5, 0.5)
    assert reported["overlap"]["overlap_share"] == pytest.approx(0.5)
    # b ended later, but was cut off, so that root did not wait for it
    assert reported["overlap"]["critical_path"] == ["a", "root"]
    assert reported["overlap"]["critical_exposed_prefill_s"] == pytest.approx(0.2 + 0.5)


def test_a_running_trace_can_be_read() -> None:
    reported = trace()
    reported.add(AgentStarted(10.0, "a", "small"))
    reported.add(AgentTokens(10.5, "a", (1,), "x"))
    facts = reported.as_json()
    assert (facts["state"], facts["duration_s"]) == ("running", None)
    assert facts["agents"]["a"]["state"] == "running"


def test_an_agent_that_failed_before_it_started_is_there() -> None:
    reported = trace()
    reported.add(AgentErred(10.5, "a", "no engine", True))
    reported.close(11.0, "failed", "AgentFailed: a")
    facts = reported.as_json()
    assert facts["agents"]["a"]["error"] == "no engine"
    assert facts["error"] == "AgentFailed: a"


def test_the_store_keeps_the_latest() -> None:
    store = TraceStore(2)
    for trace_id in ("one", "two", "three"):
        store.add(trace(trace_id))
    assert len(store) == 2 and store.get("me", "three").id == "three"
    with pytest.raises(UnknownTrace):
        store.get("me", "one")


def test_a_tenant_does_not_see_anothers_trace() -> None:
    store = TraceStore()
    store.add(trace())
    with pytest.raises(UnknownTrace):
        store.get("other", "t")


def test_a_trace_tells_where_each_agent_went_last_and_why() -> None:
    reported = whole()
    assert reported.list_placements() == ()
    for engine in ("prefill-0", "prefill-1"):
        reported.add(AgentPlaced(12.1, "root", (Placement(engine, "gimbal", "turn", 0.5),)))
    assert [str(one) for one in reported.list_placements()] == ["prefill-1 (gimbal: turn)"]
    assert reported.as_json()["agents"]["root"]["engines"] == [
        {
            "engine": "prefill-1",
            "policy": "gimbal",
            "why": "turn",
            "waited_s": 0.5,
        }
    ]
