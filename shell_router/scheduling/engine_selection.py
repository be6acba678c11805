"""Which of several engines takes a request. docs/policies.md has a section per policy.

A policy is one function and one entry in POLICIES. It gets engines that serve, at least one, in their order, and no
more than it is given: what it returns follows from its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shell_router.scheduling.engine_state import Asked, Choice, EngineState, Memory
from shell_router.scheduling.refusal import require
from shell_router.scheduling.scoring import SCORERS, best_score


@dataclass(frozen=True, slots=True)
class GimbalThresholds:
    """Algorithm 1's: KV usage that counts as full, what usages may differ by, what loads in tokens may differ by."""

    theta_kv: float = 0.9
    theta_diff: float = 0.1
    theta_load: int = 3000

    def __post_init__(self) -> None:
        for name in ("theta_kv", "theta_diff"):
            require(0 < getattr(self, name) <= 1, f"{name} must be above 0 and at most 1, not {getattr(self, name):g}")
        require(self.theta_load >= 0, f"theta_load must be at least 0, not {self.theta_load}")


@dataclass(frozen=True, slots=True)
class SelectionSettings:
    """How engines are chosen.

    `affinity_s` after its last request a user's, or a place's, engine is forgotten. `weights` are those of the policy
    `scored`, by scorer; it leaves out engines whose KV is filled to `gimbal.theta_kv`, unless all are.
    `output_weight` tokens of a prompt take an engine as long as one token that it writes. Other policies than `scored`
    choose among the engines that have the request's adapter, unless these have `adapter_slack` more requests.
    """

    policy: str = "least_running"
    gimbal: GimbalThresholds = GimbalThresholds()
    weights: Mapping[str, float] = field(default_factory=lambda: {"wait": 1.0, "affinity": 0.2, "adapter": 0.5})
    output_weight: float = 8.0
    affinity_s: float = 300.0
    adapter_slack: int = 8

    def __post_init__(self) -> None:
        require(self.policy in POLICIES, f"policy {self.policy!r} is none of: {', '.join(POLICIES)}")
        for name, weight in self.weights.items():
            require(name in SCORERS, f"weights: {name!r} is none of: {', '.join(SCORERS)}")
            require(weight >= 0, f"weights.{name} must be at least 0, not {weight:g}")
        require(any(self.weights.values()), "weights are all 0: give one scorer a weight")
        require(self.output_weight >= 0, f"output_weight must be at least 0, not {self.output_weight:g}")
        require(self.adapter_slack >= 0, f"adapter_slack must be at least 0, not {self.adapter_slack}")
        require(self.affinity_s > 0, f"affinity_s must be above 0, not {self.affinity_s:g}")

    @property
    def reads_prefixes(self) -> bool:
        """Whether the policy may look at what engines have had before, so that it has to be remembered."""
        return self.policy not in BLIND


Policy = Callable[[Asked, Sequence[EngineState], Memory, SelectionSettings, float], Choice]
"""Chooses one of the engines for the request; the last argument is the time, in monotonic seconds."""


def least_running(
    asked: Asked, engines: Sequence[EngineState], memory: Memory, settings: SelectionSettings, now_s: float
) -> Choice:
    """The engine with the fewest requests; of equals the one that was chosen longest ago."""
    return Choice(min(engines, key=lambda one: (one.running + one.waiting, one.chosen)).index, "fewest_requests")


def round_robin(
    asked: Asked, engines: Sequence[EngineState], memory: Memory, settings: SelectionSettings, now_s: float
) -> Choice:
    """One after the other, whatever they have to do."""
    return Choice(engines[memory.made % len(engines)].index, "turn")


def gimbal(
    asked: Asked, engines: Sequence[EngineState], memory: Memory, settings: SelectionSettings, now_s: float
) -> Choice:
    """Gimbal, Algorithm 1. Metric data count as available while every engine's is fresh.

    What the router holds back for an engine is part of that engine's running load: the paper's engines hold it back.
    """
    turn, theta = round_robin(asked, engines, memory, settings, now_s), settings.gimbal
    usage = [one.reported.kv_usage for one in engines if one.reported is not None]
    loads = [one.reported.tokens + one.waiting_tokens for one in engines if one.reported is not None]
    if len(usage) < len(engines):
        return Choice(turn.index, "no_metrics")
    if max(usage) >= theta.theta_kv:
        if max(usage) - min(usage) >= theta.theta_diff:
            return Choice(engines[usage.index(min(usage))].index, "lowest_kv_usage")
        if max(loads) - min(loads) > theta.theta_load:
            return Choice(engines[loads.index(min(loads))].index, "lowest_load")
        return turn
    home = memory.home(asked.user, now_s)
    return Choice(home, "user_affinity") if home in [one.index for one in engines] and home is not None else turn


def scored(
    asked: Asked, engines: Sequence[EngineState], memory: Memory, settings: SelectionSettings, now_s: float
) -> Choice:
    """The highest weighted sum of scores among engines whose KV is not full; see `scoring`."""
    roomy = [one for one in engines if one.reported is None or one.reported.kv_usage < settings.gimbal.theta_kv]
    home = memory.home(asked.place, now_s)
    return best_score(asked, roomy or engines, home, settings.weights, settings.output_weight)


POLICIES: dict[str, Policy] = {
    "least_running": least_running,
    "round_robin": round_robin,
    "gimbal": gimbal,
    "scored": scored,
}
"""Every policy by the name that settings give it."""

BLIND = frozenset({"least_running", "round_robin", "gimbal"})
"""Those of them that never look at `Asked.overlaps`: spares hashing every prompt."""

WEIGHS_ADAPTERS = frozenset({"scored"})
"""Those of them that decide themselves what it is worth that an engine has the request's adapter."""


def choose(
    asked: Asked, engines: Sequence[EngineState], memory: Memory, settings: SelectionSettings, now_s: float
) -> Choice:
    """The choice of the settings' policy, among the engines with the request's adapter where these are not too busy."""
    among = engines if settings.policy in WEIGHS_ADAPTERS else with_adapter(asked, engines, settings.adapter_slack)
    if len(among) == 1:
        return Choice(among[0].index, "has_adapter")
    return POLICIES[settings.policy](asked, among, memory, settings, now_s)


def with_adapter(asked: Asked, engines: Sequence[EngineState], slack: int) -> Sequence[EngineState]:
    """Those that have the request's adapter, so that it need not be loaded elsewhere.

    All, where none has it, or where the least busy of them has over `slack` more requests than the least busy of all:
    an adapter that is wanted so much is loaded once more.
    """
    having = [one for one in engines if one.has_adapter] if asked.adapter is not None else []
    if not having:
        return engines
    least = min(one.running + one.waiting for one in engines)
    return having if min(one.running + one.waiting for one in having) - least <= slack else engines
