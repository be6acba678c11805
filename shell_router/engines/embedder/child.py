"""One running embedding process, as the router sees it."""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from shell_router.core.embedding import TokenStates
from shell_router.engines.embedder.frames import ANSWER, LOADED, Ask, Reply, request
from shell_router.errors import EngineError, EngineStalled, EngineUnreachable

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_GRACE_S = 2.0


class EmbeddingChild:
    """A child process and the calls that wait for its answers. `answered` counts the answers it has given."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._calls = itertools.count(LOADED + 1)
        self._waiting: dict[int, asyncio.Future[TokenStates]] = {}
        self.answered = 0
        self.alive = True
        self._reader = asyncio.create_task(self._read_until_end(), name="embedding-answers")

    @classmethod
    async def launch(cls, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Self:
        """Start `command` and wait until its model is loaded. EngineError with the reason if it never is."""
        child = cls(await _spawn(command, env))
        try:
            async with asyncio.timeout(timeout_s):
                await child._answer_to(LOADED)
        except BaseException as error:
            await child.close()
            if isinstance(error, TimeoutError):
                raise EngineStalled(f"the embedding process was not ready within {timeout_s:g} s.") from None
            raise
        return child

    @property
    def pid(self) -> int:
        """The operating system's id of the process."""
        return self._process.pid

    async def embed(self, text: str) -> TokenStates:
        """Ask for one text's states and wait. Giving up the wait gives up the call; a late answer is dropped."""
        call = next(self._calls)
        self._send(request(Ask.EMBED, call, text))
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

    async def _answer_to(self, call: int) -> TokenStates:
        answer: asyncio.Future[TokenStates] = asyncio.get_running_loop().create_future()
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
            raise EngineUnreachable("the embedding process has ended.")
        # no drain: the text is in memory already, and the pipe's buffer holds what the process has not read
        self._stdin.write(frame)

    async def _read_until_end(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                await self._read_answer(self._process.stdout)
        except (asyncio.IncompleteReadError, ConnectionError):
            log.info("embedding process %d closed its pipe", self.pid)
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
        kind, call, rows, columns = ANSWER.unpack(await pipe.readexactly(ANSWER.size))
        if kind == Reply.FAILED:
            message = (await pipe.readexactly(rows)).decode()
            self._settle(call, EngineError(f"the embedding process failed. {message}"))
        else:
            self._settle(call, await _read_states(pipe, rows, columns))

    def _settle(self, call: int, outcome: TokenStates | EngineError) -> None:
        self.answered += 1
        answer = self._waiting.pop(call, None)
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
                    f"the embedding process ended (status {status}) before it answered.",
                    remedy="It is started again by the next call.",
                ),
            )


async def _spawn(command: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
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
        raise EngineUnreachable(f"the embedding process could not be started: {error}.") from error


async def _read_states(pipe: asyncio.StreamReader, rows: int, columns: int) -> TokenStates:
    """Read in pieces, so that no single step of the event loop copies a whole large array."""
    states = np.empty(rows * columns, dtype=np.float32)
    target, filled = states.view(np.uint8), 0
    while filled < target.size:
        piece = await pipe.read(min(_READ_BYTES, target.size - filled))
        if not piece:
            raise asyncio.IncompleteReadError(b"", target.size - filled)
        target[filled : filled + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        filled += len(piece)
    return states.reshape(rows, columns)
