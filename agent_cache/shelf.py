"""The logs in one process's memory, and the readers that wait for them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from agent_cache.log import Log, forgotten
from agent_cache.protocol import LogExists, LogKey, LogRead, LogTimeout


class LogShelf:
    """The logs that this process holds, by program, and those that its readers wait for. Touches no network.

    A log expires `ttl_s` after its last write, ended or not: a writer that is silent for so long has been left behind,
    and a log never ended would otherwise stay for ever. Expired logs are invisible at once and swept out when others
    begin. `dropped` is called with the key of every log that leaves.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        ttl_s: float,
        dropped: Callable[[LogKey], None] = lambda _key: None,
    ) -> None:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}; it must be positive")
        self._clock = clock
        self._ttl_s = ttl_s
        self._dropped = dropped
        self._programs: dict[tuple[str, str], dict[str, Log]] = {}
        self._awaited: dict[LogKey, Log] = {}
        self._sweep_s = clock()

    def __len__(self) -> int:
        now_s = self._clock()
        return sum(log.expires_s > now_s for logs in self._programs.values() for log in logs.values())

    @property
    def awaited(self) -> int:
        """How many logs readers wait for that have not begun."""
        return len(self._awaited)

    def find(self, key: LogKey) -> Log | None:
        """The log of `key` if it has begun and is neither forgotten nor expired."""
        logs = self._programs.get((key.tenant, key.program), {})
        log = logs.get(key.agent)
        if log is not None and log.expires_s <= self._clock():
            self._drop(key, logs.pop(key.agent))
            return None
        return log

    def begin(self, key: LogKey) -> Log:
        """A new log, handed to the readers that wait for it. Raises LogExists."""
        if self.find(key) is not None:
            raise LogExists(f"the log of {key} was begun before")
        self._sweep()
        log = self._awaited.pop(key, None) or Log()
        log.begun = True
        self.touch(log)
        self._programs.setdefault((key.tenant, key.program), {})[key.agent] = log
        return log

    def touch(self, log: Log) -> None:
        """Count the log's time to live from now."""
        log.expires_s = self._clock() + self._ttl_s

    async def read(self, key: LogKey, position: int, *, at_least: int, wait_s: float) -> LogRead:
        """As `AgentPromptCache.read`."""
        found = self._now(key, position, at_least)
        if found is None and wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    found = await self.wait(key, position, at_least)
        if found is None:
            found = self._now(key, position, 1)
        if found is None:
            message = f"nothing came after position {position} of {key} within {wait_s:g} s"
            raise LogTimeout(message, begun=self.find(key) is not None)
        return found

    async def wait(self, key: LogKey, position: int, at_least: int) -> LogRead:
        """What the log holds after `position` once that is `at_least` so much. The caller sets the limit."""
        while (found := self._now(key, position, at_least)) is None:
            log = self.find(key) or self._awaited.setdefault(key, Log())
            try:
                await log.reached(position + at_least)
            finally:
                self._stop_awaiting(key, log)
            if log.gone:
                return forgotten(position)
        return found

    def _now(self, key: LogKey, position: int, at_least: int) -> LogRead | None:
        log = self.find(key)
        if log is None:
            return forgotten(position) if position else None
        return log.after(position, at_least)

    def forget(self, tenant: str, program: str) -> None:
        """Drop every log of the program and end the reads of them, also of those not yet begun."""
        for agent, log in self._programs.pop((tenant, program), {}).items():
            self._drop(LogKey(tenant, program, agent), log)
        for key in [key for key in self._awaited if (key.tenant, key.program) == (tenant, program)]:
            self._awaited.pop(key).discard()

    def forget_all(self) -> None:
        """Forget every program."""
        programs = {(key.tenant, key.program) for key in self._awaited}
        for tenant, program in programs.union(self._programs):
            self.forget(tenant, program)

    def _stop_awaiting(self, key: LogKey, log: Log) -> None:
        if not log.begun and not log.awaited and self._awaited.get(key) is log:
            del self._awaited[key]

    def _drop(self, key: LogKey, log: Log) -> None:
        log.discard()
        self._dropped(key)

    def _sweep(self) -> None:
        """Drop what has expired; at most eight times per time to live, so that `begin` stays cheap."""
        now_s = self._clock()
        if now_s < self._sweep_s:
            return
        self._sweep_s = now_s + self._ttl_s / 8
        for name, logs in list(self._programs.items()):
            for agent in [agent for agent, log in logs.items() if log.expires_s <= now_s]:
                self._drop(LogKey(*name, agent), logs.pop(agent))
            if not logs:
                del self._programs[name]
