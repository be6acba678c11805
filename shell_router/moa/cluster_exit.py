"""Judges one cluster of one run: which agents are cut off, and whether its aggregator is
skipped."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from shell_router.core.events import Degraded, Emit, ExitScored
from shell_router.core.predictors import Embedder
from shell_router.early_exit.algorithm1 import features
from shell_router.early_exit.settings import Gate
from shell_router.errors import AgentFailed, EngineError
from shell_router.moa.agent import Output
from shell_router.topology import Cluster

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The agents that are cut off, and those of which the cluster's readers forward an output
    instead of writing.
    """

    cut: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


GO_ON = Verdict()


class ClusterExit:
    """Feeds a cluster's outputs to its gate in the order they come, and reports what the gate
    decides.

    Gates that embed draw once for each completion, and score on a worker thread, one completion at
    a time. The others never wait: nothing happens between a score and its exit. A quorum has no
    gate: `grace_s` after `min_completed` agents have ended the others are cut off, whatever they
    wrote. `unfinished` are the agents of the cluster that still run.
    """

    def __init__(
        self,
        cluster: Cluster,
        embedder: Embedder | None,
        draws: random.Random,
        unfinished: Callable[[], tuple[str, ...]],
        emit: Emit,
        clock: Callable[[], float],
    ) -> None:
        assert cluster.early_exit is not None
        self.cluster = cluster
        self._id = cluster.id
        self._settings = cluster.early_exit
        self._unfinished = unfinished
        self._gate = cluster.early_exit.gate(cluster.agents)
        self._embedder = embedder
        self._draws = draws
        self._emit = emit
        self._clock = clock
        self._completed: list[str] = []
        self._lock = asyncio.Lock()

    @property
    def reads(self) -> bool:
        """Whether it reads outputs while they are written."""
        return self._gate is not None and not self._gate.embeds

    def wrote(self, agent: str, text: str, confidence: float) -> Verdict:
        """The verdict after `agent` has written `text`. Scores that cut no agent off are not
        reported.
        """
        if self._gate is not None:
            self._gate.wrote(agent, text, confidence)
        return self.dropped()

    def dropped(self) -> Verdict:
        """The verdict after an agent has failed: those that are left may agree. Raises AgentFailed
        where a quorum has none left, not even a completed one: its readers would have nothing to
        read."""
        if self._gate is None and not self._completed and not self._unfinished():
            raise AgentFailed(
                f"No agent of {self._id!r} has answered: each has failed.",
                remedy="Ask again, or name other models.",
            )
        if self._gate is None or not self.reads or not self._completed:
            return GO_ON
        return self._judged(self._gate, self._clock(), self._unfinished(), report=False)

    async def completed(self, agent: str, output: Output) -> Verdict:
        """The verdict after `agent` has ended. The agent that completes a quorum waits here for the
        others.

        For a gate that embeds, nothing is scored that could cut none off: whether any still runs is
        asked before it and again after it. An embedder that fails leaves this completion out of the
        judgement, with a warning and an event.
        """
        gate = self._gate
        confidence = output.confidence or 0.0
        if gate is None:
            self._completed.append(agent)
            if len(self._completed) != self._settings.min_completed or not self._unfinished():
                return GO_ON
            await asyncio.sleep(self._settings.grace_s)
            return Verdict(self._unfinished())
        if not gate.embeds:
            self._completed.append(agent)
            gate.completed(agent, confidence, None)
            return self._judged(gate, self._clock(), self._unfinished(), report=True)
        async with self._lock:
            if not self._unfinished():
                return GO_ON
            started_s = self._clock()
            assert self._embedder is not None, "a gate that embeds has an embedder"
            try:
                states = await self._embedder.embed(output.text)
                await asyncio.to_thread(lambda: gate.completed(agent, confidence, features(states)))
            except (
                EngineError,
                ValueError,
            ) as error:  # ValueError: what the embedder gave is no embedding
                log.warning("cluster %s is not judged on %s: %s", self._id, agent, error)
                self._emit(Degraded(self._clock(), self._id, "early_exit", str(error)))
                return GO_ON
            self._completed.append(agent)
            return self._judged(gate, started_s, self._unfinished(), report=True)

    def _judged(
        self, gate: Gate, started_s: float, left: tuple[str, ...], *, report: bool
    ) -> Verdict:
        skips = self._settings.skip_aggregation
        if not (left or skips or gate.embeds):
            return GO_ON
        judged = gate.judge(frozenset(left), self._draws.random)
        if judged is None:
            return GO_ON
        cut = left if judged.exits else ()
        if judged.exits or report:
            score = judged.score
            self._emit(
                ExitScored(
                    self._clock(),
                    started_s,
                    self._id,
                    tuple(self._completed),
                    score.confidence,
                    score.agreement,
                    score.balance,
                    score.probability,
                    draw=judged.compared_with,
                    exited=bool(cut),
                    aborted=cut,
                )
            )
        return Verdict(cut, judged.sources if skips else ())
