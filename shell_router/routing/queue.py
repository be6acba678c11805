"""The order of requests that wait for an engine. docs/explanation/scheduling.md has a section per
order.

An order is one function and one entry in ORDERS: it gives a waiting request its key, and the lowest
key is next. `turn` ages every order but the fair one, which starves none: a request that has waited
`age_s` goes first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from shell_router.core.engine import Hints
from shell_router.errors import EngineUnavailable, require
from shell_router.routing.placement import KEPT, Choice, RoutingFeatures

OUTPUT_WEIGHT = 2
"""An output token counts as two of a prompt, as in the literature on fair serving (and in most
price lists).
"""


def _forget_oldest(remembered: OrderedDict[Any, Any]) -> None:
    while len(remembered) > KEPT:
        remembered.popitem(last=False)


Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """When requests wait in the router, and in which order.

    An engine is full while `max_running` requests run on it, while `max_prefill_tokens` tokens
    there are to be prefilled, or while prompts and outputs there, expected ones included, take
    `max_tokens` of KV; where none of these is set, requests do not wait here. `bind` says when the
    engine is chosen: at the request's `arrival`, or when an engine has a `place` for it. After
    `wait_s` a request is refused.

    `age_s` is Algorithm 2's aging. `starvation_misses` and `quantum` are Chimera's S and Q.
    """

    order: Annotated[
        str,
        "Which request is next: `fcfs`, `shortest_prefill`, `shortest_total` or `least_attained`.",
    ] = "fcfs"
    bind: Annotated[
        str,
        (
            "Choose the engine when one has capacity (`place`), or when the request arrives "
            "(`arrival`)."
        ),
    ] = "place"
    max_running: Annotated[
        int | None,
        (
            "Limit of running requests per engine. Without any of these three limits, requests do "
            "not wait in the router."
        ),
    ] = None
    max_prefill_tokens: Annotated[int | None, "Limit of prompt tokens to prefill per engine."] = (
        None
    )
    max_tokens: Annotated[
        int | None, "Limit of KV tokens per engine, expected outputs included."
    ] = None
    max_waiting: Annotated[
        int, "Requests that may wait; more are answered 429, with a time to try again."
    ] = 1000
    wait_s: Annotated[
        float, "Longest wait in the queue, in seconds; then the request is refused."
    ] = 60.0
    age_s: Annotated[
        float,
        (
            "Seconds after which a waiting request goes first, so that none starves; not of "
            "`least_attained`."
        ),
    ] = 5.0
    weights: Annotated[
        Mapping[str, float], "Shares of tenants under `least_attained`; 1 where none is named."
    ] = field(default_factory=dict)
    starvation_misses: int = field(default=100, metadata={"file": False})
    quantum: int = field(default=4, metadata={"file": False})

    def __post_init__(self) -> None:
        require(self.order in ORDERS, f"order {self.order!r} is none of: {', '.join(ORDERS)}")
        require(
            self.bind in ("arrival", "place"), f"bind must be arrival or place, not {self.bind!r}"
        )
        for name in (
            "max_running",
            "max_prefill_tokens",
            "max_tokens",
            "max_waiting",
            "starvation_misses",
            "quantum",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}")
        for name in ("wait_s", "age_s"):
            require(getattr(self, name) > 0, f"{name} must be above 0, not {getattr(self, name):g}")
        counted = not self.weights or self.order == "least_attained"
        require(counted, f"weights count under order: least_attained, and order is {self.order}")
        for tenant, weight in self.weights.items():
            require(weight > 0, f"weights.{tenant} must be above 0, not {weight:g}")

    @property
    def holds(self) -> bool:
        """Whether requests may have to wait here at all."""
        return (self.max_running, self.max_prefill_tokens, self.max_tokens) != (None, None, None)


def _ignore() -> None: ...


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A request that waits for an engine since `arrived_s`; `missed` others were chosen meanwhile.

    It goes to the `bound` engine where there is one, else to any that it has not failed on
    (`excluded`, by index). In the end it has a `slot`, or an `error` instead; `decided` is called
    then. `waits` says that it had none at once.
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


Order = Callable[[QueueEntry, "RequestQueue"], Key]
"""The key of a waiting request; requests with equal keys go by their arrival."""


def fcfs(one: QueueEntry, queue: "RequestQueue") -> Key:
    """First come, first served."""
    return ()


def shortest_prefill(one: QueueEntry, queue: "RequestQueue") -> Key:
    """The fewest tokens to prefill first (Gimbal, Algorithm 2; `turn` has its aging).

    What is known to be prefilled already is not counted: the paper's r.prompt, where nothing is.
    """
    return (one.features.new_tokens,)


def shortest_total(one: QueueEntry, queue: "RequestQueue") -> Key:
    """The program with the fewest output tokens to come first: (starvation_level, priority),
    Chimera 3.4 and 3.7.

    A request rises by a level whenever S others were chosen before it. Here nothing that runs is
    interrupted, so the quantum counts requests: the next Q of a program whose request was promoted
    start as high as it had risen. Requests of which nothing is expected count the output that is
    expected of themselves.
    """
    hints = one.features.hints
    level = queue.level(hints) - one.missed // queue.settings.starvation_misses
    return (level, one.features.output_tokens if hints.total_tokens is None else hints.total_tokens)


def least_attained(one: QueueEntry, queue: "RequestQueue") -> Key:
    """The user who has been served least, in tokens by its weight; of one user, in order of
    arrival.

    One that is not served becomes the least served: were requests to age, a flood of one user's
    would go before all.
    """
    return (queue.attained(one.features.user),)


ORDERS: dict[str, Order] = {
    "fcfs": fcfs,
    "shortest_prefill": shortest_prefill,
    "shortest_total": shortest_total,
    "least_attained": least_attained,
}
"""Every order by the name that settings give it."""


def turn(one: QueueEntry, queue: "RequestQueue", now_s: float) -> Key:
    """The full key: the lowest is next.

    Requests that have waited `age_s` come first, the longest waiting before all (Algorithm 2, line
    4). Then come requests of clients, then prefill-only updates, which only make a later request
    faster, however long they wait.
    """
    order = queue.settings.order
    update = one.features.update
    if order != "least_attained" and not update and now_s - one.arrived_s >= queue.settings.age_s:
        return (0, one.arrived_s)
    return (2 if update else 1, *ORDERS[order](one, queue), one.arrived_s)


class RequestQueue:
    """The requests that wait, which is next, and what orders know of users and programs.

    That is the tokens that users were served, and how far the requests of programs have risen.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.entries: list[QueueEntry] = []
        self._chosen = 0
        self._attained: OrderedDict[str | None, float] = OrderedDict()
        self._active: Counter[str | None] = Counter()
        self._levels: OrderedDict[tuple[str | None, str | None], tuple[int, int]] = OrderedDict()

    def attained(self, user: str | None) -> float:
        """Tokens that this user was served, outputs twice, divided by its weight, 1 where it has
        none.
        """
        return self._attained.get(user, 0.0)

    def level(self, hints: Hints) -> int:
        """The starvation level at which requests of this tenant's program start: 0 or below."""
        return self._levels.get((hints.user, hints.program), (0, 0))[0]

    def next(self, can_go: Callable[[QueueEntry], bool], now_s: float) -> QueueEntry | None:
        """The next, by the settings' order, of those that can go; None where none can."""
        able = [entry for entry in self.entries if can_go(entry)]
        for entry in able:
            entry.missed = self._chosen - entry.chosen_before
        return min(able, key=lambda entry: turn(entry, self, now_s), default=None)

    # --- what happens

    def join(self, entry: QueueEntry) -> None:
        """A request arrives. A user without requests gets no more credit than the least served user
        with some.
        """
        user = entry.features.user
        if not self._active[user] and self._active.total():
            least = min(self.attained(one) for one, requests in self._active.items() if requests)
            self._set(user, max(self.attained(user), least))
        self._active[user] += 1
        entry.chosen_before = self._chosen
        self.entries.append(entry)

    def chosen(self, entry: QueueEntry, new_tokens: int) -> None:
        """It is served next, and `new_tokens` of its prompt are to be prefilled."""
        self.entries.remove(entry)
        self._chosen += 1
        hints = entry.features.hints
        risen = entry.missed // self.settings.starvation_misses
        if hints.program is not None:
            program = hints.user, hints.program  # a client may name its program as another tenant's
            level, left = self._levels.pop(program, (0, 0))
            level, left = (-risen, self.settings.quantum) if risen else (level, left - 1)
            if left > 0:
                self._levels[program] = (level, left)
                _forget_oldest(self._levels)
        self.served(entry.features.user, new_tokens)

    def served(self, user: str | None, prompt_tokens: int, output_tokens: int = 0) -> None:
        """Tokens were prefilled, or written, for the user."""
        tokens = prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._set(user, self.attained(user) + tokens / self.settings.weights.get(user or "", 1.0))

    def left(self, features: RoutingFeatures) -> None:
        """A request that had arrived is over."""
        self._active[features.user] -= 1
        if self._active[features.user] <= 0:
            del self._active[features.user]

    def _set(self, user: str | None, tokens: float) -> None:
        self._attained[user] = tokens
        self._attained.move_to_end(user)
        _forget_oldest(self._attained)
