"""Engines started, waited for, started again when they die, and stopped, all as one context."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic

import aiohttp

from shell_router.errors import EngineUnreachable
from shell_router.launching.commands import EngineCommand
from shell_router.launching.plan import LaunchPlan
from shell_router.launching.process import EngineProcess
from shell_router.launching.restarts import EngineRestarts

log = logging.getLogger(__name__)

HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for engines to be ready, for one to stop, between looks at those that start, and lines about them."""

    start_s: float = 300.0
    stop_s: float = 15.0
    poll_s: float = 0.5
    report_s: float = 10.0
    health_s: float = 5.0


@asynccontextmanager
async def running_engines(
    launched: LaunchPlan, *, policy: EngineRestarts, patience: Patience, tell: Callable[[str], None] = log.info
) -> AsyncIterator["Engines"]:
    """Engines that serve, those elsewhere included; on leaving, and on any error, those of the plan are stopped.

    `tell` gets a line per step. Raises EngineUnreachable where one ends before it serves, or does not serve in time.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience.health_s)) as http:
        engines = Engines(launched, policy, patience, tell, http)
        try:
            await engines.start()
            keeping = asyncio.gather(*map(engines.keep, engines.processes))
            try:
                yield engines
            finally:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping
        finally:
            await engines.stop()


class Engines:
    """The engines of one plan; `running_engines` makes, keeps and stops them."""

    def __init__(
        self,
        launched: LaunchPlan,
        policy: EngineRestarts,
        patience: Patience,
        tell: Callable[[str], None],
        http: aiohttp.ClientSession,
    ) -> None:
        self.processes = [EngineProcess(command, launched.folder) for command in launched.engines]
        self._elsewhere = launched.elsewhere
        self._policy = policy
        self._patience = patience
        self._tell = tell
        self._http = http
        self._restarted_s: dict[str, list[float]] = {command.name: [] for command in launched.engines}

    def restarts(self) -> Mapping[str, int]:
        """How often each engine was started again."""
        return {name: len(times_s) for name, times_s in self._restarted_s.items()}

    async def start(self) -> None:
        """Start all, and return when all serve. Raises EngineUnreachable."""
        for process in self.processes:
            await process.start()
            self._tell(f"{process.command.name}: started; its output is in {process.log}")
        await self._until_ready([*(process.command for process in self.processes), *self._elsewhere])

    async def stop(self) -> None:
        """Stop all, all at once."""
        await asyncio.gather(*(process.stop(self._patience.stop_s) for process in self.processes))

    async def keep(self, process: EngineProcess) -> None:
        """Start the engine again whenever it ends, as the policy says; return when it is to be left down."""
        while True:
            code = await process.ended()
            if not await self._start_again(process, code):
                return
            try:
                await self._until_ready([process.command])
            except EngineUnreachable as error:
                log.warning("%s", error)
                await process.stop(self._patience.stop_s)

    async def _start_again(self, process: EngineProcess, code: int) -> bool:
        name = process.command.name
        delay_s = self._policy.next_delay_s(process.command.role, self._restarted_s[name], monotonic())
        if delay_s is None:
            log.error("%s ended with code %d and is left down: restarted too often. Read %s.", name, code, process.log)
            return False
        log.warning("%s ended with code %d; it is started again in %.1f s. Read %s.", name, code, delay_s, process.log)
        await asyncio.sleep(delay_s)
        self._restarted_s[name].append(monotonic())
        await process.start()
        return True

    async def _until_ready(self, waiting: Sequence[EngineCommand]) -> None:
        """Return when all of them serve, telling of each."""
        began_s = reported_s = monotonic()
        while True:
            serving = await asyncio.gather(*map(self._serves, waiting))
            now_s = monotonic()
            for command in (command for command, ready in zip(waiting, serving, strict=True) if ready):
                self._tell(f"{command.name}: ready after {now_s - began_s:.0f} s")
            waiting = [command for command, ready in zip(waiting, serving, strict=True) if not ready]
            if not waiting:
                return
            self._require_alive(waiting)
            if now_s - began_s > self._patience.start_s:
                raise self._late(waiting)
            if now_s - reported_s > self._patience.report_s:
                reported_s = now_s
                self._tell(f"{_names(waiting)}: starting for {now_s - began_s:.0f} s")
            await asyncio.sleep(self._patience.poll_s)

    async def _serves(self, command: EngineCommand) -> bool:
        try:
            async with self._http.get(command.ready_url) as answer:
                return answer.status == HTTP_OK
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _require_alive(self, waiting: Sequence[EngineCommand]) -> None:
        for process in self.processes:
            if process.command in waiting and not process.running:
                raise EngineUnreachable(
                    f"{process.command.name} ended before it was ready: …{process.log_tail()}",
                    remedy=f"Read {process.log}.",
                )

    def _late(self, waiting: Sequence[EngineCommand]) -> EngineUnreachable:
        logs = [str(process.log) for process in self.processes if process.command in waiting]
        return EngineUnreachable(
            f"{_names(waiting)}: not ready within {self._patience.start_s:g} s.",
            remedy=f"Raise limits.engine_start_s, or read {' and '.join(logs) or 'the log where it was started'}.",
        )


def _names(waiting: Sequence[EngineCommand]) -> str:
    return ", ".join(command.name for command in waiting)
