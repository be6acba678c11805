"""Whether the experts agree so well that no aggregator has to be asked (MOSAIC, equation 11 and Algorithm 1)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shell_router.core.vote import plurality
from shell_router.errors import ConfigError

ROUNDING = 0.005
"""A tau of 0.67 means two of three."""
ALWAYS = 2.0
"""A tau that no confidence reaches."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one expert answers, None where it answers nothing, and how sure it is: a probability."""

    answer: str | None
    sure: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer most votes are for, the vote that says it, and how much confidence that deserves, 0 to 1."""

    winner: int | None
    confidence: float


def by_plurality(votes: Sequence[Vote]) -> float:
    """C = max_a |{i : a_i = a}| / k (equation 11); an expert without an answer agrees with nobody."""
    return _share(votes, [1.0] * len(votes))


def by_probability(votes: Sequence[Vote]) -> float:
    """The share of the plurality's answer where each vote weighs as much as its expert is sure."""
    return _share(votes, [vote.sure for vote in votes])


def _share(votes: Sequence[Vote], weights: Sequence[float]) -> float:
    winner = plurality([vote.answer for vote in votes])
    if winner is None or not sum(weights):
        return 0.0
    agreeing = sum(weight for vote, weight in zip(votes, weights, strict=True) if vote.answer == votes[winner].answer)
    return agreeing / sum(weights)


ConfidenceName = Literal["plurality", "probability", "similarity"]
CONFIDENCES: Mapping[str, Callable[[Sequence[Vote]], float]] = {
    "plurality": by_plurality,
    "probability": by_probability,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """With a confidence of `tau` the plurality's answer stands; above 1, the aggregator is always asked.

    `similarity` is measured where outputs can be embedded (`likeness`); the others are counted here.
    """

    tau: float = 1.0
    confidence: ConfidenceName = "plurality"

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ConfigError(
                f"tau must be above 0, not {self.tau:g}.",
                remedy="1 means all experts, 0.67 two of three; above 1 the aggregator is always asked.",
            )

    def judge(self, votes: Sequence[Vote], alike: float = 0.0) -> Verdict:
        """The plurality and its confidence, which by `similarity` is `alike`."""
        count = CONFIDENCES.get(self.confidence)
        return Verdict(plurality([vote.answer for vote in votes]), alike if count is None else count(votes))

    def passes(self, verdict: Verdict) -> bool:
        """Whether no aggregator is needed."""
        return verdict.winner is not None and verdict.confidence >= self.tau - ROUNDING
