"""How good a model is: right answers per difficulty, and whether it is surer of its right ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import NotRequired, TypedDict

from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from shell_router.early_exit.answers import find_answer
from training.lessons import Lessons
from training.problems import Problem
from training.sampling import write


class Measured(TypedDict):
    """Shares of right answers, decoding greedily, and the AUROC of confidence for being right."""

    parameters: int
    questions: int
    accuracy: float
    by_steps: dict[str, float]
    by_kind: dict[str, float]
    by_topic: NotRequired[dict[str, float]]
    auroc: float


def measured(
    network: Qwen3ForCausalLM, tokenizer: Tokenizer, tested: Sequence[Problem]
) -> Measured:
    """Ask all of `tested` once."""
    lessons = Lessons(tokenizer)
    written = write(network, [lessons.question(one.question) for one in tested], temperature=0)
    right = [
        find_answer(tokenizer.decode(one.ids)) == problem.answer
        for one, problem in zip(written, tested, strict=True)
    ]

    def by(trait: Callable[[Problem], str]) -> dict[str, float]:
        traits = [trait(one) for one in tested]
        return {
            each: _share([ok for ok, one in zip(right, traits, strict=True) if one == each])
            for each in sorted(set(traits))
        }

    found = Measured(
        parameters=sum(weights.numel() for weights in network.parameters()),
        questions=len(tested),
        accuracy=_share(right),
        by_steps=by(lambda one: str(one.steps)),
        by_kind=by(lambda one: one.kind),
        auroc=auroc([one.confidence for one in written], right),
    )
    return {**found, "by_topic": by(lambda one: str(one.topic))} if tested[0].topic else found


def auroc(scores: Sequence[float], right: Sequence[bool]) -> float:
    """The chance that a right answer scores higher than a wrong one, ties counting half; 0.5
    without both kinds.
    """
    good = [score for score, ok in zip(scores, right, strict=True) if ok]
    bad = [score for score, ok in zip(scores, right, strict=True) if not ok]
    if not good or not bad:
        return 0.5
    return sum((a > b) + 0.5 * (a == b) for a in good for b in bad) / (len(good) * len(bad))


def _share(right: Sequence[bool]) -> float:
    return round(sum(right) / len(right), 4)


def as_table(report: Mapping[str, Measured]) -> str:
    """The figures of all sizes as a Markdown table, in percent, for the model card."""
    steps = [str(one) for one in sorted(map(int, next(iter(report.values()))["by_steps"]))]
    kinds = sorted(next(iter(report.values()))["by_kind"])
    topics = sorted(next(iter(report.values())).get("by_topic", ()))
    head = [
        "",
        "all",
        *(f"{one} step{'s' * (one != '1')}" for one in steps),
        *kinds,
        *topics,
        "AUROC",
    ]
    rows = [
        [
            size,
            _percent(one["accuracy"]),
            *(_percent(one["by_steps"][step]) for step in steps),
            *(_percent(one["by_kind"][kind]) for kind in kinds),
            *(_percent(one["by_topic"][topic]) for topic in topics),
            f"{one['auroc']:.3f}",
        ]
        for size, one in report.items()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
