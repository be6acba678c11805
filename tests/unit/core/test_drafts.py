"""Drafts are what followed the longest repeated suffix; passes are as wide as pays by what they are
seen to cost.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.drafts import WIDTHS, Drafter, DraftGate, count_matching
from shell_router.core.engine import ask_for_drafts


def test_what_followed_the_same_tokens_is_proposed() -> None:
    drafter = Drafter([1, 2, 3, 4, 5, 6, 9, 2, 3])
    assert drafter.propose(3) == [4, 5, 6]


def test_the_longest_match_wins_over_a_later_one() -> None:
    drafter = Drafter([7, 1, 2, 3, 50, 9, 2, 3, 60, 7, 1, 2, 3])
    assert drafter.propose(1) == [50]


def test_of_equal_matches_the_latest_wins() -> None:
    assert Drafter([8, 1, 2, 50, 9, 1, 2, 60, 4, 1, 2]).propose(1) == [60]


@pytest.mark.parametrize("prompt", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_nothing_is_proposed_where_nothing_repeats(prompt: Sequence[int]) -> None:
    assert list(Drafter(prompt).propose(4)) == []


def test_a_source_is_found_after_its_first_token() -> None:
    drafter = Drafter([1, 2, 3], [[40, 41, 42]])
    drafter.extend([40])
    assert drafter.propose(8) == [41, 42], "to the end of the source, and not beyond it"


def test_of_endless_sources_only_the_beginning_is_used() -> None:
    drafter = Drafter([1], [range(10, 9000), range(10_000, 20_000)])
    drafter.extend([10, 11])
    assert list(drafter.propose(2)) == [12, 13]
    drafter.extend([8998, 8999])
    assert list(drafter.propose(2)) == []
    drafter.extend([10_000, 10_001])
    assert list(drafter.propose(2)) == []


def test_texts_do_not_run_into_one_another() -> None:
    drafter = Drafter([3, 4], [[1, 2], [3]])
    drafter.extend([1, 2])
    assert list(drafter.propose(4)) == []


def test_what_repeats_at_the_end_goes_on_repeating() -> None:
    assert Drafter([1, 2, 3, 1, 2, 3]).propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert Drafter([5] * 4).propose(6) == [5] * 6


def test_output_is_drafted_from_too() -> None:
    drafter = Drafter([1])
    drafter.extend([5, 6, 7, 8, 5, 6])
    assert drafter.propose(2) == [7, 8]


def test_acceptance_follows_what_came_whether_it_was_verified_or_not() -> None:
    right, wrong = Drafter([1, 2] * 9), Drafter([1, 2] * 9)
    for step in range(20):
        right.extend(list(right.propose(4)))
        assert wrong.propose(4)
        wrong.extend([100 + step])
        wrong.extend([1, 2])
    assert right.acceptance > 0.95
    assert wrong.acceptance < 0.1


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(0, 8),
)
def test_a_proposal_continues_an_earlier_place_of_the_last_two_tokens(
    prompt: list[int], output: list[int], most: int
) -> None:
    drafter = Drafter(prompt)
    for place, token in enumerate(output):
        said = [*prompt, *output[:place]]
        proposed = list(drafter.propose(most))
        assert len(proposed) <= most
        if proposed:
            pattern, text = [*said[-2:], *proposed], [*said, *proposed]
            assert any(text[at : at + len(pattern)] == pattern for at in range(len(said) - 2))
        drafter.extend([token])


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_matching_counts_the_equal_beginning(one: list[int], other: list[int]) -> None:
    count = count_matching(one, other)
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


def test_the_request_keeps_its_own_custom_parameters() -> None:
    asked = ask_for_drafts({"temperature": 0, "custom_params": {"mine": 1}}, [(1, 2)])
    assert asked == {"temperature": 0, "custom_params": {"drafts": [[1, 2]], "mine": 1}}


def settled(
    seconds: Callable[[int, int], float], drafts: Sequence[tuple[int, float]], rows: int
) -> int:
    """The width that a gate chooses once it has seen what passes cost."""
    gate = DraftGate()
    for _ in range(60):
        width = gate.width(rows, drafts)
        gate.note(rows, width, seconds(rows, width))
    return gate.width(rows, drafts)


def test_nothing_drafted_is_a_plain_pass() -> None:
    assert settled(lambda rows, width: 1.0, [], 4) == 1


def test_where_a_wide_pass_costs_as_much_as_a_plain_one_it_is_as_wide_as_the_drafts() -> None:
    assert settled(lambda rows, width: 1.0, [(15, 0.9)], 1) == WIDTHS[-1]
    assert settled(lambda rows, width: 1.0 + width / 1000, [(3, 0.9)], 1) == 4


def test_where_computing_is_dear_passes_stay_plain() -> None:
    assert settled(lambda rows, width: float(rows * width), [(15, 0.9)], 1) == 1


def test_drafts_that_are_wrong_do_not_widen_passes() -> None:
    assert settled(lambda rows, width: 1.0 + width / 20, [(15, 0.05)], 1) == 1


def test_no_pass_is_wider_than_it_may_be() -> None:
    for widest in (1, 4):
        gate = DraftGate(widest)
        for _ in range(20):
            gate.note(1, gate.width(1, [(15, 0.99)]), 1.0)
        assert gate.width(1, [(15, 0.99)]) == widest


def test_wider_passes_are_tried_one_after_the_other() -> None:
    gate, tried = DraftGate(), []
    for _ in range(20):
        width = gate.width(4, [(15, 0.99)] * 4)
        tried.append(width)
        gate.note(4, width, 1.0 if width == 1 else float(width))
    assert tried == [1, 2, 4, 8, 16, *[1] * 15]


def test_requests_without_drafts_wait_for_half_a_plain_pass_at_most() -> None:
    assert settled(lambda rows, width: 1.0 + width / 8, [(15, 1.0)], 2) == 4
    assert settled(lambda rows, width: 1.0 + width / 8, [(15, 1.0)] * 2, 2) == 16


def test_memory_for_logits_bounds_a_pass() -> None:
    assert settled(lambda rows, width: 1.0, [(15, 1.0)] * 100, 100) == 2


def test_one_draft_does_not_hold_up_a_batch_of_others() -> None:
    dear = settled(lambda rows, width: rows * width**0.5, [(15, 0.9)], 16)
    alone = settled(lambda rows, width: rows * width**0.5, [(15, 0.9)], 1)
    assert (dear, alone) == (1, 16)


def test_a_pass_that_became_dear_is_given_up_and_tried_again_later() -> None:
    gate, chosen = DraftGate(), []
    for step in range(1200):
        width = gate.width(1, [(15, 0.9)])
        dear = 100 <= step < 600
        gate.note(1, width, 1.0 if width == 1 else (20.0 if dear else 1.1))
        chosen.append(width)
    assert set(chosen[50:100]) == {16}
    assert chosen[150:550].count(1) > 380
    assert chosen[-100:].count(16) >= 99, "now and then a plain pass tells what one costs"
