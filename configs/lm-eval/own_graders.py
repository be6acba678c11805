"""Lets lm-evaluation-harness grade as `shell-router eval` does; questions.yaml names the
function."""

from collections.abc import Mapping, Sequence
from typing import Any

from shell_router.batch.questions import choose_grader, is_right


def graded(question: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """Whether the model's answer is right, by the question's own `grader`, or else the form of its
    right answer.
    """
    right = question["answer"]
    return {
        "right": float(is_right(answers[0], right, question.get("grader") or choose_grader(right)))
    }
