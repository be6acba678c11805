"""A deployment's engines: started, waited for, started again when they die, and stopped."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic

import aiohttp

from shell_router.config.models import Role
from shell_router.errors import EngineUnreachable
from shell_router.launching.plan import HEARTBEAT_S, EngineCommand, LaunchPlan
from shell_router.processes.command import CommandProcess, require_free_ports
from shell_router.processes.restarts import RestartPolicy, keep_running

log = logging.getLogger(__name__)

HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for engines to be ready, for one to stop, between polls, and between lines of text.

    A prefill stays away for `prefill_away_s` at least: its decode has then missed two heartbeats
    and forgotten it.
    """

    start_s: float = 300.0
    stop_s: float = 15.0
    poll_s: float = 0.5
    report_s: float = 10.0
    health_s: float = 5.0
    prefill_away_s: float = 2 * HEARTBEAT_S + 1.0


def policy_of(role: Role, policy: RestartPolicy, patience: Patience) -> RestartPolicy:
    """Return the policy for an engine of this role."""
    if role == "prefill":
        return replace(policy, least_delay_s=patience.prefill_away_s)
    return policy


Sleep = Callable[[Sequence[EngineCommand]], Awaitable[None]]
"""Puts engines of one model to sleep, which serve. Raises EngineError."""


@asynccontextmanager
async def run_engines(
    launched: LaunchPlan,
    *,
    policy: RestartPolicy,
    patience: Patience,
    sleep: Sleep,
    tell: Callable[[str], None] = log.info,
) -> AsyncIterator["Engines"]:
    """Run the plan's engines, and wait for those elsewhere; stop the plan's on leaving.

    Args:
        launched: The engines.
        policy: When a dead engine is started again.
        patience: Limits of waiting.
        sleep: Puts models that take turns to sleep.
        tell: Gets a line of text per step.

    Raises:
        EngineUnreachable: An engine ends before it serves, or does not serve in time.
    """
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=patience.health_s)
    ) as http:
        engines = Engines(launched, policy, patience, tell, http)
        try:
            await engines.start(sleep)
            keeping = asyncio.gather(*map(engines.keep, launched.engines))
            try:
                yield engines
            finally:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping
        finally:
            await engines.stop()


class Engines:
    """The engines of one plan; `run_engines` makes, keeps and stops them."""

    def __init__(
        self,
        launched: LaunchPlan,
        policy: RestartPolicy,
        patience: Patience,
        tell: Callable[[str], None],
        http: aiohttp.ClientSession,
    ) -> None:
        self.processes: dict[str, CommandProcess] = {}
        self._launched = launched
        self._policy = policy
        self._patience = patience
        self._tell = tell
        self._http = http
        self._restarted_s: dict[str, list[float]] = {}
        for engine in launched.engines:
            log_file = launched.folder / f"{engine.name.replace('/', '-')}.log"
            self.processes[engine.name] = CommandProcess(
                engine.name, engine.argv, engine.env, log_file
            )
            self._restarted_s[engine.name] = []

    @property
    def running(self) -> bool:
        """Whether all processes run, ready or not."""
        return all(process.running for process in self.processes.values())

    def restarts(self) -> Mapping[str, int]:
        """Return how often each engine was started again."""
        return {name: len(times_s) for name, times_s in self._restarted_s.items()}

    async def start(self, sleep: Sleep) -> None:
        """Start all, and return when all serve; models that sleep, one after the other.

        Raises EngineError.
        """
        turns: dict[str | None, list[EngineCommand]] = {None: []}
        for engine in self._launched.engines:
            turns.setdefault(engine.sleeper, []).append(engine)
        for sleeper, engines in turns.items():
            for engine in engines:
                process = self.processes[engine.name]
                await process.start()
                self._tell(f"{engine.name}: started; its output is in {process.log}")
            if sleeper:
                await self._wait_until_ready(engines)
                await sleep(engines)
        await self._wait_until_ready([*turns[None], *self._launched.elsewhere])

    async def stop(self) -> None:
        """Stop all engines at the same time."""
        stops = (process.stop(self._patience.stop_s) for process in self.processes.values())
        await asyncio.gather(*stops)

    async def keep(self, engine: EngineCommand) -> None:
        """Start the engine again whenever it ends; return when the policy leaves it down."""
        process = self.processes[engine.name]

        async def wait_for_end() -> str:
            code = await process.wait()
            return f"{engine.name} ended with code {code}; its output is in {process.log}."

        async def start() -> None:
            require_free_ports(engine.name, engine.host, engine.ports)
            await process.start()
            try:
                await self._wait_until_ready([engine])
            except EngineUnreachable:
                await process.stop(self._patience.stop_s)
                raise

        policy = policy_of(engine.role, self._policy, self._patience)
        await keep_running(
            wait_for_end, start, restarted_s=self._restarted_s[engine.name], policy=policy
        )

    async def _wait_until_ready(self, waiting: Sequence[EngineCommand]) -> None:
        """Return when all of them serve, and tell each as it does."""
        began_s = monotonic()
        reported_s = began_s
        while True:
            serving = await asyncio.gather(*map(self._serves, waiting))
            waited_s = monotonic() - began_s
            for engine, is_ready in zip(waiting, serving, strict=True):
                if is_ready:
                    self._tell(f"{engine.name}: ready after {waited_s:.0f} s")
            waiting = [
                engine for engine, is_ready in zip(waiting, serving, strict=True) if not is_ready
            ]
            if not waiting:
                return
            self._require_startable(waiting, waited_s)
            if began_s + waited_s - reported_s > self._patience.report_s:
                reported_s = began_s + waited_s
                self._tell(f"{_names(waiting)}: starting for {waited_s:.0f} s")
            await asyncio.sleep(self._patience.poll_s)

    def _require_startable(self, waiting: Sequence[EngineCommand], waited_s: float) -> None:
        """Raise EngineUnreachable if one of them has ended, or if the time is over."""
        here = [engine for engine in waiting if engine.name in self.processes]
        own = [self.processes[engine.name] for engine in here]
        for engine, process in zip(here, own, strict=True):
            process.require_ports(engine.host, engine.ports)
            if not process.running:
                raise EngineUnreachable(
                    f"{process.name} ended before it was ready: …{process.read_log_tail()}",
                    remedy=f"Read {process.log}; launch.python must be one that has SGLang.",
                )
        if waited_s > self._patience.start_s:
            logs = " and ".join(str(process.log) for process in own) or "the log of its machine"
            raise EngineUnreachable(
                f"{_names(waiting)}: not ready within {self._patience.start_s:g} s.",
                remedy=f"Raise limits.engine_start_s, or read {logs}.",
            )

    async def _serves(self, engine: EngineCommand) -> bool:
        try:
            async with self._http.get(engine.ready_url) as answer:
                return answer.status == HTTP_OK
        except (aiohttp.ClientError, TimeoutError):
            return False


def _names(engines: Sequence[EngineCommand]) -> str:
    return ", ".join(engine.name for engine in engines)
