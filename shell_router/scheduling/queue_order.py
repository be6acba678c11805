"""Whose turn it is among requests that wait for an engine. docs/policies.md has a section per policy.

A policy is one function and one entry in ORDERS: it gives a waiting request its key, and the lowest key is next. All
are kept from starving by `turn`: who has waited `age_s` goes first, whatever the policy says of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shell_router.scheduling.engine_state import Asked
from shell_router.scheduling.queue_memory import QueueMemory
from shell_router.scheduling.refusal import require

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """When requests wait in the router, and in which order.

    An engine gets no more while `max_running` requests run on it, while `max_prefill_tokens` tokens there are to be
    prefilled, or while prompts and outputs there, expected ones included, take `max_tokens` of KV; where none of these
    is set nothing waits here. `bind` says when the engine is chosen: at the request's
    `arrival`, or when an engine has a `place` for it. After `wait_s` a request is refused.

    `age_s` is Algorithm 2's aging. `starvation_misses` and `quantum` are Chimera's S and Q. With `engine_priority` the
    order is also told to engines that schedule by priority.
    """

    order: str = "fcfs"
    bind: str = "place"
    max_running: int | None = None
    max_prefill_tokens: int | None = None
    max_tokens: int | None = None
    wait_s: float = 60.0
    age_s: float = 5.0
    starvation_misses: int = 100
    quantum: int = 4
    engine_priority: bool = False

    def __post_init__(self) -> None:
        require(self.order in ORDERS, f"order {self.order!r} is none of: {', '.join(ORDERS)}")
        require(self.bind in ("arrival", "place"), f"bind must be arrival or place, not {self.bind!r}")
        for name in ("max_running", "max_prefill_tokens", "max_tokens", "starvation_misses", "quantum"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}")
        for name in ("wait_s", "age_s"):
            require(getattr(self, name) > 0, f"{name} must be above 0, not {getattr(self, name):g}")

    @property
    def holds(self) -> bool:
        """Whether requests may have to wait here at all."""
        return (self.max_running, self.max_prefill_tokens, self.max_tokens) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits: since when, and `missed`, how many others were chosen meanwhile."""

    asked: Asked
    arrived_s: float
    missed: int = 0


Order = Callable[[Waiting, QueueMemory, QueueSettings], Key]
"""The key of a waiting request; requests with equal keys go by their arrival."""


def fcfs(one: Waiting, memory: QueueMemory, settings: QueueSettings) -> Key:
    """First come, first served."""
    return ()


def shortest_prefill(one: Waiting, memory: QueueMemory, settings: QueueSettings) -> Key:
    """The fewest tokens to prefill first (Gimbal, Algorithm 2; `turn` has its aging).

    What is known to be prefilled already is not counted: the paper's r.prompt, where nothing is.
    """
    return (one.asked.new_tokens,)


def shortest_total(one: Waiting, memory: QueueMemory, settings: QueueSettings) -> Key:
    """The program with the fewest output tokens to come first: (starvation_level, priority), Chimera 3.4 and 3.7.

    A request rises by a level whenever S others were chosen before it. Here nothing that runs is interrupted, so the
    quantum counts requests: the next Q of a program whose request was promoted start as high as it had risen. Requests
    of which nothing is expected count the output that is expected of themselves.
    """
    hints = one.asked.hints
    level = memory.level(hints.program) - one.missed // settings.starvation_misses
    return (level, one.asked.output_tokens if hints.total_tokens is None else hints.total_tokens)


def critical_path(one: Waiting, memory: QueueMemory, settings: QueueSettings) -> Key:
    """The program that came first, and of its agents the one with the longest path to the answer.

    So a program that has begun is finished before another begins, and its slowest sibling, for which all others would
    wait, starts first.
    """
    hints = one.asked.hints
    path = one.asked.output_tokens if hints.path_tokens is None else hints.path_tokens
    return (memory.began_s(hints.program, one.arrived_s), -path)


def least_attained(one: Waiting, memory: QueueMemory, settings: QueueSettings) -> Key:
    """The user who has been served least, in tokens; of one user, in order of arrival."""
    return (memory.attained(one.asked.user),)


ORDERS: dict[str, Order] = {
    "fcfs": fcfs,
    "shortest_prefill": shortest_prefill,
    "shortest_total": shortest_total,
    "critical_path": critical_path,
    "least_attained": least_attained,
}
"""Every order by the name that settings give it."""


def turn(one: Waiting, memory: QueueMemory, settings: QueueSettings, now_s: float) -> Key:
    """The full key: the lowest is next.

    Who has waited `age_s` comes first, the longest waiting before all (Algorithm 2, line 4). Then come requests that
    somebody waits for, then prefill-only updates, which only make a later request faster.
    """
    if now_s - one.arrived_s >= settings.age_s:
        return (0, one.arrived_s)
    return (2 if one.asked.update else 1, *ORDERS[settings.order](one, memory, settings), one.arrived_s)


def priority(one: Waiting, memory: QueueMemory, settings: QueueSettings) -> int:
    """The order as a number for an engine's own queue: the lower, the sooner. It does not age there."""
    first, *second = (*ORDERS[settings.order](one, memory, settings), 0.0)
    return round(1_000_000 * first + second[0]) if second[1:] else round(first)
