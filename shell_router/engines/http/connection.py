"""One kept-alive connection."""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from shell_router.engines.http.endpoint import Origin
from shell_router.engines.http.exchange import Exchange

_LENGTHS = (b"content-length", b"transfer-encoding")
_NO_BODY = (204, 304)


class Connection(asyncio.Protocol):
    """Carries one exchange at a time; `released` is called when it can carry the next, `lost` when it is gone."""

    def __init__(
        self, origin: Origin, released: Callable[["Connection"], None], lost: Callable[["Connection"], None]
    ) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self._released = released
        self._lost = lost
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._content_type = ""
        self._sized = False
        self._ended = False
        self._reusable = True
        self._paused = False
        self._transport: asyncio.Transport

    def send(self, exchange: Exchange, request: bytes) -> None:
        """Begin `exchange` by writing its request."""
        self._exchange = exchange
        self._ended, self._reusable = False, True
        self._transport.write(request)
        exchange.carried_by(self)

    @property
    def usable(self) -> bool:
        """Whether the server has not closed it, as far as is known."""
        return not self._transport.is_closing()

    # --- for the exchange

    def drop(self) -> None:
        self._exchange = None
        self._transport.abort()

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if exc is None and exchange.status and not self._sized:
            exchange.finished()  # such a body ends with its connection
        else:
            exchange.fail(ConnectionError(f"the connection broke before the answer's end ({exc or 'closed'})"))

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:  # nobody asked
            self._transport.abort()
            return
        self._exchange.heard()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._reusable = False
            if not self._ended:
                self._exchange.fail(ConnectionError(f"the answer is not HTTP/1.1 ({error})"))
        if self._ended:
            self._end()

    def _end(self) -> None:
        exchange, self._exchange, self._ended = self._exchange, None, False
        if self._reusable:
            self.resume()
            self._released(self)
        else:
            self._transport.close()
        if exchange is not None:
            exchange.finished()

    # --- httptools

    def on_message_begin(self) -> None:
        self._reusable = not self._ended  # an answer behind the answer: nobody asked
        self._content_type, self._sized = "", False

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lower in _LENGTHS:
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._sized = self._sized or status in _NO_BODY
        if status >= 200 and self._exchange is not None and not self._ended:
            self._exchange.head_came(status, self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None and not self._ended:
            self._exchange.body_came(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # a 1xx is not the answer yet
            self._ended = True
            self._reusable = self._reusable and self._parser.should_keep_alive()
