"""Work that would hold up the event loop, or needs libraries that the router never loads, in a
process of its own.

This is the router's side; `side_work.serve` is the other. Requests go to its standard input,
answers come from its standard output:

    request   kind: u8, call: u64, bytes: u32, then the body
    answer    kind: u8, call: u64, bytes: u64, then the body (DONE), or a message in UTF-8 (FAILED)

Answers come in any order. Call 0 is never asked: its answer says that the process is ready (DONE,
empty) or why it could not be (FAILED). The process ends when its input does, so it never outlives
the router.
"""

import asyncio
import itertools
import json
import logging
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from shell_router.errors import EngineError, EngineStalled, EngineUnreachable

log = logging.getLogger(__name__)

REQUEST = struct.Struct("<BQI")
ANSWER = struct.Struct("<BQQ")
DO = 0
FORGET = 1
DONE = 0
FAILED = 1
READY = 0

_READ_BYTES = 1 << 20
_GRACE_S = 2.0


class Child:
    """A child process and the calls that wait for its answers. `name` says in messages what it
    is."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._name = name
        self._calls = itertools.count(READY + 1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._silent_since_s: float | None = None
        self.alive = True
        self._reader = asyncio.create_task(self._read_until_end(), name=f"{name}-answers")

    @classmethod
    async def launch(
        cls, name: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float
    ) -> Self:
        """Start `command` and wait until it is ready. EngineError with the reason if it never
        is."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=env,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_READ_BYTES,
                # a Ctrl-C at the terminal is for the router, which then closes the pipe
                start_new_session=True,
            )
        except OSError as error:
            raise EngineUnreachable(f"the {name} process could not be started: {error}.") from error
        child = cls(process, name)
        try:
            async with asyncio.timeout(timeout_s):
                await child._answer_to(READY)
        except BaseException as error:
            await child.close()
            if isinstance(error, TimeoutError):
                raise EngineStalled(
                    f"the {name} process was not ready within {timeout_s:g} s."
                ) from None
            raise
        return child

    @property
    def pid(self) -> int:
        """The operating system's id of the process."""
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """How long it has owed an answer, and given none."""
        if self._silent_since_s is None:
            return 0.0
        return _now_s() - self._silent_since_s

    async def ask(self, body: bytes) -> bytes:
        """Ask and wait. Giving up the wait gives up the call; a late answer is dropped."""
        call = next(self._calls)
        if not self._writable:
            raise EngineUnreachable(f"the {self._name} process has ended.")
        # no drain: the body is in memory already, and the pipe's buffer holds what the process has
        # not read
        self._stdin.write(REQUEST.pack(DO, call, len(body)) + body)
        if self._silent_since_s is None:
            self._silent_since_s = _now_s()
        try:
            return await self._answer_to(call)
        finally:
            if self._waiting.pop(call, None) is not None and self._writable:
                self._stdin.write(REQUEST.pack(FORGET, call, 0))

    def kill(self) -> None:
        """End the process now; calls that wait fail, new ones are refused."""
        self.alive = False
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Close the pipe, which ends the process; kill it if it has not ended after two seconds."""
        self._stdin.close()
        await asyncio.wait({self._reader}, timeout=_GRACE_S)
        self.kill()
        await asyncio.wait({self._reader})

    async def _answer_to(self, call: int) -> bytes:
        self._waiting[call] = answer = asyncio.Future[bytes]()
        return await answer

    @property
    def _writable(self) -> bool:
        return self.alive and not self._stdin.is_closing()

    async def _read_until_end(self) -> None:
        try:
            while True:
                kind, call, size = ANSWER.unpack(await self._stdout.readexactly(ANSWER.size))
                body = await self._stdout.readexactly(size)
                if kind == FAILED:
                    failed = EngineError(f"the {self._name} process failed. {body.decode()}")
                else:
                    failed = None
                self._settle(call, failed or body)
        except (asyncio.IncompleteReadError, ConnectionError):
            log.info("%s process %d closed its pipe", self._name, self.pid)
        finally:
            self.alive = False
            self._stdin.close()
            await self._fail_waiting()

    def _settle(self, call: int, outcome: bytes | EngineError) -> None:
        answer = self._waiting.pop(call, None)
        self._silent_since_s = _now_s() if self._waiting else None
        if answer is None or answer.done():
            return
        if isinstance(outcome, EngineError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    async def _fail_waiting(self) -> None:
        """Wait for the process's end, or kill it, and fail the calls that wait."""
        try:
            async with asyncio.timeout(_GRACE_S):
                status = await self._process.wait()
        except TimeoutError:
            self.kill()
            status = await self._process.wait()
        for call in list(self._waiting):
            ended = f"the {self._name} process ended (status {status}) before it answered."
            self._settle(
                call, EngineUnreachable(ended, remedy="It is started again by the next call.")
            )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Seconds: for one answer, for the start, before a failed start is tried again.

    A process that has owed answers for `hang_s`, and for one call's limit, and gave none, is
    killed.
    """

    answer_s: float = 30.0
    start_s: float = 120.0
    retry_s: float = 10.0
    hang_s: float = 0.0


def side_command(entry: str, arguments: Mapping[str, Any], max_batch: int) -> list[str]:
    """What runs the work that `entry`, a `package.module:function`, makes of `arguments`; see
    `side_work.serve`.
    """
    settings = (json.dumps(arguments), str(max_batch))
    return [sys.executable, "-m", "shell_router.launching.side_work", entry, *settings]


def side_environment(threads: int) -> dict[str, str]:
    """For a process that loads models from the disk alone, and computes on `threads`."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {
        **os.environ,
        **offline,
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
    }


class SideProcess:
    """Asks a child process that runs `side_work.serve`; when it has died, the next call starts it
    again.

    A call waits for the start at most `start_s`, then for its answer at most `answer_s`. A process
    that has owed answers for longer than the limits allow counts as hung and is killed. After a
    failed start, calls fail with its reason for `retry_s` before it is tried again. `restarts`
    counts the starts after the first.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        limits: ProcessLimits | None = None,
    ) -> None:
        self.name = name
        self._command = tuple(command)
        self._env = dict(env)
        self._limits = limits or ProcessLimits()
        self._launch: asyncio.Task[Child] | None = None
        self._child: Child | None = None
        self._failed_s = 0.0
        self._closed = False
        self.restarts = 0

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready. EngineError if it cannot
        be.
        """
        await self._running()

    async def ask(self, body: bytes) -> bytes:
        """The answer to `body`. EngineStalled after `answer_s`, EngineUnreachable if the process
        dies.
        """
        child = await self._running()
        try:
            async with asyncio.timeout(self._limits.answer_s):
                return await child.ask(body)
        except TimeoutError:
            raise EngineStalled(
                f"no answer from the {self.name} process within {self._limits.answer_s:g} s.",
                remedy="Give it more threads, a GPU, or a longer limit.",
            ) from None
        finally:  # a caller's own limit may end the wait first
            if child.silent_s >= max(self._limits.hang_s, self._limits.answer_s) and child.alive:
                log.warning(
                    "%s process %d answered nothing for %g s: killed",
                    self.name,
                    child.pid,
                    child.silent_s,
                )
                child.kill()

    async def aclose(self) -> None:
        """End the process; calls that wait fail. Safe to call twice."""
        self._closed = True
        if self._launch is None:
            return
        self._launch.cancel()
        await asyncio.wait({self._launch})
        if self._child is not None:
            await self._child.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def pid(self) -> int | None:
        """The running process's id; None while there is none that is ready."""
        if self._child is not None and self._child.alive:
            return self._child.pid
        return None

    async def _running(self) -> Child:
        if self._closed:
            raise EngineError(f"the {self.name} process is closed.")
        if self._launch is None or self._spent(self._launch):
            if self._launch is not None:
                self.restarts += 1
                log.warning(
                    "%s process has ended; starting it again (restart %d)", self.name, self.restarts
                )
            self._launch = asyncio.create_task(self._start_child(), name=f"{self.name}-start")
        launch = self._launch
        try:
            # shared by all callers: one that gives up must not end it for the others
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            if launch.cancelled():
                raise EngineError(f"the {self.name} process was closed while it started.") from None
            raise

    async def _start_child(self) -> Child:
        if self._child is not None:
            await self._child.close()
            self._child = None
        try:
            self._child = await Child.launch(
                self.name, self._command, self._env, self._limits.start_s
            )
        except EngineError as error:
            self._failed_s = _now_s()
            log.error("%s process could not be started: %s", self.name, error)
            raise
        return self._child

    def _spent(self, launch: asyncio.Task[Child]) -> bool:
        if not launch.done():
            return False
        if self._child is None:
            return _now_s() - self._failed_s >= self._limits.retry_s
        return not self._child.alive
