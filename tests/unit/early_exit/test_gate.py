import math

import numpy as np
import pytest

from shell_router.early_exit import ClusterGate, EarlyExit, Score, decide, features, score

ONE = np.eye(1)


def scored(probability):
    return Score(confidence=1.0, agreement=0.7, balance=1.0, probability=probability)


def test_one_output_agrees_with_itself():
    assert score([0.81], ONE, tau=1.0) == Score(0.81, 1.0, 1.0, pytest.approx(0.9))


def test_agreement_at_tau_is_balanced_best():
    similarities = np.array([[1.0, 0.4], [0.4, 1.0]])
    best = score([1.0, 1.0], similarities, tau=0.8)
    assert best.agreement == pytest.approx(0.8)
    assert best.probability == pytest.approx(1.0)


def test_both_too_much_and_too_little_agreement_lower_the_score():
    alike, strange = np.ones((2, 2)), np.eye(2)
    tau = 0.8
    assert score([1.0, 1.0], alike, tau).balance == pytest.approx(0.75)
    assert score([1.0, 1.0], strange, tau).balance == pytest.approx(2 / 3 / tau)


def test_low_confidence_outputs_hardly_weigh():
    similarities = np.array([[1.0, 0, 0.9], [0, 1.0, 0], [0.9, 0, 1.0]])
    agreement = score([1.0, 1e-6, 1.0], similarities, tau=0.7).agreement
    assert agreement == pytest.approx((1 + 1 + 0.9) / 3, abs=1e-5)


def test_balance_is_never_negative():
    assert score([1.0], ONE, tau=0.3).balance == 0
    assert score([1.0], ONE, tau=0.3).probability == 0


def test_no_confidence_at_all_never_exits():
    assert score([0.0, 0.0], np.ones((2, 2)), tau=0.7) == Score(0.0, 0.0, 0.0, 0.0)


def test_only_the_lower_triangle_is_read():
    lower = np.array([[1.0, 9.9], [0.5, 1.0]])
    assert score([1.0, 1.0], lower, tau=0.7).agreement == pytest.approx(2.5 / 3)


@pytest.mark.parametrize("q", [0.0, 0.05, 0.3, 0.5, 0.77, 0.99, 1.0])
def test_the_stochastic_policy_exits_as_often_as_q(q):
    draws = np.random.default_rng(2).random(10_000)
    rate = sum(decide(scored(q), EarlyExit(), draw) for draw in draws) / len(draws)
    assert rate == pytest.approx(q, abs=0.01)


def test_the_threshold_policy_ignores_the_draw():
    settings = EarlyExit(policy="threshold", threshold=0.6)
    for draw in (0.0, 0.5, 0.999):
        assert decide(scored(0.6), settings, draw)
        assert not decide(scored(math.nextafter(0.6, 0)), settings, draw)


@pytest.mark.parametrize("draw", [-0.1, 1.0, math.nan])
def test_a_draw_outside_the_unit_interval_is_refused(draw):
    with pytest.raises(ValueError, match="draw"):
        decide(scored(0.5), EarlyExit(), draw)


def test_the_gate_is_silent_until_enough_outputs_are_there():
    gate = ClusterGate(EarlyExit(min_completed=3))
    output = features(np.random.default_rng(0).standard_normal((5, 8)))
    assert gate.complete(0.9, output) is None
    assert gate.complete(0.8, output) is None
    assert gate.complete(0.7, output) == score([0.9, 0.8, 0.7], np.ones((3, 3)), 0.7)


def test_a_refused_output_leaves_the_gate_as_it_was():
    rng = np.random.default_rng(0)
    gate = ClusterGate(EarlyExit(min_completed=2))
    gate.complete(0.9, features(rng.standard_normal((5, 8))))
    with pytest.raises(ValueError, match="different models"):
        gate.complete(0.8, features(rng.standard_normal((5, 9))))
    second = gate.complete(1.0, features(rng.standard_normal((5, 8))))
    assert second.confidence == pytest.approx(math.sqrt((0.81 + 1) / 2))


@pytest.mark.parametrize(
    "bad",
    [
        {"policy": "always"},
        {"similarity": "cosine"},
        {"tau": 0},
        {"tau": 1.1},
        {"tau": math.nan},
        {"threshold": -0.1},
        {"threshold": 1.1},
        {"min_completed": 0},
    ],
)
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        EarlyExit(**bad)
