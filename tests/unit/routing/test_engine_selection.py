from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from shell_router.core.engine import Hints
from shell_router.files.read import check
from shell_router.routing.engine_selection import (
    POLICIES,
    EnginePolicy,
    EngineScene,
    GimbalThresholds,
    SelectionSettings,
)
from shell_router.routing.placement import (
    Choice,
    ChoiceMemory,
    EngineReport,
    EngineState,
    RoutingFeatures,
)

SETTINGS = SelectionSettings()
ALICE = RoutingFeatures(100, 100, 50, Hints(user="alice"))


def chosen(
    policy: str,
    engines: Sequence[EngineState],
    asked: RoutingFeatures = ALICE,
    memory: ChoiceMemory | None = None,
    now_s: float = 0.0,
) -> Choice:
    settings = replace(SETTINGS, policy=policy)
    scene = EngineScene(asked, engines, memory or ChoiceMemory(300.0), settings, now_s)
    return POLICIES[policy].choose(scene)


def reporting(*states: tuple[float, int]) -> list[EngineState]:
    """Engines that just reported their KV usage and their tokens."""
    return [
        EngineState(index, reported=EngineReport(usage, tokens, 0, 0))
        for index, (usage, tokens) in enumerate(states)
    ]


def with_home(index: int, at_s: float = 0.0) -> ChoiceMemory:
    memory = ChoiceMemory(300.0)
    memory.note(ALICE, index, at_s)
    return memory


# --- least_running and round_robin


def test_the_fewest_requests_win_those_held_back_included() -> None:
    engines = [
        EngineState(0, running=3),
        EngineState(1, running=1, waiting=4),
        EngineState(2, running=4),
    ]
    assert chosen("least_running", engines) == Choice(0, "fewest_requests")


def test_between_equals_the_one_that_was_chosen_longest_ago_is_next() -> None:
    engines = [EngineState(0, running=1, chosen=7), EngineState(1, running=1, chosen=3)]
    assert chosen("least_running", engines).index == 1


def test_round_robin_goes_on_with_each_choice() -> None:
    engines, memory, turns = (
        [EngineState(0), EngineState(1, running=99), EngineState(2)],
        ChoiceMemory(300.0),
        [],
    )
    for _ in range(4):
        turns.append(chosen("round_robin", engines, memory=memory).index)
        memory.note(ALICE, turns[-1], 0.0)
    assert turns == [0, 1, 2, 0]


# --- Gimbal, Algorithm 1, line by line


def test_without_all_metrics_it_is_the_next_engines_turn() -> None:
    engines = [*reporting((0.95, 9000)), EngineState(1)]
    assert chosen("gimbal", engines, memory=with_home(1)) == Choice(1, "no_metrics")


def test_full_kv_and_a_difference_send_to_the_lowest_usage() -> None:
    assert chosen("gimbal", reporting((0.95, 100), (0.84, 9000))) == Choice(1, "lowest_kv_usage")


def test_full_kv_everywhere_sends_to_the_lowest_load_where_loads_differ_by_more_than_theta() -> (
    None
):
    assert chosen("gimbal", reporting((0.95, 9001), (0.9, 6000))) == Choice(1, "lowest_load")
    assert chosen("gimbal", reporting((0.95, 9000), (0.9, 6000))) == Choice(0, "turn")


def test_full_kv_breaks_affinity() -> None:
    assert chosen("gimbal", reporting((0.95, 100), (0.2, 0)), memory=with_home(0)).index == 1


def test_a_known_user_stays_and_an_unknown_one_takes_turns() -> None:
    engines = reporting((0.5, 9000), (0.1, 0))
    memory = with_home(0)
    assert chosen("gimbal", engines, memory=memory) == Choice(0, "user_affinity")
    unknown = replace(ALICE, hints=Hints())
    assert chosen("gimbal", engines, unknown, memory) == Choice(1, "turn")


def test_an_expired_affinity_is_none() -> None:
    engines = reporting((0.5, 0), (0.5, 0))
    assert chosen("gimbal", engines, memory=with_home(0), now_s=299.9).why == "user_affinity"
    assert chosen("gimbal", engines, memory=with_home(0), now_s=300.0).why == "turn"


def test_an_affinity_to_an_engine_that_is_not_there_is_none() -> None:
    assert chosen("gimbal", reporting((0.5, 0), (0.5, 0))[:1], memory=with_home(1)) == Choice(
        0, "turn"
    )


def test_users_of_a_tenant_have_homes_of_their_own_and_those_of_two_tenants_never_share_one() -> (
    None
):
    engines, memory = reporting((0.5, 0), (0.5, 0)), ChoiceMemory(300.0)
    known = replace(ALICE, hints=Hints("alice", end_user="ann"))
    memory.note(known, 1, 0.0)
    assert chosen("gimbal", engines, known, memory) == Choice(1, "user_affinity")
    for other in (
        Hints("alice", end_user="ben"),
        Hints("alice"),
        Hints("bob", end_user="ann"),
        Hints(None),
    ):
        assert chosen("gimbal", engines, replace(ALICE, hints=other), memory).why == "turn"


@pytest.mark.parametrize(("running", "why"), [(8, "user_affinity"), (9, "home_busy")])
def test_a_user_leaves_an_engine_that_has_its_share_of_all_requests(running: int, why: str) -> None:
    engines = reporting((0.5, 0), (0.5, 0))
    engines[0] = replace(engines[0], running=running - 1, waiting=1)
    engines[1] = replace(
        engines[1], running=2
    )  # 1.5 times the mean, with the new one, rounded up, is 9
    assert chosen("gimbal", engines, memory=with_home(0)) == Choice(int(why == "home_busy"), why)


def test_tokens_that_the_router_holds_back_are_running_load() -> None:
    engines = reporting((0.95, 5000), (0.95, 5000))
    engines[0] = replace(engines[0], waiting_tokens=3001)
    assert chosen("gimbal", engines) == Choice(1, "lowest_load")


# --- scored


def test_the_least_work_wins() -> None:
    engines = [EngineState(0, prefill_tokens=4000), EngineState(1, prefill_tokens=100)]
    assert chosen("scored", engines) == Choice(1, "wait")


@pytest.mark.parametrize(
    ("decodes", "updates", "index"), [(True, 0, 0), (True, 1, 1), (False, 0, 1)]
)
def test_a_request_that_an_engine_writes_for_weighs_as_2000_tokens_of_prompts(
    decodes: bool, updates: int, index: int
) -> None:
    engines = [EngineState(0, prefill_tokens=1999), EngineState(1, running=1, updates=updates)]
    asked = RoutingFeatures(100, 100, 50, decodes=decodes)
    assert chosen("scored", engines, asked).index == index


def test_a_decode_server_is_chosen_by_its_requests_alone() -> None:
    engines = [EngineState(0, running=2, output_tokens=9), EngineState(1, 1, output_tokens=9000)]
    asked = RoutingFeatures(1000, 1000, 50, overlaps={0: 900}, prefills=False)
    assert chosen("scored", engines, asked).index == 1


@pytest.mark.parametrize(("prefill_tokens", "index"), [(1799, 0), (1801, 1)])
def test_siblings_leave_a_holder_with_work_of_over_twice_what_their_prefix_saves(
    prefill_tokens: int, index: int
) -> None:
    sibling = RoutingFeatures(1000, 1000, 0, overlaps={0: 900})
    engines = [EngineState(0, prefill_tokens=prefill_tokens), EngineState(1)]
    assert chosen("scored", engines, sibling).index == index


def test_a_prefix_is_worth_nothing_where_another_engine_prefills() -> None:
    handed_over = RoutingFeatures(1000, 1000, 0, overlaps={0: 900}, prefills=False)
    engines = [EngineState(0, waiting_tokens=9), EngineState(1)]
    assert chosen("scored", engines, handed_over).index == 1


def test_agents_of_one_tree_that_share_a_user_do_not_collapse_onto_one_engine() -> None:
    memory = ChoiceMemory(300.0)
    first, second = (
        RoutingFeatures(100, 100, 50, Hints("alice", topology="tree", agent=f"p-{at}"))
        for at in (1, 2)
    )
    memory.note(first, 0, 0.0)
    busy = [EngineState(0, prefill_tokens=9), EngineState(1)]
    assert chosen("scored", busy, first, memory) == Choice(0, "affinity")
    assert chosen("scored", busy, second, memory).index == 1


def test_engines_whose_kv_is_full_are_left_out_unless_all_are() -> None:
    engines = reporting((0.95, 0), (0.5, 0))
    engines[1] = replace(engines[1], prefill_tokens=9000)
    assert chosen("scored", engines).index == 1
    assert (
        chosen(
            "scored", [engines[0], replace(engines[1], reported=EngineReport(0.99, 0, 0, 0))]
        ).index
        == 0
    )


def test_equal_engines_are_a_tie_and_take_turns() -> None:
    assert chosen("scored", [EngineState(0, chosen=2), EngineState(1, chosen=1)]) == Choice(
        1, "tie"
    )


# --- settings, and a policy of one's own


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"policy": "best"}, " or ".join(f"'{name}'" for name in POLICIES)),
        ({"weights": {"luck": 1.0}}, "weights.luck"),
        ({"weights": {"wait": -1.0}}, "weights.wait"),
        ({"weights": {"wait": 0.0}}, "weights"),
        ({"affinity_s": 0.0}, "affinity_s"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    _, (problem,) = check(SelectionSettings, fields)
    assert named in problem.message


@pytest.mark.parametrize(
    "fields",
    [
        {"theta_kv": 0.0},
        {"theta_kv": 1.1},
        {"theta_diff": 1.5},
        {"theta_load": -1},
        {"load_factor": 0.9},
    ],
)
def test_bad_thresholds_are_refused_by_name(fields: dict[str, float]) -> None:
    _, (problem,) = check(GimbalThresholds, fields)
    assert problem.at == tuple(fields)


def highest_index(scene: EngineScene) -> Choice:
    """A policy of one's own."""
    return Choice(max(one.index for one in scene.engines), "highest")


@pytest.fixture
def own_policy() -> Iterator[str]:
    POLICIES["highest_index"] = EnginePolicy(highest_index)
    yield "highest_index"
    del POLICIES["highest_index"]


def test_a_policy_is_one_function_and_one_entry(own_policy: str) -> None:
    assert SelectionSettings(own_policy).policy == own_policy
    assert chosen(own_policy, [EngineState(0), EngineState(1)]) == Choice(1, "highest")
