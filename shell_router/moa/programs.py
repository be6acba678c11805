"""Agent requests: programs whose agents arrive one by one from an external framework."""

import asyncio
import random
import sys
import uuid
import zlib
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from operator import itemgetter

from agent_cache import (
    AgentPromptCache,
    Chunk,
    End,
    LogExists,
    LogKey,
    LogRead,
    LogTimeout,
    LogWriter,
)
from shell_router import errors
from shell_router.core.engine import Hints, ServedModel
from shell_router.core.events import AgentErred, Emit, Event, answer_in
from shell_router.core.sampling import require_possible
from shell_router.moa.agent import (
    AgentRun,
    AgentTask,
    Source,
    check_task,
    ended_in_thinking,
    limited,
    usage_of,
)
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.incremental import Prompt, common_prefix, complete_prompt
from shell_router.moa.planning import (
    AGENT_REQUEST,
    compare_drafts,
    ids_are_text,
    known_of_request,
    plan_agent,
    thinking_limit,
)
from shell_router.moa.prompt import Message, Part, Slot, encoded, render
from shell_router.moa.requests import (
    AgentRequest,
    Answer,
    Deadline,
    MoaRequest,
    OutputOf,
    ProgramAgentState,
    ProgramState,
    Segment,
)
from shell_router.routing.holdout import Compared, Holdouts, HoldoutSettings
from shell_router.routing.increments import Remainder
from shell_router.topology import AUTO, Graph


@dataclass(slots=True, eq=False)
class _Record:
    """One agent of a program, from the moment it was sent.

    `model` is None if it is a topology, and `asked`, too, if it is written elsewhere. `load` holds
    what it counts for.
    """

    asked: AgentRequest | None = None
    model: ServedModel | None = None
    precursors: frozenset[str] = frozenset()
    load: ExitStack = field(default_factory=ExitStack)
    log: str = ""
    run: AgentRun | None = None
    task: asyncio.Task[Answer] | None = None
    waiting: int = 0
    ended: ProgramAgentState | None = None
    answer: Answer | None = None
    output: str = ""

    @property
    def state(self) -> ProgramAgentState:
        if self.ended:
            return self.ended
        if self.model is None or (self.run and self.run.prompt_tokens):
            return "running"
        return "waiting"

    @property
    def text(self) -> str:
        return self.run.text if self.run else self.output

    def begin(self, task: asyncio.Task[Answer]) -> None:
        """Run `task`; when it ends, keep what can still be asked for."""
        self.task, self.load = (
            task,
            self.load.pop_all(),
        )  # the load stays when the call that sent it leaves
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Answer]) -> None:
        if task.cancelled():
            self.ended = "cancelled"
        elif task.exception():
            self.ended = "failed"
        else:
            self.ended, self.answer = "finished", task.result()
        self.load.close()
        self.output = self.text
        self.run = None
        self.task = None
        if self.asked is not None and self.asked.chat:
            self.asked = None  # it is sent once: its id is the router's


@dataclass(slots=True)
class _Program:
    used_s: float
    agents: dict[str, _Record] = field(default_factory=dict)
    chosen: dict[tuple[str, ...], str] = field(
        default_factory=dict
    )  # the program's model among these candidates
    written: int = 0  # bytes that came from elsewhere

    def is_running(self) -> bool:
        return any(record.ended is None for record in self.agents.values())


class Programs:
    """Runs agent requests and remembers the programs they belong to.

    A program whose agents have all ended is forgotten `ttl_s` after its last one was sent, as the
    cache forgets their logs, or when there are more than `max_programs`, first the oldest of the
    tenant that has most, or when outputs that its tenant has written elsewhere take more than
    `max_written` bytes. None has more than `max_agents`. Without `holdouts` no program is held out
    to show what drafts save.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        cache: AgentPromptCache,
        *,
        clock: Callable[[], float],
        ttl_s: float = 3600.0,
        max_programs: int = 10_000,
        max_agents: int = 10_000,
        max_written: int = 2**27,
        chooser: ModelChooser | None = None,
        holdouts: Holdouts | None = None,
    ) -> None:
        self._models = models
        self._holdouts = holdouts or Holdouts(HoldoutSettings(share=0.0))
        self._cache = cache
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_programs = max_programs
        self._max_agents = max_agents
        self._max_written = max_written
        self._chooser = chooser or ModelChooser(models, clock=clock)
        self._programs: dict[tuple[str, str], _Program] = {}
        self._written: Counter[str] = Counter()  # by tenant
        self._chats: dict[tuple[str, str], str] = {}  # the program of a tenant's chat completion

    async def run(self, request: AgentRequest, emit: Emit) -> Answer:
        """Run one agent to its end, reporting to `emit` what happens.

        The same request sent again waits for the first one's answer, of which `emit` learns
        nothing; if the first one failed or was cancelled, it runs again. An agent is cancelled when
        the last call that waits for it is.

        Raises UnknownModel, DuplicateAgent, InvalidRequest (an agent that waits for itself),
        PrecursorTimeout, AgentFailed (a precursor failed or was cancelled, or the engine failed),
        PromptTooLong, DeadlineExceeded, and Overloaded when every remembered program is still
        running, or this one has too many agents.
        """
        if record := self._sent_before(request, request):
            return await self._result(request, record)
        planned = replace(request, sampling=limited(request.sampling))
        if request.journal is not None and (chosen := request.journal.chosen(request.agent)):
            planned = replace(planned, model=chosen, candidates=())
        longest = max(model.context_length for model in self._models.values())
        require_possible(known_of_request(request).characters, longest)
        choices: list[Event] = []  # emitted once nothing can be refused any more
        model, hints = await self._planned(planned, choices.append)
        expected = hints.output_tokens
        if expected is None:
            tokens = float(planned.sampling["max_new_tokens"])
        else:
            tokens = expected
        with ExitStack() as load:  # from the choice on, so that no other is made by the same load
            load.enter_context(self._chooser.activity.program({request.agent: (model, tokens)}))
            planned = replace(planned, model=model, candidates=())
            task = self._task(planned, hints)
            await check_task(task)
            record = _Record(request, task.model, frozenset(task.sources), load)
            work = partial(self._answer, planned, task, record, choices, emit)
            return await self._once(planned, record, work, emit)

    async def run_graph(
        self,
        request: AgentRequest,
        graph: Graph,
        run: Callable[[Graph, MoaRequest, Emit], Awaitable[Answer]],
        emit: Emit,
    ) -> Answer:
        """As `run` where a topology is the agent, which is asked once the outputs in its messages
        have ended.

        Its readers follow its answer as it is written.
        """
        record = _Record(request, precursors=frozenset(request.reads))
        return await self._once(
            request, record, partial(self._answer_of_graph, request, record, graph, run, emit), emit
        )

    async def write(self, request: AgentRequest, texts: AsyncIterator[str]) -> Answer:
        """Make `texts` the output of an agent that the router does not run; readers follow them as
        they come.

        Of `request` only tenant, program and agent count. Raises DuplicateAgent, AgentFailed and
        Overloaded.
        """
        record = _Record()
        return await self._once(request, record, partial(_copy, record, texts), lambda event: None)

    async def output(self, tenant: str, program: str, agent: str, wait_s: float) -> str | None:
        """All that the agent wrote; None if it still writes after `wait_s`. Raises UnknownProgram
        and AgentFailed.
        """
        record = self._program(tenant, program).agents.get(agent)
        if record is None:
            raise errors.UnknownProgram(
                f"Program {program!r} has no agent {agent!r}.", remedy="Send its request first."
            )
        try:
            read = await self._ended(LogKey(tenant, program, record.log), wait_s)
        except LogTimeout:
            return None
        if read.end in (End.ABORTED, End.FAILED):
            raise errors.AgentFailed(
                f"Agent {agent!r} gave no output, it {read.end.value}: {read.detail}",
                remedy="Send it again in a new program.",
            )
        return read.text if read.end else None

    def program_of(self, tenant: str, agent: str) -> str | None:
        """The program that a chat completion belongs to; None if this tenant has none of that id,
        or no more.
        """
        program = self._chats.get((tenant, agent))
        if program is not None and self._find(tenant, program):
            return program
        return None

    def state(self, tenant: str, program: str) -> ProgramState:
        """What is known of a program. Raises UnknownProgram."""
        agents = self._program(tenant, program).agents
        return ProgramState(
            program,
            {agent: record.state for agent, record in agents.items()},
            {agent: record.text for agent, record in agents.items()},
        )

    async def cancel(self, tenant: str, program: str) -> None:
        """End every running agent of the program and forget it. Raises UnknownProgram."""
        agents = self._program(tenant, program).agents
        tasks = [
            record.task for record in agents.values() if record.task and not record.task.done()
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._forget(tenant, program)

    # --- before it runs

    async def _planned(self, request: AgentRequest, emit: Emit) -> tuple[str, Hints]:
        """The request's model, the one that its program was given before, and what is expected of
        it.
        """
        known = self._find(request.tenant, request.program)
        chosen = dict(known.chosen) if known else {}
        planned = await plan_agent(self._chooser, self._models, request, chosen, emit)
        if request.model == AUTO:
            await self._make_space(request)
            program = self._programs.setdefault(
                (request.tenant, request.program), _Program(self._clock())
            )
            program.chosen.update(chosen)
        return planned

    def _task(self, request: AgentRequest, hints: Hints) -> AgentTask:
        model = self._models[request.model]
        journal = request.journal
        parts = _parts(request, model)
        if journal is not None:
            model = journal.models({model.alias: model})[model.alias]
        return AgentTask(
            request.agent,
            f"{request.agent}.{uuid.uuid4().hex if journal is None else journal.run_id}",
            model,
            parts,
            request.sampling,
            timeout_s=request.timeout_s,
            hints=hints,
            sources={
                part.agent: self._source(request, part.agent, model)
                for part in parts
                if isinstance(part, Slot)
            },
            prefill=request.prefill,
            all_needed=True,
            begin_s=request.wait_s,
            silence_s=request.timeout_s,
            drafts=bool(request.reads and model.drafts)
            and not self._without_drafts(request, model),
            marks=model.reasoning,
            max_thinking_tokens=thinking_limit(request.agent, request.max_thinking_tokens, model),
            is_read=request.is_read,
        )

    def _without_drafts(self, request: AgentRequest, model: ServedModel) -> bool:
        """Whether it is held out, as the other agents of its program are."""
        draw = random.Random(request.program).random()
        return model.drafts == "auto" and self._holdouts.holds_out(
            _drafts_of(request), draw, self._clock()
        )

    def _source(self, request: AgentRequest, precursor: str, reader: ServedModel) -> Source:
        def shares_ids() -> bool:
            # known once its log has begun here; an agent that another router runs is read as text
            if request.chat:
                writer = None
            else:
                writer = self._known(request, precursor)
            if writer is None or writer.model is None or writer.asked is None:
                return False
            return ids_are_text(writer.model, writer.asked.sampling, reader)

        return Source(self._log_key(request, precursor), shares_ids)

    def _log_key(self, request: AgentRequest, agent: str) -> LogKey:
        known = self._known(request, agent)
        return LogKey(request.tenant, request.program, known.log if known else agent)

    def _known(self, request: AgentRequest, agent: str) -> _Record | None:
        program = self._find(request.tenant, request.program)
        if program:
            return program.agents.get(agent)
        return None

    def _sent_before(self, request: AgentRequest, asked: AgentRequest | None) -> _Record | None:
        """The agent, if `asked` sent it and it has not failed. Raises DuplicateAgent for another
        one.

        An output that is written elsewhere, without `asked`, may take the place of one that failed.
        """
        record = self._known(request, request.agent)
        if record is None:
            return None
        has_failed = record.ended in ("failed", "cancelled")
        is_same = asked is not None and record.asked == asked
        if has_failed and (is_same or asked is None):
            return None
        if not is_same:
            raise _duplicate(request)
        return record

    async def _make_space(self, request: AgentRequest) -> None:
        limit_s = self._clock() - self._ttl_s  # programs are in the order of their last use
        expired = takewhile(lambda item: item[1].used_s <= limit_s, self._programs.items())
        await self._forget_ended(list(expired))
        if (request.tenant, request.program) in self._programs:
            return
        while len(self._programs) >= self._max_programs:
            if not (ended := self._oldest_ended()):
                raise errors.Overloaded(
                    f"All {self._max_programs} programs are still running.",
                    remedy="Try again when some have ended.",
                )
            await self._forget_ended(ended)

    async def _forget_ended(self, programs: Iterable[tuple[tuple[str, str], _Program]]) -> None:
        """Forget those of them that do not run. One may run again, or anew, while this awaits Redis
        for another.
        """
        for key, program in programs:
            if self._programs.get(key) is program and not program.is_running():
                await self._forget(*key)

    def _oldest_ended(self) -> list[tuple[tuple[str, str], _Program]]:
        """A hundredth of the programs of the tenant that has most, so that one cannot push out
        those of others.

        At least one, if there is any. All programs are looked at, which would be too much for every
        request.
        """
        for tenant, number in Counter(map(itemgetter(0), self._programs)).most_common():
            ended = (
                one
                for one in self._programs.items()
                if one[0][0] == tenant and not one[1].is_running()
            )
            if found := list(islice(ended, max(1, number // 100))):
                return found
        return []

    def _register(self, request: AgentRequest, record: _Record) -> None:
        """Add the agent. One that runs again needs another log; no agent's id holds a #."""
        before = self._known(request, request.agent)
        if before is None:
            record.log = request.agent
        else:
            record.log = f"{before.log}#"
        key = (request.tenant, request.program)
        program = self._programs.pop(key, None) or _Program(0.0)
        program.used_s = self._clock()
        self._programs[key] = program  # the last used is last
        if len(program.agents) >= self._max_agents:
            raise errors.Overloaded(
                (
                    f"Program {request.program!r} has {len(program.agents)} agents, which is the "
                    "limit."
                ),
                remedy="Begin a new program for every run.",
            )
        if circle := _circle(program, request.agent, record.precursors):
            raise errors.InvalidRequest(
                f"Agent {request.agent!r} would wait for itself: {' <- '.join(circle)}.",
                remedy="Break the circle of output_of segments.",
            )
        program.agents[request.agent] = record
        if request.chat:
            self._chats[request.tenant, request.agent] = request.program

    # --- while it runs

    async def _once(
        self,
        request: AgentRequest,
        record: _Record,
        work: Callable[[LogWriter], Awaitable[Answer]],
        emit: Emit,
    ) -> Answer:
        """Begin the agent, unless the same request has; its answer."""
        await self._make_space(request)
        if before := self._sent_before(request, record.asked):
            return await self._result(request, before)
        self._register(request, record)
        record.begin(asyncio.create_task(self._run(request, record, work, emit)))
        return await self._result(request, record)

    async def _result(self, request: AgentRequest, record: _Record) -> Answer:
        """What the agent answers; cancelled with its last reader."""
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
                remedy="Send it again in a new program.",
            )
        return task.result()

    async def _run(
        self,
        request: AgentRequest,
        record: _Record,
        work: Callable[[LogWriter], Awaitable[Answer]],
        emit: Emit,
    ) -> Answer:
        writer = await self._writer(request, record)
        if record.asked is None:
            limit_s = None
        else:
            limit_s = request.timeout_s
        late = f"Agent {request.agent!r} did not end within {request.timeout_s:g} s."
        try:
            with Deadline(
                limit_s, late=partial(errors.DeadlineExceeded, late, remedy="Allow more time.")
            ):
                answer = await work(writer)
            writer.end(End.FINISHED)
        except asyncio.CancelledError:
            writer.end(End.ABORTED, "cancelled")
            raise
        except errors.ShellRouterError as error:
            writer.end(End.FAILED, str(error))
            emit(AgentErred(self._clock(), request.agent, str(error), dropped=False))
            raise
        finally:
            writer.end(End.FAILED, "the router failed")  # says nothing where the log has ended
        return answer

    async def _writer(self, request: AgentRequest, record: _Record) -> LogWriter:
        try:
            return await self._cache.create(LogKey(request.tenant, request.program, record.log))
        except LogExists as error:
            if (
                request.journal is not None and request.journal.repeats
            ):  # of an earlier attempt, at a router that ended
                record.log += "#"
                return await self._writer(request, record)
            # another router's agent: what is known of this one would be wrong of that
            if program := self._programs.get((request.tenant, request.program)):
                program.agents.pop(request.agent, None)
            raise _duplicate(request) from error

    async def _answer(
        self,
        request: AgentRequest,
        task: AgentTask,
        record: _Record,
        choices: Iterable[Event],
        emit: Emit,
        writer: LogWriter,
    ) -> Answer:
        for choice in choices:
            emit(choice)
        chooser = self._chooser
        if request.journal is not None:
            request.journal.add("models", "", {request.agent: task.model.alias})
            # nothing is learned from what is repeated
            if request.journal.repeats:
                chooser = chooser.anew()
        cache = self._cache
        estimates = chooser.estimates
        clock = self._clock
        record.run = run = AgentRun(task, estimates, emit, clock=clock, writer=writer)
        run.start()
        load = estimates.prefill(task.model)
        remainder = partial(self._remainder, request)
        prompt = await complete_prompt(task, cache, load, remainder, emit, clock)
        if request.chat and request.reads:
            prompt = await self._exact(request, task, prompt)
        output = await run.decode(prompt.ids, prompt.sent)
        usage = usage_of(task, output)
        if request.reads and task.model.drafts == "auto" and chooser is self._chooser:
            compare_drafts(
                self._holdouts,
                _drafts_of(request),
                [usage],
                held_out=not task.drafts,
                now_s=clock(),
            )
        return Answer(
            output.text, output.finish.reason, {request.agent: usage}, reasoning=output.reasoning
        )

    async def _exact(self, request: AgentRequest, task: AgentTask, prompt: Prompt) -> Prompt:
        """The prompt with texts where slots were: a template may change the ends of a text, and of
        a slot it cannot.
        """
        texts = {one: (await self._ended(task.sources[one].key, 0)).text for one in request.reads}
        said = [
            Message(role, tuple(_texts(segments, texts))) for role, segments in request.messages
        ]
        text = "".join(map(str, render(task.model.tokenizer, said, request.chat_template_kwargs)))
        ids = await encoded(task.model.tokenizer, text)
        return Prompt(ids, min(prompt.sent, common_prefix(prompt.ids, ids)))

    async def _answer_of_graph(
        self,
        request: AgentRequest,
        record: _Record,
        graph: Graph,
        run: Callable[[Graph, MoaRequest, Emit], Awaitable[Answer]],
        emit: Emit,
        writer: LogWriter,
    ) -> Answer:
        texts = {agent: await self._whole(request, agent) for agent in request.reads}
        said = ((role, "".join(_texts(segments, texts))) for role, segments in request.messages)
        chat = tuple([{"role": role, "content": content} for role, content in said])
        run_id = uuid.uuid4().hex
        written = list[str]()
        sampling = request.sampling

        def follow(event: Event) -> None:
            emit(event)
            if text := answer_in(event, graph.answering):
                writer.append(Chunk(text))
                written.append(text)

        seed = sampling.get("sampling_seed", zlib.crc32(run_id.encode()))
        asked = MoaRequest(
            run_id,
            request.tenant,
            chat,
            sampling,
            seed,
            request.timeout_s,
            end_user=request.end_user,
        )
        try:
            answer = await run(
                graph, replace(asked, chat_template_kwargs=request.chat_template_kwargs), follow
            )
        finally:
            record.output = "".join(written)
        if answer.reasoning and not answer.text:
            raise ended_in_thinking(
                request.agent, sum(spent.reasoning_tokens for spent in answer.agents.values())
            )
        return answer

    async def _whole(self, request: AgentRequest, agent: str) -> str:
        """All that the precursor writes. Raises PrecursorTimeout and AgentFailed."""
        key = self._log_key(request, agent)
        try:
            await self._cache.read(key, wait_s=request.wait_s)
        except LogTimeout as error:
            if not error.begun:
                raise errors.PrecursorTimeout(
                    (
                        f"Agent {request.agent!r} waited {request.wait_s:g} s for {agent!r}, and "
                        "nothing came."
                    ),
                    remedy="Send the precursor first, or allow a longer wait.",
                ) from error
        read = await self._ended(key, request.timeout_s)
        if read.end is not End.FINISHED:
            raise errors.AgentFailed(
                (
                    f"Agent {request.agent!r} needs the output of {agent!r}, which ended early: "
                    f"{read.detail}"
                ),
                remedy="Send the precursor again in a new program.",
            )
        return read.text

    async def _ended(self, log: LogKey, wait_s: float) -> LogRead:
        """All of a log. Raises LogTimeout."""
        return await self._cache.read(log, at_least=sys.maxsize, wait_s=wait_s)

    def _remainder(self, request: AgentRequest, read: Collection[str]) -> Remainder:
        """What the agent still waits for; agents that were not sent here yet, or to another router,
        are not counted.
        """
        slowest = 0.0
        token_s = None
        for precursor in request.reads:
            if precursor in read:
                record = None
            else:
                record = self._known(request, precursor)
            if record is not None and record.run is not None and record.run.remaining[0] > slowest:
                slowest, token_s = record.run.remaining
        return Remainder(slowest, token_s)

    # --- remembering

    def _program(self, tenant: str, program: str) -> _Program:
        found = self._find(tenant, program)
        if found is None:
            raise errors.UnknownProgram(
                f"No program {program!r} is known.", remedy="Send an agent request first."
            )
        return found

    def _find(self, tenant: str, program: str) -> _Program | None:
        """The program, unless its time is over."""
        found = self._programs.get((tenant, program))
        is_kept = found is not None and (
            found.used_s > self._clock() - self._ttl_s or found.is_running()
        )
        return found if is_kept else None

    async def wrote(self, tenant: str, program: str, size: int) -> None:
        """Bytes came for an output of the program that is written elsewhere. They are kept as long
        as the program.

        Where the tenant has too many, its oldest ended programs are forgotten. Raises Overloaded if
        there is none.
        """
        if (found := self._programs.get((tenant, program))) is not None:
            found.written += size
            self._written[tenant] += size
        while self._written[tenant] > self._max_written:
            ours = (
                item for item in self._programs.items() if item[0][0] == tenant and item[1].written
            )
            others = (key for key, one in ours if key[1] != program and not one.is_running())
            if (oldest := next(others, None)) is None:
                raise errors.Overloaded(
                    (
                        f"Outputs that {tenant!r} has written take more than {self._max_written} "
                        "bytes."
                    ),
                    remedy=(
                        f"First send DELETE /v1/agent/requests/{program}, or let other "
                        "programs end."
                    ),
                )
            await self._forget(*oldest)

    async def _forget(self, tenant: str, program: str) -> None:
        forgotten = self._programs.pop((tenant, program), None)
        self._written[tenant] -= forgotten.written if forgotten else 0
        for agent in forgotten.agents if forgotten else ():
            self._chats.pop((tenant, agent), None)
        await self._cache.forget(tenant, program)


def _drafts_of(request: AgentRequest) -> Compared:
    return Compared("drafts", AGENT_REQUEST, request.model, "aggregator")


def _parts(request: AgentRequest, model: ServedModel) -> tuple[Part, ...]:
    if request.prompt:
        return _with_slots(request.prompt)
    messages = [Message(role, _with_slots(segments)) for role, segments in request.messages]
    return render(model.tokenizer, messages, request.chat_template_kwargs)


async def _copy(record: _Record, texts: AsyncIterator[str], writer: LogWriter) -> Answer:
    written = list[str]()
    try:
        async for text in texts:
            writer.append(Chunk(text))
            written.append(text)
        writer.end(End.FINISHED)
    finally:
        writer.end(End.ABORTED, "its text ended early")  # says nothing where the log has ended
        record.output = "".join(written)
    return Answer(record.output, "stop", {})


def _texts(segments: Iterable[Segment], outputs: Mapping[str, str]) -> Iterator[str]:
    return (outputs[one.agent] if isinstance(one, OutputOf) else one for one in segments)


def _with_slots(segments: Iterable[Segment]) -> tuple[Part, ...]:
    return tuple(Slot(part.agent) if isinstance(part, OutputOf) else part for part in segments)


def _circle(program: _Program, agent: str, precursors: frozenset[str]) -> tuple[str, ...]:
    """A way from `agent` over precursors back to it, empty where there is none."""
    ways: list[tuple[str, ...]] = [(agent, precursor) for precursor in precursors]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        if way[-1] == agent:
            return way
        if way[-1] not in seen:
            seen.add(way[-1])
            known = program.agents.get(way[-1])
            ways.extend((*way, precursor) for precursor in (known.precursors if known else ()))
    return ()


def _duplicate(request: AgentRequest) -> errors.DuplicateAgent:
    return errors.DuplicateAgent(
        f"Program {request.program!r} already has an agent {request.agent!r}.",
        remedy="Send the same request again, give each agent its own id, or first send DELETE"
        f" /v1/agent/requests/{request.program}.",
    )
