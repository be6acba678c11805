"""Programs whose logs are to be deleted from Redis."""

import asyncio
from itertools import islice

from agent_cache.redis.connection import Connection
from agent_cache.redis.layout import Command, Layout

PROGRAMS_PER_ROUND = 128
REMEMBERED = 10_000
"""In a long outage the oldest are dropped beyond this; their keys are left to expire."""

Program = tuple[str, str]


class Deletions:
    """A queue without duplicates: what is asked for stays in it until Redis has done it."""

    def __init__(self, connection: Connection, layout: Layout) -> None:
        self._connection = connection
        self._layout = layout
        self._waiting: dict[Program, asyncio.Future[None]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, program: Program) -> asyncio.Future[None]:
        """Ask for a deletion. The future says that it was done, or that nobody should wait for it."""
        done = self._waiting.get(program)
        if done is None or done.done():
            done = self._waiting[program] = asyncio.get_running_loop().create_future()
        if len(self._waiting) > REMEMBERED:
            _let_go(self._waiting.pop(next(iter(self._waiting))))
        return done

    async def run(self) -> None:
        """Delete the programs that wait, in two round trips for many of them."""
        while self._waiting:
            programs = list(islice(self._waiting, PROGRAMS_PER_ROUND))
            await self._delete(programs)
            for program in programs:
                _let_go(self._waiting.pop(program, None))

    def release(self) -> None:
        """Let go whoever waits; what was asked for is still done later."""
        for done in self._waiting.values():
            _let_go(done)

    async def _delete(self, programs: list[Program]) -> None:
        sets = await self._connection.ask([("SMEMBERS", self._layout.agents(*program)) for program in programs])
        commands: list[Command] = []
        for program, agents in zip(programs, sets, strict=True):
            for agent in agents:
                commands += self._layout.delete(self._layout.log_named(*program, agent.decode()))
            commands.append(("UNLINK", self._layout.agents(*program)))
        await self._connection.ask(commands)


def _let_go(done: asyncio.Future[None] | None) -> None:
    if done is not None and not done.done():
        done.set_result(None)
