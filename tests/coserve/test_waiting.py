import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coserve.pool.queue import ComponentQueue
from benchmarks.coserve.pool.values import Request, Stage
from shell_router.errors import ConfigError
from tests.coserve.fakes import COSTS

pytestmark = pytest.mark.slow


def stage(number: int, component: str, arrived_s: float = 0.0) -> Stage:
    return Stage(Request(f"r{number}", (component,)), component, number, arrived_s)


def line_of(components: str, window_s: float, *, apart_s: float = 1.0) -> ComponentQueue:
    """One request per letter, `apart_s` after each other."""
    line = ComponentQueue(window_s)
    for number, name in enumerate(components):
        line.add(stage(number, name, number * apart_s), COSTS, switch_s=0.5)
    return line


def taken(line: ComponentQueue, most: int) -> list[list[int]]:
    batches = []
    while line:
        batches.append([one.sample for one in line.take(most)])
    return batches


def test_requests_for_the_same_expert_stand_together() -> None:
    assert taken(line_of("abacb", 100), 9) == [[0, 2], [1, 4], [3]]


def test_a_group_is_split_by_the_largest_batch_and_keeps_its_turn() -> None:
    assert taken(line_of("aaabaa", 100), 2) == [[0, 1], [2, 4], [5], [3]]


def test_a_window_of_nothing_is_first_come_first_served_with_batches_of_neighbours() -> None:
    assert taken(line_of("aabab", 0), 9) == [[0, 1], [2], [3], [4]]
    assert taken(line_of("aabab", 0, apart_s=0.0), 9) == [[0, 1], [2], [3], [4]]


def test_a_request_that_comes_too_late_overtakes_no_other() -> None:
    assert taken(line_of("abbbaa", 3), 9) == [[0], [1, 2, 3], [4, 5]]
    assert taken(line_of("abbbaa", 3.1), 9) == [[0, 4], [1, 2, 3], [5]]


def test_the_predicted_seconds_are_a_switch_and_a_start_per_group_and_k_per_request() -> None:
    line = line_of("abab", 100)
    assert line.seconds == pytest.approx(2 * (0.5 + 0.02) + 4 * 0.01)
    assert line.seconds == pytest.approx(sum(group.seconds for group in line.groups))
    line.switched("b")
    assert line.seconds == pytest.approx(0.5 + 2 * 0.02 + 4 * 0.01)


def test_who_leaves_the_line_is_not_served_and_costs_nothing() -> None:
    line = line_of("abab", 100)
    line.remove("r1")
    line.remove("r3")
    assert line.seconds == pytest.approx(0.5 + 0.02 + 2 * 0.01)
    assert not line.waits_for("b")
    assert taken(line, 9) == [[0, 2]]
    assert line.seconds == 0


def test_an_expert_is_waited_for_until_the_last_who_waits_has_left() -> None:
    line = line_of("aba", 0)
    line.remove("r2")
    assert line.waits_for("a")
    assert taken(line, 9) == [[0], [1]]
    assert not line.waits_for("a")


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_s"):
        ComponentQueue(-1)


steps = st.lists(
    st.tuples(st.sampled_from("abcd"), st.floats(0, 3), st.sampled_from(("", "take", "leave"))),
    max_size=60,
)


@given(steps, st.floats(0, 8), st.integers(1, 4))
def test_no_request_is_overtaken_by_one_that_came_later_than_the_window(
    steps: list[tuple[str, float, str]], window_s: float, most: int
) -> None:
    line, now_s, arrived, served = ComponentQueue(window_s), 0.0, {}, []
    for number, (name, pause_s, then) in enumerate(steps):
        now_s += pause_s
        arrived[number] = now_s
        line.add(stage(number, name, now_s), COSTS, 0.5)
        if then == "take":
            served += [one.sample for one in line.take(most)]
        if then == "leave" and f"r{number // 2}" in line:
            line.remove(f"r{number // 2}")
            del arrived[number // 2]
    served += [number for batch in taken(line, most) for number in batch]
    assert sorted(served) == sorted(arrived)
    for place, number in enumerate(served):
        assert all(arrived[earlier] - arrived[number] <= window_s for earlier in served[:place])
