"""Who takes no further requests, and how often experts are wanted: on plain values."""

from hypothesis import given
from hypothesis import strategies as st

from shell_router.expert_pools.counted_usage import REMEMBERED, CountedUsage
from shell_router.expert_pools.draining import drained, overdue
from shell_router.expert_pools.waiting import Group
from tests.fakes.experts import COSTS


def groups(**opened_s: float) -> list[Group]:
    return [Group(name, at_s, COSTS, 0.0) for name, at_s in opened_s.items()]


def test_overdue_are_those_who_waited_for_the_window_and_whose_expert_is_not_on_its_way() -> None:
    waiting = groups(late=0.0, later=1.0, new=5.0, coming=0.0)
    assert overdue(waiting, {"coming"}.__contains__, now_s=10.0, window_s=9.0) == 2
    assert overdue(waiting, set().__contains__, now_s=10.0, window_s=11.0) == 0


def test_an_expert_that_is_waited_for_by_several_groups_is_overdue_once() -> None:
    assert overdue([*groups(late=0.0), *groups(late=1.0)], set().__contains__, now_s=10.0, window_s=0.0) == 1


def test_the_first_to_leave_are_drained_and_as_many_as_places_are_wanted() -> None:
    assert drained(["rare", "common", "often"], 2, ()) == ("rare", "common")
    assert drained(["rare"], 5, ()) == ("rare",)
    assert drained(["rare"], -1, ()) == ()


@given(st.permutations("abcde"), st.integers(0, 5), st.permutations("abcde"))
def test_who_was_drained_before_goes_on_being_drained(order: list[str], places: int, before: list[str]) -> None:
    first = drained(order, places, ())
    assert set(drained(before, places, first)) == set(first)


def test_who_has_left_is_drained_no_longer() -> None:
    assert drained(["common"], 1, ("gone",)) == ("common",)


def test_usage_is_the_share_of_requests() -> None:
    usage = CountedUsage()
    assert usage.share("a") == 0.0
    for name in "aaab":
        usage.asked(name)
    assert (usage.share("a"), usage.share("b"), usage.share("c")) == (0.75, 0.25, 0.0)


def test_what_was_asked_of_late_counts_more_than_what_was_asked_long_ago() -> None:
    usage = CountedUsage()
    for _ in range(REMEMBERED):
        usage.asked("before")
    for _ in range(REMEMBERED):
        usage.asked("now")
    assert usage.share("now") > 2 * usage.share("before")
