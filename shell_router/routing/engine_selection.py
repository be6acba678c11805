"""Choose the engine that takes a request: filters, scorers and policies.

docs/explanation/scheduling.md explains each. A new policy is a function and an entry in POLICIES, a
new scorer a function and an entry in SCORERS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated

from annotated_types import Ge, Interval

from shell_router.core.choices import list_names
from shell_router.core.engine import value
from shell_router.errors import require
from shell_router.files.types import CODE_ONLY, Amount, OneOf, Seconds
from shell_router.routing.placement import Choice, ChoiceMemory, EngineState, RoutingFeatures


@value
class EngineScene:
    """The input of policies and scorers: a request, the engines to choose from, earlier choices.

    `engines` has at least one engine; `now_s` is in monotonic seconds.
    """

    features: RoutingFeatures
    engines: Sequence[EngineState]
    memory: ChoiceMemory
    settings: "SelectionSettings"
    now_s: float


Scorer = Callable[[EngineScene], Sequence[float]]
"""A function that gives a score per engine of the scene, in their order."""


def wait(scene: EngineScene) -> Sequence[float]:
    """Score each engine by the least work of any engine over its own.

    Work is the prompt tokens that the engine still has to prefill and twice this request's uncached
    tokens: the request waits for them, and so do later ones. Counted once, a prefix that is being
    computed and a second copy of it would be a tie, and siblings would spread.

    Each request that an engine writes for slows this one's output, too, however long it still is.
    So decode servers, which prefill nothing, are scored by their requests alone.
    """
    features = scene.features
    running_tokens = features.decodes * scene.settings.running_tokens
    work = [
        1
        + engine.prefill_tokens
        + engine.waiting_tokens
        + running_tokens * (engine.running - engine.updates + engine.waiting)
        + 2 * _uncached_tokens(features, engine.index)
        for engine in scene.engines
    ]
    least = min(work)
    return [least / tokens for tokens in work]


def affinity(scene: EngineScene) -> Sequence[float]:
    """Score 1 for the engine of the last request by this user and agent.

    A session has an engine of its own; its first request may go to any.
    """
    home = None
    if scene.features.session is None:
        home = scene.memory.home(scene.features.place, scene.now_s)
    return [float(engine.index == home) for engine in scene.engines]


SCORERS: dict[str, Scorer] = {
    "wait": wait,
    "affinity": affinity,
}
"""Every scorer by its name in settings."""


def _uncached_tokens(features: RoutingFeatures, index: int) -> int:
    """Count the prompt tokens that the engine would have to prefill."""
    if features.prefills:
        return max(1, features.prompt_tokens - features.overlaps.get(index, 0))
    return 0


@dataclass(frozen=True, slots=True)
class EnginePolicy:
    """A load-balancing policy and the facts that it reads.

    Attributes:
        choose: Returns one of the scene's engines.
        reads_reports: It reads engines' reports or earlier choices, so engines are polled often
            and choices remembered.
        reads_prefixes: It reads `RoutingFeatures.overlaps`, so every prompt is hashed.
    """

    choose: Callable[[EngineScene], Choice]
    reads_reports: bool = False
    reads_prefixes: bool = False


def least_running(scene: EngineScene) -> Choice:
    """Choose the engine with the fewest requests; ties go to the one chosen longest ago."""
    least = min(scene.engines, key=lambda engine: (engine.running + engine.waiting, engine.chosen))
    return Choice(least.index, "fewest_requests")


def round_robin(scene: EngineScene) -> Choice:
    """Choose each engine in turn, whatever its load."""
    return Choice(scene.engines[scene.memory.made % len(scene.engines)].index, "turn")


def gimbal(scene: EngineScene) -> Choice:
    """Choose by Gimbal's Algorithm 1, or in turn unless every engine has a fresh report.

    Requests that the router holds back for an engine count as its running load, because the paper's
    engines hold them back themselves. The paper's affinity has no limit while KV is free, so one
    user fills one engine. Here `within_bound` limits it, and a request that leaves its user's
    engine takes turns among the engines below the bound.
    """
    engines = scene.engines
    turn = round_robin(scene)
    theta = scene.settings.gimbal
    reports = [engine.reported for engine in engines if engine.reported is not None]
    if len(reports) < len(engines):
        return Choice(turn.index, "no_metrics")
    usage = [report.kv_usage for report in reports]
    if max(usage) >= theta.theta_kv:
        if max(usage) - min(usage) >= theta.theta_diff:
            return Choice(engines[usage.index(min(usage))].index, "lowest_kv_usage")
        loads = [
            report.tokens + engine.waiting_tokens
            for engine, report in zip(engines, reports, strict=True)
        ]
        if max(loads) - min(loads) > theta.theta_load:
            return Choice(engines[loads.index(min(loads))].index, "lowest_load")
        return turn
    home = scene.memory.home(scene.features.client, scene.now_s)
    if home is None or home not in [engine.index for engine in engines]:
        return turn
    within = within_bound(engines, theta.load_factor)
    if home in [engine.index for engine in within]:
        return Choice(home, "user_affinity")
    return Choice(round_robin(replace(scene, engines=within)).index, "home_busy")


def within_bound(engines: Sequence[EngineState], factor: float) -> Sequence[EngineState]:
    """Return the engines with at most ceil(`factor` * mean) requests, this request included.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018; c = 1 +
    epsilon). At least one engine is within the bound if the factor is at least 1.
    """
    requests = [engine.running + engine.waiting for engine in engines]
    bound = ceil(factor * (sum(requests) + 1) / len(engines))
    return [engine for engine, count in zip(engines, requests, strict=True) if count < bound]


def scored(scene: EngineScene) -> Choice:
    """Choose the highest weighted sum of scores; ties go to the engine chosen longest ago.

    Engines whose KV is full are left out unless all are full. The reason is the scorer by which the
    engine is furthest above the mean, or `tie`.
    """
    full = scene.settings.gimbal.theta_kv
    not_full = [
        engine
        for engine in scene.engines
        if engine.reported is None or engine.reported.kv_usage < full
    ]
    scene = replace(scene, engines=not_full or scene.engines)
    engines = scene.engines
    parts = {
        name: [weight * score for score in SCORERS[name](scene)]
        for name, weight in scene.settings.weights.items()
        if weight > 0
    }
    sums = [sum(scores) for scores in zip(*parts.values(), strict=True)]
    best = max(range(len(engines)), key=lambda at: (sums[at], -engines[at].chosen))
    lead = {name: scores[best] - sum(scores) / len(scores) for name, scores in parts.items()}
    reason = max(lead, key=lead.__getitem__)
    return Choice(engines[best].index, reason if lead[reason] > 0 else "tie")


POLICIES: dict[str, EnginePolicy] = {
    "least_running": EnginePolicy(least_running),
    "round_robin": EnginePolicy(round_robin),
    "gimbal": EnginePolicy(gimbal, reads_reports=True),
    "scored": EnginePolicy(scored, reads_reports=True, reads_prefixes=True),
}
"""Every policy by its name in settings."""


@dataclass(frozen=True, slots=True)
class GimbalThresholds:
    """Thresholds of Gimbal's Algorithm 1."""

    theta_kv: Annotated[
        float,
        Interval(gt=0, le=1),
        "KV usage at which an engine counts as full; lower it where outputs are long.",
    ] = 0.9
    load_factor: Annotated[
        float,
        Ge(1),
        ("Requests that an engine may have, over the mean, before users leave it."),
    ] = 1.5
    theta_diff: Annotated[
        float,
        Interval(ge=0, le=1),
        "Difference in KV usage from which the least used of full engines is taken.",
    ] = 0.1
    theta_load: Annotated[
        int, Ge(0), "Difference in tokens above which the least loaded of full engines is taken."
    ] = 3000


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """Settings of the choice of engines.

    Attributes:
        weights: Weights of the scorers of policy `scored`. The policy leaves out engines whose KV
            usage is at least `gimbal.theta_kv`, unless that holds for all engines.
        running_tokens: Prompt tokens that delay an output as much as another running request.
        affinity_s: Seconds for which the last engine of a session, user or agent is remembered.
    """

    policy: Annotated[
        str, f"Which engine takes a request: {list_names(POLICIES)}.", OneOf(POLICIES)
    ] = "scored"
    gimbal: GimbalThresholds = GimbalThresholds()
    weights: Annotated[
        Mapping[Annotated[str, OneOf(SCORERS)], Amount],
        "How much each scorer counts in policy `scored`.",
    ] = field(default_factory=lambda: {"wait": 1.0, "affinity": 0.2})
    running_tokens: Annotated[int, CODE_ONLY] = 2000
    affinity_s: Annotated[
        Seconds, "Seconds for which the last engine of a session, user or agent is remembered."
    ] = 300.0

    def __post_init__(self) -> None:
        require(any(self.weights.values()), "weights are all 0: give one scorer a weight")
