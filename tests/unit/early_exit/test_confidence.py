import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.early_exit.algorithm1 import Confidence, rms_confidence

LOGPROBS = st.lists(st.floats(min_value=-50, max_value=0), min_size=1, max_size=40)


def token_confidence(logprobs):
    confidence = Confidence()
    confidence.add(logprobs)
    return confidence.value


def test_confidence_is_the_geometric_mean_of_the_token_probabilities():
    assert token_confidence([math.log(0.5), math.log(0.125)]) == pytest.approx(0.25)


@given(LOGPROBS, st.integers(1, 7))
def test_a_stream_in_chunks_ends_at_the_confidence_of_the_whole(logprobs, chunk):
    stream = Confidence()
    for start in range(0, len(logprobs), chunk):
        stream.add(logprobs[start : start + chunk])
    assert stream.value == pytest.approx(token_confidence(logprobs), rel=1e-9)


@given(LOGPROBS)
def test_confidence_stays_a_probability(logprobs):
    assert 0 <= token_confidence(logprobs) <= 1


def test_a_probability_rounded_above_one_counts_as_one():
    assert token_confidence([1e-7]) == 1


def test_an_impossible_token_takes_all_confidence():
    assert token_confidence([-0.1, -math.inf]) == 0


def test_nothing_is_measured_before_the_first_token():
    stream = Confidence()
    stream.add([])
    assert stream.value is None


def test_a_nan_is_refused_and_changes_nothing():
    stream = Confidence()
    stream.add([-1.0])
    with pytest.raises(ValueError, match="not a number"):
        stream.add([-1.0, math.nan])
    assert stream.value == pytest.approx(math.exp(-1))


def test_rms_favours_high_confidences():
    assert rms_confidence([0.2, 0.8]) == pytest.approx(math.sqrt(0.34))
    with pytest.raises(ValueError, match="no completed output"):
        rms_confidence([])
