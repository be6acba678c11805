"""A server's open connections, bounded in number and in idle time."""

import asyncio
from dataclasses import dataclass
from math import inf
from typing import cast

SWEEP_S = 1.0
"""Seconds between two looks at all connections."""
RESWEEP_S = 0.05
"""The least seconds between two looks when there are too many connections."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server.

    Attributes:
        max_connections: The most open connections.
        idle_timeout_s: How long a connection may wait for its next request.
        body_timeout_s: How long a head, a handshake, or a plain request's body may take to arrive.
        write_timeout_s: How long a client may take nothing of its reply.
        max_body_bytes: The longest body of `Request.read`.
    """

    max_connections: int
    idle_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    max_body_bytes: int


class Connections:
    """A server's open connections; the ones that are idle for too long are closed.

    A connection is idle from its beginning, or its last answer, until the head of a request is
    complete, so a client that sends a head byte by byte is idle. When one more than
    `max_connections` is opened, the longest idle one is closed.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._idle_until_s: dict[asyncio.BaseTransport, float] = {}  # the longest idle first
        self._timer: asyncio.TimerHandle | None = None
        self._swept_s = -inf

    def add(self, transport: asyncio.Transport) -> None:
        """Add a connection that waits for its first request.

        If there are too many, the longest idle one is closed, or else this one.
        """
        self.set_idle(transport, self._limits.body_timeout_s)
        most = self._limits.max_connections
        swept_lately = asyncio.get_running_loop().time() < self._swept_s + RESWEEP_S
        if len(self._idle_until_s) > most and not swept_lately:
            self._close_overdue()
        if len(self._idle_until_s) > most:
            idle = (each for each, until_s in self._idle_until_s.items() if until_s < inf)
            self._close(next(idle, transport))

    def set_busy(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that a request's head has arrived."""
        if transport in self._idle_until_s:
            self._idle_until_s[transport] = inf

    def set_idle(
        self, transport: asyncio.BaseTransport | None, limit_s: float | None = None
    ) -> None:
        """Note that the connection waits for a request, for `idle_timeout_s` or `limit_s`."""
        if transport is None or transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        self._idle_until_s.pop(transport, None)
        self._idle_until_s[transport] = loop.time() + (limit_s or self._limits.idle_timeout_s)
        self._timer = self._timer or loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self._close_overdue()
        if self._idle_until_s:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _close_overdue(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._swept_s = now_s
        for transport, until_s in tuple(self._idle_until_s.items()):
            if transport.is_closing() or until_s < now_s:
                self._close(transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        del self._idle_until_s[transport]
        cast(asyncio.Transport, transport).abort()

    def stop(self) -> None:
        """Sweep no more."""
        if self._timer is not None:
            self._timer.cancel()
