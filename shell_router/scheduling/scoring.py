"""Scorers of the policy `scored`: how good an engine is for a request, from 0 to 1, by one thing that is known of it.

A scorer is one function and one entry in SCORERS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shell_router.scheduling.engine_state import Asked, Choice, EngineState

UNKNOWN = 0.5
"""The score of an engine of which a scorer knows nothing fresh."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What all scorers see: the request, the engines, the home of its place, and what an output token weighs."""

    asked: Asked
    engines: Sequence[EngineState]
    home: int | None
    output_weight: float


Scorer = Callable[[Scene], Sequence[float]]
"""A score per engine of the scene, in their order."""


def wait(scene: Scene) -> Sequence[float]:
    """The least work until the request is through, over that on the engine: tokens there, and of it what is new there.

    A prefix that the engine has had before saves as much as it is long, so that requests that share one are put
    together exactly where that costs less than it saves.
    """
    asked, weight = scene.asked, scene.output_weight
    work = [
        1 + one.prefill_tokens + one.waiting_tokens + weight * one.output_tokens + _new_tokens(asked, one.index)
        for one in scene.engines
    ]
    least = min(work)
    return [least / one for one in work]


def requests(scene: Scene) -> Sequence[float]:
    """The fewest requests on any engine over those on this one."""
    counts = [1 + one.running + one.waiting for one in scene.engines]
    return [min(counts) / count for count in counts]


def kv_usage(scene: Scene) -> Sequence[float]:
    """The share of the engine's KV that is free, by what it reported."""
    return [UNKNOWN if one.reported is None else 1 - min(1.0, one.reported.kv_usage) for one in scene.engines]


def affinity(scene: Scene) -> Sequence[float]:
    """1 for the engine that had the last request of this user and place in a topology."""
    return [float(one.index == scene.home) for one in scene.engines]


def adapter(scene: Scene) -> Sequence[float]:
    """1 for engines that have the request's adapter, or are about to."""
    return [float(one.has_adapter) for one in scene.engines]


def prefix(scene: Scene) -> Sequence[float]:
    """The share of the prompt that the engine has had before."""
    whole = max(1, scene.asked.prompt_tokens)
    return [scene.asked.overlaps.get(one.index, 0) / whole for one in scene.engines]


SCORERS: dict[str, Scorer] = {
    "wait": wait,
    "requests": requests,
    "kv_usage": kv_usage,
    "affinity": affinity,
    "adapter": adapter,
    "prefix": prefix,
}
"""Every scorer by the name that settings give it."""


def best_score(
    asked: Asked, engines: Sequence[EngineState], home: int | None, weights: Mapping[str, float], output_weight: float
) -> Choice:
    """The engine with the highest weighted sum; of equals the one that was chosen longest ago.

    Why: the scorer by which it is furthest above the mean of all, or `tie`.
    """
    scene = Scene(asked, engines, home, output_weight)
    parts = {name: [weight * score for score in SCORERS[name](scene)] for name, weight in weights.items() if weight > 0}
    sums = [sum(scores) for scores in zip(*parts.values(), strict=True)]
    best = max(range(len(engines)), key=lambda at: (sums[at], -engines[at].chosen))
    lead = {name: scores[best] - sum(scores) / len(scores) for name, scores in parts.items()}
    first = max(lead, key=lead.__getitem__)
    return Choice(engines[best].index, first if lead[first] > 0 else "tie")


def _new_tokens(asked: Asked, index: int) -> int:
    """What the engine would have to prefill; nothing, where another engine does that."""
    return max(1, asked.prompt_tokens - asked.overlaps.get(index, 0)) if asked.prefills else 0
