from collections.abc import Sequence
from pathlib import Path

import pytest

from shell_router.batch.journal import Output
from shell_router.batch.pool import Aggregating, Agreement, Answers, Pool, PoolModel, PoolWorker
from shell_router.batch.prompts import Batch, find_winner
from shell_router.batch.questions import Question, Questions
from shell_router.errors import ConfigError
from shell_router.standins.embedded.settings import EmbeddedSection


def votes(answers: str) -> list[str | None]:
    """One answer per letter; a dot is none."""
    return [None if one == "." else one for one in answers]


def passes(
    tau: float, answers: str, sure: Sequence[float] = (), measure: Agreement = "plurality"
) -> bool:
    """Whether a question with these answers needs no aggregator."""
    names = tuple(f"m{number}" for number in range(len(answers)))
    models = dict.fromkeys((*names, "to"), PoolModel(Path()))
    gate = Aggregating("to", tau, measure)
    pool = Pool(
        models,
        (PoolWorker(embedded=EmbeddedSection()),),
        names,
        aggregate=gate,
        answers=Answers("exact"),
    )
    confidences = sure or [0.5] * len(answers)
    said = {
        ("q", "proposer", name): Output(
            "q", "proposer", name, "" if text == "." else text, confidence
        )
        for name, text, confidence in zip(names, answers, confidences, strict=True)
    }
    question = Question("q", "Which?")
    batch = Batch(pool, Questions((question,), (), ""), {"q": names})
    return batch.judge(question, said.get).passes  # type: ignore[arg-type]


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
def test_confidence_is_the_share_of_all_experts_that_agree(
    answers: str, confidence: float, winner: int | None
) -> None:
    assert find_winner(votes(answers), [0.5] * len(answers)) == (winner, pytest.approx(confidence))


@pytest.mark.parametrize(
    ("tau", "answers", "expected"),
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
def test_the_gate_is_passed_from_tau_on(tau: float, answers: str, expected: bool) -> None:
    assert passes(tau, answers) is expected


def test_by_probability_each_expert_weighs_as_much_as_it_is_sure() -> None:
    sure = [0.9, 0.2, 0.1, 0.8]
    assert find_winner(votes("abb."), sure, "probability") == (2, pytest.approx(0.3 / 2.0))
    assert not passes(0.5, "abb.", sure, "probability")
    assert passes(0.5, "aab", [0.9, 0.0, 0.5], "probability")


def test_experts_that_are_not_sure_at_all_give_no_confidence() -> None:
    assert find_winner(votes("aa"), [0.0, 0.0], "probability") == (1, 0.0)
    assert not passes(0.01, "aa", [0.0, 0.0], "probability")


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan")])
def test_a_tau_that_lets_everything_pass_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match=r"tau must be above 0, not .+\. 1 means all proposers"):
        Aggregating("a", tau)
