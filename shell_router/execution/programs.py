"""The agent-request use case: programs whose agents arrive one by one from somebody else's framework."""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from agent_cache import AgentPromptCache, End, LogExists, LogKey, LogWriter
from shell_router.core.events import AgentErred, Event
from shell_router.core.hints import Hints
from shell_router.core.model import ServedModel
from shell_router.errors import (
    AgentFailed,
    DeadlineExceeded,
    DuplicateAgent,
    InvalidRequest,
    Overloaded,
    ShellRouterError,
    UnknownModel,
    UnknownProgram,
)
from shell_router.execution.agent_planning import PlannedAgent, plan_agent
from shell_router.execution.agent_run import AgentRun, Decoding, check_parts
from shell_router.execution.choosing import ModelChooser
from shell_router.execution.incremental import Filling, Source, ids_are_text
from shell_router.execution.prompt import Message, Part, Slot, render
from shell_router.execution.requests import (
    AgentRequest,
    AgentUsage,
    Answer,
    OutputOf,
    ProgramAgentState,
    ProgramState,
    Segment,
)
from shell_router.topology import AUTO


@dataclass(slots=True)
class _Record:
    """One agent of a program, from the moment it was sent."""

    model: ServedModel
    sampling: Mapping[str, Any]
    precursors: frozenset[str]
    run: AgentRun | None = None
    task: asyncio.Task[Answer] | None = None
    ended: ProgramAgentState | None = None
    output: str = ""

    @property
    def state(self) -> ProgramAgentState:
        if self.ended:
            return self.ended
        return "running" if self.run and self.run.prompt_tokens else "waiting"

    @property
    def text(self) -> str:
        return self.run.text if self.run else self.output

    def end(self, state: ProgramAgentState) -> None:
        """Keep what can still be asked for, and nothing of the run."""
        self.ended, self.output, self.run, self.task = state, self.text, None, None


@dataclass(slots=True)
class _Program:
    used_s: float
    agents: dict[str, _Record] = field(default_factory=dict)
    chosen: dict[tuple[str, ...], str] = field(default_factory=dict)  # the program's model among these candidates

    def is_running(self) -> bool:
        return any(record.ended is None for record in self.agents.values())


class Programs:
    """Runs agent requests and remembers the programs they belong to.

    A program whose agents have all ended is forgotten `ttl_s` after its last one was sent, as the cache forgets their
    logs, or when there are more than `max_programs`, the oldest first.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        cache: AgentPromptCache,
        *,
        clock: Callable[[], float],
        ttl_s: float = 3600.0,
        max_programs: int = 10_000,
        chooser: ModelChooser | None = None,
    ) -> None:
        self._models = models
        self._cache = cache
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_programs = max_programs
        self._chooser = chooser or ModelChooser(models, clock=clock)
        self._programs: dict[tuple[str, str], _Program] = {}

    async def run(self, request: AgentRequest, emit: Callable[[Event], None]) -> Answer:
        """Run one agent to its end, telling `emit` what happens.

        Raises UnknownModel, DuplicateAgent, InvalidRequest (an agent that waits for itself), PrecursorTimeout,
        AgentFailed (a precursor failed or was cancelled, or the engine failed), PromptTooLong, DeadlineExceeded, and
        Overloaded when every remembered program is still running.
        """
        choices: list[Event] = []  # told once nothing can be refused any more
        planned = await self._planned(request, choices.append)
        with self._chooser.activity.program({request.agent: planned.in_flight(request.sampling)}, emit) as watched:
            return await self._answered(request, planned, choices, watched)

    async def _planned(self, request: AgentRequest, emit: Callable[[Event], None]) -> PlannedAgent:
        """The request's model, the one that its program was given before, and what is expected of it."""
        if request.model == AUTO:
            await self._make_room(request)
        planned = await plan_agent(self._chooser, self._models, request, emit, self._chosen_before(request))
        if request.model == AUTO:
            program = self._programs.setdefault((request.tenant, request.program), _Program(self._clock()))
            program.chosen[self._chooser.candidates(request.candidates)] = planned.model
        return planned

    def _chosen_before(self, request: AgentRequest) -> Callable[[], str | None]:
        def chosen() -> str | None:
            program = self._programs.get((request.tenant, request.program))
            return program.chosen.get(self._chooser.candidates(request.candidates)) if program else None

        return chosen

    async def _answered(
        self, asked: AgentRequest, planned: PlannedAgent, choices: Iterable[Event], emit: Callable[[Event], None]
    ) -> Answer:
        request = replace(asked, model=planned.model, candidates=())
        filling = self._filling(request, planned)
        await self._make_room(request)
        record = self._register(request, filling)
        for choice in choices:
            emit(choice)
        record.task = task = asyncio.create_task(self._run(request, filling, record, emit))
        try:
            await asyncio.wait([task])
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            record.end(_end_of(task))
        if task.cancelled():
            raise AgentFailed(
                f"Agent {request.agent!r} was cancelled with its program {request.program!r}.",
                remedy="Send it again in a new program.",
            )
        return task.result()

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
        tasks = [record.task for record in agents.values() if record.task and not record.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._forget(tenant, program)

    # --- before it runs

    def _filling(self, request: AgentRequest, planned: PlannedAgent) -> Filling:
        model = self._models.get(request.model)
        if model is None:
            raise UnknownModel(
                f"No model {request.model!r} is configured.",
                remedy=f"Use one of: {', '.join(sorted(self._models))}.",
            )
        parts = _parts(request, model)
        check_parts(request.agent, model, parts, request.sampling)
        return Filling(
            request.agent,
            f"{request.agent}.{uuid.uuid4().hex}",
            model,
            parts,
            {part.agent: self._source(request, part.agent, model) for part in parts if isinstance(part, Slot)},
            request.prefill,
            all_needed=True,
            begin_s=request.wait_s,
            silence_s=request.timeout_s,
            hints=_hints(request, planned),
        )

    def _source(self, request: AgentRequest, precursor: str, reader: ServedModel) -> Source:
        def shares_ids() -> bool:
            # known once its log has begun here; an agent that another router runs is read as text
            program = self._programs.get((request.tenant, request.program))
            writer = program.agents.get(precursor) if program else None
            return writer is not None and ids_are_text(writer.model, writer.sampling, reader)

        return Source(LogKey(request.tenant, request.program, precursor), shares_ids)

    async def _make_room(self, request: AgentRequest) -> None:
        for key in self._expired():
            await self._forget(*key)
        if (request.tenant, request.program) in self._programs:
            return
        while len(self._programs) >= self._max_programs:
            ended = next((key for key, program in self._programs.items() if not program.is_running()), None)
            if ended is None:
                raise Overloaded(
                    f"All {self._max_programs} programs are still running.",
                    remedy="Try again when some have ended.",
                )
            await self._forget(*ended)

    def _expired(self) -> list[tuple[str, str]]:
        """Programs are in the order of their last use, so only the oldest need looking at."""
        limit_s = self._clock() - self._ttl_s
        oldest = takewhile(lambda item: item[1].used_s <= limit_s, list(self._programs.items()))
        return [key for key, program in oldest if not program.is_running()]

    def _register(self, request: AgentRequest, filling: Filling) -> _Record:
        key = (request.tenant, request.program)
        program = self._programs.pop(key, None) or _Program(0.0)
        program.used_s = self._clock()
        self._programs[key] = program  # the last used is last
        if request.agent in program.agents:
            raise _duplicate(request)
        precursors = frozenset(filling.sources)
        if circle := _circle(program, request.agent, precursors):
            raise InvalidRequest(
                f"Agent {request.agent!r} would wait for itself: {' <- '.join(circle)}.",
                remedy="Break the circle of output_of segments.",
            )
        return program.agents.setdefault(request.agent, _Record(filling.model, request.sampling, precursors))

    # --- while it runs

    async def _run(
        self, request: AgentRequest, filling: Filling, record: _Record, emit: Callable[[Event], None]
    ) -> Answer:
        try:
            writer = await self._cache.create(LogKey(request.tenant, request.program, request.agent))
        except LogExists as error:  # another router's agent: what is known of this one would be wrong of that
            if program := self._programs.get((request.tenant, request.program)):
                program.agents.pop(request.agent, None)
            raise _duplicate(request) from error
        try:
            answer = await self._answer(request, filling, record, writer, emit)
        except asyncio.CancelledError:
            writer.end(End.ABORTED, "cancelled")
            raise
        except ShellRouterError as error:
            writer.end(End.FAILED, str(error))
            emit(AgentErred(self._clock(), request.agent, str(error), dropped=False))
            raise
        finally:
            writer.end(End.FAILED, "the router failed")  # says nothing where the log has ended
        return answer

    async def _answer(
        self,
        request: AgentRequest,
        filling: Filling,
        record: _Record,
        writer: LogWriter,
        emit: Callable[[Event], None],
    ) -> Answer:
        decoding = Decoding(request.sampling, logprobs=False, timeout_s=request.timeout_s)
        record.run = AgentRun(filling, decoding, writer, self._cache, self._chooser.pace, emit, clock=self._clock)
        try:
            async with asyncio.timeout(request.timeout_s):
                output = await record.run.run()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"Agent {request.agent!r} did not end within {request.timeout_s:g} s.",
                remedy="Allow more time.",
            ) from error
        writer.end(End.FINISHED)
        finish = output.finish
        usage = AgentUsage(
            request.model, finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens, "finished"
        )
        return Answer(output.text, finish.reason, {request.agent: usage})

    # --- remembering

    def _program(self, tenant: str, program: str) -> _Program:
        found = self._programs.get((tenant, program))
        if found is None:
            raise UnknownProgram(f"No program {program!r} is known.", remedy="Send an agent request first.")
        return found

    async def _forget(self, tenant: str, program: str) -> None:
        self._programs.pop((tenant, program), None)
        await self._cache.forget(tenant, program)


def _parts(request: AgentRequest, model: ServedModel) -> tuple[Part, ...]:
    if bool(request.prompt) == bool(request.messages):
        raise InvalidRequest("Exactly one of prompt and messages is needed.", remedy="Send one of the two.")
    if request.prompt:
        return _holes(request.prompt)
    return render(model.tokenizer, [Message(role, _holes(segments)) for role, segments in request.messages])


def _hints(request: AgentRequest, planned: PlannedAgent) -> Hints:
    """What follows an agent in its program is somebody else's secret, unless a predictor has learned it."""
    return Hints(
        request.tenant,
        request.program,
        agent=request.agent,
        output_tokens=planned.own_tokens,
        total_tokens=planned.total_tokens,
    )


def _holes(segments: Iterable[Segment]) -> tuple[Part, ...]:
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


def _end_of(task: asyncio.Task[Answer]) -> ProgramAgentState:
    if task.cancelled():
        return "cancelled"
    return "failed" if task.exception() else "finished"


def _duplicate(request: AgentRequest) -> DuplicateAgent:
    return DuplicateAgent(
        f"Program {request.program!r} already has an agent {request.agent!r}.",
        remedy=f"Give each agent its own id, or first send DELETE /v1/agent/requests/{request.program}.",
    )
