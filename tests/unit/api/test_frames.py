"""Events as JSON, and their joining."""

from hypothesis import given
from hypothesis import strategies as st

from shell_router.api.frames import describe_event, join_tokens
from shell_router.core.events import AgentStarted, AgentTokens, Event, PrefillIncrement

TOKENS = st.builds(
    AgentTokens, st.just(1.0), st.sampled_from("abc"), st.tuples(st.integers(0, 9)), st.text()
)
STARTS = st.builds(AgentStarted, st.just(1.0), st.sampled_from("abc"), st.just("m"))
EVENTS = st.lists(st.one_of(TOKENS, STARTS), max_size=30)


def reported(events: list[Event], agent: str) -> list[object]:
    """What one agent's events say, in order, with texts split so that joining does not show."""
    said: list[object] = []
    for event in events:
        if event.agent == agent:  # type: ignore[union-attr] # only kinds with an agent are generated
            said += list(event.ids) if isinstance(event, AgentTokens) else [event]
    return said


@given(EVENTS)
def test_joining_keeps_every_agents_tokens_and_their_order(events: list[Event]) -> None:
    joined = list(join_tokens(events))
    assert all(reported(joined, agent) == reported(events, agent) for agent in "abc")
    texts = [
        "".join(e.text for e in kind if isinstance(e, AgentTokens)) for kind in (joined, events)
    ]
    assert sorted(texts[0]) == sorted(texts[1])


def test_waiting_tokens_of_several_agents_become_one_event_each() -> None:
    events = [AgentTokens(at, agent, (at,), f"{agent}{at} ") for at in range(3) for agent in "ab"]
    assert list(join_tokens(events)) == [
        AgentTokens(2, "a", (0, 1, 2), "a0 a1 a2 "),
        AgentTokens(2, "b", (0, 1, 2), "b0 b1 b2 "),
    ]


def test_times_count_from_the_requests_start() -> None:
    event = PrefillIncrement(12.5, "a", 12.25, None, 10, 5, 5)
    assert describe_event(event, 12.0) == {
        "at_s": 0.5,
        "agent": "a",
        "started_s": 0.25,
        "slot": None,
        "prompt_tokens": 10,
        "cached_tokens": 5,
        "resident_tokens": 5,
    }
