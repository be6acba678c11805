"""Agent requests: programs whose agents arrive one by one from an external framework."""

import asyncio
import random
import sys
import uuid
import zlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from agent_cache import Chunk, End, LogExists, LogKey, LogTimeout, LogWriter
from shell_router import errors
from shell_router.core.engine import Hints, ServedModel
from shell_router.core.events import AgentErred, AgentStopped, Emit, Event, answer_in
from shell_router.core.sampling import check_sampling
from shell_router.moa.agent import (
    AgentRun,
    AgentTask,
    RunContext,
    Source,
    check_task,
    count_lost,
    count_usage,
)
from shell_router.moa.cluster_exit import ClusterExit
from shell_router.moa.comparison import observe_drafts
from shell_router.moa.deadline import Deadline
from shell_router.moa.executor import Executor
from shell_router.moa.expectations import (
    AGENT_REQUEST,
    guess_output_tokens,
    read_request_prompt,
)
from shell_router.moa.incremental import (
    CompletePrompt,
    complete_prompt,
    count_common_prefix,
    make_silence_error,
)
from shell_router.moa.planning import check_thinking_limit
from shell_router.moa.prompt import AgentPrompt, Message, Part, Slot, encode_text, render
from shell_router.moa.registry import (
    AgentRecord,
    ProgramLimits,
    ProgramRegistry,
    make_duplicate_error,
)
from shell_router.moa.requests import (
    AgentRequest,
    Answer,
    MoaRequest,
    OutputOf,
    ProgramState,
    Segment,
)
from shell_router.moa.thinking import make_no_answer_error
from shell_router.routing.holdout import Compared
from shell_router.routing.increments import Remainder
from shell_router.topology import AUTO, Cluster, Graph


class _Exited(Exception):
    """An early exit has cut the agent off."""


Work = Callable[[LogWriter], Awaitable[Answer]]
"""Runs an agent, whose output goes to the writer."""


class Programs:
    """Runs agent requests with what an `executor` has; a registry remembers their programs."""

    def __init__(self, executor: Executor, limits: ProgramLimits | None = None) -> None:
        self._executor = executor
        self._cache = executor.cache
        self._clock = executor.clock
        self._chooser = executor.chooser
        self._holdouts = executor.holdouts
        self._registry = ProgramRegistry(self._cache, limits or ProgramLimits(), self._clock)
        self.find_chat_program = self._registry.find_chat_program
        self.count_written = self._registry.count_written

    async def run(self, request: AgentRequest, emit: Emit) -> Answer:
        """Run one agent to its end, and emit what happens.

        The same request sent again waits for the first one's answer, without events; if the first
        one failed or was cancelled, the agent runs again. An agent is cancelled when the last call
        that waits for it is.

        Raises:
            UnknownModel: The model is not configured.
            DuplicateAgent: The program has this agent with other content.
            InvalidRequest: The agent would wait for itself.
            PrecursorTimeout: Nothing came from a precursor in time.
            AgentFailed: A precursor failed or was cancelled, or the engine failed.
            PromptRefused: No model of the request can take the prompt.
            DeadlineExceeded: The agent took longer than the request allows.
            Overloaded: All remembered programs still run, or this one has too many agents.
        """
        if record := self._registry.find_sent(request, request):
            return await self._await_answer(request, record)
        check_sampling(request.sampling)
        planned = request
        chosen = request.journal.chosen.get(request.agent) if request.journal else None
        if chosen is not None:
            planned = replace(planned, model=chosen, candidates=())
        self._chooser.require_possible(read_request_prompt(request).characters)
        with ExitStack() as load:
            task, choices = await self._plan(planned, load)
            planned = replace(planned, model=task.model.alias, candidates=())
            record = AgentRecord(request, task.model, frozenset(task.sources), load)
            work = partial(self._answer, planned, task, record, choices, emit)
            return await self._run_once(planned, record, work, emit)

    async def run_graph(self, request: AgentRequest, graph: Graph, emit: Emit) -> Answer:
        """Run a topology as one agent, once the outputs in its messages have ended.

        Its readers follow its answer as it is written. Raises the same errors as `run`.
        """
        record = AgentRecord(request, precursors=frozenset(request.reads))
        work = partial(self._answer_by_graph, request, record, graph, emit)
        return await self._run_once(request, record, work, emit)

    async def write(self, request: AgentRequest, texts: AsyncIterator[str]) -> Answer:
        """Make `texts` the output of an agent that the router does not run.

        Readers follow them as they come. Of `request` only tenant, program and agent count.

        Raises:
            DuplicateAgent: The program has this agent already.
            AgentFailed: The program was cancelled.
            Overloaded: All remembered programs still run, or this one has too many agents.
        """
        record = AgentRecord()
        work = partial(_copy_texts, record, texts)
        return await self._run_once(request, record, work, lambda event: None)

    async def read_output(self, tenant: str, program: str, agent: str, wait_s: float) -> str | None:
        """Return all that the agent wrote; None if it still writes after `wait_s`.

        Raises:
            UnknownProgram: The program or the agent is not known.
            AgentFailed: The agent gave no output.
        """
        record = self._registry.require_program(tenant, program).agents.get(agent)
        if record is None:
            raise errors.UnknownProgram(
                f"Program {program!r} has no agent {agent!r}.", remedy="Send its request first."
            )
        key = LogKey(tenant, program, record.log)
        try:
            read = await self._cache.read(key, at_least=sys.maxsize, wait_s=wait_s)
        except LogTimeout:
            return None
        if read.end in (End.ABORTED, End.FAILED):
            raise errors.AgentFailed(
                f"Agent {agent!r} gave no output, it {read.end.value}: {read.detail}",
                remedy="Send it again.",
            )
        return read.text if read.end else None

    def state(self, tenant: str, program: str) -> ProgramState:
        """Return the states and outputs of a program's agents. Raises UnknownProgram."""
        agents = self._registry.require_program(tenant, program).agents
        return ProgramState(
            program,
            {agent: record.state for agent, record in agents.items()},
            {agent: record.text for agent, record in agents.items()},
        )

    async def cancel(self, tenant: str, program: str) -> None:
        """End every running agent of the program and forget it. Raises UnknownProgram."""
        tasks = []
        for record in self._registry.require_program(tenant, program).agents.values():
            if record.task is not None:
                record.task.cancel()
                tasks.append(record.task)
        if tasks:
            await asyncio.wait(tasks)
        await self._registry.forget(tenant, program)

    # --- planning

    async def _plan(
        self, request: AgentRequest, load: ExitStack
    ) -> tuple[AgentTask, Sequence[Event]]:
        """Return the agent's task, with a model that can take its prompt, and the choice's events.

        Its expected tokens are in `load` from the choice on, so that no other agent sees the same.
        """
        choices: list[Event] = []  # emitted once nothing can be refused any more
        model, hints = await self._choose_model(request, choices.append)
        tokens = hints.output_tokens
        if tokens is None:
            tokens = guess_output_tokens(request.sampling)
        load.enter_context(self._chooser.activity.enter_program({request.agent: (model, tokens)}))
        try:
            logs = {agent: await self._find_log(request, agent) for agent in request.reads}
            task = self._build_task(replace(request, model=model, candidates=()), hints, logs)
            await check_task(task)
            return task, choices
        except errors.PromptRefused:
            others: Collection[str] = ()
            if request.model == AUTO:
                others = self._chooser.list_candidates(request.candidates, without=model)
            if not others:
                raise
        load.close()
        return await self._plan(replace(request, candidates=tuple(others)), load)

    async def _choose_model(self, request: AgentRequest, emit: Emit) -> tuple[str, Hints]:
        """Return the request's model and hints; a program keeps the model it was given before."""
        program = self._registry.find(request.tenant, request.program)
        chosen = dict(program.chosen) if program else {}
        choice = await self._chooser.choose_for_agent(request, chosen, emit)
        if request.model == AUTO:
            await self._registry.make_space(request)
            self._registry.remember_choices(request, chosen)
        return choice

    def _build_task(
        self, request: AgentRequest, hints: Hints, logs: Mapping[str, LogKey]
    ) -> AgentTask:
        model = self._executor.models[request.model]
        journal = request.journal
        try:
            prompt = _render_prompt(request, model)
        except errors.PromptRefused as refusal:
            raise refusal.name_agent(request.agent, model.alias) from refusal
        run_id = uuid.uuid4().hex
        if journal is not None:
            model = journal.wrap_engines({model.alias: model})[model.alias]
            run_id = journal.run_id
        # a chat's slots become texts once they are complete, so they are texts from the start
        vocabulary = "" if request.chat else model.tokenizer.fingerprint
        sources = {agent: Source(log, vocabulary) for agent, log in logs.items()}
        drafts = bool(request.reads and model.drafts)
        if drafts and model.drafts == "auto":
            # held out as the other agents of its program are
            draw = random.Random(request.program).random()
            drafts = not self._holdouts.holds_out(_name_drafts(request), draw, self._clock())
        check_thinking_limit(request.agent, request.max_thinking_tokens, model)
        return AgentTask(
            request.agent,
            f"{request.agent}.{run_id}",
            model,
            prompt.parts,
            request.sampling,
            logprobs=request.confidence,
            timeout_s=request.timeout_s,
            hints=hints,
            sources=sources,
            prefill=request.prefill,
            all_needed=not (request.drops_failed or request.early_exit),
            begin_s=request.wait_s,
            silence_s=request.timeout_s,
            drafts=drafts,
            marks=model.reasoning,
            max_thinking_tokens=request.max_thinking_tokens,
            is_read=request.is_read,
            may_shrink=bool(sources),
            messages=prompt.messages,
        )

    async def _find_log(self, request: AgentRequest, agent: str) -> LogKey:
        """Return the log of the agent's latest attempt, at whichever router it was made."""
        key = self._registry.find_log(request, agent)
        record = self._registry.find_agent(request, agent)
        is_sought = record is None or record.ended in ("failed", "cancelled")
        begins = record is not None and not record.has_log  # and takes the first name that is free
        while (is_sought or begins) and await self._has_failed(key):
            again = replace(key, agent=f"{key.agent}#")
            if not begins and not await self._has_begun(again):
                break
            key = again
        return key

    async def _has_begun(self, key: LogKey) -> bool:
        try:
            await self._cache.read(key, wait_s=0)
        except LogTimeout as timeout:
            return timeout.begun
        return True

    async def _has_failed(self, key: LogKey) -> bool:
        return await self._find_end(key) not in (None, End.FINISHED)

    async def _find_end(self, key: LogKey) -> End | None:
        try:
            return (await self._cache.read(key, at_least=sys.maxsize, wait_s=0)).end
        except LogTimeout:
            return None

    # --- running

    async def _run_once(
        self, request: AgentRequest, record: AgentRecord, work: Work, emit: Emit
    ) -> Answer:
        """Begin the agent, unless the same request has, and return its answer."""
        await self._registry.make_space(request)
        if before := self._registry.find_sent(request, record.request):
            return await self._await_answer(request, before)
        self._registry.register(request, record)
        record.begin(asyncio.create_task(self._run_work(request, record, work, emit)))
        return await self._await_answer(request, record)

    async def _await_answer(self, request: AgentRequest, record: AgentRecord) -> Answer:
        """Return the agent's answer; the agent is cancelled with the last call of this."""
        if record.task is None:
            assert record.answer is not None
            return record.answer
        task = record.task
        record.waiting += 1
        try:
            await asyncio.wait([task])
        finally:
            record.waiting -= 1
            if not task.done() and not record.waiting:
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            raise errors.AgentFailed(
                f"Agent {request.agent!r} was cancelled with its program {request.program!r}.",
                remedy="Send it again.",
            )
        return task.result()

    async def _run_work(
        self, request: AgentRequest, record: AgentRecord, work: Work, emit: Emit
    ) -> Answer:
        """Do the agent's work within its time limit, and end its log."""
        writer = await self._create_log(request, record)
        limit_s = None if record.request is None else request.timeout_s
        late = partial(
            errors.DeadlineExceeded,
            f"Agent {request.agent!r} did not end within {request.timeout_s:g} s.",
            remedy="Allow more time.",
        )
        try:
            with Deadline(limit_s, late=late) as record.limit:
                if record.is_left_out:
                    raise _Exited
                answer = await work(writer)
            writer.end(End.FINISHED, str(answer.confidence or ""))
        except _Exited:
            writer.end(End.ABORTED, "early_exit")
            if request.journal is not None:
                request.journal.add("void", "")  # sent again, it runs again
            agents = {}
            if record.run is not None:
                emit(AgentStopped(self._clock(), request.agent, "early_exit"))
                agents[request.agent] = count_lost(record.run, "early_exit")
            warning = "A reader's early exit cut the output off."
            return Answer(record.text, "abort", agents, warning=warning)
        except asyncio.CancelledError:
            writer.end(End.ABORTED, "cancelled")
            raise
        except errors.ShellRouterError as error:
            writer.end(End.FAILED, str(error))
            emit(AgentErred(self._clock(), request.agent, str(error), dropped=False))
            raise
        finally:
            writer.end(End.FAILED, "the router failed")  # has no effect if the log has ended
        return answer

    async def _create_log(self, request: AgentRequest, record: AgentRecord) -> LogWriter:
        key = LogKey(request.tenant, request.program, record.log)
        try:
            writer = await self._cache.create(key)
            record.has_log = True
            return writer
        except LogExists as error:
            repeats = request.journal is not None and request.journal.repeats
            if repeats or await self._has_failed(key):
                record.log += "#"  # the log is of an earlier attempt, at another router
                return await self._create_log(request, record)
            # another router's agent: what is known of this one would be wrong of that
            self._registry.unregister(request)
            raise make_duplicate_error(request) from error

    async def _answer(
        self,
        request: AgentRequest,
        task: AgentTask,
        record: AgentRecord,
        choices: Iterable[Event],
        emit: Emit,
        writer: LogWriter,
    ) -> Answer:
        """Run an agent that a model serves."""
        for choice in choices:
            emit(choice)
        chooser = self._chooser
        if request.journal is not None:
            request.journal.add("models", "", {request.agent: task.model.alias})
            # nothing is learned from what is repeated
            if request.journal.repeats:
                chooser = chooser.copy_unmeasured()
        context = RunContext(
            chooser.estimates,
            self._cache,
            emit,
            self._clock,
            accounts=request.accounts,
            journal=request.journal,
        )
        run = AgentRun(task, context, writer=writer)
        record.run = run
        run.start()
        expect_remainder = partial(self._expect_remainder, request)
        judging = None
        if request.early_exit is not None and request.reads:
            judging = self._begin_judging(request, task, context)
        try:
            prompt = await complete_prompt(task, context, expect_remainder)
        finally:
            if judging is not None:
                judging.cancel()
                await asyncio.wait([judging])
        if judging is not None and not judging.cancelled():
            judging.result()
        if request.chat and request.reads:
            prompt = await self._render_texts(request, task, prompt)
        output = await run.decode(prompt.ids, prompt.sent)
        usage = count_usage(task, output)
        if request.reads and task.model.drafts == "auto" and chooser is self._chooser:
            key = _name_drafts(request)
            held_out = not task.drafts
            observe_drafts(self._holdouts, key, [usage], held_out=held_out, now_s=self._clock())
        return Answer(
            output.text,
            output.finish.reason,
            {request.agent: usage},
            output.confidence,
            output.reasoning,
        )

    def _begin_judging(
        self, request: AgentRequest, task: AgentTask, context: RunContext
    ) -> asyncio.Task[None]:
        """Let the request's early exit judge its precursors, and cut off what runs here.

        Raises ConfigError.
        """
        unfinished = set(request.reads)
        judge = ClusterExit(
            Cluster(request.agent, request.reads, request.early_exit),
            context,
            self._executor.embedder,
            lambda: tuple(agent for agent in request.reads if agent in unfinished),
            request.program,
        )

        async def judge_output(agent: str) -> None:
            key = task.sources[agent].key
            try:
                read = await self._cache.read(key, at_least=sys.maxsize, wait_s=request.timeout_s)
            except LogTimeout:
                return  # the reader's own wait ends, too
            unfinished.discard(agent)
            if read.end is not End.FINISHED or not read.text.strip():
                return
            confidence = float(read.detail) if read.detail else None
            if judge.reads_text and confidence is not None:
                judge.add_text(agent, read.text, confidence)
            verdict = await judge.judge_output(agent, read.text, confidence)
            for straggler in verdict.cut:
                unfinished.discard(straggler)
                record = self._registry.find_agent(request, straggler)
                # what is written elsewhere has no request, and costs no engine anything
                if record is not None and record.request:
                    record.is_left_out = True
                    if record.limit is not None:
                        record.limit.end(_Exited())

        async def judge_outputs() -> None:
            for agent in request.reads:
                if await self._find_end(task.sources[agent].key):
                    unfinished.discard(agent)
            async with asyncio.TaskGroup() as group:
                for agent in request.reads:
                    group.create_task(judge_output(agent))

        return asyncio.create_task(judge_outputs())

    async def _render_texts(
        self, request: AgentRequest, task: AgentTask, prompt: CompletePrompt
    ) -> CompletePrompt:
        """Return the prompt with texts in place of slots.

        A template may change the ends of a text, which it cannot do to a slot.
        """
        outputs = {}
        for agent in request.reads:
            key = task.sources[agent].key
            read = await self._cache.read(key, at_least=sys.maxsize, wait_s=0)
            outputs[agent] = task.model.tokenizer.control.quote(read.text)
        messages = []
        for role, segments in request.messages:
            messages.append(Message(role, tuple(_fill_segments(segments, outputs))))
        tokenizer = task.model.tokenizer
        text = "".join(map(str, render(tokenizer, messages, request.chat_template_kwargs)))
        ids = await encode_text(tokenizer, text)
        return CompletePrompt(ids, min(prompt.sent, count_common_prefix(prompt.ids, ids)))

    async def _answer_by_graph(
        self,
        request: AgentRequest,
        record: AgentRecord,
        graph: Graph,
        emit: Emit,
        writer: LogWriter,
    ) -> Answer:
        """Run a topology whose answer is the agent's output."""
        read = {agent: await self._await_output(request, agent) for agent in request.reads}
        if read and all(output is None for output in read.values()):
            raise errors.AgentFailed(
                f"Agent {request.agent!r} has no precursor left: each failed.",
                remedy="Send the precursors again.",
            )
        outputs = {agent: output or "" for agent, output in read.items()}
        parts = [_fill_segments(segments, outputs) for _, segments in request.messages]
        self._chooser.require_possible(sum(len(text) for texts in parts for text in texts))
        chat = []
        for (role, _), texts in zip(request.messages, parts, strict=True):
            chat.append({"role": role, "content": "".join(texts)})
        run_id = uuid.uuid4().hex
        graph_request = MoaRequest(
            run_id,
            request.tenant,
            tuple(chat),
            request.sampling,
            request.sampling.get("sampling_seed", zlib.crc32(run_id.encode())),
            request.timeout_s,
            chat_template_kwargs=request.chat_template_kwargs,
            end_user=request.end_user,
            tier=request.tier,
            session=request.session,
            accounts=request.accounts,
            confidence=request.confidence,
        )
        written = list[str]()

        def copy_answer(event: Event) -> None:
            emit(event)
            if text := answer_in(event, graph.answering):
                writer.append(Chunk(text))
                written.append(text)

        try:
            answer = await self._executor.run(graph, graph_request, copy_answer)
        finally:
            record.output = "".join(written)
        if answer.reasoning and not answer.text:
            tokens = sum(usage.reasoning_tokens for usage in answer.agents.values())
            raise make_no_answer_error(request.agent, tokens)
        return answer

    async def _await_output(self, request: AgentRequest, agent: str) -> str | None:
        """Return all that the precursor writes; None if it fails and may be left out.

        Raises PrecursorTimeout and AgentFailed.
        """
        key = await self._find_log(request, agent)
        try:
            await self._cache.read(key, wait_s=request.wait_s)
        except LogTimeout as error:
            if not error.begun:
                raise make_silence_error(request.agent, agent, request.wait_s) from error
        read = await self._cache.read(key, at_least=sys.maxsize, wait_s=request.timeout_s)
        if read.end is not End.FINISHED:
            if request.drops_failed:
                return None
            raise errors.AgentFailed(
                f"Agent {request.agent!r} needs the output of {agent!r}, which ended early: "
                f"{read.detail}",
                remedy="Send the precursor again.",
            )
        return read.text

    def _expect_remainder(self, request: AgentRequest, read: Collection[str]) -> Remainder:
        """Return what the agent still waits for from precursors that run at this router."""
        slowest = 0.0
        token_s = None
        for precursor in request.reads:
            if precursor in read:
                continue
            record = self._registry.find_agent(request, precursor)
            if record is None or record.run is None:
                continue
            remaining = record.run.progress.remaining
            if remaining[0] > slowest:
                slowest, token_s = remaining
        return Remainder(slowest, token_s)


def _name_drafts(request: AgentRequest) -> Compared:
    return Compared("drafts", AGENT_REQUEST, request.model, "aggregator")


def _render_prompt(request: AgentRequest, model: ServedModel) -> AgentPrompt:
    if request.prompt:
        parts = _open_slots(request.prompt)
        return AgentPrompt(parts, [Message("user", parts)])
    messages = [Message(role, _open_slots(segments)) for role, segments in request.messages]
    parts = render(model.tokenizer, messages, request.chat_template_kwargs)
    return AgentPrompt(parts, messages)


def _open_slots(segments: Iterable[Segment]) -> tuple[Part, ...]:
    return tuple(
        Slot(segment.agent) if isinstance(segment, OutputOf) else segment for segment in segments
    )


def _fill_segments(segments: Iterable[Segment], outputs: Mapping[str, str]) -> list[str]:
    return [
        outputs[segment.agent] if isinstance(segment, OutputOf) else segment for segment in segments
    ]


async def _copy_texts(record: AgentRecord, texts: AsyncIterator[str], writer: LogWriter) -> Answer:
    """Write `texts` as the agent's output."""
    written = list[str]()
    try:
        async for text in texts:
            writer.append(Chunk(text))
            written.append(text)
        writer.end(End.FINISHED)
    finally:
        writer.end(End.ABORTED, "its text ended early")  # has no effect if the log has ended
        record.output = "".join(written)
    return Answer(record.output, "stop", {})
