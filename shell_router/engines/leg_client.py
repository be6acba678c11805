"""Requests to one server of a pair, with the router's limits, errors and aborts."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import aiohttp
from yarl import URL

from shell_router.engines.address import PairLimits, Server
from shell_router.engines.task_owner import TaskOwner
from shell_router.engines.wire import error_message, rejected
from shell_router.errors import EngineError, EngineStalled, EngineUnreachable

logger = logging.getLogger(__name__)

_JSON = {"Content-Type": "application/json"}
HTTP_OK = 200


class LegClient:
    """Posts to the servers of a pair, turns what goes wrong into the router's errors, and aborts."""

    def __init__(self, session: aiohttp.ClientSession, prefill: Server, decode: Server, limits: PairLimits) -> None:
        self._session = session
        self.prefill = prefill
        self.decode = decode
        self.limits = limits
        self.tasks = TaskOwner()

        self._stall_timeout = self._timeout(limits.stall_s)
        self._urls: dict[tuple[str, str], URL] = {}

    def _timeout(self, quiet_s: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_s, sock_read=quiet_s)

    def _url(self, server: Server, route: str) -> URL:
        """Joined once per route: it costs as much as a tenth of a small request."""
        url = self._urls.get((server.role, route))
        if url is None:
            url = self._urls[server.role, route] = server.url / route
        return url

    async def post(
        self, server: Server, route: str, body: bytes, *, quiet_s: float | None = None
    ) -> aiohttp.ClientResponse:
        """The response's head, whatever its status; raises EngineUnreachable or EngineStalled."""
        timeout = self._stall_timeout if quiet_s is None else self._timeout(quiet_s)
        try:
            return await self._session.post(self._url(server, route), data=body, headers=_JSON, timeout=timeout)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.failure(server, error) from error

    async def read_all(self, server: Server, response: aiohttp.ClientResponse) -> bytes:
        """The whole body of a good answer; raises EngineRejected or PromptTooLong for an error status."""
        try:
            body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.failure(server, error) from error
        finally:
            response.release()
        if response.status != HTTP_OK:
            raise rejected(str(server), response.status, error_message(body))
        return body

    async def get(self, server: Server, route: str, *, limit_s: float) -> bytes:
        """The body at `route`; raises EngineError."""
        try:
            async with asyncio.timeout(limit_s):
                response = await self._session.get(server.url / route, timeout=self._timeout(limit_s))
                return await self.read_all(server, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.failure(server, error) from error

    async def body(self, server: Server, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """The body as it comes; raises EngineUnreachable or EngineStalled."""
        try:
            while chunk := await response.content.readany():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.failure(server, error) from error

    def failure(self, server: Server, error: Exception) -> EngineError:
        """The router's error for what the HTTP client met."""
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
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
        try:
            async with asyncio.timeout(self.limits.abort_s):
                async with self._session.post(server.url / "abort_request", json={"rid": rid}) as response:
                    await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:  # RuntimeError: session closed
            logger.warning("could not abort %s on the %s: %r", rid, server, error)
