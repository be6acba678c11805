import numpy as np
import pytest

from shell_router.early_exit.algorithm1 import features, similarity


def normal(tokens, width, seed=0):
    return np.random.default_rng(seed).standard_normal((tokens, width))


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_an_output_agrees_fully_with_itself_whatever_its_scale(tokens):
    states = normal(tokens, 16)
    scaled = states * np.linspace(0.1, 10, 16)
    assert similarity(features(states), features(scaled)) == pytest.approx(1)


def test_order_of_tokens_and_of_arguments_do_not_matter():
    first, second = features(normal(9, 16)), features(normal(30, 16, seed=1))
    shuffled = features(normal(9, 16)[::-1])
    assert similarity(first, second) == pytest.approx(similarity(second, first))
    assert similarity(first, second) == pytest.approx(similarity(shuffled, second))


def test_fewer_tokens_than_features_never_build_the_feature_matrix():
    assert features(normal(15, 16)).matrix.shape == (15, 16)
    assert features(normal(17, 16)).matrix.shape == (16, 16)


def test_rounding_noise_in_a_dead_feature_is_no_signal():
    states = normal(9, 16)
    noisy = states.copy()
    states[:, 3] = 0
    noisy[:, 3] = 1e-32 * normal(9, 1, seed=1)[:, 0]
    other = features(normal(7, 16, seed=2))
    assert not features(noisy).present[3]
    assert similarity(features(noisy), other) == similarity(features(states), other)


def test_an_output_without_signal_is_like_nothing():
    silent = features(np.zeros((3, 4)))
    assert similarity(silent, features(normal(3, 4))) == 0
    assert similarity(silent, silent) == 0


def test_states_are_left_as_they_were():
    states = normal(4, 8)
    before = states.copy()
    features(states)
    assert np.array_equal(states, before)


@pytest.mark.parametrize(
    "states", [np.zeros(4), np.zeros((0, 4)), np.zeros((4, 0)), np.zeros((2, 2, 2))]
)
def test_a_wrong_shape_is_refused(states):
    with pytest.raises(ValueError, match="shape"):
        features(states)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_states_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        features(np.array([[1.0, bad]]))


def test_outputs_of_different_models_are_not_compared():
    with pytest.raises(ValueError, match="8 and 16 features"):
        similarity(features(normal(4, 8)), features(normal(4, 16)))
