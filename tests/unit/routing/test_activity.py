"""The activity monitor: what is in flight on an engine is exact, however requests end."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings
from shell_router.routing.failures import Breaker
from shell_router.routing.placement import RoutingFeatures

TOKENS = st.integers(0, 500)


@dataclass
class Expected:
    """What is known of one request by simply remembering all of it."""

    asked: RoutingFeatures
    entry: EngineSlot[str]
    prefilled: bool = False
    written: list[int] = field(default_factory=list)


def tracked() -> Dispatcher[str]:
    return Dispatcher([("engine", "engine-0", Breaker())], SchedulingSettings(), lambda: 0.0)


def slot(dispatcher: Dispatcher[str], features: RoutingFeatures) -> EngineSlot[str]:
    return EngineSlot(dispatcher, dispatcher.tracked[0], features, "only_engine")


def sums(living: list[Expected]) -> tuple[int, int, int, int]:
    """Requests, prompt tokens to be prefilled, output tokens to be written, tokens held."""
    prefill = sum(
        one.asked.new_tokens for one in living if not one.prefilled and one.asked.prefills
    )
    output = sum(max(0, one.asked.output_tokens - sum(one.written)) for one in living)
    held = sum(one.asked.prompt_tokens * one.prefilled + sum(one.written) for one in living)
    return len(living), prefill, output, held


@given(
    data=st.data(), requests=st.lists(st.tuples(TOKENS, TOKENS, TOKENS, st.booleans()), max_size=8)
)
def test_the_sums_are_exact_through_prefill_writing_and_every_way_to_end(
    data: st.DataObject, requests: list[tuple[int, int, int, bool]]
) -> None:
    dispatcher, living = tracked(), list[Expected]()
    load = dispatcher.tracked[0].load
    for prompt, new, output, prefills in requests:
        asked = RoutingFeatures(max(1, prompt), new, output, prefills=prefills)
        living.append(Expected(asked, slot(dispatcher, asked)))
    ended: list[Expected] = []
    for step in data.draw(
        st.lists(st.tuples(st.sampled_from("pwe"), st.integers(0, 7), st.integers(1, 300)))
    ):
        what, index, tokens = step
        if not living:
            break
        one = living[index % len(living)]
        if what == "p":
            one.entry.note_prefill()
            one.prefilled = True
        elif what == "w":
            if not one.prefilled:
                one.entry.note_prefill()
                one.prefilled = True
            one.entry.note_tokens(tokens)
            one.written.append(tokens)
        else:  # completed, aborted, cut off, failed: all the same here
            one.entry.close()
            ended.append(one)
            living.remove(one)
        for gone in ended:  # calls after a request's end change nothing
            gone.entry.close()
            gone.entry.note_tokens(5)
            gone.entry.note_prefill()
        assert (load.running, load.prefill_tokens, load.output_tokens, load.held_tokens) == sums(
            living
        )
    for one in living:
        one.entry.close()
    assert (load.running, load.updates, load.tokens) == (0, 0, 0)


def test_a_request_that_writes_more_than_expected_owes_nothing() -> None:
    dispatcher = tracked()
    load, entry = dispatcher.tracked[0].load, slot(dispatcher, RoutingFeatures(10, 10, 4))
    entry.note_prefill()
    entry.note_tokens(7)
    assert (load.output_tokens, load.held_tokens, load.tokens) == (0, 17, 17)


def test_updates_are_counted_apart() -> None:
    dispatcher = tracked()
    load, entry = (
        dispatcher.tracked[0].load,
        slot(dispatcher, RoutingFeatures(10, 3, 0, update=True)),
    )
    assert (load.running, load.updates, load.prefill_tokens) == (1, 1, 3)
    entry.close()
    assert (load.running, load.updates, load.tokens) == (0, 0, 0)
