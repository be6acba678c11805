"""What an executor loads next while it works (ours; the paper loads when the request's turn has come)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from shell_router.expert_pools.waiting import Group

REACH = 1000
"""Groups of a queue that are looked at: more are not worth the time, and experts for them count as not waited for."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """`expert` is needed at place `turn` of the queue, or, behind all who wait, by what runs now."""

    expert: str
    turn: int


def turns(groups: Iterable[Group]) -> Mapping[str, int]:
    """Per expert that is waited for, the place of its first group."""
    found: dict[str, int] = {}
    for place, group in enumerate(islice(groups, REACH)):
        found.setdefault(group.expert, place)
    return found


def next_to_load(groups: Iterable[Group], is_here: Callable[[str], bool], known: Iterable[str]) -> Ahead | None:
    """The first expert of the next groups that is not loaded here; where all are, the first of those `known` to follow.

    A known one takes no room from anybody who waits, nor from another known one.
    """
    for place, group in enumerate(groups):
        if not is_here(group.expert):
            return Ahead(group.expert, place)
    return next((Ahead(name, REACH) for name in known), None)
