"""Server-sent events to one client."""

import asyncio
import contextlib
from typing import Any

import orjson
from aiohttp import ClientConnectionResetError, web
from aiohttp.abc import AbstractStreamWriter

from shell_router.api.replies import common_headers

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
SMALL_WRITE = 2**15  # bytes; transports hold up writers at 64 KiB


def data_frame(body: Any) -> bytes:
    """One unnamed event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class _Response(web.StreamResponse):
    """Its head waits for the first bytes, as that of aiohttp's own whole answers does: one packet less."""

    _send_headers_immediately = False


class EventStream:
    """A streamed answer whose head goes out with its first bytes, or in the loop's next turn."""

    def __init__(self, request: web.Request, response: web.StreamResponse, write_timeout_s: float) -> None:
        self._request = request
        self._response = response
        self._write_timeout_s = write_timeout_s

    async def send(self, frames: bytes) -> None:
        """Write; waits while the client takes nothing.

        Raises ClientConnectionResetError when the client has gone, or took nothing within the limit.
        """
        if self._is_taken_at_once(len(frames)):
            await self._response.write(frames)
            return
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._response.write(frames)
        except TimeoutError:
            self._drop_client()
            raise ClientConnectionResetError(f"nothing taken for {self._write_timeout_s:g} s") from None

    def _is_taken_at_once(self, size: int) -> bool:
        """Whether a write of this size cannot wait; most cannot, and a clock costs a fifth of a chunk."""
        transport = self._request.transport
        return transport is not None and size <= SMALL_WRITE and transport.get_write_buffer_size() == 0

    async def end(self) -> web.StreamResponse:
        """Close the stream in order."""
        await self._response.write_eof()
        return self._response

    def _drop_client(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


async def open_stream(
    request: web.Request,
    write_timeout_s: float,
    *,
    status: int = 200,
    content_type: str = "text/event-stream; charset=utf-8",
    headers: dict[str, str] | None = None,
) -> EventStream:
    """Send the head: with what is sent before this turn of the loop ends, or by itself."""
    response = _Response(
        status=status,
        headers={
            "Content-Type": content_type,
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # or nginx would hold the stream back
            **common_headers(request),
            **(headers or {}),
        },
    )
    writer = await response.prepare(request)
    assert writer is not None
    asyncio.get_running_loop().call_soon(_send_head, writer)
    return EventStream(request, response, write_timeout_s)


def _send_head(writer: AbstractStreamWriter) -> None:
    """Nothing happens where it has gone out already."""
    with contextlib.suppress(ClientConnectionResetError):  # the client has left, which its next write will tell
        writer.send_headers()
