"""Which experts leave a memory when another one needs the room (CoServe, section 4.3, and what it is compared with).

An order is a function of what lies there; experts leave in it until enough is free.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shell_router.expert_pools.values import Expert


@dataclass(frozen=True, slots=True)
class Resident:
    """An expert in a memory. `loaded` and `used` count loads and uses there, so that smaller is longer ago.

    `turn` is the place, among those who wait there, of the first that needs it; None where nobody does. `idle` says
    that it follows on other experts none of which is loaded anywhere; in host memory also that an executor holds it.
    """

    expert: Expert
    loaded: int
    used: int
    turn: int | None = None
    idle: bool = False


def two_stage(residents: Sequence[Resident]) -> list[Resident]:
    """The paper's: first successors without a loaded predecessor, the largest first; then the least probable."""
    successors = sorted((one for one in residents if one.idle), key=lambda one: -one.expert.memory_bytes)
    others = sorted((one for one in residents if not one.idle), key=lambda one: one.expert.usage)
    return [*successors, *others]


def queue_aware(residents: Sequence[Resident]) -> list[Resident]:
    """Ours: the paper's order among those that nobody waits for, then the one whose turn comes last.

    Who waits is known, so that for them no probability is needed: it is Belady's choice, as far as the queue reaches.
    """
    unneeded = two_stage([one for one in residents if one.turn is None])
    waited_for = sorted((one for one in residents if one.turn is not None), key=lambda one: -(one.turn or 0))
    return [*unneeded, *waited_for]


def least_recently_used(residents: Sequence[Resident]) -> list[Resident]:
    """Samba-CoE's."""
    return sorted(residents, key=lambda one: one.used)


def first_in_first_out(residents: Sequence[Resident]) -> list[Resident]:
    """Samba-CoE FIFO's: the one that was loaded first."""
    return sorted(residents, key=lambda one: one.loaded)


EVICTIONS: Mapping[str, Callable[[Sequence[Resident]], list[Resident]]] = {
    "two-stage": two_stage,
    "queue-aware": queue_aware,
    "lru": least_recently_used,
    "fifo": first_in_first_out,
}


def victims(order: Iterable[Resident], missing_bytes: int) -> list[str] | None:
    """The first of `order` that free `missing_bytes` together; None where all of them are not enough."""
    leaving, freed_bytes = [], 0
    for resident in order:
        if freed_bytes >= missing_bytes:
            break
        leaving.append(resident.expert.name)
        freed_bytes += resident.expert.memory_bytes
    return leaving if freed_bytes >= missing_bytes else None


def is_idle(expert: Expert, loaded: Callable[[str], bool]) -> bool:
    """Whether it only follows on experts none of which is loaded."""
    return bool(expert.after) and not any(loaded(name) for name in expert.after)
