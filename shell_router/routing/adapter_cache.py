"""Which LoRA adapters lie on a server, and which requests for others are served next. Pure: it
loads nothing itself.

Requests for one adapter stand together in groups, in the order in which the groups were opened (as
CoServe's expert queues, section 4.2). Within `window_s` loaded adapters serve every request that
comes. Then as many of them are drained as there are other adapters that have been awaited for so
long: an adapter in steady use would else never leave. The one whose last use was first leaves
first; orders that know more gained nothing within the window (docs/benchmarks). Models that take
turns are kept by the same rules, in an order of their own (`swapping`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Generic, TypeVar

from shell_router.errors import ConfigError

W = TypeVar("W")

REACH = 1000
"""Groups of the queue that are looked at; adapters of groups behind them count as not awaited."""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter on the server. `loaded` and `used` number its load and its last use; with `pins`
    it is in use.
    """

    name: str
    loaded: int
    used: int
    pins: int = 0


Order = Callable[[Sequence[LoadedAdapter], Mapping[str, int]], Sequence[LoadedAdapter]]
"""In which order adapters leave. The mapping has, per awaited adapter, the place of its first group
in the queue.
"""


def least_recently_used(
    loaded: Sequence[LoadedAdapter], turns: Mapping[str, int]
) -> Sequence[LoadedAdapter]:
    """The one whose last use was first leaves first."""
    return sorted(loaded, key=lambda at: at.used)


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """A model's adapters: the folder of each as servers see it, at most `max_loaded_adapters` on a
    server at a time.

    Within `window_s` requests for adapters that are loaded go before one that waits for another;
    then that one gets the next place. 0 is first come, first served. A request waits `wait_s` at
    most, and a server has `load_s` to load an adapter.
    """

    folders: Mapping[str, Path] = field(default_factory=dict)
    max_loaded_adapters: int = 1
    window_s: float = 10.0
    wait_s: float = 60.0
    load_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_loaded_adapters < 1:
            raise ConfigError(
                f"max_loaded_adapters is {self.max_loaded_adapters}.", remedy="Allow 1 or more."
            )
        if self.window_s < 0:
            raise ConfigError(f"window_s is {self.window_s:g}.", remedy="Give 0 or more seconds.")
        for name in ("wait_s", "load_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name):g}.", remedy="Give more than 0 seconds."
                )


@dataclass(slots=True, eq=False)
class Group(Generic[W]):
    """Requests for one adapter that stand together, in the order of their arrival."""

    adapter: str
    opened_s: float
    waiters: list[W] = field(default_factory=list)


class AdapterCache(Generic[W]):
    """The adapters of one server, and the requests (`W`) that wait for one.

    The caller loads and unloads: it asks `next_to_load`, makes room for it by `victims`, and keeps
    `loading`, the adapter that is about to be loaded, and `taken`: places of adapters that are
    loaded, being loaded or being unloaded. `ahead` are adapters that no request waits for yet.
    Times are in monotonic seconds.
    """

    def __init__(self, settings: AdapterSettings, order: Order = least_recently_used) -> None:
        self.groups: list[Group[W]] = []
        self.loaded: dict[str, LoadedAdapter] = {}
        self.loading: str | None = None
        self.taken = 0
        self.ahead: dict[str, int] = {}
        self._settings = settings
        self._order = order
        self._draining: tuple[str, ...] = ()
        self._numbers = count()

    def is_coming(self, adapter: str) -> bool:
        """Whether it is loaded, or being loaded."""
        return adapter in self.loaded or adapter == self.loading

    def serves(self, adapter: str) -> bool:
        """Whether it is loaded and takes further requests, by what `drain` found last."""
        return adapter in self.loaded and adapter not in self._draining

    # --- waiting

    def wait(self, adapter: str, waiter: W, now_s: float) -> None:
        """Join the last group for the adapter, unless one behind it is `window_s` old; or else open
        a new group.
        """
        behind: Group[W] | None = None
        for group in reversed(self.groups):
            if group.adapter == adapter:
                if behind is None or now_s - behind.opened_s < self._settings.window_s:
                    group.waiters.append(waiter)
                    return
                break
            behind = group
        self.groups.append(Group(adapter, now_s, [waiter]))

    def leave(self, waiter: W) -> bool:
        """The request waits no longer; False if it did not wait."""
        for group in self.groups:
            if waiter in group.waiters:
                group.waiters.remove(waiter)
                if not group.waiters:
                    self.groups.remove(group)
                return True
        return False

    def drain(self, now_s: float) -> None:
        """Let some of the loaded adapters take no further requests if others have been awaited for
        `window_s`.

        Those that were drained before stay so: to drain others instead would drain two adapters for
        one place.
        """
        groups = islice(self.groups, REACH)
        window_s = self._settings.window_s
        late = {group.adapter for group in groups if now_s - group.opened_s >= window_s}
        late -= {name for name in late if self.is_coming(name)}
        if not late:
            self._draining = ()
            return
        turn = next(
            (at for at, group in enumerate(self.groups) if not self.is_coming(group.adapter)), None
        )
        order = self._leaving(turn, in_use=True)
        kept = [name for name in self._draining if name in order]
        places = len(late) - (self._settings.max_loaded_adapters - self.taken)
        self._draining = (*kept, *(name for name in order if name not in kept))[: max(0, places)]

    # --- loading

    def load_ahead(self, adapter: str, *, evicting: bool = False) -> None:
        """A request is about to want it: load it if a place is free; `evicting`, also for one that
        none awaits.
        """
        self.ahead[adapter] = REACH - evicting

    def next_to_load(self) -> tuple[str, int] | None:
        """The first awaited adapter that is not loaded, with its group's place; where all are, one
        to load ahead.
        """
        for turn, group in enumerate(self.groups):
            if group.adapter not in self.loaded:
                return group.adapter, turn
        return next(iter(self.ahead.items()), None)

    def victims(self, turn: int) -> list[str] | None:
        """The adapters to unload for one more; None where that frees too little now.

        Adapters in use, and those whose turn comes no later than `turn`, stay.
        """
        missing = 1 + self.taken - self._settings.max_loaded_adapters
        leaving = self._leaving(turn)[: max(0, missing)]
        return leaving if len(leaving) >= missing else None

    def add(self, adapter: str) -> None:
        """It is loaded, on a place that was taken before."""
        number = next(self._numbers)
        self.loaded[adapter] = LoadedAdapter(adapter, number, number)

    def pin(self, adapter: str) -> LoadedAdapter:
        """It is in use, and stays until its `pins` are counted down again."""
        at = self.loaded[adapter]
        at.pins += 1
        at.used = next(self._numbers)
        return at

    def _leaving(self, keep_before: int | None, *, in_use: bool = False) -> list[str]:
        """The adapters that may leave, in that order. Those whose turn comes no later than
        `keep_before` stay.
        """
        turns: dict[str, int] = {}
        for turn, group in enumerate(islice(self.groups, REACH)):
            turns.setdefault(group.adapter, turn)
        order = self._order(tuple(self.loaded.values()), turns)
        found = [at for at in order if in_use or not at.pins]
        return [
            at.name
            for at in found
            if keep_before is None or turns.get(at.name, REACH) > keep_before
        ]
