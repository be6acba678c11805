"""Requests to one engine server, with the router's limits, errors, aborts and its circuit breaker;
polls of several.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import orjson

from shell_router.core.engine import error_message
from shell_router.core.spans import CURRENT
from shell_router.engines.address import PairLimits, Server
from shell_router.engines.wire import broken_wire, rejected
from shell_router.errors import (
    EngineError,
    EngineRejected,
    EngineStalled,
    EngineUnreachable,
    PromptTooLong,
)
from shell_router.http.client import (
    MAX_BUFFERED_BYTES,
    Endpoint,
    Exchange,
    HttpClient,
    endpoint,
)
from shell_router.http.tasks import TaskOwner
from shell_router.routing.dispatcher import Dispatcher, TrackedEngine
from shell_router.routing.failures import Breaker, BreakerSettings
from shell_router.routing.placement import EngineReport

logger = logging.getLogger(__name__)

E = TypeVar("E")

HTTP_OK = 200
NOT_FOUND = 404
CONTRACT = 1
"""The SGLang plugin's contract that this router knows (`sglang_plugin.routes.CONTRACT`)."""

ServerFailure = EngineError | PromptTooLong
_SERVERS_FAULTS = (EngineUnreachable, EngineStalled)
MAX_ABORTS = 16
"""At a time, of one batch on one server: one of 1,024 prompts, a connection each, would take all
files of a process.
"""
LONGEST_WAIT_S = 30.0
"""Between two polls of a server that does not answer."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What the clients of all servers of a model share; `clock` gives monotonic seconds, servers
    ask for `key`.
    """

    http: HttpClient
    tasks: TaskOwner
    limits: PairLimits
    breaker: BreakerSettings
    clock: Callable[[], float]
    key: str | None = field(default=None, repr=False)


class ServerClient:
    """Posts to one server, turns what goes wrong into the router's errors, and aborts.

    `failures` counts requests that failed by the server's fault. `answers` is whether it answered
    when it was last asked for something about itself.
    """

    def __init__(self, server: Server, transport: Transport) -> None:
        self.server = server
        self.name = f"{server.role} engine"
        """For errors, which clients read; `str` has the URL too, for logs."""
        self.limits = transport.limits
        self.tasks = transport.tasks
        self.breaker = Breaker(transport.breaker)
        self.failures = 0
        self.answers = False
        self._http = transport.http
        self._clock = transport.clock
        self._key = transport.key
        self._endpoints: dict[
            str, Endpoint
        ] = {}  # reading a URL costs as much as a tenth of a small request

    def __str__(self) -> str:
        return str(self.server)

    def begin(
        self,
        route: str,
        body: bytes,
        *,
        read_timeout_s: float | None = None,
        ended: Callable[[Exchange], None] | None = None,
        max_buffered_bytes: int | None = MAX_BUFFERED_BYTES,
    ) -> Exchange:
        """Post `body` to `route`. The exchange fails with EngineUnreachable or EngineStalled."""
        span = CURRENT.get()
        return self._http.begin(
            self._endpoints.get(route) or self._endpoint("POST", route),
            body,
            read_timeout_s=read_timeout_s or self.limits.stall_s,
            ended=ended,
            max_buffered_bytes=max_buffered_bytes,
            explain=self.failure,
            headers=b"" if span is None else span.headers(),
        )

    def _endpoint(self, method: str, route: str) -> Endpoint:
        if method == "POST":
            known = route
        else:
            known = f"{method} {route}"
        found = self._endpoints.get(known)
        if found is None:
            found = self._endpoints[known] = endpoint(method, self.server.url / route, self._key)
        return found

    async def read_all(self, exchange: Exchange) -> bytes:
        """The whole body of a good answer; raises EngineRejected or PromptTooLong for an error
        status.
        """
        await exchange.head()
        return self.checked(exchange, await exchange.read_all())

    def checked(self, exchange: Exchange, body: bytes) -> bytes:
        """The body of a good answer; raises EngineRejected or PromptTooLong for another, or the
        exchange's failure.
        """
        if exchange.failure is not None:
            raise exchange.failure
        if exchange.status != HTTP_OK:
            raise rejected(self.name, exchange.status, error_message(body))
        return body

    async def get(self, route: str, *, limit_s: float) -> bytes:
        """The body at `route`; raises EngineError."""
        return await self._whole_within(self._endpoint("GET", route), None, limit_s)

    async def post(self, route: str, body: bytes, *, limit_s: float) -> bytes:
        """What `route` answers to `body`; raises EngineError."""
        return await self._whole_within(self._endpoint("POST", route), body, limit_s)

    async def _whole_within(self, at: Endpoint, body: bytes | None, limit_s: float) -> bytes:
        exchange = self._http.begin(at, body, read_timeout_s=limit_s, explain=self.failure)
        try:
            async with asyncio.timeout(limit_s):
                found = await self.read_all(exchange)
        except (EngineError, TimeoutError) as error:
            self.answers = isinstance(error, EngineRejected) and error.status < 500
            if isinstance(error, TimeoutError):
                raise self.failure(error) from error
            raise
        else:
            self.answers = True
            return found
        finally:
            exchange.close()

    # --- what it says about itself

    async def info(self, route: str = "server_info") -> dict[str, Any]:
        """The object at `route`; raises EngineError."""
        return self._object(await self.get(route, limit_s=self.limits.connect_s))

    async def knows_contract(self) -> bool:
        """Whether what the SGLang plugin adds, if it is there, means what this router takes it to
        mean.

        Raises EngineRejected where the server's role is another than it is named for, and
        EngineError.
        """
        limit_s = self.limits.connect_s
        try:
            answer = await self.get("shell_router/capabilities", limit_s=limit_s)
        except EngineRejected as refusal:
            if refusal.status != NOT_FOUND:
                raise
            answer = await self.get("model_info", limit_s=limit_s)
        found = self._object(answer)
        mode = found.get("disaggregation_mode")
        contract = found.get("contract")
        if mode not in (None, self.server.role):
            raise EngineRejected(
                f"The {self} says that its disaggregation mode is {mode}.",
                status=501,
                remedy="Correct the pair's URLs, or start it with --disaggregation-mode.",
            )
        logger.info("%s: contract of the SGLang plugin: %s", self, contract)
        if contract not in (None, CONTRACT):
            logger.warning(
                "%s: this router knows contract %d, so the plugin's route is left alone",
                self,
                CONTRACT,
            )
            return False
        return True

    async def report(self) -> EngineReport:
        """Its load by `/v1/loads`, over its data-parallel ranks: it is as full as its fullest.
        Raises EngineError.

        SGLang has `num_total_tokens` (KV in use, and tokens that wait) from 0.5.19 on; where it is
        missing, the tokens in use stand for it.
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
            raise broken_wire(self.name, f"{body[:200]!r}") from error

    def _object(self, answer: bytes) -> dict[str, Any]:
        try:
            found = orjson.loads(answer)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise broken_wire(self.name, f"{answer[:200]!r}")
        return found

    # --- failures

    def failure(self, error: Exception) -> EngineError:
        """The router's error for an OSError or TimeoutError of the HTTP client; a note of it, for
        logs, has the URL.
        """
        if isinstance(error, TimeoutError):
            found: EngineError = EngineStalled(
                f"The {self.name} sent nothing within its limit.",
                remedy="Look at its load and its log.",
            )
        else:
            found = EngineUnreachable(
                f"The {self.name} cannot be reached: {_without_address(error)}.",
                remedy="Check that it runs.",
            )
        found.__cause__ = error
        found.add_note(f"{self}: {error or type(error).__name__}")
        return found

    def failed(self, error: ServerFailure) -> None:
        """Count `error` against the server if it is the server's fault, not the request's."""
        if isinstance(error, EngineRejected):
            fault = error.status >= 500
        else:
            fault = isinstance(error, _SERVERS_FAULTS)
        if not fault:
            return
        self.failures += 1
        if self.breaker.failed(self._clock()):
            logger.warning(
                "circuit breaker of the %s is open, probing every %g s (%s)",
                self,
                self.breaker.open_s,
                error.__cause__ or error,
            )

    def succeeded(self) -> None:
        """The server has answered a request well."""
        if self.breaker.failures and self.breaker.succeeded():
            logger.info("circuit breaker of the %s is closed: it serves again", self)

    def abort(self, rids: Sequence[str]) -> None:
        """Abort `rids`, in the background, over few connections, until one is not answered in
        time."""
        for first in range(min(len(rids), MAX_ABORTS)):
            self.tasks.start(self._abort(rids[first::MAX_ABORTS]))

    async def _abort(self, rids: Sequence[str]) -> None:
        for place, rid in enumerate(rids):
            exchange = self.begin("abort_request", orjson.dumps({"rid": rid}))
            try:
                async with asyncio.timeout(self.limits.abort_s):
                    await self.read_all(exchange)
            except (EngineError, PromptTooLong, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    given_up = rids[place:]
                else:
                    given_up = [rid]
                logger.warning("could not abort %s on the %s: %r", ", ".join(given_up), self, error)
                if isinstance(error, TimeoutError):
                    return
            finally:
                exchange.close()


def _without_address(error: Exception) -> str:
    """What asyncio says of a connection that cannot be made names the address."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        number = None
    if number:
        return os.strerror(number)
    return str(error).partition(": ")[0] or type(error).__name__


@dataclass(frozen=True, slots=True, eq=False)
class Monitor(Generic[E]):
    """Polls every engine of a dispatcher, each in a task of its own, so that a slow one delays no
    other's report.

    `ask` gives an engine's state within a limit of its own, or raises EngineError. One that fails
    is asked again after the double time, up to 30 s, and its last report ages meanwhile.
    """

    dispatcher: Dispatcher[E]
    ask: Callable[[E], Awaitable[EngineReport]]
    _tasks: dict[E, asyncio.Task[None]] = field(default_factory=dict)

    async def __aenter__(self) -> "Monitor[E]":
        self.follow()
        return self

    def follow(self) -> None:
        """Ask those engines that the dispatcher has now, and no others."""
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
