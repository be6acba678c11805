"""Policies that go together, by name: CoServe's, and those that it is compared with (section 5.1 and 5.3)."""

from collections.abc import Mapping
from dataclasses import dataclass

from shell_router.errors import ConfigError
from shell_router.expert_pools.assigning import ASSIGNMENTS
from shell_router.expert_pools.evicting import EVICTIONS

INSPECTION_S = 180.0
"""All images of a board are wanted within 3 minutes (section 5.1), so that nobody may be overtaken for longer."""


@dataclass(frozen=True, slots=True)
class Policies:
    """How a pool decides.

    `assign` names one of ASSIGNMENTS. Within `window_s` a request may overtake others to stand with its like; 0 is
    first come, first served. `evict` and `evict_host` name one of EVICTIONS. While an executor works, it loads what the
    next `prefetch` groups of its queue need, and then what is known to follow on what it works on; 0 loads an expert
    when its turn has come.
    """

    assign: str = "least-extension-and-reading"
    window_s: float = INSPECTION_S
    evict: str = "queue-aware"
    evict_host: str = "two-stage"
    prefetch: int = 1

    def __post_init__(self) -> None:
        for field, known in (("assign", ASSIGNMENTS), ("evict", EVICTIONS), ("evict_host", EVICTIONS)):
            if getattr(self, field) not in known:
                raise ConfigError(f"{field} is {getattr(self, field)!r}.", remedy=f"Take one of {', '.join(known)}.")
        for field in ("window_s", "prefetch"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}.", remedy="Give 0 or more.")


POLICIES: Mapping[str, Policies] = {
    "ours": Policies(),
    "coserve": Policies("least-extension", evict="two-stage", prefetch=0),
    "samba-coe": Policies("round-robin", 0.0, "lru", "lru", prefetch=0),
    "samba-coe-fifo": Policies("round-robin", 0.0, "fifo", "fifo", prefetch=0),
}
"""Samba-CoE runs on one executor; on several, taking turns, it is the paper's Samba-CoE Parallel."""
