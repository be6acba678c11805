"""The models in memory, and the queue of requests that wait for others.

The caller loads and unloads. Requests for one model are queued in groups, in the order in which the
groups were opened (CoServe's expert queues, section 4.2). A loaded model serves every request that
comes until another model has been awaited for `window_s`. Then a loaded model is drained for each
model that has; otherwise a model in steady use would never leave.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Generic, TypeVar

W = TypeVar("W")

REACH = 1000
"""Groups of the queue that are examined. Models of groups behind them count as not awaited."""


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model in memory. `used` numbers its last use; `pins` counts the requests that it serves."""

    name: str
    used: int
    pins: int = 0


Order = Callable[[Sequence[LoadedModel], Mapping[str, int]], Sequence[LoadedModel]]
"""Sorts loaded models into the order of unloading, given each awaited model's queue position."""


@dataclass(slots=True, eq=False)
class Group(Generic[W]):
    """Requests for one model that are served together, in the order of their arrival."""

    model: str
    opened_s: float
    waiters: list[W] = field(default_factory=list)


class Turns(Generic[W]):
    """The models in memory and the requests (`W`) that wait for another.

    The caller asks `next_to_load`, makes room by `victims`, and keeps three fields up to date:
    `loading` is the model that is being loaded, `taken` counts the places of models that are
    loaded, being loaded or being unloaded, and `ahead` holds models to load before a request waits
    for them. Times are in monotonic seconds.
    """

    def __init__(self, places: int, window_s: float, order: Order) -> None:
        self.groups: list[Group[W]] = []
        self.loaded: dict[str, LoadedModel] = {}
        self.loading: str | None = None
        self.taken = 0
        self.ahead: list[str] = []
        self._places = places
        self._window_s = window_s
        self._order = order
        self._draining: tuple[str, ...] = ()
        self._numbers = count()

    def is_coming(self, model: str) -> bool:
        """Whether the model is loaded or being loaded."""
        return model in self.loaded or model == self.loading

    def serves(self, model: str) -> bool:
        """Whether the model is loaded and takes further requests, as `drain` last decided."""
        return model in self.loaded and model not in self._draining

    # --- waiting

    def wait(self, model: str, waiter: W, now_s: float) -> None:
        """Join the last group for the model, unless a group behind it is `window_s` old."""
        behind: Group[W] | None = None
        for group in reversed(self.groups):
            if group.model == model:
                if behind is None or now_s - behind.opened_s < self._window_s:
                    group.waiters.append(waiter)
                    return
                break
            behind = group
        self.groups.append(Group(model, now_s, [waiter]))

    def leave(self, waiter: W) -> bool:
        """Take the request out of the queue; False if it was not there."""
        for group in self.groups:
            if waiter in group.waiters:
                group.waiters.remove(waiter)
                if not group.waiters:
                    self.groups.remove(group)
                return True
        return False

    def drain(self, now_s: float) -> None:
        """Decide which loaded models take no further requests, because others waited `window_s`.

        Models that are drained already come first: draining others instead would empty two models
        to free one place.
        """
        late = self._list_late(now_s)
        if not late:
            self._draining = ()
            return
        turn = None
        for position, group in enumerate(self.groups):
            if not self.is_coming(group.model):
                turn = position
                break
        order = self._list_leaving(turn, in_use=True)
        kept = [name for name in self._draining if name in order]
        others = [name for name in order if name not in kept]
        needed = len(late) - (self._places - self.taken)
        self._draining = tuple([*kept, *others][: max(0, needed)])

    def _list_late(self, now_s: float) -> set[str]:
        """Return the models for which requests have waited `window_s`, and that do not load yet."""
        late = set()
        for group in islice(self.groups, REACH):
            if now_s - group.opened_s >= self._window_s and not self.is_coming(group.model):
                late.add(group.model)
        return late

    # --- loading

    def next_to_load(self) -> tuple[str, int] | None:
        """Return the first awaited model that is not loaded, and its group's position in the queue.

        If all awaited models are loaded, return a model to load ahead, and a position behind all
        groups. Return None if there is none either.
        """
        for turn, group in enumerate(self.groups):
            if group.model not in self.loaded:
                return group.model, turn
        if self.ahead:
            return self.ahead[0], REACH - 1
        return None

    def victims(self, turn: int) -> list[str] | None:
        """List the models to unload before one more is loaded; None if too few may leave now.

        Models in use stay, and so do models awaited at position `turn` or before it.
        """
        missing = 1 + self.taken - self._places
        leaving = self._list_leaving(turn)[: max(0, missing)]
        if len(leaving) < missing:
            return None
        return leaving

    def add(self, model: str) -> None:
        """Note that the model is loaded, on a place that was taken before."""
        self.loaded[model] = LoadedModel(model, next(self._numbers))

    def pin(self, model: str) -> LoadedModel:
        """Mark the model as in use; it stays until its `pins` are counted down again."""
        loaded = self.loaded[model]
        loaded.pins += 1
        loaded.used = next(self._numbers)
        return loaded

    def _list_leaving(self, keep_before: int | None, *, in_use: bool = False) -> list[str]:
        """List the models that may leave, in order; models awaited up to `keep_before` stay."""
        turns: dict[str, int] = {}
        for turn, group in enumerate(islice(self.groups, REACH)):
            turns.setdefault(group.model, turn)
        leaving = []
        for loaded in self._order(tuple(self.loaded.values()), turns):
            is_later = keep_before is None or turns.get(loaded.name, REACH) > keep_before
            if is_later and (in_use or not loaded.pins):
                leaving.append(loaded.name)
        return leaving
