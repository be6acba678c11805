"""Judges one cluster of one run: who may be cut off after each completion (Faster-MoA, 4.2)."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from shell_router.core.embedding import Embedder
from shell_router.core.events import Degraded, Event, ExitScored
from shell_router.early_exit import ClusterGate, EarlyExit, Score, decide, features
from shell_router.errors import EngineError
from shell_router.execution.agent_run import Output
from shell_router.topology import Cluster

log = logging.getLogger(__name__)

Unfinished = Callable[[], tuple[str, ...]]
"""Tells which agents of the cluster still run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is cut off, and whose output the cluster's readers pass on instead of writing; mostly nobody."""

    cut: tuple[str, ...] = ()
    source: str | None = None


GO_ON = Verdict()


class ClusterExit:
    """Takes completions in the order they came; each draws once. Scoring runs on a worker thread."""

    def __init__(
        self,
        cluster: Cluster,
        settings: EarlyExit,
        embedder: Embedder,
        draws: random.Random,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._id = cluster.id
        self._settings = settings
        self._gate = ClusterGate(settings)
        self._embedder = embedder
        self._draws = draws
        self._emit = emit
        self._clock = clock
        self._completed: list[str] = []
        self._turn = asyncio.Lock()

    def wrote(self, _agent: str, _text: str, _confidence: float, _unfinished: Unfinished) -> Verdict:
        """Nothing: only complete outputs are judged here."""
        return GO_ON

    def dropped(self, _unfinished: Unfinished) -> Verdict:
        """Nothing: what is complete has been judged."""
        return GO_ON

    async def completed(self, agent: str, output: Output, unfinished: Unfinished) -> Verdict:
        """The agents to cut off now that `agent` has ended.

        `unfinished` is asked before scoring, which is not worth its cost when nobody is left, and again after it. An
        embedder that fails leaves this completion out of the judgement, with a warning and an event.
        """
        async with self._turn:
            if not unfinished():
                return GO_ON
            started_s = self._clock()
            try:
                score = await self._score(output)
            except (EngineError, ValueError) as error:  # ValueError: what it said is no embedding
                log.warning("cluster %s is not judged on %s: %s", self._id, agent, error)
                self._emit(Degraded(self._clock(), self._id, "early_exit", str(error)))
                return GO_ON
            self._completed.append(agent)
            return Verdict(self._decide(score, started_s, unfinished())) if score else GO_ON

    async def _score(self, output: Output) -> Score | None:
        states = await self._embedder.embed(output.text)
        return await asyncio.to_thread(lambda: self._gate.complete(output.confidence or 0.0, features(states)))

    def _decide(self, score: Score, started_s: float, left: tuple[str, ...]) -> tuple[str, ...]:
        draw = self._draws.random()
        exited = bool(left) and decide(score, self._settings, draw)
        cut = left if exited else ()
        completed = tuple(self._completed)
        self._emit(exit_scored(self._clock(), started_s, self._id, completed, score, draw, cut))
        return cut


def exit_scored(
    at_s: float,
    started_s: float,
    cluster: str,
    completed: tuple[str, ...],
    score: Score,
    compared_with: float,
    cut: tuple[str, ...],
) -> ExitScored:
    """What is told of one judgement; `compared_with` is the draw, or what else the score had to reach."""
    return ExitScored(
        at_s,
        started_s,
        cluster,
        completed,
        score.confidence,
        score.agreement,
        score.balance,
        score.probability,
        draw=compared_with,
        exited=bool(cut),
        aborted=cut,
    )
