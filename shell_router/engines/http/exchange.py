"""One request and its answer."""

import asyncio
from collections.abc import Callable
from typing import Protocol

HELD_BYTES = 2**20
"""A reader that is this far behind stops the connection."""


class Carrier(Protocol):
    """The connection that carries an exchange."""

    def drop(self) -> None:
        """Break it: the exchange is over before its end."""
        ...

    def pause(self) -> None:
        """Receive nothing for now."""
        ...

    def resume(self) -> None:
        """Receive again."""
        ...


class Exchange:
    """An answer as it comes, for one reader at a time.

    `status` is 0 until the answer's head has come. `ended` is called once: the answer is complete, or it failed, as it
    also does when its reader leaves before. Without a byte for `quiet_s` while somebody reads, it fails with
    TimeoutError. With `held_bytes` None everything is kept until it is read.
    """

    __slots__ = (
        "_carrier",
        "_ended",
        "_heard_s",
        "_held",
        "_held_bytes",
        "_loop",
        "_over",
        "_paused",
        "_pieces",
        "_quiet_s",
        "_reader",
        "_watch",
        "complete",
        "content_type",
        "failure",
        "status",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        quiet_s: float,
        *,
        ended: Callable[["Exchange"], None] | None = None,
        held_bytes: int | None = HELD_BYTES,
    ) -> None:
        self.status = 0
        self.content_type = "application/octet-stream"
        self.complete = False
        self.failure: Exception | None = None
        self._ended = ended
        self._quiet_s = quiet_s
        self._held_bytes = held_bytes
        self._held = 0
        self._pieces: list[bytes] = []
        self._over = False
        self._paused = False
        self._heard_s = 0.0
        self._loop = loop
        self._carrier: Carrier | None = None
        self._reader: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    # --- for the reader

    async def head(self) -> None:
        """Return once `status` is known; raises what failed before."""
        while not self.status:
            await self._news()

    async def read(self) -> bytes:
        """What has come since the last read, or what comes next; empty at the end. Raises what failed."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._news()
        pieces, self._pieces, self._held = self._pieces, [], 0
        if self._paused:
            self._go_on()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read_all(self) -> bytes:
        """All of the body that has not been read."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def held(self) -> bytes:
        """All that has come and has not been read."""
        return b"".join(self._pieces)

    def close(self) -> None:
        """The reader leaves: unless the answer was complete, its connection is broken. Harmless when repeated."""
        self.fail(ConnectionAbortedError("its reader has left"))

    async def _news(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    # --- for the connection

    @property
    def over(self) -> bool:
        """Whether nothing more is expected."""
        return self._over

    def carried_by(self, carrier: Carrier) -> None:
        """The request is on its way."""
        self._carrier = carrier
        self._heard_s = self._loop.time()
        self._watch = self._loop.call_later(self._quiet_s, self._look)

    def heard(self) -> None:
        """Bytes came."""
        self._heard_s = self._loop.time()

    def head_came(self, status: int, content_type: str) -> None:
        """The answer's head is complete."""
        self.status = status
        if content_type:
            self.content_type = content_type
        self._wake()

    def body_came(self, piece: bytes) -> None:
        """The next bytes of the body."""
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held_bytes is not None and self._held > self._held_bytes and not self._paused and self._carrier:
            self._paused = True
            self._carrier.pause()
        self._wake()

    def finished(self) -> None:
        """The answer is complete, and its connection free."""
        if not self._over:
            self.complete = True
            self._end()

    def fail(self, error: Exception) -> None:
        """End it with `error`, unless it has ended; what came before can still be read."""
        if self._over:
            return
        self.failure = error
        carrier = self._carrier
        self._end()
        if carrier is not None:
            carrier.drop()

    def _end(self) -> None:
        self._over, self._carrier = True, None
        if self._watch is not None:
            self._watch.cancel()
        self._wake()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _go_on(self) -> None:
        self._paused = False
        self.heard()
        if self._carrier is not None:
            self._carrier.resume()

    def _look(self) -> None:
        silent_s = 0.0 if self._paused else self._loop.time() - self._heard_s
        if silent_s >= self._quiet_s:
            self.fail(TimeoutError(f"silent for {self._quiet_s:g} s"))
        else:
            self._watch = self._loop.call_later(self._quiet_s - silent_s, self._look)
