"""How few switches there could have been: what a run is measured against."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from shell_router.errors import ConfigError


def fewest_switches_in_any_order(needed: Iterable[str], loaded_first: Collection[str]) -> int:
    """What no schedule undercuts: each expert that is needed and was not loaded at first is loaded once."""
    return len(set(needed) - set(loaded_first))


def fewest_switches_in_this_order(
    served: Sequence[str], loaded_first: Collection[str], memory_bytes: Mapping[str, int], budget_bytes: int
) -> int:
    """Loads of the best eviction for the experts of the batches `served` in turn, by Belady's rule.

    The rule is exact where all experts are of one size. For mixed sizes each size gets the whole budget for itself, so
    that this is a bound from below. Raises ConfigError where an expert does not fit.
    """
    if too_large := [name for name in served if memory_bytes[name] > budget_bytes]:
        raise ConfigError(f"{budget_bytes} bytes do not hold {too_large[0]}.", remedy="Give more.")
    loads = 0
    for size in {memory_bytes[name] for name in served}:
        alike = [name for name in served if memory_bytes[name] == size]
        loads += _belady(alike, [name for name in loaded_first if memory_bytes[name] == size], budget_bytes // size)
    return loads


def _belady(served: Sequence[str], loaded_first: Collection[str], room: int) -> int:
    next_use = _next_uses(served)
    first_use = {name: place for place, name in reversed(list(enumerate(served)))}
    held = {name: first_use.get(name, len(served)) for name in loaded_first}
    furthest = [(-use, name) for name, use in held.items()]
    heapify(furthest)
    loads = 0
    for place, name in enumerate(served):
        if name not in held:
            loads += 1
            while len(held) >= room:
                use, leaving = heappop(furthest)
                if held.get(leaving) == -use:  # entries of earlier uses are left in the heap
                    del held[leaving]
        held[name] = next_use[place]
        heappush(furthest, (-next_use[place], name))
    return loads


def _next_uses(served: Sequence[str]) -> list[int]:
    """For each place, the next place of the same expert; the length where there is none."""
    seen: dict[str, int] = {}
    uses = [len(served)] * len(served)
    for place in range(len(served) - 1, -1, -1):
        uses[place] = seen.get(served[place], len(served))
        seen[served[place]] = place
    return uses
