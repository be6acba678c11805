"""The order of requests that wait for an engine.

docs/explanation/scheduling.md has a section per order. A new order is a function and an entry in
ORDERS. The function gives a waiting request its key; the request with the lowest key is next.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from shell_router.core.choices import list_names
from shell_router.core.engine import Hints
from shell_router.errors import EngineUnavailable, require
from shell_router.files.types import CODE_ONLY, Count, OneOf, Positive, Seconds
from shell_router.routing.placement import KEPT, Choice, RoutingFeatures

OUTPUT_WEIGHT = 2
"""Prompt tokens that an output token counts as, by the literature on fair serving and most price
lists.
"""


def _forget_oldest(remembered: OrderedDict[Any, Any]) -> None:
    while len(remembered) > KEPT:
        remembered.popitem(last=False)


def _ignore() -> None: ...


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A request that waits for an engine.

    Attributes:
        missed: How many requests were chosen since it came.
        excluded: Indices of engines that it has failed on.
        bound: The engine it waits for; any engine if None.
        slot: Its slot, once it is granted.
        error: Why it gets no slot.
        decided: Called once it has a slot or an error.
        waits: Whether it got no slot at once.
    """

    features: RoutingFeatures
    arrived_s: float
    missed: int = 0
    excluded: frozenset[int] = frozenset()
    bound: Choice | None = None
    slot: Any = None
    error: EngineUnavailable | None = None
    decided: Callable[[], None] = _ignore
    waits: bool = False
    chosen_before: int = 0


Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of waiting requests.

    Attributes:
        key: Gives a request's key; requests with equal keys go by their arrival.
        ages: Whether a request that has waited `age_s` goes first, so that none starves.
        weighs_tenants: Whether the order reads the settings' `weights`.
    """

    key: Callable[[QueueEntry, "RequestQueue"], Key]
    ages: bool = True
    weighs_tenants: bool = False


def fcfs(entry: QueueEntry, queue: "RequestQueue") -> Key:
    """Order by arrival alone."""
    return ()


def shortest_prefill(entry: QueueEntry, queue: "RequestQueue") -> Key:
    """Order by tokens to prefill, fewest first (Gimbal, Algorithm 2; `sort_key` has its aging).

    Tokens known to be cached are not counted. Without any this is the paper's r.prompt.
    """
    return (entry.features.new_tokens,)


def shortest_total(entry: QueueEntry, queue: "RequestQueue") -> Key:
    """Order by (starvation_level, output tokens left in the program), Chimera 3.4 and 3.7.

    A request rises by a level whenever S others were chosen before it. Running requests are not
    interrupted here, so the quantum counts requests: the next Q of a program whose request was
    promoted start at the level it had reached. A request without an expected total counts its own
    expected output.
    """
    hints = entry.features.hints
    level = queue.level(hints) - entry.missed // queue.settings.starvation_misses
    if hints.total_tokens is None:
        return (level, entry.features.output_tokens)
    return (level, hints.total_tokens)


def least_attained(entry: QueueEntry, queue: "RequestQueue") -> Key:
    """Order by the tokens that the user was served, divided by its weight, fewest first.

    It does not age: a user who is not served becomes the least served, and with aging a flood of
    one user's requests would go before all others.
    """
    return (queue.count_attained(entry.features.user),)


ORDERS: dict[str, Order] = {
    "fcfs": Order(fcfs),
    "shortest_prefill": Order(shortest_prefill),
    "shortest_total": Order(shortest_total),
    "least_attained": Order(least_attained, ages=False, weighs_tenants=True),
}
"""Every order by its name in settings."""

_WEIGHING = [name for name, order in ORDERS.items() if order.weighs_tenants]
_UNAGED = [name for name, order in ORDERS.items() if not order.ages]


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """When requests wait in the router, and in which order.

    An engine is full while `max_running` requests run on it, while `max_prefill_tokens` tokens
    there are to be prefilled, or while prompts and outputs there, expected ones included, take
    `max_tokens` of KV. If none of these is set, requests do not wait here. `bind` says when the
    engine is chosen: at the request's `arrival`, or when an engine has a `place` for it. After
    `wait_s` a request is refused. `age_s` is the aging of Gimbal's Algorithm 2;
    `starvation_misses` and `quantum` are Chimera's S and Q.
    """

    order: Annotated[str, f"Which request is next: {list_names(ORDERS)}.", OneOf(ORDERS)] = "fcfs"
    bind: Annotated[
        Literal["arrival", "place"],
        "Choose the engine when one has capacity (`place`), or when the request arrives "
        "(`arrival`).",
    ] = "place"
    max_running: Annotated[
        Count | None,
        ("Limit of running requests per engine. Without these three limits no request waits."),
    ] = None
    max_prefill_tokens: Annotated[Count | None, "Limit of prompt tokens to prefill per engine."] = (
        None
    )
    max_tokens: Annotated[
        Count | None, "Limit of KV tokens per engine, expected outputs included."
    ] = None
    max_waiting: Annotated[Count, "Requests that may wait; more are answered 429."] = 1000
    wait_s: Annotated[
        Seconds, "Longest wait in the queue, in seconds; then the request is refused."
    ] = 60.0
    age_s: Annotated[
        Seconds,
        "Seconds after which a waiting request goes first, so that none starves; not of "
        f"{list_names(_UNAGED)}.",
    ] = 5.0
    weights: Annotated[
        Mapping[str, Positive],
        f"Shares of tenants under {list_names(_WEIGHING)}; 1 where none is named.",
    ] = field(default_factory=dict)
    starvation_misses: Annotated[int, CODE_ONLY] = 100
    quantum: Annotated[int, CODE_ONLY] = 4

    def __post_init__(self) -> None:
        require(
            not self.weights or self.order in _WEIGHING,
            f"weights count under order: {' or '.join(_WEIGHING)}, and order is {self.order}",
        )

    @property
    def holds(self) -> bool:
        """Whether requests may have to wait here at all."""
        return (self.max_running, self.max_prefill_tokens, self.max_tokens) != (None, None, None)


def sort_key(entry: QueueEntry, queue: "RequestQueue", now_s: float) -> Key:
    """Return the full key of a waiting request; the lowest is next.

    Requests that have waited `age_s` come first, the longest waiting before all (Gimbal, Algorithm
    2, line 4). Then come the other requests of clients by their tiers. Those of `flex` come after
    all of these, and prefill-only updates last, however long they wait: an update only makes a
    later request faster.
    """
    order = ORDERS[queue.settings.order]
    key = (*order.key(entry, queue), entry.arrived_s)
    tier = entry.features.hints.tier
    if entry.features.update:
        return (4, *key)
    if tier == "flex":
        return (3, *key)
    if order.ages and now_s - entry.arrived_s >= queue.settings.age_s:
        return (0, entry.arrived_s)
    return (1 if tier == "priority" else 2, *key)


class RequestQueue:
    """The waiting requests, with the state that orders keep.

    It counts the tokens that each user was served, and each program's starvation level.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.entries: list[QueueEntry] = []
        self._chosen = 0
        self._attained: OrderedDict[str | None, float] = OrderedDict()
        self._active: Counter[str | None] = Counter()
        self._levels: OrderedDict[tuple[str | None, str | None], tuple[int, int]] = OrderedDict()

    def count_attained(self, user: str | None) -> float:
        """Return the tokens that the user was served, outputs doubled, over its weight."""
        return self._attained.get(user, 0.0)

    def level(self, hints: Hints) -> int:
        """Return the level, 0 or below, at which requests of this tenant's program start."""
        return self._levels.get((hints.user, hints.program), (0, 0))[0]

    def next(self, can_go: Callable[[QueueEntry], bool], now_s: float) -> QueueEntry | None:
        """Return the first entry, by the settings' order, that can go; None if none can."""
        able = [entry for entry in self.entries if can_go(entry)]
        for entry in able:
            entry.missed = self._chosen - entry.chosen_before
        return min(able, key=lambda entry: sort_key(entry, self, now_s), default=None)

    def join(self, entry: QueueEntry) -> None:
        """Add a request that arrives.

        A user without requests gets no more credit than the least served user that has some.
        """
        user = entry.features.user
        if not self._active[user] and self._active.total():
            least = min(
                self.count_attained(other) for other, count in self._active.items() if count
            )
            self._set(user, max(self.count_attained(user), least))
        self._active[user] += 1
        entry.chosen_before = self._chosen
        self.entries.append(entry)

    def take(self, entry: QueueEntry, new_tokens: int) -> None:
        """Remove an entry that is served now; `new_tokens` of its prompt are to be prefilled."""
        self.entries.remove(entry)
        self._chosen += 1
        hints = entry.features.hints
        risen = entry.missed // self.settings.starvation_misses
        if hints.program is not None:
            program = hints.user, hints.program  # a client may name its program as another tenant's
            level, left = self._levels.pop(program, (0, 0))
            left -= 1
            if risen:
                level = -risen
                left = self.settings.quantum
            if left > 0:
                self._levels[program] = (level, left)
                _forget_oldest(self._levels)
        self.count_tokens(entry.features.user, new_tokens)

    def count_tokens(self, user: str | None, prompt_tokens: int, output_tokens: int = 0) -> None:
        """Count tokens that were prefilled or decoded for the user."""
        tokens = prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._set(
            user, self.count_attained(user) + tokens / self.settings.weights.get(user or "", 1.0)
        )

    def leave(self, features: RoutingFeatures) -> None:
        """Count a request that has joined as ended."""
        self._active[features.user] -= 1
        if self._active[features.user] <= 0:
            del self._active[features.user]

    def _set(self, user: str | None, tokens: float) -> None:
        self._attained[user] = tokens
        self._attained.move_to_end(user)
        _forget_oldest(self._attained)
