"""Runs one request through an agent graph, to a single model, or through steps, each of which is
one of these.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, Literal

from agent_cache import AgentPromptCache, Chunk, End, LogKey, LogWriter
from shell_router.core.engine import ServedModel
from shell_router.core.events import (
    AgentErred,
    AgentStarted,
    AgentStopped,
    AggregationSkipped,
    Emit,
    ModelChosen,
)
from shell_router.core.predictors import Embedder
from shell_router.early_exit.answers import Ballot, ballot, elected
from shell_router.errors import (
    AgentFailed,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    PromptTooLong,
    ShellRouterError,
)
from shell_router.moa.agent import AgentRun, AgentTask, Output, Wrote, could_have_written, usage_of
from shell_router.moa.choosing import Leave, ModelChooser
from shell_router.moa.cluster_exit import ClusterExit, Verdict
from shell_router.moa.incremental import complete_prompt
from shell_router.moa.planning import Plan, plan_run
from shell_router.moa.prompt import LONG_TEXT, encoded
from shell_router.moa.requests import AgentUsage, Answer, CutOff, Deadline, MoaRequest
from shell_router.moa.steps import Classes, Walk
from shell_router.routing.holdout import Holdouts, HoldoutSettings
from shell_router.routing.increments import Remainder
from shell_router.topology import VOTE, Agent, Cluster, Graph, Topology

log = logging.getLogger(__name__)


class Executor:
    """Answers requests by walking topologies of both kinds. Between requests it keeps how fast each
    model was, and what updates and drafts save.

    Without `holdouts` no program is held out to show that.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        cache: AgentPromptCache,
        embedder: Embedder | None,
        *,
        clock: Callable[[], float],
        chooser: ModelChooser | None = None,
        holdouts: HoldoutSettings | None = None,
    ) -> None:
        self.models = models
        self.holdouts = Holdouts(holdouts or HoldoutSettings(share=0.0))
        self.chooser = chooser or ModelChooser(models, clock=clock)
        self.cache = cache
        self.embedder = embedder
        self.classes = Classes(embedder)
        self.clock = clock
        self.estimates = self.chooser.estimates

    def run(self, topology: Graph, request: MoaRequest, emit: Emit) -> Coroutine[Any, Any, Answer]:
        """Run `request` to the root's end, or the last step's, reporting to `emit` what happens, as
        it happens.

        Raises UnknownModel and PromptTooLong before anything runs where that can be known,
        AgentFailed (or the error itself, where there is but one agent), PromptTooLong or
        DeadlineExceeded later. However it ends, cancellation included, every engine request of it
        has been aborted, every task has ended, and its cache logs are gone.
        """
        if not isinstance(topology, Topology):
            return Walk(
                self.run, self.chooser, self.models, self.classes, topology, request, emit
            ).answer()
        journal = request.journal
        kept = self
        if journal is not None:
            topology = journal.pinned(topology)
            # nothing is learned from outputs that are repeated
            if journal.repeats:
                chooser = self.chooser.anew()
            else:
                chooser = self.chooser
            models = journal.models(self.models)
            kept = Executor(models, self.cache, self.embedder, clock=self.clock, chooser=chooser)
            if journal.repeats:
                kept.holdouts = kept.holdouts
            else:
                kept.holdouts = self.holdouts
        return kept._run(topology, request, emit)

    async def _run(self, topology: Topology, request: MoaRequest, emit: Emit) -> Answer:
        started_s = self.clock()
        plan = await plan_run(self.chooser, self.models, topology, request, self.holdouts)
        if request.journal is not None:
            request.journal.pin(plan.choices)
        late = partial(
            DeadlineExceeded,
            f"{topology.name!r} gave no answer within {request.timeout_s:g} s.",
            remedy="Allow more time, or ask a smaller topology.",
        )
        with self.chooser.activity.program(plan.expected) as leave:
            graph = plan.topology
            is_single = len(plan.tasks) == 1 and not graph.clusters and not graph.root.fallbacks
            if is_single:
                run = None
            else:
                run = _Run(self, plan, emit, leave)
            for choice in plan.choices:
                emit(choice)
            try:
                with Deadline(request.timeout_s, late=late):
                    answer = await (self._single(plan, emit) if run is None else run.answer())
                now_s = self.clock()
                plan.compare(self.holdouts, answer, now_s - started_s, now_s)
                return answer
            finally:
                if run is not None:
                    await self.cache.forget(request.tenant, request.id)

    async def _single(self, plan: Plan, emit: Emit) -> Answer:
        """One agent, whom no other reads: its prompt is known, and nothing of its output is
        kept."""
        (task,) = plan.tasks.values()
        agent = AgentRun(task, self.estimates, emit, clock=self.clock)
        agent.start()
        try:
            (text,) = task.parts or ("",)
            output = await agent.decode(await encoded(task.model.tokenizer, str(text)))
        except ShellRouterError as error:
            emit(AgentErred(self.clock(), task.agent, str(error), dropped=False))
            raise
        usage = {task.agent: usage_of(task, output)}
        return Answer(
            output.text,
            output.finish.reason,
            usage,
            output.confidence,
            output.reasoning,
            output.calls,
        )


class _Run:
    """One request's agents: each a task that goes on as soon as its own precursors let it
    (localized readiness).
    """

    def __init__(self, executor: Executor, plan: Plan, emit: Emit, leave: Leave) -> None:
        self._topology = plan.topology
        self._tasks = dict(plan.tasks)
        self._instead = plan.instead
        self._request = plan.request
        self._executor = executor
        self._cache = executor.cache
        self._clock = executor.clock
        self._emit = emit
        self._leave = leave
        self._exits = self._cluster_exits()
        self._writers: dict[str, LogWriter] = {}
        self._runs: dict[str, AgentRun] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._filling: set[str] = set()
        self._news = asyncio.Event()
        self._skipped: dict[str, tuple[str, Output]] = {}
        self._outputs: dict[str, Output] = {}
        self._gone: dict[str, CutOff | Literal["failed"]] = {}

    def _cluster_exits(self) -> dict[str, ClusterExit]:
        """The judge of each agent whose cluster has early exit."""
        found: dict[str, ClusterExit] = {}
        for cluster in self._topology.clusters:
            if cluster.early_exit is None:
                continue
            embedder = self._executor.embedder
            if cluster.early_exit.needs.embeds and embedder is None:
                raise ConfigError(
                    (
                        f"Topology {self._topology.name!r} asks for early exit, but no embedder is "
                        "configured."
                    ),
                    remedy="Set `embedder` in the configuration, or turn early_exit off.",
                )
            draws = random.Random(f"{self._request.seed}/{cluster.id}")
            unfinished = partial(self._unfinished, cluster)
            judge = ClusterExit(cluster, embedder, draws, unfinished, self._emit, self._clock)
            found |= dict.fromkeys(cluster.agents, judge)
        return found

    async def answer(self) -> Answer:
        """Run all agents; the root's end ends the run."""
        tenant = self._request.tenant
        program = self._request.id
        keys = (LogKey(tenant, program, agent) for agent in self._topology.agents)
        writers = await asyncio.gather(*(self._cache.create(key) for key in keys))
        self._writers.update(zip(self._topology.agents, writers, strict=True))
        estimates = self._executor.estimates
        for name, task in self._tasks.items():
            self._runs[name] = self._run_of(task)
        try:
            async with asyncio.TaskGroup() as group:
                for agent in self._topology.agents.values():
                    self._running[agent.id] = group.create_task(self._agent(agent))
            root = self._outputs[self._topology.root.id]
            usage = {agent: self._usage(agent) for agent in self._topology.agents}
            for name, used in usage.items():
                decoded = used.state == "finished"
                read = used.state in ("finished", "skipped")
                estimates.observe_fate(self._topology.name, name, decoded=decoded, read=read)
            return Answer(
                root.text, root.finish.reason, usage, root.confidence, root.reasoning, root.calls
            )
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
            raise first from first.__cause__
        finally:
            # all refer back to this object: what they hold would wait for the garbage collector
            self._runs.clear()
            self._running.clear()

    async def _agent(self, agent: Agent) -> None:
        try:
            output = await (self._vote(agent) if agent.votes else self._output(agent.id))
        except ShellRouterError as error:
            self._failed(agent, error)
            return
        self._leave(agent.id)
        self._outputs[agent.id] = output
        self._news.set()
        self._writers[agent.id].end(End.FINISHED)
        if agent.votes:
            self._cut_unneeded()
        if agent.id == self._topology.root.id:
            for other in self._outputs.keys() - {agent.id}:  # their judgements come too late
                self._running[other].cancel()
        else:
            await self._judge(agent.id, output)

    def _run_of(self, task: AgentTask) -> AgentRun:
        writer = self._writers[task.agent]
        wrote = self._watched(task.agent)
        return AgentRun(
            task,
            self._executor.estimates,
            self._emit,
            clock=self._clock,
            writer=writer,
            wrote=wrote,
        )

    async def _output(self, agent: str) -> Output:
        """The agent's, by its model or, where that fails before it has written anything, by its
        fallbacks.
        """
        for attempt in range(len(self._topology.agents[agent].fallbacks)):
            try:
                return await self._attempt(agent)
            except EngineError as error:
                if self._runs[agent].decoded:
                    raise
                failed = self._tasks[agent].model.alias
                task = await self._instead(agent, attempt)
                log.warning(
                    "agent %s: %s takes the place of %s: %s", agent, task.model.alias, failed, error
                )
                now_s = self._clock()
                why = f"{failed} failed"
                self._emit(
                    ModelChosen(
                        now_s, now_s, (agent,), task.model.alias, "fallback", why, {}, {}, ()
                    )
                )
                self._tasks[agent], self._runs[agent] = task, self._run_of(task)
        return await self._attempt(agent)

    async def _attempt(self, agent: str) -> Output:
        """Fill the prompt and decode it, unless this agent's aggregation is skipped meanwhile."""
        run = self._runs[agent]
        run.start()
        self._filling.add(agent)
        try:
            if agent not in self._skipped:
                load = self._executor.estimates.prefill(run.task.model)
                remainder = partial(self._remainder, agent)
                prompt = await complete_prompt(
                    run.task, self._cache, load, remainder, self._emit, self._clock
                )
                self._filling.discard(agent)
                return await run.decode(prompt.ids, prompt.sent)
        except asyncio.CancelledError:
            if agent not in self._skipped or _is_cancelled_again():
                raise
        finally:
            self._filling.discard(agent)
        return await run.forward(*self._skipped[agent])

    async def _vote(self, agent: Agent) -> Output:
        """The precursor's output that the vote is for, forwarded as soon as no other answer can
        win.
        """
        self._emit(AgentStarted(self._clock(), agent.id, VOTE))
        source = await self._elected(agent)
        output = self._outputs[source]
        self._writers[agent.id].append(Chunk(output.text, ()))
        if (wrote := self._watched(agent.id)) and wrote(output.text, output.confidence or 0.0):
            await asyncio.sleep(0)  # the cancellation that has just been asked for arrives here
        self._emit(
            AggregationSkipped(self._clock(), agent.id, source, output.text, output.confidence)
        )
        return output.forwarded

    async def _elected(self, agent: Agent) -> str:
        ballots: dict[str, Ballot] = {}
        while True:
            for voter in agent.precursors:
                if voter in self._outputs and voter not in ballots:
                    ballots[voter] = await _ballot(voter, self._outputs[voter])
            waiting = [
                one for one in agent.precursors if one not in ballots and one not in self._gone
            ]
            if found := elected(
                [ballots[voter] for voter in agent.precursors if voter in ballots], len(waiting)
            ):
                return found.agent
            if not waiting:
                raise AgentFailed(
                    (
                        f"Agent {agent.id!r} has no output to count: each precursor failed or was "
                        "cut off."
                    ),
                    remedy="Ask again, or add precursors.",
                )
            if self._outputs.keys().isdisjoint(
                waiting
            ):  # else it ended while another ballot was read
                self._news.clear()
                await self._news.wait()

    def _remainder(self, agent: str, read: Collection[str]) -> Remainder:
        """What the prompt of `agent` still waits for, with the outputs of `read` in it."""
        chance = self._executor.estimates.chance
        name = self._topology.name
        survives = chance(name, agent, "decoded")
        slowest = 0.0
        token_s = None
        longest_s = 0.0
        for precursor in self._topology.agents[agent].precursors:
            if precursor not in read:
                survives *= chance(name, precursor, "read")
            if self._is_running(precursor) and precursor in self._runs:  # a vote has none
                tokens, seconds = self._runs[precursor].remaining
                if tokens * (seconds or 1.0) > longest_s:
                    slowest = tokens
                    token_s = seconds
                    longest_s = tokens * (seconds or 1.0)
        return Remainder(slowest, token_s, survives)

    def _failed(self, agent: Agent, error: ShellRouterError) -> None:
        dropped = agent.on_failure == "drop" and agent.id != self._topology.root.id
        self._leave(agent.id)
        self._gone[agent.id] = "failed"
        self._news.set()
        self._writers[agent.id].end(End.FAILED, str(error))
        self._emit(AgentErred(self._clock(), agent.id, str(error), dropped))
        if dropped:
            if judge := self._exits.get(agent.id):
                self._apply(judge.dropped(), judge.cluster)
            self._cut_unneeded()
        elif isinstance(error, PromptTooLong | AgentFailed) or len(self._topology.agents) == 1:
            raise error
        else:
            raise AgentFailed(
                f"Agent {agent.id!r} of {self._topology.name!r} failed: {error}",
                remedy="Ask again, or set on_failure: drop to go on without this agent.",
            ) from error

    def _watched(self, agent: str) -> Wrote | None:
        """What is done whenever `agent` has written something: its cluster is judged, if that reads
        what is written.
        """
        if agent not in self._exits or not self._exits[agent].reads:
            return None

        def wrote(text: str, confidence: float) -> bool:
            if judge := self._exits.get(agent):
                self._apply(judge.wrote(agent, text, confidence), judge.cluster)
            return agent in self._gone

        return wrote

    async def _judge(self, agent: str, output: Output) -> None:
        if judge := self._exits.get(agent):
            self._apply(await judge.completed(agent, output), judge.cluster)
            if not self._unfinished(judge.cluster):
                for one in judge.cluster.agents:
                    self._exits.pop(one, None)  # it holds what all of them wrote

    def _unfinished(self, cluster: Cluster) -> tuple[str, ...]:
        return tuple(name for name in cluster.agents if self._is_running(name))

    def _apply(self, verdict: Verdict, cluster: Cluster) -> None:
        for reader in self._topology.readers_of(cluster) if verdict.sources else ():
            if (
                reader in self._tasks
                and self._is_running(reader)
                and self._tasks[reader].offer is None
            ):
                task = self._tasks[reader]
                prompt = self._topology.agents[reader].prompt
                outputs = {one: self._outputs[one] for one in verdict.sources}
                fit = (
                    one
                    for one, output in outputs.items()
                    if could_have_written(output, task.sampling, prompt)
                )
                if source := next(fit, None):
                    self._skip(reader, source, outputs[source])
        for straggler in verdict.cut:
            self._cut(straggler, "early_exit")
        if verdict.cut:
            self._cut_starved()
            self._cut_unneeded()

    def _skip(self, reader: str, source: str, output: Output) -> None:
        """Let `reader` end with the output of `source`, and drop its prompt, which still waits for
        precursors.
        """
        if reader not in self._skipped:
            self._skipped[reader] = source, output
            if reader in self._filling:
                self._running[reader].cancel()

    def _is_running(self, agent: str) -> bool:
        return agent not in self._outputs and agent not in self._gone

    def _cut_starved(self) -> None:
        """End the agents that an exit has left nothing to read; some agent that has ended still
        leads to the root.
        """
        for name, agent in self._topology.agents.items():
            read = [self._gone.get(one) for one in agent.precursors]
            if (
                "early_exit" in read
                and None not in read
                and name != self._topology.root.id
                and self._is_running(name)
            ):
                self._cut(name, "early_exit")

    def _cut_unneeded(self) -> None:
        needed = self._topology.needed(self._gone.keys() | self._outputs.keys())
        for agent in self._topology.agents:
            if agent not in needed and self._is_running(agent):
                self._cut(agent, "unneeded")

    def _cut(self, agent: str, why: CutOff) -> None:
        """End the agent's log first, so that its successors go on at once, then its task and engine
        request.
        """
        self._leave(agent)
        self._gone[agent] = why
        self._news.set()
        self._writers[agent].end(End.ABORTED, why)
        self._emit(AgentStopped(self._clock(), agent, why))
        self._running[agent].cancel()

    def _usage(self, agent: str) -> AgentUsage:
        if agent not in self._tasks:
            return AgentUsage(VOTE, 0, 0, 0, self._gone.get(agent, "skipped"))
        task = self._tasks[agent]
        run = self._runs[agent]
        if agent not in self._outputs:
            return AgentUsage(
                task.model.alias, run.prompt_tokens, run.decoded, 0, self._gone[agent]
            )
        if agent in self._skipped:
            return AgentUsage(task.model.alias, 0, 0, 0, "skipped")
        return usage_of(task, self._outputs[agent])


async def _ballot(voter: str, output: Output) -> Ballot:
    read = partial(
        ballot,
        voter,
        output.text,
        output.confidence or 0.0,
        is_cut=output.finish.reason == "length",
    )
    if len(output.text) < LONG_TEXT:
        return read()
    return await asyncio.to_thread(read)


def _is_cancelled_again() -> bool:
    """Take back one cancellation of the current task; whether there are others."""
    current = asyncio.current_task()
    return current is not None and current.uncancel() > 0
