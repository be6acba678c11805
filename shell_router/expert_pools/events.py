"""What a pool tells while it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from shell_router.errors import ExpertError
from shell_router.expert_pools.values import Tier


@dataclass(frozen=True, slots=True)
class Switched:
    """`executor` loaded `expert`, which lay in `tier`; `ahead` of its turn, while something else ran."""

    executor: str
    expert: str
    tier: Tier
    ahead: bool
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """`executor` ran a batch of `samples` on `expert`."""

    executor: str
    expert: str
    samples: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class GaveUp:
    """`executor` could not load `expert`, which `requests` waited for there and have failed for. Others try again."""

    executor: str
    expert: str
    requests: int
    at_s: float
    error: ExpertError


Event = Switched | Served | GaveUp
Watch = Callable[[Event], None]
