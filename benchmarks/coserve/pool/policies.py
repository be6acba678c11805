"""How a component pool decides: which executor takes a request, what is loaded first (CoServe, 4.1
and 4.2).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.coserve.pool.memory import Order, queue_aware, two_stage
from benchmarks.coserve.pool.values import Component, ExecutorSettings
from shell_router.errors import require


@dataclass(frozen=True, slots=True)
class QueueView:
    """What an executor's queue is predicted to take now, and how much longer with the request.

    Of that the disk, which all executors share, reads for `reads_s` for the queue, and
    `added_reads_s` more.
    """

    seconds: float
    added_s: float
    reads_s: float = 0.0
    added_reads_s: float = 0.0


Assign = Callable[[Sequence[QueueView], int], int]
"""From the queues of the executors that could serve a request, and the number of requests before
it, to an index.
"""


def least_extension_and_reading(queues: Sequence[QueueView], number: int) -> int:
    """The queue with which the longest of all queues is shortest (Figure 8), where the disk is a
    queue too (ours).

    Of equals, the one that grows least; then the shortest, so that idle executors get work. The
    paper adds up a queue's loads as if each executor had a disk of its own, and loads a component
    again on another executor as soon as its own has the longest queue; with one disk for all, that
    delays every request.
    """
    reads_s = sum(queue.reads_s for queue in queues)
    longest_s = max(reads_s, *(queue.seconds for queue in queues))

    def cost(index: int) -> tuple[float, float, float]:
        queue = queues[index]
        longest_then_s = max(
            longest_s, queue.seconds + queue.added_s, reads_s + queue.added_reads_s
        )
        return longest_then_s, queue.added_s, queue.seconds

    return min(range(len(queues)), key=cost)


def initial_placement(
    components: Iterable[Component], executors: Sequence[ExecutorSettings]
) -> Mapping[str, list[Component]]:
    """Per executor, what it loads first: the most probable component for the first executor, the
    next for the second.

    An executor that is full is passed over; a component that fits nowhere is left out.
    """
    placed: dict[str, list[Component]] = {executor.name: [] for executor in executors}
    free = {executor.name: executor.shelf_bytes for executor in executors}
    turn = 0
    for component in by_probability(components):
        order = [executors[(turn + step) % len(executors)] for step in range(len(executors))]
        taker = next(
            (
                one
                for one in order
                if one.takes(component) and free[one.name] >= component.memory_bytes
            ),
            None,
        )
        if taker is not None:
            placed[taker.name].append(component)
            free[taker.name] -= component.memory_bytes
            turn = (executors.index(taker) + 1) % len(executors)
    return placed


def host_placement(
    components: Iterable[Component], budget_bytes: int, elsewhere: frozenset[str]
) -> list[Component]:
    """What host memory holds first: the most probable components that no executor loads, as far as
    they fit (ours).
    """
    placed = []
    free_bytes = budget_bytes
    for component in by_probability(components):
        if component.name not in elsewhere and component.memory_bytes <= free_bytes:
            placed.append(component)
            free_bytes -= component.memory_bytes
    return placed


def by_probability(components: Iterable[Component]) -> list[Component]:
    """The most probable first."""
    return sorted(components, key=lambda one: (-one.usage, one.name))


@dataclass(frozen=True, slots=True)
class Policies:
    """How a pool decides.

    Within `window_s` a request may overtake others to stand with its like; 0 is first come, first
    served. The default is the time in which the paper wants all images of a board (section 5.1).
    While an executor works, it loads what the next `prefetch` groups of its queue need, and then
    what is known to follow on what it works on; 0 loads a component when its turn has come.
    """

    assign: Assign = least_extension_and_reading
    window_s: float = 180.0
    evict: Order = queue_aware
    evict_host: Order = two_stage
    prefetch: int = 1

    def __post_init__(self) -> None:
        for field in ("window_s", "prefetch"):
            require(
                getattr(self, field) >= 0, f"{field} is {getattr(self, field)}.", "Give 0 or more."
            )
