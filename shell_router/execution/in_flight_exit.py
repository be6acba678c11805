"""Judges one cluster of one run while its agents still write (see `early_exit.in_flight`)."""

from collections.abc import Callable

from shell_router.core.events import Event
from shell_router.early_exit import NO_QUORUM, EarlyExit, InFlightGate
from shell_router.execution.agent_run import Output
from shell_router.execution.cluster_exit import GO_ON, Unfinished, Verdict, exit_scored
from shell_router.topology import Cluster


class InFlightExit:
    """Takes what the agents write in the order it comes. Never waits: nothing happens between a score and its exit."""

    def __init__(
        self,
        cluster: Cluster,
        settings: EarlyExit,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._id = cluster.id
        self._settings = settings
        self._gate = InFlightGate(cluster.agents, quorum=settings.min_completed)
        self._emit = emit
        self._clock = clock
        self._completed: list[str] = []

    def wrote(self, agent: str, text: str, confidence: float, unfinished: Unfinished) -> Verdict:
        """What follows from `agent` having written `text`. Scores that cut nobody off are not told."""
        self._gate.wrote(agent, text, confidence)
        return self._judged(unfinished(), tell=False) if self._completed else GO_ON

    def dropped(self, unfinished: Unfinished) -> Verdict:
        """What follows from an agent having failed: those that are left may agree."""
        return self._judged(unfinished(), tell=False) if self._completed else GO_ON

    async def completed(self, agent: str, _output: Output, unfinished: Unfinished) -> Verdict:
        """What follows from `agent` having ended. The last one matters only where outputs are passed on."""
        self._completed.append(agent)
        self._gate.completed(agent)
        return self._judged(unfinished(), tell=True)

    def _judged(self, left: tuple[str, ...], *, tell: bool) -> Verdict:
        if not (left or self._settings.pass_on):
            return GO_ON
        started_s = self._clock()
        score = self._gate.score(frozenset(left))
        exited = score is not NO_QUORUM and score.probability >= self._settings.threshold
        cut = left if exited else ()
        if exited or tell:
            reached, completed = self._settings.threshold, tuple(self._completed)
            self._emit(exit_scored(self._clock(), started_s, self._id, completed, score, reached, cut))
        return Verdict(cut, self._gate.surest(frozenset(left)) if exited and self._settings.pass_on else None)
