"""Judges one cluster of one run: cuts off agents, or skips the aggregator."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from shell_router.core.events import Degraded, Emit, ExitScored
from shell_router.core.predictors import Embedder
from shell_router.early_exit.algorithm1 import Score, features
from shell_router.errors import AgentFailed, EngineError
from shell_router.moa.agent import AgentOutput
from shell_router.topology import Cluster

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The effect of a judgement.

    Attributes:
        cut: Agents to abort.
        sources: Agents whose output the cluster's readers forward instead of generating, the most
            confident first.
    """

    cut: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


GO_ON = Verdict()


class ClusterExit:
    """The early exit of a cluster: feeds outputs to its gate in their order, reports its decisions.

    A gate that embeds draws once per completion, and scores on a worker thread, one completion at a
    time. Other gates never wait: nothing happens between a score and its exit.

    Args:
        cluster: A cluster with early exit.
        embedder: Needed by policies that embed.
        draws: Gives the draws of stochastic policies.
        unfinished: Gives the agents of the cluster that still run.
        emit: Receives events.
        clock: Gives monotonic seconds.
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
        self._needs = cluster.early_exit.needs
        self._unfinished = unfinished
        self._gate = cluster.early_exit.new_gate(cluster.agents)
        self._embedder = embedder
        self._draws = draws
        self._emit = emit
        self._clock = clock
        self._completed: list[str] = []
        self._lock = asyncio.Lock()

    @property
    def reads_text(self) -> bool:
        """Whether it reads outputs while they are written."""
        return self._needs.reads_streams

    def judge_text(self, agent: str, text: str, confidence: float) -> Verdict:
        """Judge after `agent` has written `text`. Scores without an exit are not reported."""
        self._gate.add_text(agent, text, confidence)
        return self.judge_failure()

    def judge_failure(self) -> Verdict:
        """Judge after an agent has failed: the others may agree.

        Raises:
            AgentFailed: The policy judges no outputs, and all agents have failed, so readers would
                have nothing to read.
        """
        if not (self._needs.judges or self._completed or self._unfinished()):
            raise AgentFailed(
                f"No agent of {self._id!r} has answered: each has failed.",
                remedy="Ask again, or name other models.",
            )
        if self.reads_text and self._completed:
            return self._judge(self._clock(), report=False)
        return GO_ON

    async def judge_output(self, agent: str, output: AgentOutput) -> Verdict:
        """Judge after `agent` has ended.

        The agent whose completion decides a quorum waits here while the others have their grace.
        """
        if self._needs.embeds:
            return await self._judge_embedding(agent, output)
        self._completed.append(agent)
        self._gate.add_output(agent, output.text, output.confidence or 0.0, None)
        verdict = self._judge(self._clock(), report=True)
        if verdict.cut and self._needs.takes_grace:
            await asyncio.sleep(self._settings.grace_s)
            return replace(verdict, cut=self._unfinished())
        return verdict

    async def _judge_embedding(self, agent: str, output: AgentOutput) -> Verdict:
        """Embed and judge, if any agent still runs.

        If the embedder fails, this completion is left out of the judgement, with a warning and an
        event.
        """
        async with self._lock:
            if not self._unfinished():
                return GO_ON
            started_s = self._clock()
            assert self._embedder is not None, "a policy that embeds has an embedder"
            confidence = output.confidence or 0.0
            try:
                states = await self._embedder.embed(output.text)
                await asyncio.to_thread(
                    lambda: self._gate.add_output(agent, output.text, confidence, features(states))
                )
            # ValueError: the embedder's answer is no embedding
            except (EngineError, ValueError) as error:
                log.warning("cluster %s is not judged on %s: %s", self._id, agent, error)
                self._emit(Degraded(self._clock(), self._id, "early_exit", str(error)))
                return GO_ON
            self._completed.append(agent)
            return self._judge(started_s, report=True)

    def _judge(self, started_s: float, *, report: bool) -> Verdict:
        running = self._unfinished()
        skips = self._settings.skip_aggregation
        if not (running or skips or self._needs.embeds):
            return GO_ON
        judged = self._gate.judge(frozenset(running), self._draws.random)
        if judged is None:
            return GO_ON
        cut = running if judged.exits else ()
        if judged.score is not None and (judged.exits or report):
            self._report(judged.score, judged.compared_with, started_s, cut)
        return Verdict(cut, judged.sources if skips else ())

    def _report(
        self, score: Score, compared_with: float, started_s: float, cut: tuple[str, ...]
    ) -> None:
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
                draw=compared_with,
                exited=bool(cut),
                aborted=cut,
            )
        )
