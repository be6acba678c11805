"""One running process beside the router, as the router sees it."""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Self

from shell_router.errors import EngineError, EngineStalled, EngineUnreachable
from shell_router.side_process.frames import ANSWER, READY, Ask, Reply, request

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_GRACE_S = 2.0


class Child:
    """A child process and the calls that wait for its answers. `name` says in messages what it is."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self._calls = itertools.count(READY + 1)
        self._waiting: dict[int, asyncio.Future[bytearray]] = {}
        self._silent_since_s: float | None = None
        self.alive = True
        self._reader = asyncio.create_task(self._read_until_end(), name=f"{name}-answers")

    @classmethod
    async def launch(cls, name: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Self:
        """Start `command` and wait until it is ready. EngineError with the reason if it never is."""
        child = cls(await _spawn(name, command, env), name)
        try:
            async with asyncio.timeout(timeout_s):
                await child._answer_to(READY)
        except BaseException as error:
            await child.close()
            if isinstance(error, TimeoutError):
                raise EngineStalled(f"the {name} process was not ready within {timeout_s:g} s.") from None
            raise
        return child

    @property
    def pid(self) -> int:
        """The operating system's id of the process."""
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """How long it has owed an answer, and given none."""
        return 0.0 if self._silent_since_s is None else _now_s() - self._silent_since_s

    async def ask(self, body: bytes) -> bytearray:
        """Ask and wait. Giving up the wait gives up the call; a late answer is dropped."""
        call = next(self._calls)
        self._send(request(Ask.DO, call, body))
        if self._silent_since_s is None:
            self._silent_since_s = _now_s()
        try:
            return await self._answer_to(call)
        finally:
            if self._waiting.pop(call, None) is not None and self._writable:
                self._send(request(Ask.FORGET, call))

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

    async def _answer_to(self, call: int) -> bytearray:
        answer: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()
        self._waiting[call] = answer
        return await answer

    @property
    def _writable(self) -> bool:
        return self.alive and not self._stdin.is_closing()

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    def _send(self, frame: bytes) -> None:
        if not self._writable:
            raise EngineUnreachable(f"the {self._name} process has ended.")
        # no drain: the body is in memory already, and the pipe's buffer holds what the process has not read
        self._stdin.write(frame)

    async def _read_until_end(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                await self._read_answer(self._process.stdout)
        except (asyncio.IncompleteReadError, ConnectionError):
            log.info("%s process %d closed its pipe", self._name, self.pid)
        finally:
            self.alive = False
            self._stdin.close()
            self._fail_waiting(await self._exit_status())

    async def _exit_status(self) -> int:
        try:
            async with asyncio.timeout(_GRACE_S):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return await self._process.wait()

    async def _read_answer(self, pipe: asyncio.StreamReader) -> None:
        kind, call, size = ANSWER.unpack(await pipe.readexactly(ANSWER.size))
        body = await _read_body(pipe, size)
        if kind == Reply.FAILED:
            self._settle(call, EngineError(f"the {self._name} process failed. {body.decode()}"))
        else:
            self._settle(call, body)

    def _settle(self, call: int, outcome: bytearray | EngineError) -> None:
        answer = self._waiting.pop(call, None)
        self._silent_since_s = _now_s() if self._waiting else None
        if answer is None or answer.done():
            return
        if isinstance(outcome, EngineError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def _fail_waiting(self, status: int) -> None:
        for call in list(self._waiting):
            self._settle(
                call,
                EngineUnreachable(
                    f"the {self._name} process ended (status {status}) before it answered.",
                    remedy="It is started again by the next call.",
                ),
            )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _spawn(name: str, command: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
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


async def _read_body(pipe: asyncio.StreamReader, size: int) -> bytearray:
    """Read in pieces, so that no single step of the event loop copies a whole large array."""
    body, filled = bytearray(size), 0
    while filled < size:
        piece = await pipe.read(min(_READ_BYTES, size - filled))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size - filled)
        body[filled : filled + len(piece)] = piece
        filled += len(piece)
    return body
