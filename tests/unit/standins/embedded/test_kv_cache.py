"""The prefix cache against a naive one."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shell_router.standins.embedded.prefill import KvCache

SHORT_LEAF = st.integers(0, 4)
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def kv_of(tokens: Sequence[int]) -> Tensor:
    """KV that tells which prefix it belongs to: position i holds a number made of tokens 0 to i."""
    numbers: list[float] = []
    for token in tokens:
        numbers.append((numbers[-1] if numbers else 1.0) * 3 + token)
    return (
        torch.tensor(numbers, dtype=torch.float64)
        .reshape(1, 1, 1, -1, 1)
        .expand(2, 2, 1, -1, 1)
        .clone()
    )


def gathered(cache: KvCache, tokens: Sequence[int]) -> tuple[int, Tensor]:
    match = cache.find(tuple(tokens))
    kv = torch.zeros(2, 2, 1, len(tokens), 1, dtype=torch.float64)
    match.copy_into(kv)
    return match.length, kv[:, :, :, : match.length]


def longest_shared(tokens: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    return max(
        (
            next(
                (i for i, (a, b) in enumerate(zip(tokens, o, strict=False)) if a != b),
                min(len(tokens), len(o)),
            )
            for o in others
        ),
        default=0,
    )


def assert_all_can_be_evicted(cache: KvCache) -> None:
    other = (9999,) * cache.capacity
    cache.keep(other, torch.zeros(2, 2, 1, cache.capacity, 1, dtype=torch.float64))
    assert cache.find(other).length == cache.tokens == cache.capacity


@given(PROMPTS, st.lists(st.integers(0, 2), min_size=1, max_size=8), SHORT_LEAF)
def test_without_eviction_a_match_is_the_longest_shared_prefix_with_its_own_kv(
    prompts: list[list[int]], wanted: list[int], short: int
) -> None:
    cache = KvCache(10_000, short_leaf_tokens=short)
    for tokens in prompts:
        cache.keep(tuple(tokens), kv_of(tokens))
    length, kv = gathered(cache, wanted)
    assert length == longest_shared(wanted, prompts)
    assert torch.equal(kv, kv_of(wanted)[:, :, :, :length])
    assert cache.tokens == len(
        {tuple(tokens[: i + 1]) for tokens in prompts for i in range(len(tokens))}
    )


@given(PROMPTS, st.integers(1, 12), SHORT_LEAF)
def test_eviction_keeps_the_budget_and_never_the_wrong_kv(
    prompts: list[list[int]], capacity: int, short: int
) -> None:
    cache = KvCache(capacity, short_leaf_tokens=short)
    for tokens in prompts:
        cache.keep(tuple(tokens), kv_of(tokens))
        assert cache.tokens <= capacity
        kept = {
            tuple(each[: i + 1]) for each in prompts for i in range(cache.find(tuple(each)).length)
        }
        assert cache.tokens == len(kept)
        for each in prompts:
            length, kv = gathered(cache, each)
            assert torch.equal(kv, kv_of(each)[:, :, :, :length])


@given(PROMPTS, st.integers(1, 12), st.lists(st.integers(0, 2), min_size=1, max_size=8), SHORT_LEAF)
def test_what_is_pinned_is_never_evicted(
    prompts: list[list[int]], capacity: int, pinned: list[int], short: int
) -> None:
    cache = KvCache(capacity, short_leaf_tokens=short)
    cache.keep(tuple(pinned), kv_of(pinned))
    match = cache.find(tuple(pinned))
    cache.pin(match.node)
    for tokens in prompts:
        cache.keep(tuple(tokens), kv_of(tokens))
        assert cache.find(tuple(pinned)).length >= match.length
    cache.unpin(match.node)
    assert_all_can_be_evicted(cache)


def test_an_insert_that_splits_a_node_does_not_walk_on_into_its_lower_half() -> None:
    cache = KvCache(10, short_leaf_tokens=0)
    for tokens in ([0, 1], [0, 1, 0], [0, 0]):
        cache.keep(tuple(tokens), kv_of(tokens))
    assert cache.find((0, 0)).length == 2
    assert cache.tokens == 4


def test_a_partial_match_pins_what_it_touches_even_when_the_node_is_split_later() -> None:
    cache = KvCache(6)
    cache.keep((1, 2, 3, 4), kv_of([1, 2, 3, 4]))
    match = cache.find((1, 2))
    cache.pin(match.node)
    cache.keep((1, 2, 5, 6), kv_of([1, 2, 5, 6]))
    cache.keep((0, 0, 0, 0), kv_of([0, 0, 0, 0]))
    assert cache.find((1, 2)).length == 2
    cache.unpin(match.node)
    assert_all_can_be_evicted(cache)


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = KvCache(6)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        cache.keep(tuple(tokens), kv_of(tokens))
    cache.find((1, 1))
    cache.keep((4, 4), kv_of([4, 4]))
    assert [cache.find((token, token)).length for token in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_where_pins_leave_too_little_room_a_leading_part_is_kept() -> None:
    cache = KvCache(5)
    cache.keep((1, 1, 1), kv_of([1, 1, 1]))
    cache.pin(cache.find((1, 1, 1)).node)
    cache.keep((2, 2, 2, 2), kv_of([2, 2, 2, 2]))
    assert cache.tokens == 5
    assert cache.find((2, 2, 2, 2)).length == 2


def test_an_insert_copies_so_that_later_writes_to_the_source_do_not_show() -> None:
    cache = KvCache(10)
    kv = kv_of([1, 2])
    cache.keep((1, 2), kv)
    kv.zero_()
    assert torch.equal(gathered(cache, [1, 2])[1], kv_of([1, 2]))


def test_a_prompt_that_grew_token_by_token_is_matched_whole_and_can_be_evicted() -> None:
    tokens = list(range(3000))
    kv = torch.zeros(2, 2, 1, 3000, 1, dtype=torch.float64)
    cache = KvCache(3000)
    for count in range(1, 3001):
        cache.keep(tuple(tokens[:count]), kv)
    assert cache.find(tuple(tokens)).length == 3000
    assert_all_can_be_evicted(cache)


OWNED = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=8)),
    min_size=1,
    max_size=12,
)


def kv_by(owner: int, tokens: Sequence[int]) -> Tensor:
    return kv_of(tokens) + 0.25 * owner


@given(OWNED, st.integers(1, 30), SHORT_LEAF)
def test_owners_share_the_budget_and_never_kv(
    prompts: list[tuple[int, list[int]]], capacity: int, short: int
) -> None:
    cache = KvCache(capacity, short_leaf_tokens=short)
    for owner, tokens in prompts:
        cache.keep(tuple(tokens), kv_by(owner, tokens), owner)
        assert cache.tokens <= capacity
        for other, each in prompts:
            match = cache.find(tuple(each), other)
            kv = torch.zeros(2, 2, 1, len(each), 1, dtype=torch.float64)
            match.copy_into(kv)
            assert torch.equal(
                kv[:, :, :, : match.length], kv_by(other, each)[:, :, :, : match.length]
            )


def test_the_least_recently_used_leaf_goes_first_whatever_owns_it() -> None:
    cache = KvCache(6)
    for owner in (0, 1, 2):
        cache.keep((7, 7), kv_by(owner, [7, 7]), owner)
    cache.find((7, 7), 0)
    cache.keep((8, 8), kv_by(3, [8, 8]), 3)
    assert [cache.find((7, 7), owner).length for owner in (0, 1, 2)] == [2, 0, 2]


def with_memory_for(copies: int, kv: Tensor) -> Tensor:
    """KV that can be copied that many times."""
    left = iter(range(copies))

    class Scarce(Tensor):
        def clone(self, *, memory_format: torch.memory_format | None = None) -> "Scarce":
            if next(left, None) is None:
                raise RuntimeError("out of memory")
            return super().clone(memory_format=memory_format).as_subclass(Scarce)

    return kv.as_subclass(Scarce)


def test_kv_that_there_is_no_memory_for_leaves_nothing_in_the_cache() -> None:
    cache = KvCache(10)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.keep((1, 2, 3), with_memory_for(0, kv_of([1, 2, 3])))
    assert (cache.tokens, gathered(cache, [1, 2, 3])[0]) == (0, 0)


def test_a_node_that_there_is_no_memory_to_split_stays_whole() -> None:
    cache = KvCache(10)
    cache.keep((1, 2, 3), with_memory_for(2, kv_of([1, 2, 3])))
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.find((1, 2))
    length, kv = gathered(cache, [1, 2, 3])
    assert (cache.tokens, length) == (3, 3)
    assert torch.equal(kv, kv_of([1, 2, 3]))
