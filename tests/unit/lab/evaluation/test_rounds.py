"""The order of the questions, and their seeds."""

from collections import Counter
from itertools import pairwise, permutations

import pytest

from shell_router.lab.evaluation.records import Item, Setting
from shell_router.lab.evaluation.run import Asked, plan_rounds, request_seed

ITEMS = [Item(index, f"{index}?", "1", "numeric", {}) for index in range(3)]
SETTINGS = [Setting(name, "model") for name in ("a", "b")]


def indices(asked: Asked) -> list[tuple[int, int]]:
    return [(item.index, seed) for item, seed in asked]


def test_every_question_goes_through_all_settings_before_the_next_and_another_begins_each_time() -> (
    None
):
    rounds = list(plan_rounds(ITEMS, [0, 1], SETTINGS))
    assert [indices(asked) for asked, _ in rounds] == [
        [(0, 0)],
        [(1, 0)],
        [(2, 0)],
        [(0, 1)],
        [(1, 1)],
        [(2, 1)],
    ]
    assert ["".join(one.name for one in settings) for _, settings in rounds] == [
        "ab",
        "ba",
        "ba",
        "ab",
        "ab",
        "ba",
    ]


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_each_setting_comes_right_after_each_other_one_equally_often(names: str) -> None:
    settings = [Setting(name, "model") for name in names]
    orders = [order for _, order in plan_rounds(ITEMS[:1], range(2 * len(names)), settings)]
    followed = Counter((one.name, other.name) for order in orders for one, other in pairwise(order))
    assert followed == dict.fromkeys(permutations(names, 2), 2)
    assert Counter(order[0].name for order in orders) == dict.fromkeys(names, 2)


def test_questions_that_are_asked_at_once_go_through_the_settings_together() -> None:
    rounds = list(plan_rounds(ITEMS, [0, 1], SETTINGS, concurrency=2))
    assert [indices(asked) for asked, _ in rounds] == [
        [(0, 0), (1, 0)],
        [(2, 0)],
        [(0, 1), (1, 1)],
        [(2, 1)],
    ]
    assert ["".join(one.name for one in settings) for _, settings in rounds] == [
        "ab",
        "ba",
        "ba",
        "ab",
    ]


def test_a_requests_seed_depends_on_seed_and_question() -> None:
    seeds = [request_seed(seed, question) for seed in (0, 1) for question in (0, 1)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(0, 0) == 1207832273  # fixed: records of different versions stay comparable
