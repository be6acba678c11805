"""The gate against a literal transcription of Faster-MoA's Algorithm 1: [h, h] matrices and double
loops.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shell_router.early_exit.algorithm1 import Confidence, features, similarity
from shell_router.early_exit.cluster_gate import ClusterGate

TOLERANCE = 1e-6


def corr(matrix):
    scale = np.sqrt(np.diag(matrix))
    outer = np.outer(scale, scale)
    return np.divide(matrix, outer, out=np.zeros_like(matrix), where=outer > 0)


def frob_cos_sim(u, v):
    corr_u, corr_v = corr(u), corr(v)
    norms = np.sqrt(np.trace(corr_u.T @ corr_u)) * np.sqrt(np.trace(corr_v.T @ corr_v))
    return np.trace(corr_u.T @ corr_v) / norms if norms > 0 else 0.0


def metric_q(states, logprobs, tau):
    """Lines 2 to 13 for all l outputs at once: C-bar, P, B, Q."""
    count = len(states)
    c = [np.exp(np.sum(logprobs[i]) / len(logprobs[i])) for i in range(count)]
    c_bar = np.sqrt(sum(value**2 for value in c) / count)
    sim = np.zeros((count, count))
    wide = [one.astype(np.float64) for one in states]
    for i in range(count):
        for j in range(i + 1):
            same = i == j
            sim[i, j] = 1.0 if same else frob_cos_sim(wide[i].T @ wide[i], wide[j].T @ wide[j])
            sim[j, i] = sim[i, j]
    weight, weighted = 0.0, 0.0
    for i in range(count):
        for j in range(i + 1):
            weight += c[i] * c[j]
            weighted += c[i] * c[j] * sim[i, j]
    p = weighted / weight
    b = max(1 - abs(p - tau) / tau, 0.0)
    return c_bar, p, b, np.sqrt(c_bar * b)


def assert_follows_algorithm1(states, logprobs, tau):
    gate = ClusterGate(tau=tau, min_completed=1)
    for count in range(1, len(states) + 1):
        confidence = Confidence()
        confidence.add(logprobs[count - 1])
        gate.add_output("a", "", confidence.value, features(states[count - 1]))
        scored = gate.score()
        expected = metric_q(states[:count], logprobs[:count], tau)
        found = (scored.confidence, scored.agreement, scored.balance, scored.probability)
        assert found == pytest.approx(expected, abs=TOLERANCE)


@st.composite
def clusters(draw):
    """Outputs of one width: normal states, at times without some columns or near copies of each
    other.
    """
    width = draw(st.integers(2, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    base = rng.standard_normal((64, width))
    states = []
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.integers(1, 64))
        output = base[:tokens] + draw(st.sampled_from([0.0, 0.3, 3.0])) * rng.standard_normal(
            (tokens, width)
        )
        output[:, rng.random(width) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
        states.append((output * draw(st.sampled_from([1e-3, 1.0, 1e4]))).astype(np.float32))
    logprobs = [-rng.exponential(draw(st.sampled_from([0.05, 1.0])), size=9) for _ in states]
    return states, logprobs


@given(clusters(), st.floats(0.05, 1.0))
def test_every_completion_scores_as_algorithm_1(cluster, tau):
    assert_follows_algorithm1(*cluster, tau)


@pytest.mark.parametrize("shapes", [(200, 120, 31), (200, 500, 1), (384, 383, 400)])
def test_it_scores_as_algorithm_1_at_the_size_of_real_outputs(shapes):
    rng = np.random.default_rng(sum(shapes))
    states = [rng.standard_normal((tokens, 384)).astype(np.float32) + 0.2 for tokens in shapes]
    logprobs = [-rng.exponential(0.2, size=tokens) for tokens in shapes]
    assert_follows_algorithm1(states, logprobs, 0.7)


small_states = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 8)).flatmap(
    lambda shape: st.tuples(
        *(
            arrays(np.float64, (tokens, shape[2]), elements=st.integers(-3, 3).map(float))
            for tokens in shape[:2]
        )
    )
)


@given(small_states)
def test_all_forms_equal_the_matrix_form(pair):
    """Small integers bring out zero columns, equal columns, single rows and more tokens than
    features.
    """
    first, second = pair
    expected = frob_cos_sim(first.T @ first, second.T @ second)
    assert similarity(features(first), features(second)) == pytest.approx(expected, abs=TOLERANCE)
