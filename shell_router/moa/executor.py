"""Runs one request: on an agent graph, on a single model, or step by step.

Each step is a graph or a model.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

from agent_cache import AgentPromptCache, Chunk, End, LogKey, LogWriter
from shell_router.core.budget import UNLIMITED, Purse
from shell_router.core.engine import Finish, ServedModel
from shell_router.core.events import (
    AgentErred,
    AgentStarted,
    AgentStopped,
    AggregationSkipped,
    Degraded,
    Emit,
    ModelChosen,
)
from shell_router.core.predictors import Embedder
from shell_router.early_exit.answers import Ballot, cast_ballot, elect
from shell_router.early_exit.evidence import ExitEvidence
from shell_router.errors import (
    AgentFailed,
    BudgetExceeded,
    DeadlineExceeded,
    EngineError,
    PromptRefused,
    ShellRouterError,
    UnknownModel,
)
from shell_router.moa.agent import (
    AgentOutput,
    AgentRun,
    AgentTask,
    OnText,
    RunContext,
    could_have_written,
    count_lost,
    count_usage,
)
from shell_router.moa.agent_calls import issue_calls
from shell_router.moa.calls import ToolCall
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.cluster_exit import ClusterExit, Verdict
from shell_router.moa.deadline import Deadline
from shell_router.moa.expectations import Leave
from shell_router.moa.incremental import CompletePrompt, complete_prompt
from shell_router.moa.journal import OutputLeft, RunJournal
from shell_router.moa.planning import Plan, Resources, plan_fallback, plan_run
from shell_router.moa.prompt import LONG_TEXT, encode_text
from shell_router.moa.requests import (
    NOTHING_KEPT,
    AgentUsage,
    Answer,
    CutOff,
    FanOut,
    MoaRequest,
)
from shell_router.moa.steps import Classes, Walk
from shell_router.moa.turns import Turns
from shell_router.routing.holdout import Holdouts, HoldoutSettings
from shell_router.routing.increments import Remainder
from shell_router.topology import VOTE, Agent, Cluster, Graph, Topology

log = logging.getLogger(__name__)

ANSWER_S = 0.2
"""The time before the deadline at which a root that keeps time is cut off, so that the answer still
goes out.
"""

_NUMBER = r"(?:(?<!\w)-)?[0-9]+"


class Executor:
    """Answers requests by running their topologies, which are agent graphs or steps.

    Between requests it keeps how fast each model was, and what updates and drafts save. Without
    `holdouts` it measures no savings, because no run goes without updates or drafts.
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
        self.cache = cache
        self.clock = clock
        self.holdouts = Holdouts(holdouts or HoldoutSettings(share=0.0))
        self._evidence = ExitEvidence(self.holdouts.settings.share)
        self.chooser = chooser or ModelChooser(models, clock=clock)
        self.estimates = self.chooser.estimates
        self.models = models
        self.embedder = embedder
        self._classes = Classes(embedder)
        self._resources = Resources(models, self.chooser, self.holdouts)
        # batches wait and are preempted: nothing is learned from their times for online requests
        no_holdouts = Holdouts(HoldoutSettings(share=0.0))
        self._for_batches = Resources(models, self.chooser.copy_unmeasured(), no_holdouts)
        self._turns = Turns(cache)

    async def run(self, topology: Graph, request: MoaRequest, emit: Emit) -> Answer:
        """Run `request` to the end of the root, or of the last step, and emit what happens.

        However it ends, cancellation included, all of its engine requests have been aborted, all of
        its tasks have ended, and its logs are gone. What its root has read stays for its turn.

        Raises:
            UnknownModel: A model is not configured; nothing has run.
            PromptRefused: A model cannot take its prompt; if that can be known, nothing has run.
            AgentFailed: An agent failed. If there is only one agent, its error is raised instead.
            DeadlineExceeded: The run took longer than the request allows.
        """
        late: Callable[[], ShellRouterError] = partial(
            DeadlineExceeded,
            f"{topology.name!r} gave no answer within {request.timeout_s:g} s.",
            remedy="Allow more time, or ask a topology with fewer agents or steps.",
        )
        budget = request.budget.tighten(topology.budget)
        if budget != UNLIMITED:
            purse = Purse(budget, request.purse)
            request = replace(request, purse=purse)
            if budget.seconds is not None and budget.seconds < request.timeout_s:
                request = replace(request, timeout_s=budget.seconds)
                why = f"and {topology.name!r} gave no answer within {budget.seconds:g} s"
                late = partial(purse.make_error, why)
        ends_s = asyncio.get_running_loop().time() + request.timeout_s
        if request.ends_s:  # a step has the deadline of its request
            ends_s = min(ends_s, request.ends_s)
        with Deadline(request.timeout_s, late=late):
            async with self._turns.open(topology, request) as turn:
                request = replace(request, turn=turn, ends_s=ends_s)
                if isinstance(topology, Topology):
                    answer = await self._run(topology, request, emit)
                else:
                    walk = Walk(self.run, self.chooser, self._classes, topology, request, emit)
                    answer = await walk.answer()
                if not answer.calls and not turn.continues:
                    turn.read = None  # no request goes on with it
                answer = replace(answer, agents={**turn.kept.agents, **answer.agents})
                if turn.read is not None:
                    for name, used in answer.agents.items():
                        is_below = turn.read.reader and name not in topology.answering
                        if is_below or name in turn.read.outputs:
                            turn.read.agents[name] = used.keep()
        return answer

    async def _run(self, topology: Topology, request: MoaRequest, emit: Emit) -> Answer:
        started_s = self.clock()
        resources = self._for_batches if request.tier == "batch" else self._resources
        journal = request.journal
        if journal is not None:
            topology = journal.pin_models(topology)
            resources = self._take_resources(journal)
        plan = await _plan_turn(resources, topology, request)
        if journal is not None:
            journal.record_choices(plan.choices)
        topology = plan.outline.topology
        is_single = len(plan.tasks) == 1 and not topology.clusters and not topology.root.fallbacks
        is_single = is_single and not plan.refusals and not request.turn.kept.outputs
        # these may end with the text so far
        is_single = is_single and not topology.root_reserve_s and request.purse is None
        is_single = is_single and not request.accounts
        context = RunContext(
            resources.chooser.estimates,
            self.cache,
            emit,
            self.clock,
            request.purse,
            request.accounts,
            journal,
            self._evidence,
        )
        with resources.chooser.activity.enter_program(plan.expected) as leave:
            run = None
            if not is_single:
                run = GraphRun(plan, context, self.embedder, leave)
            for event in (*request.turn.list_stops(self.clock()), *plan.choices):
                emit(event)
            try:
                if run is None:
                    answer = await self._run_single(plan, context)
                else:
                    answer = await run.answer()
                if plan.comparison is not None and not request.turn.calls_below:
                    now_s = self.clock()
                    plan.comparison.observe(plan.tasks, answer, now_s - started_s, now_s)
                return answer
            finally:
                if run is not None:
                    await self.cache.forget(request.tenant, request.id)

    def _take_resources(self, journal: RunJournal) -> Resources:
        """Return the resources of a journaled run; nothing is learned from repeated outputs."""
        models = journal.wrap_engines(self.models)
        if journal.repeats:
            return Resources(models, self.chooser.copy_unmeasured(), self._for_batches.holdouts)
        return Resources(models, self.chooser, self.holdouts)

    async def _run_single(self, plan: Plan, context: RunContext) -> Answer:
        """Run a single-agent topology; no log is written, because no agent reads it."""
        (task,) = plan.tasks.values()
        agent = AgentRun(task, context)
        agent.start()
        try:
            (text,) = task.parts or ("",)
            output = await agent.decode(await encode_text(task.model.tokenizer, str(text)))
        except ShellRouterError as error:
            context.emit(AgentErred(self.clock(), task.agent, str(error), dropped=False))
            error.spent = {task.agent: count_lost(agent, "failed", str(error))}
            raise
        return _make_answer(output, {task.agent: count_usage(task, output)})


async def _plan_turn(resources: Resources, topology: Topology, request: MoaRequest) -> Plan:
    """Plan the run; if its turn goes on, of the agents alone whose outputs are not kept.

    Those that have called tools stay on the models that have their prompts.
    """
    turn = request.turn
    kept = turn.kept
    if kept is NOTHING_KEPT:
        return await plan_run(resources, topology, request)
    needed = topology.find_needed(kept.outputs)
    agents = {}
    for agent in topology.agents.values():
        if agent.id in needed:
            turn.slots[agent.id] = agent.precursors
            open_slots = [name for name in agent.precursors if name not in kept.outputs]
            agents[agent.id] = replace(agent, precursors=tuple(open_slots))
    topology = replace(topology, agents=agents, clusters=())
    models = {call.agent: call.model for call in kept.issued.values() if call.agent in agents}
    if kept.reader:
        turn.slots[topology.root.id] = tuple(kept.outputs)
        models = {topology.root.id: kept.reader}
    with suppress(PromptRefused, UnknownModel):  # another model may be chosen
        return await plan_run(resources, topology.with_models(models), request)
    return await plan_run(resources, topology, request)


class _AggregationSkipped(Exception):
    """The outputs that an agent would read agree, so it forwards one of them."""


class _WroteNothing(ShellRouterError):
    """The agent's output is blank, which is nothing to read."""

    def __init__(self, agent: str, output: AgentOutput) -> None:
        super().__init__(f"Agent {agent!r} wrote nothing.")
        self.output = output


@dataclass(slots=True, eq=False)
class _Member:
    """The state of one agent of a run; without a task for an engine it has no `run`.

    Attributes:
        work: The asyncio task that runs the agent.
        filling: Open while the agent's prompt waits for precursors.
        forwards: The agent whose output is forwarded instead of asking an engine.
        output: The output of a finished agent.
        gone: Why the agent gave no output.
        error: The error of a failed agent.
        blank: The output of an agent that failed because it wrote nothing.
        calling: The output of an agent below the root that ended with calls.
    """

    agent: Agent
    writer: LogWriter
    run: AgentRun | None
    work: asyncio.Task[None] | None = None
    filling: Deadline | None = None
    forwards: str | None = None
    output: AgentOutput | None = None
    gone: CutOff | Literal["failed"] | None = None
    error: str = ""
    blank: AgentOutput | None = None
    calling: AgentOutput | None = None

    @property
    def is_running(self) -> bool:
        return self.output is None and self.gone is None

    @property
    def model(self) -> str:
        return self.agent.model if self.run is None else self.run.task.model.alias

    def cancel(self) -> None:
        assert self.work is not None
        self.work.cancel()


class GraphRun:
    """Runs the agents of one plan, each in a task of its own.

    An agent goes on as soon as its own precursors let it (localized readiness). The run ends with
    its root.
    """

    def __init__(
        self,
        plan: Plan,
        context: RunContext,
        embedder: Embedder | None,
        leave: Leave,
    ) -> None:
        """Prepare the run; `leave` is called with every agent that has ended.

        Raises:
            ConfigError: An early exit needs an embedder, and none is configured.
        """
        self._plan = plan
        self._topology = plan.outline.topology
        self._root = self._topology.root.id
        self._context = context
        self._estimates = context.estimates
        self._clock = context.clock
        self._emit = context.emit
        self._leave = leave
        self._watching: list[ClusterExit] = []
        self._exits = self._open_exits(embedder)
        self._firsts = self._topology.asked_first
        self._members: dict[str, _Member] = {}
        self._news = asyncio.Event()
        self._is_late = False
        self._late_answer: AgentOutput | None = None

    def _open_exits(self, embedder: Embedder | None) -> dict[str, ClusterExit]:
        """Return the early exit that judges each agent whose cluster has one."""
        exits: dict[str, ClusterExit] = {}
        for cluster in self._topology.clusters:
            if cluster.early_exit is None:
                continue
            unfinished = partial(self._list_unfinished, cluster)
            cluster_exit = ClusterExit(
                cluster,
                self._context,
                embedder,
                unfinished,
                self._plan.outline.request.seed,
                self._plan,
                self._measure_decoding_s,
            )
            if cluster_exit.watches:
                self._watching.append(cluster_exit)
            exits |= dict.fromkeys(cluster.agents, cluster_exit)
        return exits

    async def answer(self) -> Answer:
        """Run all agents and return the root's answer."""
        await self._open_members()
        timers: list[asyncio.TimerHandle] = []
        try:
            async with asyncio.TaskGroup() as group:
                for member in self._members.values():
                    member.work = group.create_task(self._run_agent(member))
                timers = self._set_timers()
            await self._teach_exits()
            answer = self._conclude()
            turn = self._plan.outline.request.turn
            if turn.name and not turn.kept.reader:
                turn.read = await self._collect_reads(turn.kept)
                if not turn.read.reader:
                    answer = self._issue_calls(answer, turn.read)
            return answer
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
            if isinstance(first, ShellRouterError):
                first.spent = self._count_usage()
            raise first from first.__cause__
        finally:
            for timer in timers:
                timer.cancel()
            # members and their tasks refer to each other and to this object: without this, their
            # texts would stay until the garbage collector runs
            for member in self._members.values():
                member.work = None
            self._members.clear()

    async def _open_members(self) -> None:
        """Create the log and the run of every agent."""
        request = self._plan.outline.request
        agents = self._topology.agents
        keys = [LogKey(request.tenant, request.id, agent) for agent in agents]
        writers = await asyncio.gather(*map(self._context.cache.create, keys))
        for agent, writer in zip(agents.values(), writers, strict=True):
            task = self._plan.tasks.get(agent.id)
            run = None if task is None else self._open_run(task, writer)
            self._members[agent.id] = _Member(agent, writer, run)

    def _open_run(self, task: AgentTask, writer: LogWriter) -> AgentRun:
        return AgentRun(task, self._context, writer=writer, on_text=self._watch(task.agent))

    def _conclude(self) -> Answer:
        """Return the answer, and update the estimates with how each agent ended."""
        usage = self._count_usage()
        for name, used in usage.items():
            if used.state == "waiting":
                continue
            is_decoded = used.state == "finished"
            is_read = used.state in ("finished", "skipped")
            self._estimates.observe_fate(
                self._topology.name, name, decoded=is_decoded, read=is_read
            )
        ended = [member.output or member.calling for member in self._members.values()]
        warnings = dict.fromkeys(output.warning for output in ended if output is not None)
        output = self._late_answer or self._members[self._root].output
        if output is None:
            return Answer("", "stop", usage, warning=" ".join(filter(None, warnings)))
        warnings[output.warning] = None
        output = replace(output, warning=" ".join(filter(None, warnings)))
        return _make_answer(output, usage)

    def _count_usage(self) -> dict[str, AgentUsage]:
        return {name: _count_usage(member) for name, member in self._members.items()}

    async def _collect_reads(self, kept: FanOut) -> FanOut:
        """Return the outputs that the root has read; if it waits, all that there are."""
        root = self._members[self._root]
        tasks: Collection[AgentTask] = self._plan.tasks.values()
        read = FanOut("", {**kept.outputs}, issued={**kept.issued})
        if root.gone != "waiting":
            assert root.run is not None, "roots that vote call no tools"
            tasks = [root.run.task]
            read = FanOut(root.run.task.model.alias, {}, issued=kept.issued)
        for name, source in chain.from_iterable(task.sources.items() for task in tasks):
            author = self._members.get(name)
            _, ids = read.outputs.get(name, ("", ()))
            if ids or (author is not None and author.gone == "waiting"):
                continue
            log = source.kept or await self._context.cache.read(source.key, wait_s=0)
            read.outputs[name] = ("", ())
            if log.end is End.FINISHED:
                read.outputs[name] = (log.text, log.ids if log.vocabulary else ())
        return read

    def _issue_calls(self, answer: Answer, read: FanOut) -> Answer:
        """Return the answer with the calls of all agents that wait for results of their own."""
        outputs = []
        for name, member in self._members.items():
            if member.calling is not None and member.gone == "waiting":
                outputs.append((name, member.model, member.calling.text, member.calling.calls))
        issued = issue_calls(outputs)
        read.issued.update(issued)
        calls = [ToolCall(id, call.name, call.arguments) for id, call in issued.items()]
        return replace(answer, calls=tuple(calls))

    # --- one agent

    async def _run_agent(self, member: _Member) -> None:
        await self._run_to_end(member)
        if self._topology.callers:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        """End the run once all agents that still run wait for results of calls."""
        waiting: dict[str, _Member] = {}
        for name, member in self._members.items():
            if not member.is_running:
                continue
            if member.calling is None and waiting.keys().isdisjoint(member.agent.precursors):
                return
            waiting[name] = member
        for name, member in waiting.items():
            if member.calling is None:
                self._cut(name, "waiting")
            else:
                self._leave(name)
                member.gone = "waiting"
                member.writer.end(End.ABORTED, "waiting")

    async def _run_to_end(self, member: _Member) -> None:
        agent = member.agent
        try:
            write = self._vote if agent.votes else self._produce
            output = await write(member)
            if agent.id != self._root and not (output.text.strip() or output.calls):
                raise _WroteNothing(agent.id, output)
        except ShellRouterError as error:
            self._fail(member, error)
            return
        if agent.id != self._root and output.calls:
            member.calling = output  # it has not finished: its log stays open
            return
        self._leave(agent.id)
        member.output = output
        self._news.set()
        member.writer.end(End.FINISHED)
        if agent.votes:
            self._cut_unneeded()
        if agent.id != self._root:
            if self._is_late:
                self._begin_reserve()
            await self._judge(agent.id, output)
            return
        self._end_judgements()

    def _end_judgements(self) -> None:
        """Cancel the agents that have ended, and whose clusters' judgements come too late."""
        for member in self._members.values():
            if member.output is not None:
                member.cancel()

    async def _produce(self, member: _Member) -> AgentOutput:
        """Return the output of the agent's model.

        If the model refuses the prompt, or fails before it has written anything, its fallbacks take
        its place.
        """
        failure: EngineError | PromptRefused | None = self._plan.refusals.get(member.agent.id)
        if failure is not None:
            self._emit(AgentStarted(self._clock(), member.agent.id, member.model))
        for attempt in range(-1, len(member.agent.fallbacks)):
            try:
                if attempt >= 0 and failure is not None:
                    await self._fall_back(member, attempt, failure)
                if member.run is not None:
                    return await self._attempt(member)
            except (EngineError, PromptRefused) as error:
                failure = error
                has_begun = member.run is not None and member.run.progress.decoded
                if has_begun or isinstance(error, OutputLeft):
                    break
        assert failure is not None, "the agent has no run because of it"
        raise failure

    async def _fall_back(self, member: _Member, attempt: int, error: ShellRouterError) -> None:
        """Give the agent the task of its next fallback."""
        agent = member.agent.id
        failed = member.model
        task = await plan_fallback(self._plan.outline, agent, attempt)
        model = task.model.alias
        log.warning("agent %s: %s takes the place of %s: %s", agent, model, failed, error)
        now_s = self._clock()
        why = f"{failed} failed"
        self._emit(ModelChosen(now_s, now_s, (agent,), model, "fallback", why, {}, {}, ()))
        member.run = self._open_run(task, member.writer)

    async def _attempt(self, member: _Member) -> AgentOutput:
        """Fill the prompt and decode it, unless the agent's aggregation is skipped meanwhile."""
        run = member.run
        assert run is not None
        run.start()
        if member.agent.id not in self._firsts:
            await self._await_ends(self._firsts)
        if member.forwards is None:
            prompt = await self._complete_prompt(member, run.task)
            if prompt is not None:
                return await run.decode(prompt.ids, prompt.sent)
        assert member.forwards is not None
        return await self._forward(member, member.forwards)

    async def _await_ends(self, agents: Collection[str]) -> None:
        while any(self._members[name].is_running for name in agents):
            self._news.clear()
            await self._news.wait()

    async def _forward(self, member: _Member, source: str) -> AgentOutput:
        """Take the output of the agent `source` as this agent's own, without asking an engine."""
        output = self._members[source].output
        assert output is not None
        text = output.text
        chunk = Chunk(text)
        if member.run is not None:
            tokenizer = member.run.task.model.tokenizer
            ids = await encode_text(tokenizer, tokenizer.control.quote(text))
            chunk = Chunk(text, tuple(ids), tokenizer.fingerprint)
        member.writer.append(chunk)
        on_text = self._watch(member.agent.id)
        if on_text is not None and on_text(text, output.confidence or 0.0):
            await asyncio.sleep(0)  # the cancellation just requested arrives here
        self._emit(
            AggregationSkipped(self._clock(), member.agent.id, source, text, output.confidence)
        )
        return output.drop_reasoning()

    async def _complete_prompt(self, member: _Member, task: AgentTask) -> CompletePrompt | None:
        """Return the filled prompt; None if the agent's aggregation is skipped meanwhile."""
        try:
            with Deadline() as member.filling:
                expect_remainder = partial(self._expect_remainder, member.agent)
                return await complete_prompt(task, self._context, expect_remainder)
        except _AggregationSkipped:
            return None
        finally:
            member.filling = None

    def _expect_remainder(self, agent: Agent, read: Collection[str]) -> Remainder:
        """Return what the agent's prompt still waits for after it has `read` some precursors."""
        name = self._topology.name
        survives = self._estimates.get_chance(name, agent.id, "decoded")
        remaining_tokens = 0.0
        token_s = None
        longest_s = 0.0
        for precursor in agent.precursors:
            if precursor not in read:
                survives *= self._estimates.get_chance(name, precursor, "read")
            other = self._members[precursor]
            if other.is_running and other.run is not None:
                tokens, seconds = other.run.progress.remaining
                if tokens * (seconds or 1.0) > longest_s:
                    remaining_tokens = tokens
                    token_s = seconds
                    longest_s = tokens * (seconds or 1.0)
        return Remainder(remaining_tokens, token_s, survives)

    def _fail(self, member: _Member, error: ShellRouterError) -> None:
        """Note that the agent failed, and raise the run's error unless it can be dropped."""
        read = [self._members[name] for name in member.agent.precursors]
        unpaid = [precursor.error for precursor in read if precursor.gone == "budget"]
        if isinstance(error, AgentFailed) and unpaid:  # it has nothing to read
            error = BudgetExceeded(unpaid[0])
        if isinstance(error, BudgetExceeded):
            self._end_unpaid(member, error)
            return
        if isinstance(error, OutputLeft) and self._topology.root_reserve_s:
            self._begin_reserve()  # it was cut off then
            if member.is_running:
                self._cut_root()
            if not member.is_running:
                return
        elif isinstance(error, OutputLeft) and self._plan.outline.request.accounts:
            self._end_unpaid(member, BudgetExceeded("A budget ended there before."))
            return
        agent = member.agent
        if isinstance(error, OutputLeft) and agent.id in self._exits:
            self._end(agent.id, "early_exit")  # an earlier attempt's exit cut it off
            self._cut_starved()
            return
        is_root = agent.id == self._root
        is_dropped = not is_root and agent.on_failure == "drop"
        if isinstance(error, _WroteNothing):
            is_dropped = True
            member.blank = error.output
        self._leave(agent.id)
        member.gone = "failed"
        member.error = str(error)
        self._news.set()
        self._emit(AgentErred(self._clock(), agent.id, str(error), is_dropped))
        if is_dropped:
            # a log that ends lets readers go on, whose requests would be aborted if the run failed
            member.writer.end(End.FAILED, str(error))
            if cluster_exit := self._exits.get(agent.id):
                self._apply(cluster_exit.judge_failure(), cluster_exit.cluster)
            self._cut_unneeded()
        elif isinstance(error, PromptRefused | AgentFailed) or len(self._topology.agents) == 1:
            raise error
        else:
            remedy = "Ask again, or set on_failure: drop to go on without this agent."
            raise AgentFailed(
                f"Agent {agent.id!r} of {self._topology.name!r} failed: {error}",
                remedy="Ask again." if is_root else remedy,
            ) from error

    # --- the budget

    def _end_unpaid(self, member: _Member, error: BudgetExceeded) -> None:
        """End an agent that the budget pays no more; raise its error if nothing can answer."""
        if member.agent.id != self._root:
            member.error = str(error)
            self._end(member.agent.id, "budget")
            self._cut_unneeded()
            return
        self._cut_root("budget")
        if member.is_running:
            raise error

    # --- the root's time

    def _set_timers(self) -> list[asyncio.TimerHandle]:
        request = self._plan.outline.request
        purse = request.purse
        reserve_s = self._topology.root_reserve_s
        loop = asyncio.get_running_loop()
        timers = []
        if reserve_s:
            timers.append(loop.call_at(request.ends_s - reserve_s, self._begin_reserve))
        is_short = purse is not None and purse.budget.seconds == request.timeout_s
        if reserve_s or is_short:
            why: CutOff = "budget" if is_short else "deadline"
            timers.append(loop.call_at(request.ends_s - ANSWER_S, self._cut_root, why))
        return timers

    def _begin_reserve(self) -> None:
        """Cut off all agents but the root as soon as it has an output to read."""
        self._is_late = True
        voters = self._members[self._root].agent.voters
        if any(self._members[name].output is not None for name in voters):
            self._cut_below()

    def _cut_below(self, why: CutOff = "deadline") -> None:
        for name, member in self._members.items():
            if name != self._root and member.is_running:
                member.error = "It was cut off to leave the root time before the deadline."
                if why == "budget":
                    member.error = "It was cut off at the end of the budget."
                self._cut(name, why)

    def _cut_root(self, why: CutOff = "deadline") -> None:
        """Cut off the root; its text so far is the answer, or else the nearest finished output.

        Without either, the root keeps the time that is left.
        """
        root = self._members[self._root]
        source = self._find_nearest()
        text = "" if root.run is None else root.run.text
        if not root.is_running or not (source or text.strip()):
            return
        warning = f"The {why} cut {self._root!r} off: the answer is its text so far."
        if source and not text.strip():
            output = self._members[source].output
            assert output is not None
            text += output.text
            left = "money" if why == "budget" else "time"
            warning = f"The {why} left {self._root!r} no {left}: {source!r} answers in its place."
            self._emit(
                AggregationSkipped(
                    self._clock(), self._root, source, output.text, output.confidence
                )
            )
        reasoning = "" if root.run is None else root.run.reasoning
        finish = Finish("length", 0, 0, 0)
        self._late_answer = AgentOutput(text, finish, None, reasoning=reasoning, warning=warning)
        self._cut_below(why)
        self._cut(self._root, why)
        self._end_judgements()

    def _find_nearest(self) -> str:
        """Return the agent below the root whose output is the nearest to it; "" without any."""
        agents = [self._root]
        known = {self._root}
        for agent in agents:
            if self._members[agent].output is not None:
                return agent
            voters = [name for name in self._topology.agents[agent].voters if name not in known]
            agents += voters
            known.update(voters)
        return ""

    # --- votes

    async def _vote(self, member: _Member) -> AgentOutput:
        """Forward the elected precursor's output as soon as no other answer can win."""
        agent = member.agent
        self._emit(AgentStarted(self._clock(), agent.id, VOTE))
        chosen = ""
        if agent.votes == "judge":
            chosen = await self._follow_judge(self._members[agent.precursors[-1]])
        return await self._forward(member, chosen or await self._elect(agent))

    async def _follow_judge(self, judge: _Member) -> str:
        """Return the agent whose output the judge names, "" if it names none that there is."""
        await self._await_ends({judge.agent.id})
        if judge.output is None or judge.run is None:
            return ""
        if judge.forwards is not None:
            return judge.forwards
        ballot = await _read_ballot(judge.agent.id, judge.output)
        slots = {
            str(number): name
            for number, name in enumerate(judge.run.task.sources, 1)
            if self._members[name].output is not None
        }
        named = {slots.get(number, "") for number in re.findall(_NUMBER, ballot.answer or "")}
        if len(named) == 1 and "" not in named:
            return named.pop()
        judge.error = "It named no output, so that the majority chose."
        log.warning("judge %s: %s", judge.agent.id, judge.error)
        self._emit(Degraded(self._clock(), judge.agent.id, "judge", judge.error))
        return ""

    async def _elect(self, agent: Agent) -> str:
        """Return the precursor whose output wins the vote."""
        ballots: dict[str, Ballot] = {}
        voters = {voter: self._members[voter] for voter in agent.voters}
        while True:
            for name, voter in voters.items():
                if voter.output is not None and name not in ballots:
                    ballots[name] = await _read_ballot(name, voter.output)
            # a voter that ended while another's ballot was read still counts as waiting
            waiting = [name for name in voters if name not in ballots and voters[name].gone is None]
            cast = [ballots[name] for name in voters if name in ballots]
            if winner := elect(cast, len(waiting), by_confidence=agent.votes == "confidence"):
                return winner.agent
            if not waiting:
                raise AgentFailed(
                    f"Agent {agent.id!r} has no output to count: each precursor failed, wrote "
                    "nothing or was cut off.",
                    remedy="Ask again, or add precursors.",
                )
            if all(voters[name].output is None for name in waiting):
                self._news.clear()
                await self._news.wait()

    # --- early exit

    def _measure_decoding_s(self, agent: str) -> float:
        run = self._members[agent].run
        return 0.0 if run is None else run.progress.decoding_s

    async def _teach_exits(self) -> None:
        """Show the exits that only watched what the readers of their clusters answered.

        A cluster of which an agent failed or was cut off teaches nothing.
        """
        for cluster_exit in self._watching:
            if any(self._members[name].output is None for name in cluster_exit.cluster.agents):
                continue
            successors = map(self._topology.successors.__getitem__, cluster_exit.cluster.agents)
            answers = []
            for reader in set(chain.from_iterable(successors)):
                output = self._members[reader].output
                if output is not None:
                    answers.append((await _read_ballot(reader, output)).answer or "")
            cluster_exit.learn(answers)

    def _watch(self, agent: str) -> OnText | None:
        """Return the callback that judges a cluster by each new text; None if no gate reads it."""
        if agent not in self._exits or not self._exits[agent].reads_text:
            return None

        def judge_text(text: str, confidence: float) -> bool:
            if cluster_exit := self._exits.get(agent):
                verdict = cluster_exit.judge_text(agent, text, confidence)
                self._apply(verdict, cluster_exit.cluster)
            return self._members[agent].gone is not None

        return judge_text

    async def _judge(self, agent: str, output: AgentOutput) -> None:
        """Judge the agent's cluster by its complete output."""
        if cluster_exit := self._exits.get(agent):
            cluster = cluster_exit.cluster
            readers = map(self._members.__getitem__, self._topology.readers_of(cluster))
            if not cluster_exit.only_forwards or any(
                self._find_forwarded(reader, (agent,)) for reader in readers
            ):
                judged = cluster_exit.judge_output(agent, output.text, output.confidence)
                self._apply(await judged, cluster)
            if not self._list_unfinished(cluster):
                for name in cluster.agents:
                    self._exits.pop(name, None)  # it would keep all their outputs

    def _list_unfinished(self, cluster: Cluster) -> tuple[str, ...]:
        return tuple(name for name in cluster.agents if self._members[name].is_running)

    def _apply(self, verdict: Verdict, cluster: Cluster) -> None:
        """Skip the cluster's readers and cut its stragglers, as the verdict says."""
        if verdict.sources:
            for reader in self._topology.readers_of(cluster):
                self._skip_aggregation(self._members[reader], verdict.sources)
        for straggler in verdict.cut:
            self._cut(straggler, "early_exit")
        if verdict.cut:
            self._cut_starved()
            self._cut_unneeded()

    def _skip_aggregation(self, reader: _Member, sources: Collection[str]) -> None:
        """Let `reader` forward the first output of `sources` that it may forward."""
        source = self._find_forwarded(reader, sources)
        if source is None:
            return
        reader.forwards = source
        if reader.filling is not None:
            reader.filling.end(_AggregationSkipped())

    def _find_forwarded(self, reader: _Member, sources: Collection[str]) -> str | None:
        """Return the first of `sources` whose output `reader` could have written."""
        if reader.run is None or reader.run.task.offer is not None:
            return None
        is_root = reader.agent.id == self._root
        if is_root and self._plan.outline.request.turn.continues:
            return None  # it alone reads the results of calls
        if not reader.is_running or reader.forwards is not None:
            return None
        sampling = reader.run.task.sampling
        for source in sources:
            output = self._members[source].output
            assert output is not None
            if could_have_written(output, sampling, reader.agent.prompt):
                return source
        return None

    def _cut_starved(self) -> None:
        """Cut the agents whose precursors are all gone, at least one of them by an early exit.

        The root is not cut: an output that it needs is always left.
        """
        for name, member in self._members.items():
            read = [self._members[precursor].gone for precursor in member.agent.precursors]
            is_starved = "early_exit" in read and None not in read
            if is_starved and name != self._root and member.is_running:
                self._cut(name, "early_exit")

    def _cut_unneeded(self) -> None:
        """Cut the agents whose outputs no running agent needs any more."""
        ended = {name for name, member in self._members.items() if not member.is_running}
        needed = self._topology.find_needed(ended)
        for name, member in self._members.items():
            if name not in needed and member.is_running:
                self._cut(name, "unneeded")

    def _cut(self, agent: str, why: CutOff) -> None:
        """Abort the agent; its log ends first, so that its successors go on at once."""
        self._end(agent, why)
        self._members[agent].cancel()

    def _end(self, agent: str, why: CutOff) -> None:
        member = self._members[agent]
        self._leave(agent)
        member.gone = why
        self._news.set()
        member.writer.end(End.ABORTED, why)
        self._emit(AgentStopped(self._clock(), agent, why))


def _make_answer(root: AgentOutput, usage: Mapping[str, AgentUsage]) -> Answer:
    return Answer(
        root.text,
        root.finish.reason,
        usage,
        root.confidence,
        root.reasoning,
        root.calls,
        root.warning,
        matched=root.finish.matched,
    )


def _count_usage(member: _Member) -> AgentUsage:
    """Return the tokens that an agent cost, however it ended."""
    model = member.model
    if member.run is None:
        return AgentUsage(model, 0, 0, 0, member.gone or "skipped", error=member.error)
    if member.calling is not None:
        return count_usage(member.run.task, member.calling)
    if member.blank is not None:
        cost = count_usage(member.run.task, member.blank)
        return replace(cost, state="failed", error=member.error)
    if member.output is None:
        return count_lost(member.run, member.gone or "unneeded", member.error)
    if member.forwards is not None:
        return AgentUsage(model, 0, 0, 0, "skipped")
    used = count_usage(member.run.task, member.output)
    if member.error:
        used = replace(used, error=member.error)
    return used


async def _read_ballot(voter: str, output: AgentOutput) -> Ballot:
    is_cut = output.finish.reason == "length"
    confidence = output.confidence or 0.0
    if len(output.text) < LONG_TEXT:
        return cast_ballot(voter, output.text, confidence, is_cut=is_cut)
    return await asyncio.to_thread(cast_ballot, voter, output.text, confidence, is_cut=is_cut)
