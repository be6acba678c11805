"""Requests in work, their output on its way to the client, and the thread that owns the model."""

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.output import Piece, abort_reason
from shell_router.standins.embedded.sampling import Grammar
from shell_router.standins.embedded.wire import GenerateRequest

logger = logging.getLogger(__name__)
Job = TypeVar("Job")
Result = TypeVar("Result", covariant=True)  # noqa: PLC0105 - as Protocol asks
STOP_LIMIT_S = 10.0


class Inflight:
    """One request in work, with its output's pieces in order, which one reader takes in batches.
    One event loop only.

    The reader is woken by the first piece, then by every `stream_interval` more, and by the last,
    as in SGLang. `cached_tokens` is set before the first piece, `transferring` while its KV is on
    its way.
    """

    def __init__(self, request: GenerateRequest, grammar: Grammar | None = None) -> None:
        self.request = request
        self.grammar = grammar
        self.cached_tokens = 0
        self.transferring = False
        self._pieces: list[Piece] = []
        self._due = 1
        self._filled = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Add to the output."""
        self._pieces.append(piece)
        if len(self._pieces) >= self._due or piece.finish_reason is not None:
            self._filled.set()

    async def take(self) -> list[Piece]:
        """Everything that came since the last call; waits until that is due."""
        await self._filled.wait()
        self._filled.clear()
        self._due = self.request.stream_interval
        pieces = self._pieces
        self._pieces = []
        return pieces

    def abort(self) -> None:
        """Make an abort the output's end. Its reader then stops the work."""
        if self.transferring:
            self.fail("KV transfer failed with exception KVTransferError: Aborted by AbortReq.")
        else:
            self.put(Piece(finish_reason=abort_reason()))

    def fail(self, message: str) -> None:
        """Make a failure of the server's the output's end."""
        self.put(Piece(finish_reason=abort_reason(message, 500)))


@dataclass(frozen=True, slots=True)
class Loads:
    """What a server is doing now. Tokens are of KV; `*_total` count since start."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    prefill_inflight: int = 0
    decode_prealloc: int = 0
    decode_transfer: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0


class Service(ABC, Generic[Job, Result]):
    """One side of the pair: the model's thread, and what the event loop does for its requests.

    `inflight` are the requests in work, by `rid`. One event loop only.
    """

    def __init__(
        self, worker: "Worker[Job, Result]", deliver: Callable[[Job, Result], None]
    ) -> None:
        """See `ModelThread`."""
        self.inflight: dict[str, Inflight] = {}
        self.thread = ModelThread(worker, deliver)

    async def stop(self) -> None:
        await self.thread.stop()

    def check(self, request: GenerateRequest) -> None:
        """Raise `InvalidRequest` on a request that this side cannot take."""
        if request.bootstrap_room is None:
            raise InvalidRequest(
                "Invalid request: Disaggregated request received without bootstrap room id. "
                f"req.rid={request.rid!r}"
            )

    @contextmanager
    def in_work(self, request: GenerateRequest, grammar: Grammar | None) -> Iterator[Inflight]:
        """Register a request for the length of the block. Raises `InvalidRequest`, as on an id in
        use.
        """
        self.check(request)
        if request.rid in self.inflight:
            raise InvalidRequest(
                f"Duplicate request ID detected: {request.rid}",
                remedy="Use a new id for every attempt.",
            )
        self.inflight[request.rid] = inflight = Inflight(request, grammar)
        try:
            yield inflight
        finally:
            del self.inflight[request.rid]

    def abort_all(self) -> None:
        for inflight in self.inflight.values():
            inflight.abort()

    @abstractmethod
    async def work(self, inflight: Inflight) -> None:
        """Put the request's output, piece by piece. Cancelling it frees everything within one
        step."""

    @abstractmethod
    def loads(self) -> Loads:
        """How much work there is."""


async def output_of(
    service: Service[Any, Any], inflight: Inflight
) -> AsyncGenerator[Sequence[Piece], None]:
    """The request's pieces as they come, to the last; its work never outlives this generator."""
    task = asyncio.create_task(_guarded(service, inflight))
    try:
        finished = False
        while not finished:
            pieces = await inflight.take()
            finished = any(piece.finish_reason is not None for piece in pieces)
            yield pieces
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _guarded(service: Service[Any, Any], inflight: Inflight) -> None:
    try:
        await service.work(inflight)
    except Exception as error:
        # whatever it is, the client must hear of it: this task has no other reader
        logger.exception("Request %s failed", inflight.request.rid)
        inflight.fail(f"{type(error).__name__}: {error}")


class Worker(Protocol[Job, Result]):
    """What runs in the thread. `step` may be called when nothing is to be done."""

    @property
    def busy(self) -> bool: ...

    def admit(self, job: Job) -> None: ...

    def drop(self, job: Job) -> None:
        """Free all that `job` holds; unknown or finished jobs are no error."""

    def step(self) -> Sequence[tuple[Job, Result]]:
        """Do one step of work; returns the results that it has for jobs."""

    def fail(self, message: str) -> Sequence[tuple[Job, Result]]:
        """Give up everything in work after an error in a step."""


class ModelThread(Generic[Job, Result]):
    """Runs a worker step by step; between steps it obeys commands, so that each takes effect within
    one step.
    """

    def __init__(self, worker: Worker[Job, Result], deliver: Callable[[Job, Result], None]) -> None:
        """`deliver` is called in the event loop's thread."""
        self._worker = worker
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        # None ends the thread
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        self._commands.put(partial(self._worker.admit, job))

    def drop(self, job: Job) -> None:
        self._commands.put(partial(self._worker.drop, job))

    async def stop(self) -> None:
        """End after the current step."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, STOP_LIMIT_S)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._obey():
                results = self._step()
                if results:
                    self._loop.call_soon_threadsafe(self._deliver_all, results)

    def _obey(self) -> bool:
        """Carry out waiting commands, waiting for one when idle; False ends the thread."""
        try:
            command = self._commands.get(block=not self._worker.busy)
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self) -> Sequence[tuple[Job, Result]]:
        try:
            return self._worker.step()
        except Exception as error:
            # Whatever a model raises must end the requests that met it, never the server.
            logger.exception("A step of the model failed; its requests are given up")
            return self._worker.fail(f"{type(error).__name__}: {error}")

    def _deliver_all(self, results: Sequence[tuple[Job, Result]]) -> None:
        for job, result in results:
            self._deliver(job, result)
