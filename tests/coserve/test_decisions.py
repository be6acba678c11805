from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coserve.pool.errors import MemoryBudgetExceeded
from benchmarks.coserve.pool.memory import (
    Memory,
    Order,
    Resident,
    queue_aware,
    two_stage,
    victims,
)
from benchmarks.coserve.pool.policies import (
    Policies,
    QueueView,
    host_placement,
    initial_placement,
    least_extension_and_reading,
)
from benchmarks.coserve.pool.values import Costs, ExecutorSettings, Request
from benchmarks.coserve.runs import (
    fewest_switches_in_any_order,
    fewest_switches_in_this_order,
    first_in_first_out,
    least_extension,
    least_recently_used,
    round_robin,
)
from benchmarks.swapping import fewest_offline
from shell_router.errors import ConfigError, InvalidRequest
from tests.coserve.fakes import component, executor

pytestmark = pytest.mark.slow


def test_a_request_goes_where_the_longest_queue_grows_least_and_of_those_where_it_adds_least() -> (
    None
):
    as_in_figure_8 = [QueueView(5, 3), QueueView(6, 2), QueueView(10, 1)]
    assert least_extension(as_in_figure_8, 0) == 1


def test_a_queue_that_would_become_the_longest_is_taken_only_if_it_becomes_so_by_least() -> None:
    assert least_extension([QueueView(9, 3), QueueView(10, 1.5)], 0) == 1
    assert least_extension([QueueView(0, 3), QueueView(10, 1.5)], 0) == 0


def test_of_equal_queues_the_shortest_is_taken() -> None:
    assert least_extension([QueueView(3, 1), QueueView(1, 1), QueueView(9, 1)], 0) == 1


def test_where_the_one_disk_is_the_bottleneck_no_expert_is_read_again_without_need() -> None:
    loaded_on_the_longest = [QueueView(30, 5, 20), QueueView(5, 4, 20, 3)]
    assert least_extension(loaded_on_the_longest, 0) == 1
    assert least_extension_and_reading(loaded_on_the_longest, 0) == 0


def test_where_the_disk_has_time_queues_alone_decide() -> None:
    views = [QueueView(30, 1, 2), QueueView(5, 4, 2, 3)]
    assert least_extension_and_reading(views, 0) == least_extension(views, 0) == 1


def test_taking_turns_reads_nothing_but_the_number() -> None:
    assert [round_robin([QueueView(9, 9), QueueView(0, 0)], number) for number in range(3)] == [
        0,
        1,
        0,
    ]


def test_the_first_of_its_like_pays_for_start_and_switch_and_the_next_only_k() -> None:
    costs = Costs(1, 10, 1, 0, 100, 100)
    first, loaded = costs.added_seconds(100, joins=False), costs.added_seconds(0, joins=False)
    joining = costs.added_seconds(0, joins=True)
    assert (first, loaded, joining) == (111, 11, 1)


def resident(name: str, usage: float, memory_bytes: int = 100, **facts: object) -> Resident:
    return Resident(
        component(name, usage, memory_bytes=memory_bytes), **{"loaded": 0, "used": 0, **facts}
    )  # type: ignore[arg-type]


def order(policy: Order, residents: Sequence[Resident]) -> list[str]:
    return [one.component.name for one in policy(residents)]


def test_two_stages_idle_successors_by_size_then_all_others_by_probability() -> None:
    residents = [
        resident("likely", 0.9),
        resident("rare", 0.1, memory_bytes=500),
        resident("small idle", 0.8, 50, idle=True),
        resident("large idle", 0.95, 300, idle=True),
        resident("common", 0.5),
    ]
    assert order(two_stage, residents) == ["large idle", "small idle", "rare", "common", "likely"]


def test_the_queue_aware_order_keeps_longest_what_is_needed_first() -> None:
    residents = [
        resident("soon", 0.1, turn=0),
        resident("later", 0.9, turn=7),
        resident("unknown", 1.0),
    ]
    assert order(queue_aware, residents) == ["unknown", "later", "soon"]


def test_the_baselines_read_only_the_past() -> None:
    residents = [resident("a", 0.9, loaded=2, used=3), resident("b", 0.1, loaded=1, used=4)]
    assert order(least_recently_used, residents) == ["a", "b"]
    assert order(first_in_first_out, residents) == ["b", "a"]


def test_no_more_leave_than_must() -> None:
    leaving = [resident("a", 0), resident("b", 0), resident("c", 0)]
    assert victims(leaving, 101) == ["a", "b"]
    assert victims(leaving, 300) == ["a", "b", "c"]
    assert victims(leaving, 0) == []


def test_no_component_is_evicted_in_vain() -> None:
    assert victims([resident("a", 0)], 101) is None


def test_the_most_probable_experts_are_dealt_out_in_turn_until_memory_is_full() -> None:
    components = [
        component(name, usage)
        for name, usage in zip("abcdef", (0.1, 0.6, 0.5, 0.4, 0.3, 0.2), strict=True)
    ]
    placed = initial_placement(components, [executor("one", room=2), executor("two", room=1)])
    assert {name: [one.name for one in those] for name, those in placed.items()} == {
        "one": ["b", "d"],
        "two": ["c"],
    }
    assert [one.name for one in host_placement(components, 250, frozenset("bcd"))] == ["e", "f"]


def test_an_executor_without_costs_for_an_architecture_is_given_none_of_it() -> None:
    placed = initial_placement(
        [component("a", 0.5)], [ExecutorSettings("cpu", 1000, {}), executor("gpu")]
    )
    assert {name: len(those) for name, those in placed.items()} == {"cpu": 0, "gpu": 1}


def test_memory_that_is_not_there_is_not_given() -> None:
    memory = Memory("gpu", 100)
    memory.reserve(60)
    with pytest.raises(MemoryBudgetExceeded):
        memory.reserve(41)
    memory.release(60)
    assert (memory.used_bytes, memory.peak_bytes) == (0, 60)


def test_in_any_order_each_expert_that_was_not_there_is_loaded_once() -> None:
    assert fewest_switches_in_any_order("abcab", {"a", "z"}) == 2


small = st.text("abcd", max_size=8)


@given(small, st.integers(1, 3), st.data())
def test_beladys_rule_agrees_with_trying_everything(
    served: str, room: int, data: st.DataObject
) -> None:
    first = frozenset(data.draw(st.sets(st.sampled_from("abcd"), max_size=room)))
    sizes = dict.fromkeys("abcd", 10)
    assert fewest_switches_in_this_order(served, first, sizes, room * 10) == _fewest(
        served, first, room
    )


@given(st.text("abcd", min_size=1, max_size=8), st.data())
def test_the_search_for_one_client_agrees_with_trying_everything_and_for_many_loads_each_once(
    served: str, data: st.DataObject
) -> None:
    first = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    needed = [(name,) for name in served]
    assert fewest_offline(needed, 1, first) == _fewest(served, frozenset(first), len(first))
    assert fewest_offline(needed, len(served), first) == len(set(served) - set(first))


def test_the_search_lets_no_request_go_on_before_its_first_model_has_answered() -> None:
    assert fewest_offline([("a", "b"), ("b", "a")], 2, "a") == 2
    assert fewest_offline([("a", "b"), ("a", "b")], 2, "a") == 1


def _fewest(served: str, held: frozenset[str], room: int) -> int:
    if not served:
        return 0
    if served[0] in held:
        return _fewest(served[1:], held, room)
    kept = [frozenset(some) for some in combinations(sorted(held), min(len(held), room - 1))]
    return 1 + min(_fewest(served[1:], some | {served[0]}, room) for some in kept)


def test_a_memory_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not hold a"):
        fewest_switches_in_this_order("a", (), {"a": 10}, 5)


@pytest.mark.parametrize("wrong", [{"window_s": -1}, {"prefetch": -1}])
def test_policies_refuse_bad_values_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Policies(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("chain", [(), ("a", "b", "a")])
def test_a_chain_names_each_expert_once_and_one_at_least(chain: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        Request("r", chain)
