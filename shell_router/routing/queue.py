"""The order of requests that wait for an engine.

docs/explanation/scheduling.md has a section per order. A new order is a function and an entry in
ORDERS. The function gives a waiting request its key; the request with the lowest key is next.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from shell_router.core.choices import list_names
from shell_router.errors import EngineUnavailable, require
from shell_router.files.types import Count, OneOf, Positive, Seconds
from shell_router.routing.placement import KEPT, Choice, RoutingFeatures

OUTPUT_WEIGHT = 2
"""Prompt tokens that an output token counts as, by the literature on fair serving and most price
lists.
"""

KEPT_PROGRAMS, IDLE_S = 10_000, 600.0
"""Programs that are remembered, and for how many seconds without a request."""


@dataclass(slots=True, eq=False)
class Program:
    """The unit of fairness within a tenant: a session, or else a run, or else a request.

    Attributes:
        user: Its tenant.
        tokens: Those that it was served, outputs doubled, over the weight of its tenant.
        active: Its requests that wait or run.
        running: Those that run.
        level: The level, 0 or below, at which its requests start.
        promoted: How many more of its requests start there.
        used_s: When its last request came.
    """

    user: str | None = None
    tokens: float = 0.0
    active: int = 0
    running: int = 0
    level: int = 0
    promoted: int = 0
    used_s: float = 0.0


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
        program: Set when it joins a queue.
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
    program: Program = field(default_factory=Program)

    @property
    def began_s(self) -> float:
        """When its run began; without one, when it came."""
        return min(self.features.hints.began_s, self.arrived_s)


Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of waiting requests.

    Attributes:
        key: Gives a request's key; requests with equal keys go by the beginning of their runs.
        ages: Whether a request that has waited `age_s` goes first, so that none starves.
        ages_by_run: Whether it has waited since its run began.
        weighs_tenants: Whether the order is fair, and reads the settings' `weights`.
    """

    key: Callable[[QueueEntry, "RequestQueue"], Key]
    ages: bool = True
    ages_by_run: bool = False
    weighs_tenants: bool = False


def fcfs(entry: QueueEntry, queue: "RequestQueue") -> Key:
    """Order by the beginning of runs: a running graph's root goes before agents of later ones."""
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
    expected output. What is left of a session is not known: as much as it was served is added.
    """
    hints = entry.features.hints
    program = entry.program
    level = program.level - entry.missed // queue.settings.starvation_misses
    served = program.tokens if hints.session else 0.0
    if hints.total_tokens is None:
        return (level, served + entry.features.output_tokens)
    return (level, served + hints.total_tokens)


def least_attained(entry: QueueEntry, queue: "RequestQueue") -> Key:
    """Order by the tokens that the user was served, divided by its weight, fewest first.

    Requests of one user go by what their programs were served. Agents that read outputs of their
    run go before: if it took turns with later runs, all would end late.
    It does not age: a user who is not served becomes the least served, and with aging a flood of
    one user's requests would go before all others.
    """
    attained = queue.count_attained(entry.features.user)
    if entry.features.hints.goes_on:
        return (attained, 0.0, 0)
    return (attained, entry.program.tokens, entry.program.running)


ORDERS: dict[str, Order] = {
    "fcfs": Order(fcfs, ages_by_run=True),
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
    `wait_s` a request is refused. `age_s` is the aging of Gimbal's Algorithm 2.
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
    starvation_misses: Annotated[
        Count,
        "Chimera's S: others chosen before a waiting request until it rises (`shortest_total`).",
    ] = 100
    quantum: Annotated[Count, "Chimera's Q: requests of its program that then start as high."] = 4

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
    key = (*order.key(entry, queue), entry.began_s, entry.arrived_s)
    tier = entry.features.hints.tier
    if entry.features.update:
        return (4, *key)
    if tier == "flex":
        return (3, *key)
    since_s = entry.arrived_s
    if order.ages_by_run:
        since_s = entry.began_s
    if order.ages and now_s - since_s >= queue.settings.age_s:
        return (0, since_s, entry.arrived_s)
    return (1 if tier == "priority" else 2, *key)


class RequestQueue:
    """The waiting requests, with the state that orders keep.

    It counts the tokens that each user and each program was served, and keeps programs' levels.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.entries: list[QueueEntry] = []
        self._chosen = 0
        self._attained: OrderedDict[str | None, float] = OrderedDict()
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._active: dict[str | None, set[Program]] = {}

    def count_attained(self, user: str | None) -> float:
        """Return the tokens that the user was served, outputs doubled, over its weight."""
        return self._attained.get(user, 0.0)

    def next(self, can_go: Callable[[QueueEntry], bool], now_s: float) -> QueueEntry | None:
        """Return the first entry, by the settings' order, that can go; None if none can."""
        able = [entry for entry in self.entries if can_go(entry)]
        for entry in able:
            entry.missed = self._chosen - entry.chosen_before
        return min(able, key=lambda entry: sort_key(entry, self, now_s), default=None)

    def join(self, entry: QueueEntry) -> None:
        """Add a request that arrives.

        A user without requests gets no more credit than the least served user that has some; nor
        does a program of the user in a fair order.
        """
        user = entry.features.user
        program = entry.program = self._find_program(entry)
        if user not in self._active:
            if self._active:
                least = min(self.count_attained(other) for other in self._active)
                self._set(user, max(self.count_attained(user), least))
            self._active[user] = set()
        others = self._active[user]
        if others and not program.active and ORDERS[self.settings.order].weighs_tenants:
            program.tokens = max(program.tokens, min(other.tokens for other in others))
        program.active += 1
        others.add(program)
        entry.chosen_before = self._chosen
        self.entries.append(entry)

    def _find_program(self, entry: QueueEntry) -> Program:
        user, key = entry.features.user, entry.features.program
        if key is None:
            return Program(user)
        program = self._programs.setdefault(key, Program(user))
        program.used_s = entry.arrived_s
        self._programs.move_to_end(key)
        oldest = next(iter(self._programs.values()))
        while len(self._programs) > KEPT_PROGRAMS or oldest.used_s < entry.arrived_s - IDLE_S:
            self._programs.popitem(last=False)
            oldest = next(iter(self._programs.values()))
        return program

    def take(self, entry: QueueEntry, new_tokens: int) -> None:
        """Remove an entry that is served now; `new_tokens` of its prompt are to be prefilled."""
        self.entries.remove(entry)
        self._chosen += 1
        program = entry.program
        program.running += 1
        if program.promoted:
            program.promoted -= 1
        if risen := entry.missed // self.settings.starvation_misses:
            program.level = -risen
            program.promoted = self.settings.quantum
        elif not program.promoted:
            program.level = 0
        self.count_tokens(program, new_tokens)

    def count_tokens(self, program: Program, prompt_tokens: int, output_tokens: int = 0) -> None:
        """Count tokens that were prefilled or decoded for the program."""
        user = program.user
        tokens = prompt_tokens + OUTPUT_WEIGHT * output_tokens
        share = tokens / self.settings.weights.get(user or "", 1.0)
        program.tokens += share
        self._set(user, self.count_attained(user) + share)

    def end(self, program: Program) -> None:
        """Count a request of the program that was taken as ended."""
        program.running -= 1
        self.leave(program)

    def leave(self, program: Program) -> None:
        """Count a request of the program that has joined as gone."""
        program.active -= 1
        if not program.active:
            active = self._active[program.user]
            active.remove(program)
            if not active:
                del self._active[program.user]

    def _set(self, user: str | None, tokens: float) -> None:
        self._attained[user] = tokens
        self._attained.move_to_end(user)
        while len(self._attained) > KEPT:
            self._attained.popitem(last=False)
