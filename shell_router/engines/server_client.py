"""Requests to one engine server, with the router's limits, errors, aborts and its circuit breaker."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import orjson

from shell_router.core.engine_errors import error_message
from shell_router.engines.address import PairLimits, Server
from shell_router.engines.breaker import Breaker, BreakerSettings
from shell_router.engines.http import Endpoint, Exchange, HttpClient
from shell_router.engines.http.endpoint import endpoint
from shell_router.engines.http.exchange import HELD_BYTES
from shell_router.engines.task_owner import TaskOwner
from shell_router.engines.wire import rejected
from shell_router.errors import EngineError, EngineRejected, EngineStalled, EngineUnreachable, PromptTooLong

logger = logging.getLogger(__name__)

HTTP_OK = 200

ServerFailure = EngineError | PromptTooLong


@dataclass(frozen=True, slots=True)
class Transport:
    """What the clients of all servers of a model share. `clock` gives monotonic seconds."""

    http: HttpClient
    tasks: TaskOwner
    limits: PairLimits
    breaker: BreakerSettings
    clock: Callable[[], float]


class ServerClient:
    """Posts to one server, turns what goes wrong into the router's errors, and aborts.

    `running` counts requests under way, `failures` those that were the server's fault. `priority_sign` is 1 where it is
    known to schedule low priorities first, -1 where high ones, else None.
    """

    def __init__(self, server: Server, transport: Transport) -> None:
        self.server = server
        self.limits = transport.limits
        self.tasks = transport.tasks
        self.breaker = Breaker(transport.breaker)
        self.running = 0
        self.failures = 0
        self.priority_sign: int | None = None
        self._http = transport.http
        self._clock = transport.clock
        self._endpoints: dict[tuple[str, str], Endpoint] = {}

    def __str__(self) -> str:
        return str(self.server)

    def begin(
        self,
        route: str,
        body: bytes,
        *,
        quiet_s: float | None = None,
        ended: Callable[[Exchange], None] | None = None,
        held_bytes: int | None = HELD_BYTES,
    ) -> Exchange:
        """Post `body`; its answer comes by the exchange, whose failure `failure` translates."""

        def over(exchange: Exchange) -> None:
            self.running -= 1
            if ended is not None:
                ended(exchange)

        at = self._endpoint("POST", route)
        self.running += 1
        return self._http.begin(at, body, quiet_s=quiet_s or self.limits.stall_s, ended=over, held_bytes=held_bytes)

    def _endpoint(self, method: str, route: str) -> Endpoint:
        """Read once per route: it costs as much as a tenth of a small request."""
        found = self._endpoints.get((method, route))
        if found is None:
            found = self._endpoints[method, route] = endpoint(method, self.server.url / route)
        return found

    async def head(self, exchange: Exchange) -> None:
        """Return once the answer's head is there, whatever its status; raises EngineUnreachable or EngineStalled."""
        try:
            await exchange.head()
        except (TimeoutError, OSError) as error:
            raise self.failure(error) from error

    async def read_all(self, exchange: Exchange) -> bytes:
        """The whole body of a good answer; raises EngineRejected or PromptTooLong for an error status."""
        try:
            await exchange.head()
            body = await exchange.read_all()
        except (TimeoutError, OSError) as error:
            raise self.failure(error) from error
        return self._good(exchange, body)

    def whole(self, exchange: Exchange) -> bytes:
        """As `read_all`, of an exchange that has ended and of which nothing was read."""
        if exchange.failure is not None:
            raise self.failure(exchange.failure) from exchange.failure
        return self._good(exchange, exchange.held())

    def _good(self, exchange: Exchange, body: bytes) -> bytes:
        if exchange.status != HTTP_OK:
            raise rejected(str(self), exchange.status, error_message(body))
        return body

    async def get(self, route: str, *, limit_s: float) -> bytes:
        """The body at `route`; raises EngineError."""
        return await self._whole_within(self._http.begin(self._endpoint("GET", route), None, quiet_s=limit_s), limit_s)

    async def post(self, route: str, body: bytes, *, limit_s: float) -> bytes:
        """What `route` answers to `body`; raises EngineError. It is no request of the server's `running` ones."""
        return await self._whole_within(self._http.begin(self._endpoint("POST", route), body, quiet_s=limit_s), limit_s)

    async def _whole_within(self, exchange: Exchange, limit_s: float) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                return await self.read_all(exchange)
        except TimeoutError as error:
            raise self.failure(error) from error
        finally:
            exchange.close()

    async def body(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """The body as it comes; raises EngineUnreachable or EngineStalled."""
        try:
            while chunk := await exchange.read():
                yield chunk
        except (TimeoutError, OSError) as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> EngineError:
        """The router's error for what the HTTP client met."""
        if isinstance(error, TimeoutError):
            return EngineStalled(f"The {self} sent nothing within its limit.", remedy="Look at its load and its log.")
        return EngineUnreachable(
            f"The {self} cannot be reached: {error or type(error).__name__}.", remedy="Check that it runs."
        )

    def failed(self, error: ServerFailure) -> None:
        """Count `error` against the server if it is the server's fault: what is wrong with a request is not."""
        if not _servers_fault(error):
            return
        self.failures += 1
        if self.breaker.failed(self._clock()):
            logger.warning("the %s failed again and again (%s); only now and then is it tried", self, error)

    def succeeded(self) -> None:
        """The server has answered a request well."""
        if self.breaker.succeeded():
            logger.info("the %s serves again", self)

    def abort(self, rids: Sequence[str]) -> None:
        """Abort `rids`, in the background and within a limit."""
        for rid in rids:
            self.tasks.start(self._abort(rid))

    async def _abort(self, rid: str) -> None:
        exchange = self.begin("abort_request", orjson.dumps({"rid": rid}))
        try:
            async with asyncio.timeout(self.limits.abort_s):
                await self.read_all(exchange)
        except (EngineError, PromptTooLong, TimeoutError) as error:
            logger.warning("could not abort %s on the %s: %r", rid, self, error)
        finally:
            exchange.close()


def _servers_fault(error: ServerFailure) -> bool:
    if isinstance(error, EngineRejected):
        return error.status >= 500
    return isinstance(error, EngineUnreachable | EngineStalled)
