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
    """A request in work, with its output's pieces in order, for one reader. One event loop only.

    The reader is woken by the first piece, then by every `stream_interval` more, and by the last,
    as in SGLang. `cached_tokens` is set before the first piece, `transferring` while the KV is
    under way.
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
        """Add a piece to the output."""
        self._pieces.append(piece)
        if len(self._pieces) >= self._due or piece.finish_reason is not None:
            self._filled.set()

    async def take(self) -> list[Piece]:
        """Wait until pieces are due, and return all that came since the last call."""
        await self._filled.wait()
        self._filled.clear()
        self._due = self.request.stream_interval
        pieces = self._pieces
        self._pieces = []
        return pieces

    def abort(self) -> None:
        """End the output with an abort. Its reader then stops the work."""
        if self.transferring:
            self.fail("KV transfer failed with exception KVTransferError: Aborted by AbortReq.")
        else:
            self.put(Piece(finish_reason=abort_reason()))

    def fail(self, message: str) -> None:
        """End the output with a failure of the server."""
        self.put(Piece(finish_reason=abort_reason(message, 500)))


@dataclass(frozen=True, slots=True)
class Loads:
    """The current load of a server. Tokens are of KV; `*_total` count since start."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    prefill_inflight: int = 0
    decode_prealloc: int = 0
    decode_transfer: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0


class Service(ABC, Generic[Job, Result]):
    """One side of the pair: the model's thread, and the event loop's work for its requests.

    `inflight` are the requests in work, by `rid`. One event loop only.
    """

    def __init__(
        self, worker: "ModelWorker[Job, Result]", deliver: Callable[[Job, Result], None]
    ) -> None:
        self.inflight: dict[str, Inflight] = {}
        self.thread = ModelThread(worker, deliver)

    async def stop(self) -> None:
        """Stop the model's thread."""
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
        """Register a request for the length of the block.

        Raises `InvalidRequest`, also for an id in use.
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
        """Abort all requests."""
        for inflight in self.inflight.values():
            inflight.abort()

    @abstractmethod
    async def work(self, inflight: Inflight) -> None:
        """Put the request's output, piece by piece. A cancel frees everything within one step."""

    @abstractmethod
    def loads(self) -> Loads:
        """Return the current load."""


async def output_of(
    service: Service[Any, Any], inflight: Inflight
) -> AsyncGenerator[Sequence[Piece], None]:
    """Yield the request's pieces as they come, to the last; its work ends with the generator."""
    task = asyncio.create_task(_run_work(service, inflight))
    try:
        finished = False
        while not finished:
            pieces = await inflight.take()
            finished = any(piece.finish_reason is not None for piece in pieces)
            yield pieces
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _run_work(service: Service[Any, Any], inflight: Inflight) -> None:
    try:
        await service.work(inflight)
    except Exception as error:
        # whatever it is, the client must hear of it: this task has no other reader
        logger.exception("Request %s failed", inflight.request.rid)
        inflight.fail(f"{type(error).__name__}: {error}")


class ModelWorker(Protocol[Job, Result]):
    """The protocol of the object that the model's thread runs."""

    @property
    def busy(self) -> bool:
        """Whether the next step has something to do."""

    def admit(self, job: Job) -> None:
        """Take a job."""

    def drop(self, job: Job) -> None:
        """Free all that `job` holds; unknown or finished jobs are no error."""

    def step(self) -> Sequence[tuple[Job, Result]]:
        """Do one step of work, if there is any; return the results that it has for jobs."""

    def fail(self, message: str) -> Sequence[tuple[Job, Result]]:
        """Give up everything in work after an error in a step."""


class ModelThread(Generic[Job, Result]):
    """A thread that runs a worker step by step, and obeys commands between steps."""

    def __init__(
        self, worker: ModelWorker[Job, Result], deliver: Callable[[Job, Result], None]
    ) -> None:
        # `deliver` is called in the event loop's thread
        self._worker = worker
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        # None ends the thread
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Have the worker admit a job before its next step."""
        self._commands.put(partial(self._worker.admit, job))

    def drop(self, job: Job) -> None:
        """Have the worker drop a job before its next step."""
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
        """Carry out commands, and wait for one when idle; return False at the end."""
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
