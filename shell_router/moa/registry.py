"""Remembers the programs of external frameworks and their agents, within quotas."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice, takewhile

from agent_cache import AgentPromptCache, LogKey
from shell_router.core.engine import ServedModel
from shell_router.errors import DuplicateAgent, InvalidRequest, Overloaded, UnknownProgram
from shell_router.moa.agent import AgentRun
from shell_router.moa.deadline import Deadline
from shell_router.moa.requests import AgentRequest, Answer, ProgramAgentState


@dataclass(slots=True, eq=False)
class AgentRecord:
    """One agent of a program, from the moment it was sent.

    Attributes:
        request: None for an output that is written elsewhere, and for a chat that has ended.
        model: None for a topology, and for an output that is written elsewhere.
        precursors: The agents that it reads.
        load: Holds its entry in the chooser's activity.
        log: The agent id of its log in the cache.
        has_log: Whether the log is there.
        run: Its decoding, while it runs.
        limit: The limit of its work, which early exits end.
        is_left_out: Whether a reader's early exit has ended it.
        task: The asyncio task that runs it.
        waiting: How many callers wait for its answer.
    """

    request: AgentRequest | None = None
    model: ServedModel | None = None
    precursors: frozenset[str] = frozenset()
    load: ExitStack = field(default_factory=ExitStack)
    log: str = ""
    has_log: bool = False
    run: AgentRun | None = None
    limit: Deadline | None = None
    is_left_out: bool = False
    task: asyncio.Task[Answer] | None = None
    waiting: int = 0
    ended: ProgramAgentState | None = None
    answer: Answer | None = None
    output: str = ""

    @property
    def state(self) -> ProgramAgentState:
        """The state that clients see."""
        if self.ended:
            return self.ended
        if self.model is None or (self.run and self.run.progress.prompt_tokens):
            return "running"
        return "waiting"

    @property
    def text(self) -> str:
        """The output so far."""
        return self.run.text if self.run else self.output

    def begin(self, task: asyncio.Task[Answer]) -> None:
        """Follow `task`; when it ends, keep what can still be asked for."""
        self.task = task
        self.load = self.load.pop_all()  # the load stays when the call that sent the agent leaves
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Answer]) -> None:
        if task.cancelled():
            self.ended = "cancelled"
        elif task.exception():
            self.ended = "failed"
        else:
            self.ended = "finished"
            self.answer = task.result()
            if self.answer.reason == "abort":  # an early exit cut it off
                self.ended = "cancelled"
        self.load.close()
        self.output = self.text
        self.run = None
        self.limit = None
        self.task = None
        if self.request is not None and self.request.chat:
            self.request = None  # the router drew its id, so it is not sent again


@dataclass(slots=True)
class ProgramRecord:
    """A program that is remembered.

    Attributes:
        used_s: When its last agent was sent.
        agents: Its agents, by id.
        chosen: Its model, by candidates.
        written_bytes: The size of its outputs that are written elsewhere.
    """

    used_s: float
    agents: dict[str, AgentRecord] = field(default_factory=dict)
    chosen: dict[tuple[str, ...], str] = field(default_factory=dict)
    written_bytes: int = 0

    def is_running(self) -> bool:
        """Tell whether any agent has not ended."""
        return any(agent.ended is None for agent in self.agents.values())


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The programs that are remembered.

    Attributes:
        ttl_s: Seconds from a program's last agent until it is forgotten, as its logs are.
        max_programs: Above it, the tenant with most programs loses its oldest.
        max_agents: Agents of a program.
        max_written_bytes: A tenant's outputs that are written elsewhere.
    """

    ttl_s: float = 3600.0
    max_programs: int = 10_000
    max_agents: int = 10_000
    max_written_bytes: int = 2**27


ProgramKey = tuple[str, str]
"""A tenant, and the program's id."""


class ProgramRegistry:
    """Remembers programs, the last used last; of running programs none is forgotten."""

    def __init__(
        self, cache: AgentPromptCache, limits: ProgramLimits, clock: Callable[[], float]
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._clock = clock
        self._programs: dict[ProgramKey, ProgramRecord] = {}
        self._written_bytes: Counter[str] = Counter()  # by tenant
        self._chats: dict[tuple[str, str], str] = {}  # the program, by tenant and agent

    def find(self, tenant: str, program: str) -> ProgramRecord | None:
        """Return the program, unless its time is over."""
        record = self._programs.get((tenant, program))
        if record is None:
            return None
        if record.used_s > self._clock() - self._limits.ttl_s or record.is_running():
            return record
        return None

    def require_program(self, tenant: str, program: str) -> ProgramRecord:
        """Return the program. Raises UnknownProgram."""
        record = self.find(tenant, program)
        if record is None:
            raise UnknownProgram(
                f"No program {program!r} is known.", remedy="Send an agent request first."
            )
        return record

    def find_agent(self, request: AgentRequest, agent: str) -> AgentRecord | None:
        """Return the agent of the request's program."""
        program = self.find(request.tenant, request.program)
        if program is None:
            return None
        return program.agents.get(agent)

    def find_log(self, request: AgentRequest, agent: str) -> LogKey:
        """Return the key of the agent's log in the request's program."""
        record = self.find_agent(request, agent)
        return LogKey(request.tenant, request.program, record.log if record else agent)

    def find_chat_program(self, tenant: str, agent: str) -> str | None:
        """Return the program of a chat completion of this tenant, unless it is forgotten."""
        program = self._chats.get((tenant, agent))
        if program is not None and self.find(tenant, program):
            return program
        return None

    def find_sent(self, request: AgentRequest, sent: AgentRequest | None) -> AgentRecord | None:
        """Return the agent if `sent` began it before, and it has not failed.

        An output that is written elsewhere, without `sent`, may replace an agent that failed.

        Raises:
            DuplicateAgent: The agent was sent with other content.
        """
        record = self.find_agent(request, request.agent)
        if record is None:
            return None
        has_failed = record.ended in ("failed", "cancelled")
        is_same = sent is not None and record.request == sent
        if has_failed and (is_same or sent is None):
            return None
        if not is_same:
            raise make_duplicate_error(request)
        return record

    def remember_choices(self, request: AgentRequest, chosen: dict[tuple[str, ...], str]) -> None:
        """Keep the models chosen for the request's program."""
        key = (request.tenant, request.program)
        program = self._programs.setdefault(key, ProgramRecord(self._clock()))
        program.chosen.update(chosen)

    def register(self, request: AgentRequest, record: AgentRecord) -> None:
        """Add the agent to its program.

        Raises:
            Overloaded: The program has too many agents.
            InvalidRequest: The agent would wait for itself.
        """
        before = self.find_agent(request, request.agent)
        # an agent that runs again needs another log; no agent's id holds a #
        record.log = request.agent if before is None else f"{before.log}#"
        key = (request.tenant, request.program)
        program = self._programs.pop(key, None) or ProgramRecord(0.0)
        program.used_s = self._clock()
        self._programs[key] = program
        agents = program.agents
        if len(agents) >= self._limits.max_agents:
            raise Overloaded(
                f"Program {request.program!r} has {len(agents)} agents, which is the limit.",
                remedy="Begin a new program for every run.",
            )
        if circle := _find_circle(program, request.agent, record.precursors):
            raise InvalidRequest(
                f"Agent {request.agent!r} would wait for itself: {' <- '.join(circle)}.",
                remedy="Break the circle of output_of segments.",
            )
        agents[request.agent] = record
        if request.chat:
            self._chats[request.tenant, request.agent] = request.program

    def unregister(self, request: AgentRequest) -> None:
        """Remove the agent from its program."""
        if program := self._programs.get((request.tenant, request.program)):
            program.agents.pop(request.agent, None)

    async def make_space(self, request: AgentRequest) -> None:
        """Forget programs until the request's program has its place. Raises Overloaded."""
        limit_s = self._clock() - self._limits.ttl_s
        expired = takewhile(lambda item: item[1].used_s <= limit_s, self._programs.items())
        await self._forget_ended(list(expired))
        if (request.tenant, request.program) in self._programs:
            return
        while len(self._programs) >= self._limits.max_programs:
            ended = self._list_oldest_ended()
            if not ended:
                raise Overloaded(
                    f"All {self._limits.max_programs} programs are still running.",
                    remedy="Try again when some have ended.",
                )
            await self._forget_ended(ended)

    def _list_ended(self, tenant: str) -> Iterator[tuple[ProgramKey, ProgramRecord]]:
        for key, program in self._programs.items():
            if key[0] == tenant and not program.is_running():
                yield key, program

    def _list_oldest_ended(self) -> list[tuple[ProgramKey, ProgramRecord]]:
        """Return the oldest ended programs of the tenant that has most, a hundredth of its own.

        So no tenant can push out the programs of others. As all programs are looked at, this would
        be too much for every request.
        """
        programs_by_tenant = Counter(tenant for tenant, _ in self._programs)
        for tenant, number in programs_by_tenant.most_common():
            oldest = list(islice(self._list_ended(tenant), max(1, number // 100)))
            if oldest:
                return oldest
        return []

    async def _forget_ended(self, programs: Iterable[tuple[ProgramKey, ProgramRecord]]) -> None:
        # one may run again, or begin anew, while this awaits Redis for another
        for key, program in programs:
            if self._programs.get(key) is program and not program.is_running():
                await self.forget(*key)

    async def count_written(self, tenant: str, program: str, size: int) -> None:
        """Count bytes of an output that is written elsewhere, which are kept with its program.

        Raises:
            Overloaded: The tenant has too many, and no other ended program to forget.
        """
        record = self._programs.get((tenant, program))
        if record is not None:
            record.written_bytes += size
            self._written_bytes[tenant] += size
        while self._written_bytes[tenant] > self._limits.max_written_bytes:
            await self.forget(*self._find_written(tenant, besides=program))

    def _find_written(self, tenant: str, *, besides: str) -> ProgramKey:
        """Return the oldest ended program with outputs written elsewhere."""
        for key, program in self._list_ended(tenant):
            if program.written_bytes and key[1] != besides:
                return key
        most = self._limits.max_written_bytes
        raise Overloaded(
            f"Outputs that {tenant!r} has written take more than {most} bytes.",
            remedy=f"First send DELETE /v1/agent/requests/{besides}, or let other programs end.",
        )

    async def forget(self, tenant: str, program: str) -> None:
        """Forget the program, and its logs in the cache."""
        record = self._programs.pop((tenant, program), None)
        if record is not None:
            self._written_bytes[tenant] -= record.written_bytes
            for agent in record.agents:
                self._chats.pop((tenant, agent), None)
        await self._cache.forget(tenant, program)


def _find_circle(program: ProgramRecord, agent: str, precursors: frozenset[str]) -> tuple[str, ...]:
    """Return a path from `agent` over precursors back to it, empty if there is none."""
    paths: list[tuple[str, ...]] = [(agent, precursor) for precursor in precursors]
    seen: set[str] = set()
    while paths:
        path = paths.pop()
        last = path[-1]
        if last == agent:
            return path
        if last in seen:
            continue
        seen.add(last)
        record = program.agents.get(last)
        if record is not None:
            paths.extend((*path, precursor) for precursor in record.precursors)
    return ()


def make_duplicate_error(request: AgentRequest) -> DuplicateAgent:
    """Return the error for an agent id that its program has already."""
    return DuplicateAgent(
        f"Program {request.program!r} already has an agent {request.agent!r}.",
        remedy="Send the same request again, give each agent its own id, or first send DELETE"
        f" /v1/agent/requests/{request.program}.",
    )
