"""Runs one request through an agent graph."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from agent_cache import AgentPromptCache, End, LogWriter
from shell_router.core.embedding import Embedder
from shell_router.core.events import AgentErred, AgentStopped, Event
from shell_router.core.model import ServedModel
from shell_router.early_exit import EarlyExit
from shell_router.errors import AgentFailed, ConfigError, DeadlineExceeded, PromptTooLong, ShellRouterError
from shell_router.execution.agent_run import AgentRun, Output, Wrote, could_have_written
from shell_router.execution.choosing import ModelChooser
from shell_router.execution.cluster_exit import ClusterExit, Verdict
from shell_router.execution.in_flight_exit import InFlightExit
from shell_router.execution.planning import Planned, plan
from shell_router.execution.preparation import Preparation, PreparedAgent
from shell_router.execution.requests import AgentUsage, Answer, CutOff, MoaRequest
from shell_router.topology import Agent, Cluster, Topology

Judge = ClusterExit | InFlightExit


class Executor:
    """Answers requests by walking topologies. Between requests it keeps only how fast each model was."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        cache: AgentPromptCache,
        embedder: Embedder | None,
        *,
        clock: Callable[[], float],
        chooser: ModelChooser | None = None,
    ) -> None:
        self._models = models
        self._cache = cache
        self._embedder = embedder
        self._clock = clock
        self._chooser = chooser or ModelChooser(models, clock=clock)
        self._pace = self._chooser.pace

    async def run(self, topology: Topology, request: MoaRequest, emit: Callable[[Event], None]) -> Answer:
        """Run `request` to the root's end, telling `emit` what happens, as it happens.

        Raises UnknownModel and PromptTooLong before anything runs where that can be known, AgentFailed (or the
        error itself, where there is but one agent), PromptTooLong or DeadlineExceeded later. However it ends,
        cancellation included, every engine request of it has been aborted, every task has ended, and its cache logs
        are gone.
        """
        choices: list[Event] = []  # told once nothing can be refused any more: a stream's head goes out with the first
        planned = await plan(self._chooser, self._models, topology, request, choices.append)
        with self._chooser.activity.program(planned.expected(self._pace, request), emit) as watched:
            return await self._answer(planned, request, choices, watched)

    async def _answer(
        self, planned: Planned, request: MoaRequest, choices: Sequence[Event], emit: Callable[[Event], None]
    ) -> Answer:
        topology = planned.topology
        prepared = Preparation(topology, request, self._models, self._pace, planned.learned).agents()
        exits = self._cluster_exits(topology, request, emit)
        for choice in choices:
            emit(choice)
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._run(topology, prepared, exits, emit).answer()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{topology.name!r} gave no answer within {request.timeout_s:g} s.",
                remedy="Allow more time, or ask a smaller topology.",
            ) from error
        finally:
            await self._cache.forget(request.tenant, request.id)

    def _run(
        self,
        topology: Topology,
        prepared: Mapping[str, PreparedAgent],
        exits: dict[str, Judge],
        emit: Callable[[Event], None],
    ) -> "_Run":
        def agent_run(agent: PreparedAgent, writer: LogWriter, wrote: Wrote) -> AgentRun:
            cache, pace = self._cache, self._pace
            return AgentRun(agent.filling, agent.decoding, writer, cache, pace, emit, clock=self._clock, wrote=wrote)

        return _Run(topology, prepared, exits, self._cache, agent_run, emit, self._clock)

    def _cluster_exits(
        self, topology: Topology, request: MoaRequest, emit: Callable[[Event], None]
    ) -> dict[str, Judge]:
        """The judge of each cluster that has early exit, by cluster id."""

        def judge(cluster: Cluster, settings: EarlyExit) -> Judge:
            if not settings.embeds:
                return InFlightExit(cluster, settings, emit, clock=self._clock)
            if self._embedder is None:
                raise ConfigError(
                    f"Topology {topology.name!r} asks for early exit, but no embedder is configured.",
                    remedy="Set `embedder` in the configuration, or turn early_exit off.",
                )
            draws = random.Random(f"{request.seed}/{cluster.id}")
            return ClusterExit(cluster, settings, self._embedder, draws, emit, clock=self._clock)

        return {one.id: judge(one, one.early_exit) for one in topology.clusters if one.early_exit}


class _Run:
    """One request's agents: each a task that goes on as soon as its own precursors let it (localized readiness)."""

    def __init__(
        self,
        topology: Topology,
        prepared: Mapping[str, PreparedAgent],
        exits: dict[str, Judge],
        cache: AgentPromptCache,
        agent_run: Callable[[PreparedAgent, LogWriter, Wrote], AgentRun],
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._topology = topology
        self._prepared = prepared
        self._exits = exits
        self._cache = cache
        self._agent_run = agent_run
        self._emit = emit
        self._clock = clock
        self._writers: dict[str, LogWriter] = {}
        self._runs: dict[str, AgentRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outputs: dict[str, Output] = {}
        self._gone: dict[str, CutOff | Literal["failed"]] = {}

    async def answer(self) -> Answer:
        """Run all agents; the root's end ends the run."""
        writers = await asyncio.gather(*(self._cache.create(agent.key) for agent in self._prepared.values()))
        for (name, prepared), writer in zip(self._prepared.items(), writers, strict=True):
            self._writers[name] = writer
            self._runs[name] = self._agent_run(prepared, writer, self._watched(name))
        try:
            async with asyncio.TaskGroup() as group:
                for agent in self._topology.agents.values():
                    self._tasks[agent.id] = group.create_task(self._agent(agent))
            root = self._outputs[self._topology.root.id]
            usage = {agent: self._usage(agent) for agent in self._prepared}
            return Answer(root.text, root.finish.reason, usage, root.confidence)
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
            raise first from first.__cause__
        finally:
            # both refer back to this object: what they hold would wait for the garbage collector
            self._runs.clear()
            self._tasks.clear()

    async def _agent(self, agent: Agent) -> None:
        try:
            output = await self._runs[agent.id].run()
        except ShellRouterError as error:
            self._failed(agent, error)
            return
        self._outputs[agent.id] = output
        self._writers[agent.id].end(End.FINISHED)
        if agent.id == self._topology.root.id:
            self._end_all_but(agent.id)
        else:
            await self._judge(agent.id, output)

    def _end_all_but(self, root: str) -> None:
        """Only judgements that came too late are left."""
        for agent, task in self._tasks.items():
            if agent != root:
                task.cancel()

    def _failed(self, agent: Agent, error: ShellRouterError) -> None:
        dropped = agent.on_failure == "drop" and agent.id != self._topology.root.id
        self._gone[agent.id] = "failed"
        self._writers[agent.id].end(End.FAILED, str(error))
        self._emit(AgentErred(self._clock(), agent.id, str(error), dropped))
        if dropped:
            self._judge_without(agent.id)
            self._cut_unneeded()
        elif isinstance(error, PromptTooLong | AgentFailed) or len(self._topology.agents) == 1:
            raise error
        else:
            raise AgentFailed(
                f"Agent {agent.id!r} of {self._topology.name!r} failed: {error}",
                remedy="Ask again, or set on_failure: drop to go on without this agent.",
            ) from error

    def _watched(self, agent: str) -> Wrote:
        """What is done whenever `agent` has written something: its cluster is judged."""
        cluster = self._topology.cluster_of.get(agent)
        if cluster is None or cluster.id not in self._exits:
            return lambda _text, _confidence: False
        unfinished = partial(self._unfinished, cluster)

        def wrote(text: str, confidence: float) -> bool:
            if judge := self._exits.get(cluster.id):
                self._apply(judge.wrote(agent, text, confidence, unfinished), cluster)
            return agent in self._gone

        return wrote

    async def _judge(self, agent: str, output: Output) -> None:
        cluster = self._topology.cluster_of.get(agent)
        if cluster is not None and (judge := self._exits.get(cluster.id)):
            self._apply(await judge.completed(agent, output, partial(self._unfinished, cluster)), cluster)
            if not self._unfinished(cluster):
                self._exits.pop(cluster.id, None)  # it holds what all of them wrote

    def _judge_without(self, agent: str) -> None:
        cluster = self._topology.cluster_of.get(agent)
        if cluster is not None and (judge := self._exits.get(cluster.id)):
            self._apply(judge.dropped(partial(self._unfinished, cluster)), cluster)

    def _unfinished(self, cluster: Cluster) -> tuple[str, ...]:
        return tuple(name for name in cluster.agents if self._is_running(name))

    def _apply(self, verdict: Verdict, cluster: Cluster) -> None:
        if verdict.source is not None:
            output = self._outputs[verdict.source]
            for reader in self._topology.readers_of(cluster):
                if self._is_running(reader) and could_have_written(output, self._prepared[reader].decoding.sampling):
                    self._runs[reader].pass_on(verdict.source, output)
        for straggler in verdict.cut:
            self._cut(straggler, "early_exit")
        if verdict.cut:
            self._cut_unneeded()

    def _is_running(self, agent: str) -> bool:
        return agent not in self._outputs and agent not in self._gone

    def _cut_unneeded(self) -> None:
        needed = self._topology.needed(self._gone)
        for agent in self._topology.agents:
            if agent not in needed and self._is_running(agent):
                self._cut(agent, "unneeded")

    def _cut(self, agent: str, why: CutOff) -> None:
        """End the agent's log first, so that its successors go on at once, then its task and engine request."""
        self._gone[agent] = why
        self._writers[agent].end(End.ABORTED, why)
        self._emit(AgentStopped(self._clock(), agent, why))
        self._tasks[agent].cancel()

    def _usage(self, agent: str) -> AgentUsage:
        model, run = self._topology.agents[agent].model, self._runs[agent]
        if agent in self._outputs and run.passes_on:
            return AgentUsage(model, 0, 0, 0, "passed_on")
        if agent in self._outputs:
            finish = self._outputs[agent].finish
            return AgentUsage(model, finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens, "finished")
        return AgentUsage(model, run.prompt_tokens, run.decoded, 0, self._gone[agent])
