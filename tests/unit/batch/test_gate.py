import pytest

from shell_router.batch.pool import Aggregating
from shell_router.batch.prompts import Vote, verdict_of
from shell_router.errors import ConfigError


def votes(answers: str, sure: float = 0.5) -> list[Vote]:
    """One vote per letter; a dot answers nothing."""
    return [Vote(None if one == "." else one, sure) for one in answers]


@pytest.mark.parametrize(
    ("answers", "confidence", "winner"),
    [
        ("aaa", 1, 2),
        ("aab", 2 / 3, 1),
        ("aba", 2 / 3, 2),
        ("abc", 1 / 3, 2),
        ("aa.", 2 / 3, 1),
        ("a..", 1 / 3, 0),
        ("...", 0, None),
        ("", 0, None),
        ("a", 1, 0),
        ("aabb", 1 / 2, 3),
        ("bbaa.", 2 / 5, 3),
    ],
)
def test_confidence_is_the_share_of_all_experts_that_agree(answers: str, confidence: float, winner: int | None) -> None:
    verdict = verdict_of(votes(answers))
    assert verdict.winner == winner
    assert verdict.confidence == pytest.approx(confidence)


@pytest.mark.parametrize(
    ("tau", "answers", "passes"),
    [
        (1.0, "aaa", True),
        (1.0, "aab", False),
        (1.0, "aa.", False),
        (1.0, "a", True),
        (0.67, "aab", True),
        (2 / 3, "aab", True),
        (0.66, "aab", True),
        (0.67, "aabb", False),
        (0.67, "abc", False),
        (0.01, "...", False),
        (0.01, "", False),
        (0.001, "...", False),
        (2.0, "aaa", False),
        (float("inf"), "aaa", False),
    ],
)
def test_the_gate_is_passed_from_tau_on(tau: float, answers: str, passes: bool) -> None:
    assert verdict_of(votes(answers)).passes(tau) is passes


def test_by_probability_each_expert_weighs_as_much_as_it_is_sure() -> None:
    said = [Vote("a", 0.9), Vote("b", 0.2), Vote("b", 0.1), Vote(None, 0.8)]
    verdict = verdict_of(said, "probability")
    assert verdict.confidence == pytest.approx(0.3 / 2.0)
    assert verdict.winner == 2
    assert not verdict.passes(0.5)
    assert verdict_of([Vote("a", 0.9), Vote("a", 0.0), Vote("b", 0.5)], "probability").passes(0.5)


def test_experts_that_are_not_sure_at_all_give_no_confidence() -> None:
    verdict = verdict_of(votes("aa", sure=0.0), "probability")
    assert verdict.confidence == 0
    assert not verdict.passes(0.01)


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan")])
def test_a_tau_that_lets_everything_pass_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match=r"tau must be above 0, not .+\. 1 means all proposers"):
        Aggregating("a", tau)
