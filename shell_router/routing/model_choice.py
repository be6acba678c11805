"""Which of several models answers: Chimera's Algorithm 1 (lines 4 to 22), and simpler ways."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from shell_router.errors import require


@dataclass(frozen=True, slots=True)
class ModelChoiceSettings:
    """How models are chosen.

    As in the paper, the slack is nothing as long as any model is idle: whatever else is known, the
    idle one answers.
    """

    policy: Annotated[str, "How a model is chosen: `chimera`, `worth` or `best_score`."] = "chimera"
    latency_slack: Annotated[
        float,
        "Chimera's tau: a model may be expected to take (1 + tau) times as long as the fastest.",
    ] = 1.0
    score_margin: Annotated[
        float, "Chimera's Delta s: by how much a slower model's score must be higher."
    ] = 0.05
    answer_worth_s: Annotated[
        float, "Of policy `worth`: seconds of waiting that a right answer makes up for."
    ] = 20.0

    def __post_init__(self) -> None:
        require(
            self.policy in POLICIES,
            f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}",
        )
        for name in ("latency_slack", "score_margin"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be at least 0 and finite, not {value}")
        worth_s = self.answer_worth_s
        require(0 < worth_s < math.inf, f"answer_worth_s must be above 0 and finite, not {worth_s}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may be chosen: what the router scores it, and its load.

    `tokens_in_flight` is P_m, the predicted output tokens of what it was given and has not done.
    `decode_s_per_token` is a sequence's seconds per token with `max_batch` sequences at once; None
    until measured. `own_tokens` are what it is expected to write itself, None where it is not
    known.
    """

    model: str
    score: float | None
    tokens_in_flight: float
    decode_s_per_token: float | None
    max_batch: int
    own_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The chosen model, why, and by which waits: L[m] in seconds, or, where the cost of any
    candidate's tokens is not known, P_m over its batch in tokens; `unmeasured` then names those.
    """

    model: str
    why: str
    waits: Mapping[str, float] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """What policies see: the models, at least one, and the wait for each."""

    candidates: Sequence[Candidate]
    settings: ModelChoiceSettings
    waits: Mapping[str, float]

    @property
    def fastest(self) -> Candidate:
        """The shortest wait; of several, as on idle models, the one whose tokens cost least, then
        the first.
        """
        return min(
            self.candidates, key=lambda one: (self.waits[one.model], one.decode_s_per_token or 0.0)
        )

    @property
    def within_slack(self) -> Sequence[Candidate]:
        """Line 18; the fastest is among them."""
        limit = (1 + self.settings.latency_slack) * min(self.waits.values())
        return [one for one in self.candidates if self.waits[one.model] <= limit]

    @property
    def scored(self) -> bool:
        """Whether every model has a score."""
        return all(one.score is not None for one in self.candidates)


def choose_model(candidates: Sequence[Candidate], settings: ModelChoiceSettings) -> ModelChoice:
    """One of `candidates`, which are not empty."""
    waits, unmeasured = _waits(candidates)
    if len(candidates) == 1:
        return ModelChoice(candidates[0].model, "only", waits, unmeasured)
    chosen, why = POLICIES[settings.policy](Scene(candidates, settings, waits))
    return ModelChoice(chosen.model, why, waits, unmeasured)


def scores_decide(candidates: Sequence[Candidate], settings: ModelChoiceSettings) -> bool:
    """Whether scores could change which of `candidates` is chosen, as busy as they are. Reads
    none."""
    if len(candidates) == 1 or settings.policy not in READS_SCORES:
        return False
    return (
        settings.policy != "chimera"
        or len(Scene(candidates, settings, _waits(candidates)[0]).within_slack) > 1
    )


def _waits(candidates: Sequence[Candidate]) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """L[m] = P_m * decode_s_per_token / max_batch by model (Algorithm 1, line 11), and those whose
    cost is not known: see ModelChoice."""
    unmeasured = tuple(one.model for one in candidates if one.decode_s_per_token is None)
    costs = [1.0 if unmeasured else one.decode_s_per_token or 0.0 for one in candidates]
    waits = {
        one.model: one.tokens_in_flight * cost / one.max_batch
        for one, cost in zip(candidates, costs, strict=True)
    }
    return waits, unmeasured


Policy = Callable[[Scene], tuple[Candidate, str]]


def chimera(scene: Scene) -> tuple[Candidate, str]:
    """The highest score within the latency slack and above the score margin (lines 12 to 22);
    without scores, the load.

    The paper's loop ends at the first model within the slack, whether its score suffices or not:
    those after it have lower ones. Where only the fastest is within the slack, scores do not
    matter.
    """
    fastest = scene.fastest
    within = scene.within_slack
    if len(within) == 1:
        return fastest, "fastest"
    if not scene.scored:
        return fastest, "no_scores"
    best = max(within, key=_score)
    if best is not fastest and _score(best) >= _score(fastest) + scene.settings.score_margin:
        return best, "better"
    return fastest, "fastest"


def worth(scene: Scene) -> tuple[Candidate, str]:
    """The highest score less what waiting costs, q[m] - (L[m] + own time) / `answer_worth_s`;
    without scores, the load.

    Our own. Chimera's slack lets every question to a better model while there is room, and none
    when there is not; here those that gain most by it go first. Own time is `own_tokens` *
    `decode_s_per_token`, where both are known of all.
    """
    if not scene.scored:
        return scene.fastest, "no_scores"
    known = all(one.own_tokens is not None for one in scene.candidates)

    def gain(one: Candidate) -> float:
        if known:
            own_s = (one.own_tokens or 0.0) * (one.decode_s_per_token or 0.0)
        else:
            own_s = 0.0
        return _score(one) - (scene.waits[one.model] + own_s) / scene.settings.answer_worth_s

    return max(scene.candidates, key=gain), "worth"


def best_score(scene: Scene) -> tuple[Candidate, str]:
    """The highest score, whatever the load; without scores, the load."""
    if scene.scored:
        return (max(scene.candidates, key=_score), "best_score")
    return (scene.fastest, "no_scores")


POLICIES: dict[str, Policy] = {
    "chimera": chimera,
    "worth": worth,
    "best_score": best_score,
}
READS_SCORES = frozenset({"chimera", "worth", "best_score"})
"""Policies whose choice depends on scores; for others they need not be predicted."""


def _score(candidate: Candidate) -> float:
    if candidate.score is None:
        return -math.inf
    return candidate.score
