import math

import numpy as np
import pytest

from shell_router.early_exit.algorithm1 import Score, features, score
from shell_router.early_exit.cluster_gate import ClusterGate
from shell_router.early_exit.settings import POLICIES, EarlyExit
from shell_router.errors import InvalidField
from shell_router.files.read import read_sent

ONE = np.eye(1)


def judged(gate, draw):
    return gate.judge((), lambda: draw).exits


def two_outputs(**settings):
    """A gate after two unlike outputs, and its Q."""
    rng = np.random.default_rng(0)
    gate = ClusterGate(tau=0.7, min_completed=2, **settings)
    for agent in "ab":
        gate.add_output(agent, "", 0.8, features(rng.standard_normal((5, 8))))
    return gate, gate.score().probability


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


def test_the_papers_policy_exits_as_often_as_q():
    gate, q = two_outputs()
    assert 0.5 < q < 1
    assert judged(gate, math.nextafter(q, 0))
    assert not judged(gate, q)


def test_the_threshold_policy_ignores_the_draw():
    _, q = two_outputs()
    reached, _ = two_outputs(threshold=q)
    missed, _ = two_outputs(threshold=math.nextafter(q, 1))
    for draw in (0.0, 0.5, 0.999):
        assert judged(reached, draw)
        assert not judged(missed, draw)


@pytest.mark.parametrize(("likeness", "q"), [(0.95, 0.73), (0.8, 0.77), (0.5, 0.85), (0.0, 0.93)])
def test_by_the_paper_two_sure_outputs_score_lower_the_more_they_agree(likeness, q):
    similarities = np.array([[1.0, 0.0], [likeness, 1.0]])
    assert score([0.9, 0.9], similarities, 0.7).probability == pytest.approx(q, abs=0.005)


def test_the_monotone_gate_scores_the_higher_the_more_pairs_agree():
    similarities = np.array([[1.0, 0, 0], [0.4, 1.0, 0], [0.6, 0.8, 1.0]])
    pairs = score([1.0, 1.0, 1.0], similarities, None)
    assert (pairs.agreement, pairs.balance) == (pytest.approx(0.6), pytest.approx(0.6))
    scores = [score([0.9, 0.9], np.array([[1, 0], [p, 1]]), None) for p in (0, 0.5, 0.8, 1)]
    assert sorted(each.probability for each in scores) == [each.probability for each in scores]
    assert score([0.9], ONE, None).probability == 0


def test_the_gate_is_silent_until_enough_outputs_are_there():
    gate = ClusterGate(tau=0.7, min_completed=3)
    output = features(np.random.default_rng(0).standard_normal((5, 8)))
    gate.add_output("a", "", 0.9, output)
    assert gate.score() is None
    gate.add_output("a", "", 0.8, output)
    assert gate.score() is None
    gate.add_output("c", "", 0.7, output)
    assert gate.score() == score([0.9, 0.8, 0.7], np.ones((3, 3)), 0.7)


def test_a_refused_output_leaves_the_gate_as_it_was():
    rng = np.random.default_rng(0)
    gate = ClusterGate(tau=0.7, min_completed=2)
    gate.add_output("a", "", 0.9, features(rng.standard_normal((5, 8))))
    with pytest.raises(ValueError, match="different models"):
        gate.add_output("b", "", 0.8, features(rng.standard_normal((5, 9))))
    gate.add_output("b", "", 1.0, features(rng.standard_normal((5, 8))))
    second = gate.score()
    assert second.confidence == pytest.approx(math.sqrt((0.81 + 1) / 2))


@pytest.mark.parametrize(
    "bad",
    [
        {"policy": "always"},
        {"scope": "tree"},
        {"tau": 0},
        {"tau": 1.1},
        {"tau": math.nan},
        {"threshold": -0.1},
        {"threshold": 1.1},
        {"min_completed": 0},
        {"max_changed_percent": 0},
    ],
)
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(InvalidField, match=f"{next(iter(bad))} must be "):
        read_sent(EarlyExit, bad, "early_exit")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_judges_complete_outputs_by_a_gate(policy: str) -> None:
    gate = EarlyExit(policy, threshold=0.5, min_completed=2).new_gate(("a", "b", "c"))
    for agent in ("a", "b"):
        states = features(np.ones((3, 4)))
        gate.add_text(agent, "Answer: 4\n", 1.0)
        gate.add_output(agent, "Answer: 4\n", 1.0, states if POLICIES[policy].embeds else None)
    judgement = gate.judge(("c",), lambda: 0.0)
    assert judgement is not None and judgement.exits
    assert (judgement.score is None) != POLICIES[policy].judges


def test_a_quorum_exits_once() -> None:
    gate = EarlyExit("quorum", min_completed=1).new_gate(("a", "b", "c"))
    exits = []
    for agent in ("a", "b"):
        gate.add_output(agent, "", 0.0, None)
        judgement = gate.judge(("c",), lambda: 0.0)
        exits.append(judgement is not None and judgement.exits)
    assert exits == [True, False]
