"""Which executor's queue takes a request (CoServe, section 4.2, prediction and assigning)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueView:
    """What an executor's queue is predicted to take now, and how much longer with the request."""

    seconds: float
    added_s: float


def added_seconds(*, sample_s: float, batch_s: float, load_s: float, joins: bool, here: bool) -> float:
    """The additional latency of a request on a queue.

    It is K behind others that wait for the same expert (`joins`), K + B otherwise. The switch comes on top unless the
    expert is `here`: loaded, or waited for already, so that it is loaded for somebody else.
    """
    return sample_s + (0.0 if joins else batch_s) + (0.0 if here else load_s)


def least_extension(queues: Sequence[QueueView], number: int) -> int:
    """The queue with which the longest of all queues is shortest; of equals, the one that grows least (Figure 8).

    Equal in that too, the shortest queue is taken, so that executors that stand idle get work.
    """
    longest_s = max(queue.seconds for queue in queues)

    def cost(index: int) -> tuple[float, float, float]:
        queue = queues[index]
        return max(longest_s, queue.seconds + queue.added_s), queue.added_s, queue.seconds

    return min(range(len(queues)), key=cost)


def round_robin(queues: Sequence[QueueView], number: int) -> int:
    """One after the other, as Samba-CoE Parallel does (section 5.1): the request's `number` alone decides."""
    return number % len(queues)


ASSIGNMENTS: Mapping[str, Callable[[Sequence[QueueView], int], int]] = {
    "least-extension": least_extension,
    "round-robin": round_robin,
}
"""Each takes the queues of the executors that could serve the request, and how many requests came before it."""
