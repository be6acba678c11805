"""Exchanges over pooled connections."""

import asyncio
from collections import deque
from collections.abc import Callable

from shell_router.engines.http.connection import Connection
from shell_router.engines.http.endpoint import Endpoint, Origin
from shell_router.engines.http.exchange import HELD_BYTES, Exchange
from shell_router.engines.task_owner import TaskOwner

IDLE_S = 2.0
"""Below uvicorn's and SGLang's 5 s: a connection that the server closes while it is used again fails the request."""


class HttpClient:
    """Begins exchanges, as many at a time as asked for. Connections idle for `idle_s` are not used again.

    Make it where its loop runs: asking asyncio for the loop again and again costs a system call each on Python 3.11.
    """

    def __init__(self, *, connect_s: float, idle_s: float = IDLE_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[Origin, deque[Connection]] = {}
        self._connecting = TaskOwner()

    def begin(
        self,
        endpoint: Endpoint,
        body: bytes | None,
        *,
        quiet_s: float,
        ended: Callable[[Exchange], None] | None = None,
        held_bytes: int | None = HELD_BYTES,
    ) -> Exchange:
        """Send a request; its exchange fails with OSError or TimeoutError. See `Exchange` for the rest."""
        exchange = Exchange(self._loop, quiet_s, ended=ended, held_bytes=held_bytes)
        connection = self._idle_connection(endpoint.origin)
        if connection is None:
            self._connecting.start(self._connect(endpoint, exchange, endpoint.request(body)))
        else:
            connection.send(exchange, endpoint.request(body))
        return exchange

    @property
    def idle(self) -> int:
        """Connections that carry nothing and are kept."""
        return sum(map(len, self._idle.values()))

    async def aclose(self, limit_s: float) -> None:
        """Close idle connections, after `limit_s` also those still being opened; the rest close as they end."""
        await self._connecting.aclose(limit_s)
        for idle in self._idle.values():
            for connection in tuple(idle):
                connection.drop()
            idle.clear()

    def _idle_connection(self, origin: Origin) -> Connection | None:
        """The one last used; it is the one least likely to be closed by the server."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.usable and self._now_s() - connection.idle_since_s < self._idle_s:
                return connection
            connection.drop()
        return None

    async def _connect(self, endpoint: Endpoint, exchange: Exchange, request: bytes) -> None:
        host, port, tls = endpoint.origin
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(endpoint.origin, self._keep, self._forget), host, port, ssl=tls or None
                )
        except TimeoutError:
            exchange.fail(ConnectionError(f"no connection within {self._connect_s:g} s"))
        except (OSError, ValueError) as error:  # ValueError: a host name that no encoding takes
            exchange.fail(error if isinstance(error, OSError) else ConnectionError(str(error)))
        except asyncio.CancelledError:
            exchange.fail(ConnectionAbortedError("the client is closing"))
            raise
        else:
            if exchange.over:
                self._keep(connection)
            else:
                connection.send(exchange, request)

    def _keep(self, connection: Connection) -> None:
        """Keep a connection that carries nothing, and close those at the other end that nobody needed."""
        now_s = self._now_s()
        idle = self._idle.setdefault(connection.origin, deque())
        connection.idle_since_s = now_s
        idle.append(connection)
        while now_s - idle[0].idle_since_s >= self._idle_s:
            idle.popleft().drop()

    def _forget(self, connection: Connection) -> None:
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)

    def _now_s(self) -> float:
        return self._loop.time()
