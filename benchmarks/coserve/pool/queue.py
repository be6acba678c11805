"""The queue for components: requests for the same one stand together, and leave in batches
(CoServe, section 4.2).

The paper groups "within a defined window" and does not define it. Here it is a time: no request is
overtaken by one that came `window_s` later or more. A window of 0 is first come, first served, in
which only neighbors share a batch.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice

from benchmarks.coserve.pool.values import Costs, Stage
from shell_router.errors import require

REACH = 1000
"""Groups of a queue that are looked at; components for those behind them count as not waited for.
"""


@dataclass(slots=True, eq=False)
class Group:
    """Stages at one component that stand together, by request id, in the order of their arrival."""

    number: int
    component: str
    opened_s: float
    costs: Costs
    switch_s: float
    read_s: float = 0.0
    stages: dict[str, Stage] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """What it is predicted to take: K + B and the switch for its first request, K for each
        further one.
        """
        return self.switch_s + self.costs.batch_seconds(len(self.stages))


class ComponentQueue:
    """Groups in the order in which they were opened."""

    def __init__(self, window_s: float) -> None:
        require(window_s >= 0, f"window_s is {window_s}.", "Give 0 or more seconds.")
        self._window_s = window_s
        self._numbers = count()
        self._for: dict[str, list[Group]] = {}
        self._of: dict[str, Group] = {}
        self.groups: list[Group] = []
        self.seconds = 0.0
        self.read_seconds = 0.0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    @property
    def first(self) -> Group | None:
        """The group whose turn it is."""
        return self.groups[0] if self.groups else None

    def joins(self, component: str, now_s: float) -> bool:
        """Whether a request for `component` that comes now would stand with others that wait for
        it.

        It overtakes every group behind theirs; the one right behind was opened first of them.
        """
        if component not in self._for:
            return False
        behind = bisect_right(
            self.groups, self._for[component][-1].number, key=lambda group: group.number
        )
        return behind == len(self.groups) or now_s - self.groups[behind].opened_s < self._window_s

    def waits_for(self, component: str) -> bool:
        """Whether any request waits for `component`."""
        return component in self._for

    def add(self, stage: Stage, costs: Costs, switch_s: float, read_s: float = 0.0) -> bool:
        """To those that wait for the same component, within the window; or else to the end. True
        for a new group.

        `switch_s` is what loading the component for it is predicted to take, `read_s` of it on the
        disk; a request that joins a group needs no switch.
        """
        opens = not self.joins(stage.component, stage.arrived_s)
        if opens:
            group = Group(
                next(self._numbers), stage.component, stage.arrived_s, costs, switch_s, read_s
            )
            self.groups.append(group)
            self._for.setdefault(group.component, []).append(group)
            self.read_seconds += read_s
            self.seconds += switch_s + costs.batch_s
        group = self._for[stage.component][-1]
        group.stages[stage.request.id] = stage
        self._of[stage.request.id] = group
        self.seconds += group.costs.sample_s
        return opens

    def switched(self, component: str) -> None:
        """`component` is loaded now: its groups need no switch any longer."""
        for group in self._for.get(component, ()):
            self.seconds -= group.switch_s
            self.read_seconds -= group.read_s
            group.switch_s = group.read_s = 0.0

    def take(self, most: int) -> tuple[Stage, ...]:
        """The first group's first `most` stages (splitting); what is left of the group keeps its
        turn.
        """
        if self.groups:
            taken = tuple(islice(self.groups[0].stages.values(), most))
        else:
            taken = ()
        for stage in taken:
            self.remove(stage.request.id)
        return taken

    def remove(self, request_id: str) -> None:
        """The request leaves; KeyError for one that does not wait."""
        group = self._of.pop(request_id)
        del group.stages[request_id]
        self.seconds -= group.costs.sample_s
        if group.stages:
            return
        self.seconds -= group.switch_s + group.costs.batch_s
        self.read_seconds -= group.read_s
        self.groups.remove(group)
        alike = self._for[group.component]
        alike.remove(group)
        if not alike:
            del self._for[group.component]
        if not self.groups:
            self.seconds = self.read_seconds = 0.0  # or roundings would add up


def turns(groups: Iterable[Group]) -> Mapping[str, int]:
    """Per component that is waited for, the number of its first group."""
    found: dict[str, int] = {}
    for number, group in enumerate(islice(groups, REACH)):
        found.setdefault(group.component, number)
    return found


def next_to_load(
    groups: Iterable[Group], is_here: Callable[[str], bool], known: Iterable[str]
) -> tuple[str, int] | None:
    """The first component of the next groups that is not loaded here, and its group's number in the
    queue.

    Where all are, the first that is `known` to follow on what runs. It evicts none that is waited
    for, nor another known one.
    """
    for number, group in enumerate(groups):
        if not is_here(group.component):
            return group.component, number
    return next(((name, REACH) for name in known), None)
