"""The grader that lets lm-evaluation-harness grade as `shell-router eval` does.

`questions.yaml` names its function.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shell_router.batch.questions import choose_grader, is_right


def graded(question: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """Grade the model's answer by the question's `grader`, else by the right answer's form."""
    right = question["answer"]
    return {
        "right": float(is_right(answers[0], right, question.get("grader") or choose_grader(right)))
    }
