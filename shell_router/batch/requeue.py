"""What becomes of prompts that a worker failed to answer."""

from collections.abc import Mapping

from shell_router.batch.plan import Expert

BISECTIONS = 50


def shared_out(expert: Expert, busy_s: Mapping[int, float]) -> dict[int, int]:
    """How many of the expert's prompts each worker gets, so that the last one is done earliest.

    `busy_s` says how long each worker that may take some is still busy; at least one may.
    """
    low_s, high_s = min(busy_s.values()), min(busy_s.values()) + expert.session_s(expert.prompts)
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if sum(_fitting(expert, busy_s, middle_s).values()) >= expert.prompts:
            high_s = middle_s
        else:
            low_s = middle_s
    return _taken(_fitting(expert, busy_s, high_s), expert.prompts, first=min(busy_s, key=busy_s.__getitem__))


def _fitting(expert: Expert, busy_s: Mapping[int, float], until_s: float) -> dict[int, int]:
    return {worker: expert.fitting(until_s - busy) for worker, busy in busy_s.items()}


def _taken(fitting: Mapping[int, int], prompts: int, *, first: int) -> dict[int, int]:
    """As many as there are, the fullest workers first; `first` takes what rounding has left over."""
    taken: dict[int, int] = {}
    for worker, count in sorted(fitting.items(), key=lambda item: -item[1]):
        if take := min(count, prompts - sum(taken.values())):
            taken[worker] = take
    if left := prompts - sum(taken.values()):
        taken[first] = taken.get(first, 0) + left
    return taken
