"""Which experts take no further requests, so that one that is waited for finds a place (ours).

An expert that serves many requests at a time, as an adapter on an engine does, may be in use without a pause. Whoever
waits for another one would wait for ever; so within a window experts that are loaded serve whoever comes, and then as
many of them are drained as there are others that have been waited for for so long.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from shell_router.expert_pools.foresight import REACH
from shell_router.expert_pools.waiting import Group


def overdue(groups: Iterable[Group], is_coming: Callable[[str], bool], now_s: float, window_s: float) -> int:
    """How many experts that are not loaded, nor being loaded, have been waited for for `window_s` or longer."""
    late = (group.expert for group in islice(groups, REACH) if now_s - group.opened_s >= window_s)
    return len({name for name in late if not is_coming(name)})


def drained(order: Sequence[str], places: int, before: Iterable[str]) -> tuple[str, ...]:
    """The first `places` of `order`, in which experts leave.

    Those that were drained `before` come first: to change one's mind would drain two experts for one place.
    """
    kept = [name for name in before if name in order]
    return (*kept, *(name for name in order if name not in kept))[: max(0, places)]
