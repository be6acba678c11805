"""The queue of one executor: requests for the same expert stand together, and leave in batches (CoServe, section 4.2).

The paper groups "within a defined window" and does not define it. Ours is a time: nobody is overtaken by a request that
came `window_s` later or more. A window of 0 is first come, first served, in which only neighbours share a batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from shell_router.errors import ConfigError
from shell_router.expert_pools.values import Costs, Stage


@dataclass(slots=True, eq=False)
class Group:
    """Stages at one expert that stand together, by request id, in the order of their arrival."""

    expert: str
    opened_s: float
    costs: Costs
    switch_s: float
    read_s: float = 0.0
    stages: dict[str, Stage] = field(default_factory=dict)
    ahead: "Group | None" = None
    behind: "Group | None" = None

    @property
    def seconds(self) -> float:
        """What it is predicted to take: K + B and the switch for its first request, K for each further one."""
        return self.switch_s + self.costs.batch_seconds(len(self.stages))


class WaitingLine:
    """Groups in the order in which they were opened."""

    def __init__(self, window_s: float) -> None:
        if window_s < 0:
            raise ConfigError(f"window_s is {window_s}.", remedy="Give 0 or more seconds.")
        self._window_s = window_s
        self._groups: dict[int, Group] = {}
        self._for: dict[str, list[Group]] = {}
        self._last: Group | None = None
        self._of: dict[str, Group] = {}
        self.seconds = 0.0
        self.read_seconds = 0.0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    @property
    def groups(self) -> Iterator[Group]:
        """From the first to the last."""
        return iter(self._groups.values())

    @property
    def first(self) -> Group | None:
        """The group whose turn it is."""
        return next(self.groups, None)

    def joins(self, expert: str, now_s: float) -> bool:
        """Whether a request for `expert` that comes now would stand with others that wait for it.

        It overtakes every group behind theirs; the one right behind was opened first of them.
        """
        group = self._newest(expert)
        return group is not None and (group.behind is None or now_s - group.behind.opened_s < self._window_s)

    def waits_for(self, expert: str) -> bool:
        """Whether anybody waits for `expert`."""
        return expert in self._for

    def add(self, stage: Stage, costs: Costs, switch_s: float, read_s: float = 0.0) -> bool:
        """Behind those that wait for the same expert, within the window; or else at the end, which it tells by True.

        `switch_s` is what loading the expert for it is predicted to take, `read_s` of it on the disk; whoever joins a
        group needs no switch.
        """
        group = self._newest(stage.expert)
        joins = group is not None and self.joins(stage.expert, stage.arrived_s)
        if group is None or not joins:
            group = self._append(Group(stage.expert, stage.arrived_s, costs, switch_s, read_s))
            self.read_seconds += read_s
            self.seconds += switch_s + costs.batch_s
        group.stages[stage.request.id] = stage
        self._of[stage.request.id] = group
        self.seconds += group.costs.sample_s
        return not joins

    def switched(self, expert: str) -> None:
        """`expert` is loaded now: nobody who waits for it needs a switch any longer."""
        for group in self._for.get(expert, ()):
            self.seconds -= group.switch_s
            self.read_seconds -= group.read_s
            group.switch_s = group.read_s = 0.0

    def _newest(self, expert: str) -> Group | None:
        """The last of its groups: the only one that can still be joined."""
        groups = self._for.get(expert)
        return groups[-1] if groups else None

    def _append(self, group: Group) -> Group:
        group.ahead = self._last
        if self._last is not None:
            self._last.behind = group
        self._last = group
        self._groups[id(group)] = group
        self._for.setdefault(group.expert, []).append(group)
        return group

    def take(self, most: int) -> tuple[Stage, ...]:
        """The first group's first `most` stages (splitting); what is left of the group keeps its turn."""
        group = self.first
        if group is None:
            return ()
        taken = tuple(islice(group.stages.values(), most))
        for stage in taken:
            self.remove(stage.request.id)
        return taken

    def remove(self, request_id: str) -> None:
        """Whoever waits no longer leaves; KeyError for who does not wait."""
        group = self._of.pop(request_id)
        del group.stages[request_id]
        self.seconds -= group.costs.sample_s
        if not group.stages:
            self._drop(group)

    def _drop(self, group: Group) -> None:
        self.seconds -= group.switch_s + group.costs.batch_s
        self.read_seconds -= group.read_s
        del self._groups[id(group)]
        alike = self._for[group.expert]
        alike.remove(group)
        if not alike:
            del self._for[group.expert]
        if group.ahead is not None:
            group.ahead.behind = group.behind
        if group.behind is not None:
            group.behind.ahead = group.ahead
        else:
            self._last = group.ahead
        if not self._groups:
            self.seconds = self.read_seconds = 0.0  # or roundings would add up
