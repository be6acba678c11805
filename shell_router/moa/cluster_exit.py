"""Judges one cluster of one run: cuts off agents, or skips the aggregator."""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from shell_router.core.events import Degraded, ExitScored
from shell_router.core.predictors import Embedder
from shell_router.early_exit.algorithm1 import Score, features
from shell_router.early_exit.evidence import LEVELS, Judged
from shell_router.early_exit.gate import Judgement
from shell_router.errors import AgentFailed, ConfigError, EngineError
from shell_router.moa.agent import RunContext
from shell_router.moa.planning import Outline, Plan
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

NO_SCORE = 2.0
"""A threshold that no score reaches."""


class ClusterExit:
    """The early exit of a cluster: feeds outputs to its gate in their order, reports its decisions.

    A gate that embeds draws once per completion, and scores on a worker thread, one completion at a
    time. Other gates never wait: nothing happens between a score and its exit.

    Args:
        cluster: A cluster with early exit.
        context: The run's context; its evidence calibrates thresholds.
        embedder: Needed by policies that embed.
        unfinished: Gives the agents of the cluster that still run.
        seed: Fixes the draws.
        plan: The plan of a topology's run, which calibrated thresholds and stragglers need.
        decoding_s: Gives the seconds that an agent has decoded so far, for stragglers.

    Raises:
        ConfigError: The policy embeds, and no embedder is configured.
    """

    def __init__(
        self,
        cluster: Cluster,
        context: RunContext,
        embedder: Embedder | None,
        unfinished: Callable[[], tuple[str, ...]],
        seed: object,
        plan: Plan | None = None,
        decoding_s: Callable[[str], float] = lambda agent: 0.0,
    ) -> None:
        assert cluster.early_exit is not None
        if cluster.early_exit.needs.embeds and embedder is None:
            raise ConfigError(
                f"{cluster.id!r} asks for early exit, but no embedder is configured.",
                remedy="Set `embedder` in the configuration, or turn early_exit off.",
            )
        self.cluster = cluster
        self._id = cluster.id
        self._settings = cluster.early_exit
        self._needs = cluster.early_exit.needs
        self._unfinished = unfinished
        self._embedder = embedder
        self._draws = random.Random(f"{seed}/{cluster.id}")
        self._emit = context.emit
        self._clock = context.clock
        self._context = context
        self._plan = plan
        self._decoding_s = decoding_s
        self._limits_s = self._limit_decoding()
        threshold = self._find_threshold()
        self.watches = threshold == math.inf
        self._watched: list[str | None] = []  # the leading answer when a level was reached first
        settings = replace(self._settings, threshold=min(threshold, NO_SCORE))
        self._gate = settings.new_gate(cluster.agents)
        self._completed: list[str] = []
        self._lock = asyncio.Lock()

    @property
    def _outline(self) -> Outline:
        assert self._plan is not None, "only topologies set what needs it"
        return self._plan.outline

    def _find_threshold(self) -> float:
        """Return the score at which the cluster exits, inf if it only watches.

        A run that is repeated keeps its thresholds.
        """
        if self._settings.max_changed_percent is None:
            return self._settings.threshold
        journal = self._context.journal
        if journal is None:
            return self._calibrate()
        name = f"threshold of {self._id}"
        if name not in journal.kept:
            journal.kept[name] = str(self._calibrate())
            journal.add("kept", name, journal.kept[name])
        return float(journal.kept[name])

    def _calibrate(self) -> float:
        evidence = self._context.evidence
        threshold = evidence.find_threshold(self._judged)
        if threshold == math.inf:
            few = "Too few complete runs show that an exit would not change the answer."
            self._emit(Degraded(self._clock(), self._id, "evidence", few))
        request = self._outline.request
        draws = random.Random(f"early_exit/{request.seed}/{request.question[-1000:]}")
        if draws.random() < evidence.share:
            return math.inf
        return threshold

    @cached_property
    def _judged(self) -> Judged:
        topology = self._outline.topology
        agents = [topology.agents[name] for name in self.cluster.agents]
        models = tuple([agent.model for agent in agents])
        return Judged(topology.name, models, self._settings, hash(repr(agents)))

    def _limit_decoding(self) -> Mapping[str, float]:
        """Return the seconds of decoding after which each agent is a straggler; empty for never.

        The length is the cluster's, as an agent's own mean may hold outputs that ran to their
        limit; the seconds per token are those of its model.
        """
        # batches wait for online requests between their tokens
        if not self._settings.straggler_factor or self._outline.request.tier == "batch":
            return {}
        outline = self._outline
        expected = [outline.hints[name].output_tokens for name in self.cluster.agents]
        tokens = [count for count in expected if count]
        agents = [outline.topology.agents[name] for name in self.cluster.agents]
        writing = [agent for agent in agents if not agent.votes]
        token_s = {agent.id: outline.estimates.get_token_s(agent.model) for agent in writing}
        paces = {name: seconds for name, seconds in token_s.items() if seconds is not None}
        if tokens and len(paces) == len(token_s):
            longest_tokens = self._settings.straggler_factor * median(tokens)
            return {name: longest_tokens * seconds for name, seconds in paces.items()}
        unknown = "A model of the cluster has not been measured yet."
        self._emit(Degraded(self._clock(), self._id, "stragglers", unknown))
        return {}

    def learn(self, answers: Sequence[str]) -> None:
        """Compare the leading answers of exits with the `answers` of the cluster's readers."""
        journal = self._context.journal
        if not answers or (journal is not None and journal.repeats):
            return
        gates = [cluster.early_exit for cluster in self._outline.topology.clusters]
        calibrated = [gate for gate in gates if gate is not None and gate.max_changed_percent]
        assert self._settings.max_changed_percent is not None
        allowed = self._settings.max_changed_percent / 100 / len(calibrated)
        self._context.evidence.observe(self._judged, self._watched, answers, allowed)

    @property
    def only_forwards(self) -> bool:
        """Whether it judges only what a reader may forward."""
        return self._needs.forwards and self._settings.skip_aggregation

    @property
    def reads_text(self) -> bool:
        """Whether it reads outputs while they are written."""
        return self._needs.reads_streams

    def judge_text(self, agent: str, text: str, confidence: float) -> Verdict:
        """Judge after `agent` has written `text`. Scores without an exit are not reported."""
        self.add_text(agent, text, confidence)
        return self.judge_failure()

    def add_text(self, agent: str, text: str, confidence: float) -> None:
        """Read what `agent` has written, without judging it."""
        self._gate.add_text(agent, text, confidence)

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

    async def judge_output(self, agent: str, text: str, confidence: float | None) -> Verdict:
        """Judge after `agent` has ended.

        The agent whose completion decides a quorum waits here while the others have their grace,
        or until they are stragglers. An agent request's output without the confidence that is
        needed is left out.
        """
        if confidence is None and self._needs.judges and self._plan is None:
            return self._leave_out(agent, "Its confidence is unknown: ask for it.")
        confidence = confidence or 0.0
        if self._needs.embeds:
            verdict = await self._judge_embedding(agent, text, confidence)
        else:
            self._completed.append(agent)
            self._gate.add_output(agent, text, confidence, None)
            verdict = self._judge(self._clock(), report=True)
        if verdict.cut and self._needs.takes_grace:
            await asyncio.sleep(self._settings.grace_s)
            return Verdict(self._unfinished())
        is_enough = len(self._completed) == self._settings.min_completed
        if verdict == GO_ON and is_enough and self._limits_s:
            return await self._await_stragglers()
        return verdict

    async def _await_stragglers(self) -> Verdict:
        """Return once all agents that still run have decoded longer than the limit."""
        while running := self._unfinished():
            # an agent that votes has no limit, and ends once the others have
            left_s = [
                self._limits_s[name] - self._decoding_s(name)
                for name in running
                if name in self._limits_s
            ]
            if not left_s:
                return GO_ON
            wait_s = max(left_s)
            if wait_s <= 0:
                log.info("cluster %s: %s decoded too long", self._id, ", ".join(running))
                return Verdict(running)
            await asyncio.sleep(wait_s + 0.001)  # by rounding, a clock may end just before it
        return GO_ON

    def _leave_out(self, agent: str, why: object) -> Verdict:
        """Judge without this completion, with a warning and an event."""
        log.warning("cluster %s is not judged on %s: %s", self._id, agent, why)
        self._emit(Degraded(self._clock(), self._id, "early_exit", str(why)))
        return GO_ON

    async def _judge_embedding(self, agent: str, text: str, confidence: float) -> Verdict:
        """Embed and judge, if any agent still runs; leave out what the embedder fails on."""
        async with self._lock:
            if not self._unfinished():
                return GO_ON
            started_s = self._clock()
            assert self._embedder is not None, "a policy that embeds has an embedder"
            try:
                states = await self._embedder.embed(text)
                await asyncio.to_thread(
                    lambda: self._gate.add_output(agent, text, confidence, features(states))
                )
            # ValueError: the embedder's answer is no embedding
            except (EngineError, ValueError) as error:
                return self._leave_out(agent, error)
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
        if self.watches:
            self._watch(judged)
        cut = running if judged.exits else ()
        if judged.score is not None and (judged.exits or report):
            self._report(judged.score, judged.compared_with, started_s, cut)
        return Verdict(cut, judged.sources if skips else ())

    def _watch(self, judged: Judgement) -> None:
        """Note the leading answer for the levels that are reached first."""
        if judged.score is not None:
            # 0.29 * 100 is less than 29
            level = int(judged.score.probability * LEVELS + 1e-9)
            self._watched += [judged.answer] * (level + 1 - len(self._watched))

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
