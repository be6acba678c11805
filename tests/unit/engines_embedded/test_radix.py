"""The prefix cache against a naive one."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shell_router.engines.embedded.radix import RadixCache

SHORT_LEAF = st.integers(0, 4)
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def kv_of(tokens: Sequence[int]) -> Tensor:
    """KV that tells which prefix it belongs to: position i holds a number made of tokens 0 to i."""
    numbers: list[float] = []
    for token in tokens:
        numbers.append((numbers[-1] if numbers else 1.0) * 3 + token)
    return torch.tensor(numbers, dtype=torch.float64).reshape(1, 1, 1, -1, 1).expand(2, 2, 1, -1, 1).clone()


def gathered(cache: RadixCache, tokens: Sequence[int]) -> tuple[int, Tensor]:
    match = cache.match(tokens)
    kv = torch.zeros(2, 2, 1, len(tokens), 1, dtype=torch.float64)
    match.copy_into(kv)
    return match.length, kv[:, :, :, : match.length]


def longest_shared(tokens: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    return max(
        (
            next((i for i, (a, b) in enumerate(zip(tokens, o, strict=False)) if a != b), min(len(tokens), len(o)))
            for o in others
        ),
        default=0,
    )


@settings(deadline=None, max_examples=200)
@given(PROMPTS, st.lists(st.integers(0, 2), min_size=1, max_size=8), SHORT_LEAF)
def test_without_eviction_a_match_is_the_longest_shared_prefix_with_its_own_kv(
    prompts: list[list[int]], wanted: list[int], short: int
) -> None:
    cache = RadixCache(10_000, short_leaf_tokens=short)
    for tokens in prompts:
        cache.insert(tokens, kv_of(tokens))
    length, kv = gathered(cache, wanted)
    assert length == longest_shared(wanted, prompts)
    assert torch.equal(kv, kv_of(wanted)[:, :, :, :length])
    assert cache.tokens == len({tuple(tokens[: i + 1]) for tokens in prompts for i in range(len(tokens))})


@settings(deadline=None, max_examples=200)
@given(PROMPTS, st.integers(1, 12), SHORT_LEAF)
def test_eviction_keeps_the_budget_and_never_the_wrong_kv(prompts: list[list[int]], capacity: int, short: int) -> None:
    cache = RadixCache(capacity, short_leaf_tokens=short)
    for tokens in prompts:
        cache.insert(tokens, kv_of(tokens))
        assert cache.tokens <= capacity
        assert cache.tokens == len({s[: i + 1] for s in cache.sequences() for i in range(len(s))})
        for each in prompts:
            length, kv = gathered(cache, each)
            assert torch.equal(kv, kv_of(each)[:, :, :, :length])


@settings(deadline=None, max_examples=200)
@given(PROMPTS, st.integers(1, 12), st.lists(st.integers(0, 2), min_size=1, max_size=8), SHORT_LEAF)
def test_what_is_pinned_is_never_evicted(
    prompts: list[list[int]], capacity: int, pinned: list[int], short: int
) -> None:
    cache = RadixCache(capacity, short_leaf_tokens=short)
    cache.insert(pinned, kv_of(pinned))
    match = cache.match(pinned)
    cache.pin(match.node)
    for tokens in prompts:
        cache.insert(tokens, kv_of(tokens))
        assert cache.match(pinned).length >= match.length
    cache.unpin(match.node)
    cache.clear()
    assert cache.tokens == 0


def test_an_insert_that_splits_a_node_does_not_walk_on_into_its_lower_half() -> None:
    cache = RadixCache(10, short_leaf_tokens=0)
    for tokens in ([0, 1], [0, 1, 0], [0, 0]):
        cache.insert(tokens, kv_of(tokens))
    assert cache.match([0, 0]).length == 2
    assert cache.tokens == 4


def test_a_partial_match_pins_what_it_touches_even_when_the_node_is_split_later() -> None:
    cache = RadixCache(6)
    cache.insert([1, 2, 3, 4], kv_of([1, 2, 3, 4]))
    match = cache.match([1, 2])
    cache.pin(match.node)
    cache.insert([1, 2, 5, 6], kv_of([1, 2, 5, 6]))
    cache.insert([0, 0, 0, 0], kv_of([0, 0, 0, 0]))
    assert cache.match([1, 2]).length == 2
    cache.unpin(match.node)
    cache.clear()
    assert cache.tokens == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache(6)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        cache.insert(tokens, kv_of(tokens))
    cache.match([1, 1])
    cache.insert([4, 4], kv_of([4, 4]))
    assert [cache.match([token, token]).length for token in (1, 2, 3, 4)] == [2, 0, 2, 2]
    assert cache.evicted_tokens == 2


def test_where_pins_leave_too_little_room_a_leading_part_is_kept() -> None:
    cache = RadixCache(5)
    cache.insert([1, 1, 1], kv_of([1, 1, 1]))
    cache.pin(cache.match([1, 1, 1]).node)
    assert cache.insert([2, 2, 2, 2], kv_of([2, 2, 2, 2])) == 2
    assert cache.match([2, 2, 2, 2]).length == 2


def test_an_insert_copies_so_that_later_writes_to_the_source_do_not_show() -> None:
    cache = RadixCache(10)
    kv = kv_of([1, 2])
    cache.insert([1, 2], kv)
    kv.zero_()
    assert torch.equal(gathered(cache, [1, 2])[1], kv_of([1, 2]))


def test_a_prompt_that_grew_token_by_token_is_matched_whole_and_can_be_evicted() -> None:
    tokens = list(range(3000))
    kv = torch.zeros(1, 2, 1, 3000, 1)
    cache = RadixCache(3000)
    for count in range(1, 3001):
        cache.insert(tokens[:count], kv)
    assert cache.match(tokens).length == 3000
    cache.clear()
    assert cache.tokens == 0


OWNED = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=8)), min_size=1, max_size=12
)


def kv_by(owner: int, tokens: Sequence[int]) -> Tensor:
    return kv_of(tokens) + 0.25 * owner


@settings(deadline=None, max_examples=200)
@given(OWNED, st.integers(1, 30), SHORT_LEAF)
def test_owners_share_the_budget_and_never_kv(prompts: list[tuple[int, list[int]]], capacity: int, short: int) -> None:
    cache = RadixCache(capacity, short_leaf_tokens=short)
    for owner, tokens in prompts:
        cache.insert(tokens, kv_by(owner, tokens), owner)
        assert cache.tokens <= capacity
        for other, each in prompts:
            match = cache.match(each, other)
            kv = torch.zeros(2, 2, 1, len(each), 1, dtype=torch.float64)
            match.copy_into(kv)
            assert torch.equal(kv[:, :, :, : match.length], kv_by(other, each)[:, :, :, : match.length])


@settings(deadline=None, max_examples=200)
@given(OWNED, st.integers(0, 2), SHORT_LEAF)
def test_what_is_forgotten_of_one_owner_is_all_of_it_and_nothing_of_the_others(
    prompts: list[tuple[int, list[int]]], gone: int, short: int
) -> None:
    cache = RadixCache(10_000, short_leaf_tokens=short)
    for owner, tokens in prompts:
        cache.insert(tokens, kv_by(owner, tokens), owner)
    cache.forget(gone)
    kept = [(owner, tokens) for owner, tokens in prompts if owner != gone]
    assert all(cache.match(tokens, owner).length == len(tokens) for owner, tokens in kept)
    assert all(cache.match(tokens, gone).length == 0 for _, tokens in prompts)
    assert cache.tokens == len({(owner, *tokens[: i + 1]) for owner, tokens in kept for i in range(len(tokens))})


def test_the_least_recently_used_leaf_goes_first_whoever_owns_it() -> None:
    cache = RadixCache(6)
    for owner in (0, 1, 2):
        cache.insert([7, 7], kv_by(owner, [7, 7]), owner)
    cache.match([7, 7], 0)
    cache.insert([8, 8], kv_by(3, [8, 8]), 3)
    assert [cache.match([7, 7], owner).length for owner in (0, 1, 2)] == [2, 0, 2]
