"""How adapters share the places that a server has for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shell_router.errors import ConfigError
from shell_router.expert_pools.evicting import EVICTIONS


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """A model's adapters, by name the folder of each as its servers see it, and `room` of them on a server at a time.

    Within `window_s` requests for adapters that are loaded go before one that waits for another; then that one gets the
    next place. 0 is first come, first served. `evict` names one of EVICTIONS. Nobody waits longer than `wait_s`, and
    no server is given longer than `load_s` to load an adapter.
    """

    folders: Mapping[str, Path] = field(default_factory=dict)
    room: int = 1
    window_s: float = 10.0
    evict: str = "queue-aware"
    wait_s: float = 60.0
    load_s: float = 60.0

    def __post_init__(self) -> None:
        if self.room < 1:
            raise ConfigError(f"room is {self.room}.", remedy="Give 1 or more adapters a place.")
        if self.window_s < 0:
            raise ConfigError(f"window_s is {self.window_s:g}.", remedy="Give 0 or more seconds.")
        for name in ("wait_s", "load_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name):g}.", remedy="Give more than 0 seconds.")
        if self.evict not in EVICTIONS:
            raise ConfigError(f"evict is {self.evict!r}.", remedy=f"Take one of {', '.join(EVICTIONS)}.")
