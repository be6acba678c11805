"""Engines that have the request's adapter are preferred, until they have much more to do."""

import pytest

from shell_router.routing.engine_selection import (
    POLICIES,
    SCORERS,
    Scene,
    SelectionSettings,
    choose,
    with_adapter,
)
from shell_router.routing.placement import ChoiceMemory, EngineState, RoutingFeatures

WANTED = RoutingFeatures(adapter="algebra")


def engines(*running: int, having: tuple[int, ...]) -> list[EngineState]:
    return [
        EngineState(at, running=count, has_adapter=at in having) for at, count in enumerate(running)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_that_has_the_adapter_is_chosen_whatever_the_policy(policy: str) -> None:
    choice = choose(
        Scene(
            WANTED, engines(0, 1, 0, having=(1,)), ChoiceMemory(1.0), SelectionSettings(policy), 0.0
        )
    )
    assert choice.index == 1
    assert POLICIES[policy].weighs_adapters or choice.why == "has_adapter"


def test_of_several_that_have_it_the_policy_chooses() -> None:
    choice = choose(
        Scene(WANTED, engines(0, 5, 3, having=(1, 2)), ChoiceMemory(1.0), SelectionSettings(), 0.0)
    )
    assert (choice.index, choice.why) == (2, "fewest_requests")


def test_an_engine_that_is_much_busier_than_another_is_no_longer_preferred() -> None:
    there = engines(0, 9, having=(1,))
    assert with_adapter(WANTED, there, slack=9) == there[1:]
    assert with_adapter(WANTED, there, slack=8) == there


def test_without_an_adapter_or_where_no_engine_has_it_all_engines_are_eligible() -> None:
    there = engines(3, 0, having=(0,))
    assert with_adapter(RoutingFeatures(), there, slack=8) == there
    unknown = engines(3, 0, having=())
    assert with_adapter(WANTED, unknown, slack=8) == unknown


def test_the_scorer_tells_who_has_it() -> None:
    assert SCORERS["adapter"](
        Scene(WANTED, engines(0, 0, having=(1,)), ChoiceMemory(1.0), SelectionSettings(), 0.0)
    ) == [0.0, 1.0]


def test_a_slack_below_zero_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="adapter_slack must be at least 0"):
        SelectionSettings(adapter_slack=-1)
