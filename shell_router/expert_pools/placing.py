"""What is loaded before the first request comes (CoServe, section 4.1, system initialization)."""

from collections.abc import Iterable, Mapping, Sequence

from shell_router.expert_pools.values import ExecutorSettings, Expert


def initial_placement(experts: Iterable[Expert], executors: Sequence[ExecutorSettings]) -> Mapping[str, list[Expert]]:
    """Per executor, what it loads first: the most probable expert goes to the first executor, the next to the second.

    An executor without room for it is passed over; an expert that nobody has room for is left out.
    """
    placed: dict[str, list[Expert]] = {executor.name: [] for executor in executors}
    free = {executor.name: executor.shelf_bytes for executor in executors}
    turn = 0
    for expert in sorted(experts, key=lambda one: (-one.usage, one.name)):
        order = [executors[(turn + step) % len(executors)] for step in range(len(executors))]
        taker = next((one for one in order if one.takes(expert) and free[one.name] >= expert.memory_bytes), None)
        if taker is not None:
            placed[taker.name].append(expert)
            free[taker.name] -= expert.memory_bytes
            turn = (executors.index(taker) + 1) % len(executors)
    return placed


def host_placement(experts: Iterable[Expert], budget_bytes: int, elsewhere: frozenset[str]) -> list[Expert]:
    """What host memory holds first: the most probable experts that no executor loads, as far as they fit (ours)."""
    placed, free_bytes = [], budget_bytes
    for expert in sorted(experts, key=lambda one: (-one.usage, one.name)):
        if expert.name not in elsewhere and expert.memory_bytes <= free_bytes:
            placed.append(expert)
            free_bytes -= expert.memory_bytes
    return placed
