"""Engines started, waited for, started again when they die, and stopped, all as one context."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import aiohttp

from shell_router.errors import EngineUnreachable
from shell_router.launching.plan import HEARTBEAT_S, EngineCommand, LaunchPlan, Role
from shell_router.launching.with_parent import with_parent

log = logging.getLogger(__name__)

LOG_TAIL_BYTES = 8192
HTTP_OK = 200


class EngineProcess:
    """One run after the other of one command. It ends with this process, however that ends
    (Linux)."""

    def __init__(self, command: EngineCommand, folder: Path) -> None:
        self.command = command
        self.log = folder / f"{command.name.replace('/', '-')}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._leads = False
        """Whether something of its group may be left: once that is killed, its number may be
        another's."""

    @property
    def running(self) -> bool:
        """Whether its process runs, ready or not."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the command; its output is added to the log. Raises EngineUnreachable."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *with_parent(self.command.argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.command.env},
                    # Ctrl-C in the terminal is for the router: it stops its engines in order
                    start_new_session=True,
                )
                self._leads = True
        except OSError as error:
            raise EngineUnreachable(
                f"{self.command.name} cannot be started: {error}.",
                remedy=(
                    "Free memory or processes where there are too few; its log has to be "
                    f"writable: {self.log}."
                ),
            ) from error

    async def ended(self) -> int:
        """Wait for its end, kill what is left of its group, which may hold ports and GPUs, and give
        its exit code.
        """
        assert self._process is not None
        code = await self._process.wait()
        self._signal(signal.SIGKILL)
        self._leads = False
        return code

    def last_words(self) -> str:
        """The end of its log, which may have gigabytes."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace").strip()
        return "its log cannot be read"

    async def stop(self, limit_s: float) -> None:
        """SIGTERM to the group, SIGKILL to what is left of it after `limit_s`; returns when the
        engine is gone.
        """
        if self._process is None or not self._leads:
            return
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        self._signal(signal.SIGKILL)
        await self._process.wait()
        self._leads = False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._leads:
            with suppress(
                ProcessLookupError, PermissionError
            ):  # macOS: a group of zombies is EPERM
                os.killpg(self._process.pid, number)


LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `limit` restarts of one engine within `window_s`; each waits twice as long as the one
    before.

    None waits less than `least_delay_s`.
    """

    limit: int = 5
    delay_s: float = 1.0
    window_s: float = 600.0
    least_delay_s: float = 0.0

    def next_delay_s(self, restarted_s: Sequence[float], now_s: float) -> float | None:
        """Seconds to wait before the next start; None where the engine is to be left down."""
        recent = sum(1 for at_s in restarted_s if now_s - at_s < self.window_s)
        if recent >= self.limit:
            return None
        return max(self.least_delay_s, min(self.delay_s * 2.0**recent, LONGEST_DELAY_S))


DEFAULT_POLICY = RestartPolicy()


async def keep_running(
    ended: Callable[[], Awaitable[str]],
    start: Callable[[], Awaitable[None]],
    *,
    restarted_s: list[float],
    policy: RestartPolicy,
    clock: Callable[[], float] = monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Start an engine again whenever it ends; return when it is to be left down.

    `ended` waits for its end and tells how it ended in a sentence. `start` returns when it serves,
    and raises EngineUnreachable where it does not; what is left of it ends then. Times of restarts
    are added to `restarted_s`.
    """
    while True:
        how = await ended()
        delay_s = policy.next_delay_s(restarted_s, clock())
        if delay_s is None:
            log.error(
                "%s It ended too often and is left down; requests that need it fail. Its log "
                "says why "
                "(SIGKILL: is there too little memory?); then start this command again.",
                how,
            )
            return
        log.warning(
            "%s It is started again in %g s; until it is ready, requests that need it fail.",
            how,
            delay_s,
        )
        await sleep(delay_s)
        restarted_s.append(clock())
        try:
            await start()
        except EngineUnreachable as error:
            log.warning("%s", error)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for engines to be ready, for one to stop, between looks at those that start, and
    lines about them.

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
    """The policy for an engine of this role."""
    if role == "prefill":
        return replace(policy, least_delay_s=patience.prefill_away_s)
    return policy


Sleep = Callable[[Sequence[EngineCommand]], Awaitable[None]]
"""Puts engines of one model to sleep, which serve. Raises EngineError."""


@asynccontextmanager
async def running_engines(
    launched: LaunchPlan,
    *,
    policy: RestartPolicy,
    patience: Patience,
    sleep: Sleep,
    tell: Callable[[str], None] = log.info,
) -> AsyncIterator["Engines"]:
    """Engines that serve, those elsewhere included; on leaving, and on any error, those of the plan
    are stopped.

    `tell` gets a line per step; `sleep` is for models that take turns by sleeping. Raises
    EngineUnreachable where one ends before it serves, or does not serve in time, and what `sleep`
    raises.
    """
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=patience.health_s)
    ) as http:
        engines = Engines(launched, policy, patience, tell, http)
        try:
            await engines.start(sleep)
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
        policy: RestartPolicy,
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
        self._restarted_s: dict[str, list[float]] = {
            command.name: [] for command in launched.engines
        }

    def restarts(self) -> Mapping[str, int]:
        """How often each engine was started again."""
        return {name: len(times_s) for name, times_s in self._restarted_s.items()}

    async def start(self, sleep: Sleep) -> None:
        """Start all, and return when all serve; models that sleep one after the other. Raises
        EngineError.
        """
        turns: dict[str | None, list[EngineProcess]] = {None: []}
        for process in self.processes:
            turns.setdefault(process.command.sleeper, []).append(process)
        for sleeper, processes in turns.items():
            for process in processes:
                await process.start()
                self._tell(f"{process.command.name}: started; its output is in {process.log}")
            if sleeper:
                started = [process.command for process in processes]
                await self._until_ready(started)
                await sleep(started)
        await self._until_ready([*(process.command for process in turns[None]), *self._elsewhere])

    async def stop(self) -> None:
        """Stop all, all at once."""
        await asyncio.gather(*(process.stop(self._patience.stop_s) for process in self.processes))

    async def keep(self, process: EngineProcess) -> None:
        """Start the engine again whenever it ends, as the policy says; return when it is to be left
        down.
        """

        async def ended() -> str:
            return (
                f"{process.command.name} ended with code {await process.ended()}; its output "
                f"is in {process.log}."
            )

        async def start() -> None:
            await process.start()
            try:
                await self._until_ready([process.command])
            except EngineUnreachable:
                await process.stop(self._patience.stop_s)
                raise

        policy = policy_of(process.command.role, self._policy, self._patience)
        await keep_running(
            ended, start, restarted_s=self._restarted_s[process.command.name], policy=policy
        )

    async def _until_ready(self, waiting: Sequence[EngineCommand]) -> None:
        """Return when all of them serve, telling of each."""
        began_s = reported_s = monotonic()
        while True:
            serving = await asyncio.gather(*map(self._serves, waiting))
            now_s = monotonic()
            for command in (
                command for command, ready in zip(waiting, serving, strict=True) if ready
            ):
                self._tell(f"{command.name}: ready after {now_s - began_s:.0f} s")
            waiting = [
                command for command, ready in zip(waiting, serving, strict=True) if not ready
            ]
            if not waiting:
                return
            names = ", ".join(command.name for command in waiting)
            self._require_alive(waiting)
            if now_s - began_s > self._patience.start_s:
                logs = " and ".join(
                    str(process.log) for process in self.processes if process.command in waiting
                )
                raise EngineUnreachable(
                    f"{names}: not ready within {self._patience.start_s:g} s.",
                    remedy=(
                        "Raise limits.engine_start_s, or read "
                        f"{logs or 'the log where it was started'}."
                    ),
                )
            if now_s - reported_s > self._patience.report_s:
                reported_s = now_s
                self._tell(f"{names}: starting for {now_s - began_s:.0f} s")
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
                    f"{process.command.name} ended before it was ready: …{process.last_words()}",
                    remedy=f"Read {process.log}.",
                )
