"""The client of one engine server, with limits, errors, aborts and a breaker; slots and reports."""

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import orjson

from shell_router.core.engine import error_message
from shell_router.core.exact_json import NewValues
from shell_router.core.spans import CURRENT
from shell_router.engines.address import PairLimits, Server
from shell_router.engines.wire import refusal_error, wire_error
from shell_router.errors import (
    EngineError,
    EngineRejected,
    EngineStalled,
    EngineUnavailable,
    EngineUnreachable,
    PromptTooLong,
    hide_user,
)
from shell_router.http.client import (
    AnswerTooLong,
    Endpoint,
    Exchange,
    HttpClient,
    make_endpoint,
)
from shell_router.http.tasks import TaskOwner
from shell_router.routing.dispatcher import QUIET_S, Dispatcher, EngineSlot, TrackedEngine
from shell_router.routing.failures import Breaker, BreakerSettings
from shell_router.routing.placement import EngineReport, PlacementRequest

logger = logging.getLogger(__name__)

E = TypeVar("E")

HTTP_OK = 200
NOT_FOUND = 404
CONTRACT = 1
"""The version of the SGLang plugin's contract that this router knows
(`sglang_plugin.routes.CONTRACT`).
"""

ServerFailure = EngineError | PromptTooLong
_SERVERS_FAULTS = (EngineUnreachable, EngineStalled)
_MODEL_NAME = re.compile(r"(?m)(?:models--.*--)?([^/.\n][^/\n]*?)(?:/snapshots/[^/]+)?/?$")
"""The name of a model at the end of a path, also of a folder in the hub's cache."""
MAX_ABORTS = 16
"""Connections for the aborts of one batch on one server. A connection for each of 1,024 prompts
would take all files of a process.
"""
LONGEST_WAIT_S = 30.0
"""Longest pause between two polls of a server that does not answer."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The parts that the clients of a model's servers share.

    Attributes:
        http: Their connections.
        tasks: The owner of background work, such as aborts.
        clock: Gives monotonic seconds.
        folder: The model's folder, which the servers were started with, too.
        key: Sent as a bearer.
        headers: Sent, too.
    """

    http: HttpClient
    tasks: TaskOwner
    limits: PairLimits
    breaker: BreakerSettings
    clock: Callable[[], float]
    folder: Path = Path()
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class ServerClient:
    """Posts to one server, turns failures into the router's errors, and aborts.

    Attributes:
        failures: Requests that failed by the server's fault.
        answers: Whether the server answered when it was last asked about itself.
    """

    def __init__(self, server: Server, transport: Transport) -> None:
        self.server = server
        self.name = server.name
        """The name in errors, which clients read; `str` has the URL too, for logs."""
        self.limits = transport.limits
        self.tasks = transport.tasks
        self.breaker = Breaker(transport.breaker)
        self.failures = 0
        self.answers = False
        self._http = transport.http
        self._clock = transport.clock
        self._key = transport.key
        self._headers = transport.headers
        self._folder = transport.folder
        # parsing a URL costs a tenth of a small request
        self._endpoints: dict[str, Endpoint] = {}

    def __str__(self) -> str:
        return str(self.server)

    def begin(
        self,
        route: str,
        body: bytes,
        *,
        read_timeout_s: float | None = None,
        streamed: bool = False,
        ended: Callable[[Exchange], None] | None = None,
    ) -> Exchange:
        """Post `body` to `route`; the exchange fails with EngineUnreachable or EngineStalled."""
        span = CURRENT.get()
        return self._http.begin(
            self._endpoints.get(route) or self._endpoint("POST", route),
            body,
            read_timeout_s=read_timeout_s or self.limits.stall_s,
            streamed=streamed,
            ended=ended,
            explain=self.failure,
            headers=b"" if span is None else span.headers(),
        )

    def _endpoint(self, method: str, route: str) -> Endpoint:
        name = route if method == "POST" else f"{method} {route}"
        if name not in self._endpoints:
            self._endpoints[name] = make_endpoint(
                method, self.server.url / route, self._key, self._headers
            )
        return self._endpoints[name]

    async def read_all(self, exchange: Exchange) -> bytes:
        """Return the whole body of a good answer.

        Raises:
            EngineRejected: The status is an error.
            PromptTooLong: The server says so.
        """
        await exchange.wait_for_head()
        return self.check_answer(exchange, await exchange.read_all())

    def check_answer(self, exchange: Exchange, body: bytes) -> bytes:
        """Return the body of a complete answer; raise its failure, or the refusal of its status."""
        if exchange.failure is not None:
            raise exchange.failure
        if exchange.status != HTTP_OK:
            raise refusal_error(self.name, exchange.status, error_message(body))
        return body

    async def get(self, route: str, *, limit_s: float) -> bytes:
        """Get the body at `route`; raises EngineError."""
        return await self._fetch(self._endpoint("GET", route), None, limit_s)

    async def post(self, route: str, body: bytes, *, limit_s: float) -> bytes:
        """Post `body` to `route` and return the answer; raises EngineError."""
        return await self._fetch(self._endpoint("POST", route), body, limit_s)

    async def _fetch(self, at: Endpoint, sent: bytes | None, limit_s: float) -> bytes:
        exchange = self._http.begin(at, sent, read_timeout_s=limit_s, explain=self.failure)
        try:
            async with asyncio.timeout(limit_s):
                body = await self.read_all(exchange)
        except (EngineError, TimeoutError) as error:
            self.answers = isinstance(error, EngineRejected) and error.status < 500
            if isinstance(error, TimeoutError):
                raise self.failure(error) from error
            raise
        else:
            self.answers = True
            return body
        finally:
            exchange.close()

    async def info(self, route: str = "server_info") -> NewValues:
        """Get the JSON object at `route`; raises EngineError."""
        return self._object(await self.get(route, limit_s=self.limits.connect_s))

    async def knows_contract(self) -> bool:
        """Tell whether the server's plugin, if it has one, has the contract that this router knows.

        Raises:
            EngineRejected: The server has another role than its address says.
            EngineError: It does not answer.
        """
        limit_s = self.limits.connect_s
        try:
            answer = await self.get("shell_router/capabilities", limit_s=limit_s)
        except EngineRejected as refusal:
            if refusal.status != NOT_FOUND:
                raise
            answer = await self.get("model_info", limit_s=limit_s)
        capabilities = self._object(answer)
        mode = capabilities.get("disaggregation_mode")
        contract = capabilities.get("contract")
        if mode not in (None, self.server.mode):
            raise EngineRejected(
                f"The {self} says that its disaggregation mode is {mode}.",
                status=501,
                remedy=f"Correct the URLs, or start it with --disaggregation-mode "
                f"{self.server.mode}.",
            )
        self._check_model(str(capabilities.get("model_path", "")))
        if contract not in (None, CONTRACT):
            logger.warning(
                "%s: this router knows contract %d, so the plugin's route is left alone",
                self,
                CONTRACT,
            )
            return False
        return True

    def _check_model(self, path: str) -> None:
        """Warn if the server was started with a model of another name than the router's."""
        paths = f"{path}\n{self._folder}".lower()
        if len({*_MODEL_NAME.findall(paths)}) > 1:
            logger.warning(
                "the %s serves %s, and the model's path is %s: unless both are one model, its "
                "answers are wrong; correct the URLs or the path",
                self,
                path,
                self._folder,
            )

    async def report(self) -> EngineReport:
        """Get the server's load from `/v1/loads`; it is as full as its fullest data-parallel rank.

        SGLang has `num_total_tokens` (KV in use, and tokens that wait) from 0.5.19 on; without it
        the tokens in use stand for it. Raises EngineError.
        """
        body = await self.get("v1/loads", limit_s=self.limits.connect_s)
        try:
            ranks = orjson.loads(body)["loads"]
            rates = [rate for rank in ranks if (rate := rank.get("cache_hit_rate")) is not None]
            return EngineReport(
                max((float(rank["token_usage"]) for rank in ranks), default=0.0),
                sum(int(rank.get("num_total_tokens", rank["num_used_tokens"])) for rank in ranks),
                sum(rank["num_running_reqs"] for rank in ranks),
                sum(rank["num_waiting_reqs"] for rank in ranks),
                max(rates, default=None),
            )
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise wire_error(self.name, f"{body[:200]!r}") from error

    def _object(self, answer: bytes) -> NewValues:
        with suppress(orjson.JSONDecodeError):
            content = orjson.loads(answer)
            if isinstance(content, dict):
                return content
        raise wire_error(self.name, f"{answer[:200]!r}")

    def failure(self, error: Exception) -> EngineError:
        """Make the router's error of the HTTP client's OSError or TimeoutError.

        A note of the error, for logs, has the URL.
        """
        failure: EngineError = EngineUnreachable(
            f"The {self.name} cannot be reached: {describe_failure(error)}.",
            remedy="Check that it runs.",
        )
        if isinstance(error, TimeoutError):
            failure = EngineStalled(
                f"The {self.name} sent nothing within its limit.",
                remedy="Look at its load and its log.",
            )
        elif isinstance(error, AnswerTooLong):
            failure = EngineRejected(
                f"The {self.name} sent {error}, which is the router's limit.",
                status=502,
                remedy="Check that the URL is an SGLang server of a supported version.",
            )
        failure.__cause__ = error
        failure.add_note(f"{self}: {error or type(error).__name__}")
        return failure

    def note_failure(self, error: ServerFailure) -> None:
        """Count `error` against the server if it is the server's fault, not the request's."""
        crashed = isinstance(error, EngineRejected) and error.status >= 500
        if not (crashed or isinstance(error, _SERVERS_FAULTS)):
            return
        self.failures += 1
        if self.breaker.note_failure(self._clock()):
            logger.warning(
                "circuit breaker of the %s is open, probing every %g s (%s)",
                self,
                self.breaker.open_s,
                error.__cause__ or error,
            )

    def note_success(self) -> None:
        """Count a good answer, which closes the breaker."""
        if self.breaker.failures and self.breaker.note_success():
            logger.info("circuit breaker of the %s is closed: it serves again", self)

    def abort(self, rids: Sequence[str]) -> None:
        """Abort `rids` in the background, over few connections.

        The aborts end when one is not answered in time.
        """
        for first in range(min(len(rids), MAX_ABORTS)):
            self.tasks.start(self._abort(rids[first::MAX_ABORTS]))

    async def _abort(self, rids: Sequence[str]) -> None:
        for number, rid in enumerate(rids):
            exchange = self.begin("abort_request", orjson.dumps({"rid": rid}))
            try:
                async with asyncio.timeout(self.limits.abort_s):
                    await self.read_all(exchange)
            except (EngineError, PromptTooLong) as error:
                logger.warning("could not abort %s on the %s: %r", rid, self, error)
            except TimeoutError as error:
                left = ", ".join(rids[number:])
                logger.warning("could not abort %s on the %s: %r", left, self, error)
                return
            finally:
                exchange.close()


def describe_failure(error: Exception) -> str:
    """Describe a failed request; asyncio's words for a failed connection would name the address."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return hide_user(str(error)).partition(": ")[0] or type(error).__name__


@dataclass(frozen=True, slots=True, eq=False)
class Monitor(Generic[E]):
    """Polls every engine of a dispatcher, each in a task of its own.

    A slow engine so delays no other's report. `ask` gets an engine's report within a limit of its
    own, or raises EngineError. An engine that fails is polled again after twice the pause, up to 30
    s, and its last report ages meanwhile.
    """

    dispatcher: Dispatcher[E]
    ask: Callable[[E], Awaitable[EngineReport]]
    _tasks: dict[E, asyncio.Task[None]] = field(default_factory=dict)

    async def __aenter__(self) -> "Monitor[E]":
        self.follow()
        return self

    def follow(self) -> None:
        """Poll the engines that the dispatcher has now, and no others."""
        for gone in self._tasks.keys() - set(self.dispatcher.engines):
            self._tasks.pop(gone).cancel()
        for at in self.dispatcher.tracked:
            if at.engine not in self._tasks:
                self._tasks[at.engine] = asyncio.create_task(self._follow(at))

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, at: TrackedEngine[E]) -> None:
        wait_s = 0.0
        while True:
            poll_s = self.dispatcher.poll_s
            try:
                self.dispatcher.report(at.index, await self.ask(at.engine))
                wait_s = poll_s
            except EngineError as error:
                at.failed_polls += 1
                if wait_s <= poll_s:
                    logger.warning(
                        "%s does not report its state, and is chosen without it: %s",
                        at.engine,
                        error,
                    )
                wait_s = min(2 * max(wait_s, poll_s), max(LONGEST_WAIT_S, poll_s))
            await asyncio.sleep(wait_s)


def _recheck(dispatcher: Dispatcher[E]) -> None:
    """Look every second whether engines are idle by now, as long as batches wait."""
    try:
        dispatcher.grant()
    finally:
        dispatcher.is_rechecked = bool(dispatcher.batches.entries)
        if dispatcher.is_rechecked:
            asyncio.get_running_loop().call_later(QUIET_S, _recheck, dispatcher)


async def take_slot(
    dispatcher: Dispatcher[E], request: PlacementRequest, avoid: Collection[E] = ()
) -> EngineSlot[E]:
    """Wait for a slot on an engine, to which the request is then sent at once.

    However it ends without a slot, the queue has forgotten the request.

    Args:
        dispatcher: The engines.
        request: The request.
        avoid: Engines that get the request only if no other serves.

    Raises:
        EngineUnavailable: All breakers are open, or no slot came free in time.
    """
    entry = dispatcher.submit(request, avoid)
    if isinstance(entry, EngineSlot):
        return entry
    decided = asyncio.get_running_loop().create_future()
    wait_s = dispatcher.settings.queue.wait_s
    is_batch = request.hints.tier == "batch"  # it waits until its batch expires
    entry.decided = lambda: None if decided.done() else decided.set_result(None)
    if is_batch and not dispatcher.is_rechecked:
        dispatcher.is_rechecked = True
        asyncio.get_running_loop().call_later(QUIET_S, _recheck, dispatcher)
    try:
        async with asyncio.timeout(None if is_batch else wait_s):
            await decided
        if entry.error is not None:
            raise entry.error
    except BaseException as error:
        dispatcher.withdraw(entry)
        if not isinstance(error, TimeoutError):
            raise
        raise EngineUnavailable(
            f"No engine had capacity for the request within {wait_s:g} s.",
            remedy="Ask again later, add engines, or raise scheduling.queue.wait_s.",
        ) from error
    slot: EngineSlot[E] = entry.slot
    return slot
