from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.engine import Generation
from shell_router.routing.placement import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    PlacementRequest,
    PrefixIndex,
    PromptIndex,
    RoutingFeatures,
    blocks_of,
)

SHARED = list(range(3 * BLOCK_TOKENS))


def test_an_engine_overlaps_by_the_whole_blocks_that_it_has_had() -> None:
    index = PrefixIndex()
    index.add(blocks_of([*SHARED, *range(900, 999)]), 2)
    assert index.overlaps(blocks_of([*SHARED, 7, 8, 9])) == {2: 3 * BLOCK_TOKENS}
    assert index.overlaps(blocks_of(SHARED[:-1])) == {2: 2 * BLOCK_TOKENS}


def test_each_engine_has_its_own_longest_prefix() -> None:
    index = PrefixIndex()
    index.add(blocks_of(SHARED[:BLOCK_TOKENS]), 0)
    index.add(blocks_of(SHARED), 5)
    assert index.overlaps(blocks_of(SHARED)) == {0: BLOCK_TOKENS, 5: 3 * BLOCK_TOKENS}


def test_equal_blocks_behind_different_beginnings_are_different() -> None:
    index = PrefixIndex()
    index.add(blocks_of(SHARED), 0)
    assert index.overlaps([1, *SHARED[1:]]) == {}


def test_prompts_for_different_adapters_share_nothing() -> None:
    index = PrefixIndex()
    index.add(blocks_of(SHARED, "algebra"), 0)
    assert index.overlaps(blocks_of(SHARED, "algebra")) == {0: 3 * BLOCK_TOKENS}
    assert index.overlaps(blocks_of(SHARED, "biology")) == index.overlaps(blocks_of(SHARED)) == {}


def test_what_a_tenant_with_a_prefix_cache_of_its_own_has_sent_is_new_for_all_others() -> None:
    prompts = PromptIndex()
    prompts.prefixes = PrefixIndex()

    def seen(cache_key: str | None) -> RoutingFeatures:
        request = PlacementRequest.of(Generation("r", SHARED, cache_key=cache_key))
        return prompts.features(request, prefills=True, decodes=True)

    prompts.note_sent(seen("alice"), 0)
    assert seen("alice").overlaps == {0: 3 * BLOCK_TOKENS}
    assert seen("bob").overlaps == seen(None).overlaps == {}


def test_what_was_met_longest_ago_is_forgotten_first() -> None:
    index = PrefixIndex(max_blocks=3)
    index.add(blocks_of(SHARED), 0)
    index.add(blocks_of([9] * BLOCK_TOKENS), 1)
    assert index.overlaps(blocks_of([9] * BLOCK_TOKENS)) == {1: BLOCK_TOKENS}
    assert index.overlaps(blocks_of(SHARED)) == {}, "its first block has left"


def test_of_a_very_long_prompt_only_the_beginning_is_looked_at() -> None:
    index = PrefixIndex()
    endless = list(range((MAX_BLOCKS + 9) * BLOCK_TOKENS))
    index.add(blocks_of(endless), 0)
    assert index.overlaps(blocks_of(endless)) == {0: MAX_BLOCKS * BLOCK_TOKENS}


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=12
    )
)
def test_overlaps_are_the_longest_common_prefixes_in_whole_blocks(
    prompts: list[tuple[int, int, int]],
) -> None:
    """Prompts of `shared` blocks that all have and `own` blocks of `which`, sent to the engine of
    that number.
    """
    index, sent = PrefixIndex(), list[tuple[int, list[int]]]()
    for shared, own, which in prompts:
        ids = list(range(shared * BLOCK_TOKENS)) + [10_000 + which] * (own * BLOCK_TOKENS)
        best: dict[int, int] = {}
        for engine, before in sent:
            same = next(
                (
                    at
                    for at, pair in enumerate(zip(ids, before, strict=False))
                    if pair[0] != pair[1]
                ),
                None,
            )
            common = (
                (min(len(ids), len(before)) if same is None else same)
                // BLOCK_TOKENS
                * BLOCK_TOKENS
            )
            if common > best.get(engine, 0):
                best[engine] = common
        assert index.overlaps(blocks_of(ids)) == best
        index.add(blocks_of(ids), which)
        sent.append((which, ids))
