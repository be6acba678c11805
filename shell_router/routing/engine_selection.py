"""Which of several engines takes a request: filters, scorers and policies. See
docs/explanation/scheduling.md.

A policy is one function and one entry in POLICIES, a scorer one function and one entry in SCORERS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Annotated

from shell_router.core.engine import value
from shell_router.errors import require
from shell_router.routing.placement import Choice, ChoiceMemory, EngineState, RoutingFeatures


@value
class Scene:
    """What policies and scorers see: the request, the engines that serve, at least one, and the
    choices before.

    `now_s` is in monotonic seconds.
    """

    features: RoutingFeatures
    engines: Sequence[EngineState]
    memory: ChoiceMemory
    settings: "SelectionSettings"
    now_s: float


Scorer = Callable[[Scene], Sequence[float]]
"""A score per engine of the scene, in their order."""


def wait(scene: Scene) -> Sequence[float]:
    """The least work until the request is through, over that on the engine: tokens there, and of it
    what is new there.

    A prefix that the engine has had before saves its length, so that requests that share one are
    put together where that costs less than it saves.
    """
    features = scene.features
    weight = scene.settings.output_weight
    work = [
        1
        + one.prefill_tokens
        + one.waiting_tokens
        + weight * one.output_tokens
        + _new_tokens(features, one.index)
        for one in scene.engines
    ]
    least = min(work)
    return [least / one for one in work]


def affinity(scene: Scene) -> Sequence[float]:
    """1 for the engine that had the last request of this user and place in a topology."""
    home = scene.memory.home(scene.features.place, scene.now_s)
    return [float(one.index == home) for one in scene.engines]


def adapter(scene: Scene) -> Sequence[float]:
    """1 for engines that have the request's adapter, or are about to."""
    return [float(one.has_adapter) for one in scene.engines]


SCORERS: dict[str, Scorer] = {
    "wait": wait,
    "affinity": affinity,
    "adapter": adapter,
}
"""Every scorer by the name that settings give it."""


def _new_tokens(features: RoutingFeatures, index: int) -> int:
    """What the engine would have to prefill; nothing, where another engine does that."""
    if features.prefills:
        return max(1, features.prompt_tokens - features.overlaps.get(index, 0))
    return 0


@dataclass(frozen=True, slots=True)
class GimbalThresholds:
    """Algorithm 1's: KV usage that counts as full, what usages may differ by, what loads in tokens
    may differ by.
    """

    theta_kv: Annotated[
        float, "KV usage at which an engine counts as full; lower it where outputs are long."
    ] = 0.9
    load_factor: Annotated[
        float,
        (
            "Requests that an engine may have, over the mean, before users leave it; more keeps "
            "more "
            "prefixes warm."
        ),
    ] = 1.5
    theta_diff: float = field(default=0.1, metadata={"file": False})
    theta_load: int = field(default=3000, metadata={"file": False})

    def __post_init__(self) -> None:
        for name in ("theta_kv", "theta_diff"):
            require(
                0 < getattr(self, name) <= 1,
                f"{name} must be above 0 and at most 1, not {getattr(self, name):g}",
            )
        require(
            1 <= self.load_factor < inf,
            f"load_factor must be a number from 1 on, not {self.load_factor:g}",
        )
        require(self.theta_load >= 0, f"theta_load must be at least 0, not {self.theta_load}")


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """How engines are chosen.

    `affinity_s` after its last request a user's, or a place's, engine is forgotten. `weights` are
    those of the policy `scored`, by scorer; it leaves out engines whose KV is filled to
    `gimbal.theta_kv`, unless all are. `output_weight` tokens of a prompt take an engine as long as
    one token that it writes. Other policies than `scored` choose among the engines that have the
    request's adapter, unless these have `adapter_slack` more requests.
    """

    policy: Annotated[
        str, "Which engine takes a request: `least_running`, `round_robin`, `gimbal` or `scored`."
    ] = "least_running"
    gimbal: GimbalThresholds = GimbalThresholds()
    weights: Annotated[
        Mapping[str, float], "Of `scored`: how much waiting, prefix reuse and adapters count."
    ] = field(default_factory=lambda: {"wait": 1.0, "affinity": 0.2, "adapter": 0.5})
    output_weight: float = field(default=8.0, metadata={"file": False})
    affinity_s: Annotated[
        float, "Seconds for which a user's or an agent's last engine is remembered."
    ] = 300.0
    adapter_slack: int = field(default=8, metadata={"file": False})

    def __post_init__(self) -> None:
        require(
            self.policy in POLICIES, f"policy {self.policy!r} is none of: {', '.join(POLICIES)}"
        )
        for name, weight in self.weights.items():
            require(name in SCORERS, f"weights: {name!r} is none of: {', '.join(SCORERS)}")
            require(weight >= 0, f"weights.{name} must be at least 0, not {weight:g}")
        require(any(self.weights.values()), "weights are all 0: give one scorer a weight")
        require(
            self.output_weight >= 0, f"output_weight must be at least 0, not {self.output_weight:g}"
        )
        require(
            self.adapter_slack >= 0, f"adapter_slack must be at least 0, not {self.adapter_slack}"
        )
        require(self.affinity_s > 0, f"affinity_s must be above 0, not {self.affinity_s:g}")


Policy = Callable[[Scene], Choice]
"""Chooses one of the engines for the request."""


def least_running(scene: Scene) -> Choice:
    """The engine with the fewest requests; of equals the one that was chosen longest ago."""
    return Choice(
        min(scene.engines, key=lambda one: (one.running + one.waiting, one.chosen)).index,
        "fewest_requests",
    )


def round_robin(scene: Scene) -> Choice:
    """One after the other, whatever they have to do."""
    return Choice(scene.engines[scene.memory.made % len(scene.engines)].index, "turn")


def gimbal(scene: Scene) -> Choice:
    """Gimbal, Algorithm 1. Metric data count as available while every engine's is fresh.

    What the router holds back for an engine is part of that engine's running load: the paper's
    engines hold it back. The paper's affinity has no limit as long as KV is free, so that one user
    fills one engine; here it is that of `within_bound`, and a request that leaves its user's engine
    for it takes turns among the engines below.
    """
    engines = scene.engines
    turn = round_robin(scene)
    theta = scene.settings.gimbal
    usage = [one.reported.kv_usage for one in engines if one.reported is not None]
    loads = [
        one.reported.tokens + one.waiting_tokens for one in engines if one.reported is not None
    ]
    if len(usage) < len(engines):
        return Choice(turn.index, "no_metrics")
    if max(usage) >= theta.theta_kv:
        if max(usage) - min(usage) >= theta.theta_diff:
            return Choice(engines[usage.index(min(usage))].index, "lowest_kv_usage")
        is_uneven = max(loads) - min(loads) > theta.theta_load
        if is_uneven:
            return Choice(engines[loads.index(min(loads))].index, "lowest_load")
        return turn
    home = scene.memory.home(scene.features.client, scene.now_s)
    if home is None or home not in [one.index for one in engines]:
        return turn
    within = replace(scene, engines=within_bound(engines, theta.load_factor))
    is_within = home in [one.index for one in within.engines]
    if is_within:
        return Choice(home, "user_affinity")
    return Choice(round_robin(within).index, "home_busy")


def within_bound(engines: Sequence[EngineState], factor: float) -> Sequence[EngineState]:
    """Those that have, with this request, at most `factor` times the mean requests of all, rounded
    up.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018; c = 1 +
    epsilon). With a factor of at least 1 there always is one.
    """
    requests = [one.running + one.waiting for one in engines]
    bound = ceil(factor * (sum(requests) + 1) / len(engines))
    return [one for one, has in zip(engines, requests, strict=True) if has < bound]


def scored(scene: Scene) -> Choice:
    """The highest weighted sum of scores among engines whose KV is not full; of equals the one
    chosen longest ago.

    Why: the scorer by which it is furthest above the mean of all, or `tie`.
    """
    full = scene.settings.gimbal.theta_kv
    not_full = [
        one for one in scene.engines if one.reported is None or one.reported.kv_usage < full
    ]
    scene = replace(scene, engines=not_full or scene.engines)
    engines = scene.engines
    weights = scene.settings.weights
    parts = {
        name: [weight * score for score in SCORERS[name](scene)]
        for name, weight in weights.items()
        if weight > 0
    }
    sums = [sum(scores) for scores in zip(*parts.values(), strict=True)]
    best = max(range(len(engines)), key=lambda at: (sums[at], -engines[at].chosen))
    lead = {name: scores[best] - sum(scores) / len(scores) for name, scores in parts.items()}
    first = max(lead, key=lead.__getitem__)
    return Choice(engines[best].index, first if lead[first] > 0 else "tie")


POLICIES: dict[str, Policy] = {
    "least_running": least_running,
    "round_robin": round_robin,
    "gimbal": gimbal,
    "scored": scored,
}
"""Every policy by the name that settings give it."""

BLIND = frozenset({"least_running", "round_robin"})
"""Policies that read only the router's own count: neither engines' reports, nor earlier choices,
nor prefixes.
"""

IGNORES_PREFIXES = BLIND | {"gimbal"}
"""Policies that never read `RoutingFeatures.overlaps`, which spares hashing every prompt."""

WEIGHS_ADAPTERS = frozenset({"scored"})
"""Policies that weigh themselves whether an engine has the request's adapter."""


def choose(scene: Scene) -> Choice:
    """The choice of the settings' policy, among the engines with the request's adapter where these
    are not too busy.
    """
    settings = scene.settings
    if settings.policy not in WEIGHS_ADAPTERS and scene.features.adapter is not None:
        scene = replace(
            scene, engines=with_adapter(scene.features, scene.engines, settings.adapter_slack)
        )
    if len(scene.engines) == 1:
        return Choice(scene.engines[0].index, "has_adapter")
    return POLICIES[settings.policy](scene)


def with_adapter(
    features: RoutingFeatures, engines: Sequence[EngineState], slack: int
) -> Sequence[EngineState]:
    """Those that have the request's adapter, so that it need not be loaded elsewhere.

    All, where none has it, or where the least busy of them has over `slack` more requests than the
    least busy of all: an adapter that is wanted so much is loaded once more.
    """
    if features.adapter is not None:
        having = [one for one in engines if one.has_adapter]
    else:
        having = []
    if not having:
        return engines
    least = min(one.running + one.waiting for one in engines)
    if min(one.running + one.waiting for one in having) - least <= slack:
        return having
    return engines
