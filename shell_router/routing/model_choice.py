"""Choose which of several models answers, by Chimera's Algorithm 1 (lines 4 to 22) or simpler ways.

A new policy is a function and an entry in POLICIES.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from shell_router.core.choices import list_names
from shell_router.files.types import Amount, OneOf, Seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may be chosen, with its predicted score and its load.

    Attributes:
        tokens_in_flight: P_m, the predicted output tokens that the model still has to decode.
        decode_s_per_token: Seconds per token of a sequence, with `max_batch` sequences at once;
            None until measured.
        own_tokens: Output tokens expected of this request; None if unknown.
    """

    model: str
    score: float | None
    tokens_in_flight: float
    decode_s_per_token: float | None
    max_batch: int
    own_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The chosen model, and why.

    Attributes:
        waits: L[m] in seconds, by model. If any candidate's cost is unknown, all are P_m over
            `max_batch`, in tokens.
        unmeasured: The candidates whose cost is unknown.
    """

    model: str
    why: str
    waits: Mapping[str, float] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelScene:
    """The input of policies: the candidates, at least one, and the wait for each by model."""

    candidates: Sequence[Candidate]
    settings: "ModelChoiceSettings"
    waits: Mapping[str, float]

    @property
    def fastest(self) -> Candidate:
        """The candidate with the shortest wait; ties go to the fastest decoder, then to the first.

        Idle models tie: each has a wait of 0.
        """
        return min(
            self.candidates,
            key=lambda model: (self.waits[model.model], model.decode_s_per_token or 0.0),
        )

    @property
    def within_slack(self) -> Sequence[Candidate]:
        """The candidates within the latency slack (line 18), the fastest included."""
        limit = (1 + self.settings.latency_slack) * min(self.waits.values())
        return [model for model in self.candidates if self.waits[model.model] <= limit]

    @property
    def scored(self) -> bool:
        """Whether every candidate has a score."""
        return all(model.score is not None for model in self.candidates)


def _always(scene: ModelScene) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """A way to choose a model.

    Attributes:
        choose: Returns one of the scene's candidates, and the reason.
        scores_decide: Tells, without reading scores, whether they could change the choice. If not,
            they need not be predicted.
    """

    choose: Callable[[ModelScene], tuple[Candidate, str]]
    scores_decide: Callable[[ModelScene], bool] = _always


def chimera(scene: ModelScene) -> tuple[Candidate, str]:
    """Choose the highest score within the latency slack and above the score margin (lines 12-22).

    Without scores the load decides. The paper's loop ends at the first model within the slack,
    whether its score suffices or not, because the models after it have lower scores.
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


def worth(scene: ModelScene) -> tuple[Candidate, str]:
    """Choose the highest q[m] - (L[m] + own time) / `answer_worth_s`; without scores, the fastest.

    This policy is our own. Chimera's slack gives every question to a better model while there is
    room, and none when there is not; here the questions that gain most go first. Own time is
    `own_tokens` * `decode_s_per_token`, if it is known of all candidates. While a candidate's cost
    is unknown, waits are no seconds: the best of the least loaded ones answers.
    """
    if not scene.scored:
        return scene.fastest, "no_scores"
    if any(model.decode_s_per_token is None for model in scene.candidates):
        least = min(scene.waits.values())
        idlest = [model for model in scene.candidates if scene.waits[model.model] == least]
        return max(idlest, key=_score), "unmeasured"
    has_lengths = all(model.own_tokens is not None for model in scene.candidates)

    def gain(model: Candidate) -> float:
        cost_s = scene.waits[model.model]
        if has_lengths:
            cost_s += (model.own_tokens or 0.0) * (model.decode_s_per_token or 0.0)
        return _score(model) - cost_s / scene.settings.answer_worth_s

    return max(scene.candidates, key=gain), "worth"


def best_score(scene: ModelScene) -> tuple[Candidate, str]:
    """Choose the highest score, whatever the load; without scores, the fastest."""
    if scene.scored:
        return max(scene.candidates, key=_score), "best_score"
    return scene.fastest, "no_scores"


def _score(candidate: Candidate) -> float:
    if candidate.score is None:
        return -math.inf
    return candidate.score


POLICIES: dict[str, ModelPolicy] = {
    "chimera": ModelPolicy(chimera, scores_decide=lambda scene: len(scene.within_slack) > 1),
    "worth": ModelPolicy(worth),
    "best_score": ModelPolicy(best_score),
}
"""Every policy by its name in settings."""


@dataclass(frozen=True, slots=True)
class ModelChoiceSettings:
    """Settings of the choice of models.

    As in the paper, the slack is 0 while any model is idle, so an idle model always answers.
    """

    policy: Annotated[str, f"How a model is chosen: {list_names(POLICIES)}.", OneOf(POLICIES)] = (
        "chimera"
    )
    latency_slack: Annotated[
        Amount,
        "Chimera's tau: a model may take (1 + tau) times as long as the fastest.",
    ] = 1.0
    score_margin: Annotated[
        Amount, "Chimera's Delta s: by how much a slower model's score must be higher."
    ] = 0.05
    answer_worth_s: Annotated[
        Seconds, "Seconds of waiting that a right answer makes up for, in policy `worth`."
    ] = 20.0


def choose_model(candidates: Sequence[Candidate], settings: ModelChoiceSettings) -> ModelChoice:
    """Return one of `candidates`, of which there is at least one."""
    waits, unmeasured = _waits(candidates)
    if len(candidates) == 1:
        return ModelChoice(candidates[0].model, "only", waits, unmeasured)
    chosen, why = POLICIES[settings.policy].choose(ModelScene(candidates, settings, waits))
    return ModelChoice(chosen.model, why, waits, unmeasured)


def scores_decide(candidates: Sequence[Candidate], settings: ModelChoiceSettings) -> bool:
    """Tell whether scores could change which of `candidates` is chosen under their present load."""
    if len(candidates) == 1:
        return False
    waits, _ = _waits(candidates)
    return POLICIES[settings.policy].scores_decide(ModelScene(candidates, settings, waits))


def _waits(candidates: Sequence[Candidate]) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """Compute `ModelChoice.waits` and `unmeasured`.

    L[m] = P_m * decode_s_per_token / max_batch (Algorithm 1, line 11).
    """
    unmeasured = tuple(model.model for model in candidates if model.decode_s_per_token is None)
    waits = {}
    for model in candidates:
        token_s = 1.0 if unmeasured else model.decode_s_per_token or 0.0
        waits[model.model] = model.tokens_in_flight * token_s / model.max_batch
    return waits, unmeasured
