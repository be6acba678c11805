"""Judges one cluster of one run: which agents are cut off, and whether its aggregator is skipped."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from shell_router.core.events import Degraded, Event, ExitScored
from shell_router.core.predictors import Embedder
from shell_router.early_exit import features
from shell_router.errors import AgentFailed, EngineError
from shell_router.moa.agent import Output
from shell_router.topology import Cluster

log = logging.getLogger(__name__)

Unfinished = Callable[[], tuple[str, ...]]
"""The agents of the cluster that still run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The agents that are cut off, and those of which the cluster's readers forward an output instead of writing."""

    cut: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


GO_ON = Verdict()


class QuorumExit:
    """Cuts off a cluster's unfinished agents `grace_s` after `min_completed` of it have ended, whatever they wrote."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.early_exit is not None
        self._cluster, self._settings = cluster, cluster.early_exit
        self._completed = 0

    def wrote(self, agent: str, text: str, confidence: float, unfinished: Unfinished) -> Verdict:
        """Nothing is read."""
        return GO_ON

    def dropped(self, unfinished: Unfinished) -> Verdict:
        """Raises AgentFailed where no agent of the cluster is left: its readers would have nothing to read."""
        if not self._completed and not unfinished():
            raise AgentFailed(
                f"No agent of {self._cluster.id!r} has answered: each has failed.",
                remedy="Ask again, or name other models.",
            )
        return GO_ON

    async def completed(self, agent: str, output: Output, unfinished: Unfinished) -> Verdict:
        """The agent that completes the quorum waits here for the others."""
        self._completed += 1
        if self._completed != self._settings.min_completed or not unfinished():
            return GO_ON
        await asyncio.sleep(self._settings.grace_s)
        return Verdict(unfinished())


class ClusterExit:
    """Feeds a cluster's outputs to its gate in the order they come, and reports what the gate decides.

    Gates that embed draw once for each completion, and score on a worker thread, one completion at a time. The others
    never wait: nothing happens between a score and its exit.
    """

    def __init__(
        self,
        cluster: Cluster,
        embedder: Embedder | None,
        draws: random.Random,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        assert cluster.early_exit is not None
        self._id = cluster.id
        self._skips = cluster.early_exit.skip_aggregation
        self._gate = cluster.early_exit.gate(cluster.agents)
        self._embedder = embedder
        self._draws = draws
        self._emit = emit
        self._clock = clock
        self._completed: list[str] = []
        self._lock = asyncio.Lock()

    def wrote(self, agent: str, text: str, confidence: float, unfinished: Unfinished) -> Verdict:
        """The verdict after `agent` has written `text`. Scores that cut no agent off are not reported."""
        self._gate.wrote(agent, text, confidence)
        return self.dropped(unfinished)

    def dropped(self, unfinished: Unfinished) -> Verdict:
        """The verdict after an agent has failed: those that are left may agree."""
        if self._gate.embeds or not self._completed:
            return GO_ON
        return self._judged(self._clock(), unfinished(), report=False)

    async def completed(self, agent: str, output: Output, unfinished: Unfinished) -> Verdict:
        """The verdict after `agent` has ended.

        For a gate that embeds, `unfinished` is asked before scoring, which is not worth its cost if none is left, and
        again after it. An embedder that fails leaves this completion out of the judgement, with a warning and an event.
        """
        if not self._gate.embeds:
            self._completed.append(agent)
            self._gate.completed(agent, output.confidence or 0.0, None)
            return self._judged(self._clock(), unfinished(), report=True)
        async with self._lock:
            if not unfinished():
                return GO_ON
            started_s = self._clock()
            try:
                await self._embed(agent, output)
            except (EngineError, ValueError) as error:  # ValueError: what the embedder gave is no embedding
                log.warning("cluster %s is not judged on %s: %s", self._id, agent, error)
                self._emit(Degraded(self._clock(), self._id, "early_exit", str(error)))
                return GO_ON
            self._completed.append(agent)
            return self._judged(started_s, unfinished(), report=True)

    async def _embed(self, agent: str, output: Output) -> None:
        assert self._embedder is not None, "a gate that embeds has an embedder"
        states = await self._embedder.embed(output.text)
        confidence = output.confidence or 0.0
        await asyncio.to_thread(lambda: self._gate.completed(agent, confidence, features(states)))

    def _judged(self, started_s: float, left: tuple[str, ...], *, report: bool) -> Verdict:
        if not (left or self._skips or self._gate.embeds):
            return GO_ON
        judged = self._gate.judge(frozenset(left), self._draws.random)
        if judged is None:
            return GO_ON
        cut = left if judged.exits else ()
        if judged.exits or report:
            score, completed = judged.score, tuple(self._completed)
            self._emit(
                ExitScored(
                    self._clock(),
                    started_s,
                    self._id,
                    completed,
                    score.confidence,
                    score.agreement,
                    score.balance,
                    score.probability,
                    draw=judged.compared_with,
                    exited=bool(cut),
                    aborted=cut,
                )
            )
        return Verdict(cut, judged.sources if self._skips else ())
