from hypothesis import given
from hypothesis import strategies as st

from shell_router.standins.prefix_cache import PrefixCache

IDS = st.lists(st.integers(0, 2), max_size=8)


def longest_common(ids: list[int], others: list[list[int]]) -> int:
    lengths = [0]
    for other in others:
        same = 0
        while same < min(len(ids), len(other)) and ids[same] == other[same]:
            same += 1
        lengths.append(same)
    return max(lengths)


@given(st.lists(IDS, max_size=12), IDS)
def test_with_room_for_all_a_prompt_is_known_as_far_as_any_before_it_goes(
    before: list[list[int]], asked: list[int]
) -> None:
    cache = PrefixCache(10_000)
    for ids in before:
        cache.add(ids)
    assert cache.match(asked) == longest_common(asked, before)
    assert cache.tokens == len({tuple(ids[: end + 1]) for ids in before for end in range(len(ids))})


@given(st.lists(st.tuples(st.booleans(), IDS), max_size=40), st.integers(1, 12))
def test_it_never_holds_more_than_its_room_nor_claims_what_it_was_not_given(
    asked: list[tuple[bool, list[int]]], room: int
) -> None:
    cache, before = PrefixCache(room), list[list[int]]()
    for added, ids in asked:
        if added:
            cache.add(ids)
            before.append(ids)
            assert cache.match(ids) == min(len(ids), room)
        else:
            assert cache.match(ids) <= longest_common(ids, before)
        assert cache.tokens <= room


def test_what_was_used_longest_ago_leaves_first() -> None:
    cache = PrefixCache(6)
    cache.add([1, 1, 1])
    cache.add([2, 2, 2])
    cache.match([1, 1, 1])
    cache.add([3, 3])
    assert [cache.match([n] * 3) for n in (1, 2, 3)] == [3, 0, 2]


def test_ends_leave_before_the_beginning_that_others_share() -> None:
    cache = PrefixCache(6)
    cache.add([1, 1, 2, 2])
    cache.add([1, 1, 3, 3])
    cache.add([1, 1, 4])
    assert [cache.match([1, 1, n, n]) for n in (2, 3, 4)] == [2, 4, 3]
