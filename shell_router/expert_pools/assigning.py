"""Which executor's queue takes a request (CoServe, section 4.2, prediction and assigning)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueView:
    """What an executor's queue is predicted to take now, and how much longer with the request.

    Of that the disk, which all executors share, reads for `reads_s` for those who wait, and `added_reads_s` more.
    """

    seconds: float
    added_s: float
    reads_s: float = 0.0
    added_reads_s: float = 0.0


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


def least_extension_and_reading(queues: Sequence[QueueView], number: int) -> int:
    """Ours: the disk is a queue too. Where what all executors want to read takes longest, it decides.

    The paper adds up a queue's loads as if each executor had a disk of its own, and loads an expert again on another
    executor as soon as its own has the longest queue; with one disk for all, that makes everybody wait.
    """
    reads_s = sum(queue.reads_s for queue in queues)
    longest_s = max(reads_s, *(queue.seconds for queue in queues))

    def cost(index: int) -> tuple[float, float, float]:
        queue = queues[index]
        longest_then_s = max(longest_s, queue.seconds + queue.added_s, reads_s + queue.added_reads_s)
        return longest_then_s, queue.added_s, queue.seconds

    return min(range(len(queues)), key=cost)


def round_robin(queues: Sequence[QueueView], number: int) -> int:
    """One after the other, as Samba-CoE Parallel does (section 5.1): the request's `number` alone decides."""
    return number % len(queues)


ASSIGNMENTS: Mapping[str, Callable[[Sequence[QueueView], int], int]] = {
    "least-extension": least_extension,
    "least-extension-and-reading": least_extension_and_reading,
    "round-robin": round_robin,
}
"""Each takes the queues of the executors that could serve the request, and how many requests came before it."""
