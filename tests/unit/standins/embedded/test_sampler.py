"""Sampling: what is drawn, how often, and with which log-probability."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shell_router.standins.embedded.sampling import BatchSampler, Draw, shape_logits
from shell_router.standins.embedded.wire import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5], dtype=torch.float64)


def draw_of(said: list[int] | None = None, prompt: tuple[int, ...] = (), **params: Any) -> Draw:
    return Draw(SamplingParams(**params), prompt, frozenset({4}), said or [])


def sample(draws: list[Draw], seed: int = 0) -> tuple[list[int], list[float | None]]:
    drawn = BatchSampler(draws, with_logprobs=True, rng=random.Random(seed))(
        LOGITS.expand(len(draws), -1)
    )
    return [token for token, _ in drawn], [logprob for _, logprob in drawn]


def drawn(count: int = 4000, **params: Any) -> Counter[int]:
    sampler = BatchSampler([draw_of(**params)] * count, with_logprobs=False, rng=random.Random(7))
    return Counter(token for token, _ in sampler(LOGITS.expand(count, -1)))


def test_greedy_takes_the_likeliest_and_reports_its_logprob() -> None:
    tokens, logprobs = sample([draw_of(top_k=1)])
    assert tokens == [0]
    assert logprobs == pytest.approx([float(torch.log_softmax(LOGITS, -1)[0])])


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    counts, expected = drawn(temperature=0.5), torch.softmax(LOGITS / 0.5, -1)
    assert [counts[token] / 4000 for token in range(5)] == pytest.approx(
        expected.tolist(), abs=0.03
    )


def test_logprobs_are_those_after_temperature_and_before_truncation() -> None:
    tokens, logprobs = sample([draw_of(temperature=2.0, top_p=0.5)])
    assert logprobs == pytest.approx([float(torch.log_softmax(LOGITS / 2.0, -1)[tokens[0]])])


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 4}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1}),
    ],
)
def test_truncation_leaves_only_the_likely(params: dict[str, Any], possible: set[int]) -> None:
    assert set(drawn(**params)) == possible


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {2: 1e39}}, {"min_new_tokens": 5, "stop_token_ids": frozenset(range(5))}],
)
def test_what_is_drawn_exists_even_where_no_probability_does(params: dict[str, Any]) -> None:
    draw = Draw(SamplingParams(**params), (), params.get("stop_token_ids", frozenset()), [])
    ((token, _),) = BatchSampler([draw], with_logprobs=False, rng=random.Random(0))(
        LOGITS.float()[None]
    )
    assert 0 <= token < len(LOGITS)


@given(
    st.integers(0, 50),
    st.integers(0, 6),
    st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.1}]),
)
def test_a_seeded_request_draws_the_same_in_any_batch(
    seed: int, others: int, theirs: dict[str, Any]
) -> None:
    alone, _ = sample([draw_of(said=[1, 2], sampling_seed=seed)], seed=1)
    crowd = [draw_of(**theirs) for _ in range(others)]
    together, _ = sample(
        [*crowd, draw_of(said=[1, 2], sampling_seed=seed), draw_of(top_k=1)], seed=2
    )
    assert together[others] == alone[0]


def test_a_seeded_request_draws_anew_at_each_position() -> None:
    tokens = {
        sample([draw_of(said=[0] * position, sampling_seed=3)])[0][0] for position in range(40)
    }
    assert len(tokens) > 2


def test_penalties_lower_what_was_said() -> None:
    logits = LOGITS.clone()
    shape_logits(logits, draw_of(said=[0, 0, 2], frequency_penalty=0.5, presence_penalty=0.25))
    assert logits.tolist() == [2.0 - 1.25, 1.0, 0.0 - 0.75, -1.0, 0.5]


def test_the_repetition_penalty_counts_prompt_and_output() -> None:
    logits = LOGITS.clone()
    shape_logits(logits, draw_of(said=[3], prompt=(0,), repetition_penalty=2.0))
    assert logits.tolist() == [1.0, 1.0, 0.0, -2.0, 0.5]


def test_a_bias_is_added() -> None:
    assert sample([draw_of(top_k=1, logit_bias={3: 10.0})])[0] == [3]


def test_stop_tokens_wait_for_the_minimum_length() -> None:
    biased: dict[str, Any] = {"top_k": 1, "logit_bias": {4: 10.0}}
    assert sample([draw_of(said=[0], min_new_tokens=2, **biased)])[0] == [0]
    assert sample([draw_of(said=[0, 0], min_new_tokens=2, **biased)])[0] == [4]
