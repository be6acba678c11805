"""Requests to the servers of a pair, with the router's limits, errors and aborts."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import orjson

from shell_router.core.engine_errors import error_message
from shell_router.engines.address import PairLimits, Server
from shell_router.engines.http import Endpoint, Exchange, HttpClient
from shell_router.engines.http.endpoint import endpoint
from shell_router.engines.http.exchange import HELD_BYTES
from shell_router.engines.task_owner import TaskOwner
from shell_router.engines.wire import rejected
from shell_router.errors import EngineError, EngineStalled, EngineUnreachable, PromptTooLong

logger = logging.getLogger(__name__)

HTTP_OK = 200


class LegClient:
    """Posts to the servers of a pair, turns what goes wrong into the router's errors, and aborts."""

    def __init__(self, prefill: Server, decode: Server, limits: PairLimits) -> None:
        self.prefill = prefill
        self.decode = decode
        self.limits = limits
        self.tasks = TaskOwner()
        self._http = HttpClient(connect_s=limits.connect_s)
        self._endpoints: dict[tuple[str, str, str], Endpoint] = {}

    def begin(
        self,
        server: Server,
        route: str,
        body: bytes,
        *,
        quiet_s: float | None = None,
        ended: Callable[[Exchange], None] | None = None,
        held_bytes: int | None = HELD_BYTES,
    ) -> Exchange:
        """Post `body`; its answer comes by the exchange, whose failure `failure` translates."""
        at = self._endpoint("POST", server, route)
        return self._http.begin(at, body, quiet_s=quiet_s or self.limits.stall_s, ended=ended, held_bytes=held_bytes)

    def _endpoint(self, method: str, server: Server, route: str) -> Endpoint:
        """Read once per route: it costs as much as a tenth of a small request."""
        key = (method, server.role, route)
        found = self._endpoints.get(key)
        if found is None:
            found = self._endpoints[key] = endpoint(method, server.url / route)
        return found

    async def head(self, server: Server, exchange: Exchange) -> None:
        """Return once the answer's head is there, whatever its status; raises EngineUnreachable or EngineStalled."""
        try:
            await exchange.head()
        except (TimeoutError, OSError) as error:
            raise self.failure(server, error) from error

    async def read_all(self, server: Server, exchange: Exchange) -> bytes:
        """The whole body of a good answer; raises EngineRejected or PromptTooLong for an error status."""
        try:
            await exchange.head()
            body = await exchange.read_all()
        except (TimeoutError, OSError) as error:
            raise self.failure(server, error) from error
        return self._good(server, exchange, body)

    def whole(self, server: Server, exchange: Exchange) -> bytes:
        """As `read_all`, of an exchange that has ended and of which nothing was read."""
        if exchange.failure is not None:
            raise self.failure(server, exchange.failure) from exchange.failure
        return self._good(server, exchange, exchange.held())

    def _good(self, server: Server, exchange: Exchange, body: bytes) -> bytes:
        if exchange.status != HTTP_OK:
            raise rejected(str(server), exchange.status, error_message(body))
        return body

    async def get(self, server: Server, route: str, *, limit_s: float) -> bytes:
        """The body at `route`; raises EngineError."""
        exchange = self._http.begin(self._endpoint("GET", server, route), None, quiet_s=limit_s)
        try:
            async with asyncio.timeout(limit_s):
                return await self.read_all(server, exchange)
        except TimeoutError as error:
            raise self.failure(server, error) from error
        finally:
            exchange.close()

    async def body(self, server: Server, exchange: Exchange) -> AsyncIterator[bytes]:
        """The body as it comes; raises EngineUnreachable or EngineStalled."""
        try:
            while chunk := await exchange.read():
                yield chunk
        except (TimeoutError, OSError) as error:
            raise self.failure(server, error) from error

    def failure(self, server: Server, error: Exception) -> EngineError:
        """The router's error for what the HTTP client met."""
        if isinstance(error, TimeoutError):
            return EngineStalled(f"The {server} sent nothing within its limit.", remedy="Look at its load and its log.")
        return EngineUnreachable(
            f"The {server} cannot be reached: {error or type(error).__name__}.", remedy="Check that it runs."
        )

    def abort(self, rids: Sequence[str]) -> None:
        """Abort `rids` on every server of the pair, in the background and within a limit."""
        for server in (self.prefill, self.decode):
            for rid in rids:
                self.tasks.start(self._abort(server, rid))

    async def _abort(self, server: Server, rid: str) -> None:
        exchange = self.begin(server, "abort_request", orjson.dumps({"rid": rid}))
        try:
            async with asyncio.timeout(self.limits.abort_s):
                await self.read_all(server, exchange)
        except (EngineError, PromptTooLong, TimeoutError) as error:
            logger.warning("could not abort %s on the %s: %r", rid, server, error)
        finally:
            exchange.close()

    async def aclose(self) -> None:
        """Wait, within the abort limit, for the aborts and legs that still end, then close idle connections."""
        await self.tasks.aclose(self.limits.abort_s)
        await self._http.aclose(self.limits.abort_s)
