"""An HTTP application: its routes, and the requests and replies of their handlers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from aiohttp import ClientConnectionResetError, MultipartReader, web
from multidict import MultiDict, MultiDictProxy, MultiMapping

T = TypeVar("T")
D = TypeVar("D")

ClientGone = ClientConnectionResetError
"""The error of a write to a client that has left, or that does not read."""

UNMATCHED = "unmatched"
"""The route of a request that no route matches."""

CODINGS = ("identity", "gzip", "deflate", "zstd")
"""The Content-Encodings of bodies that `Request.read` unpacks."""

NO_QUERY: MultiMapping[str] = MultiDictProxy(MultiDict[str]())
NO_MATCH: Mapping[str, str] = {}


UnknownRoute = web.HTTPNotFound
"""The error of a path without a route."""
MethodNotAllowed = web.HTTPMethodNotAllowed
"""The error of a path that has routes, and none for the method."""


def allowed_methods(error: web.HTTPMethodNotAllowed) -> str:
    """Return the methods that the path has routes for."""
    return ", ".join(sorted(error.allowed_methods))


UnreadableBody = web.RequestPayloadError
"""The error of a body that is not framed as its head says."""
BodyTooLarge = web.HTTPRequestEntityTooLarge
"""The error of a body over the server's limit."""


class Key(Generic[T]):
    """The name, and the type, of a value that a request or an application carries."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Key({self.name})"


class Carrier(dict[Any, Any]):
    """Values by their `Key`s."""

    if TYPE_CHECKING:  # a method in Python would make each look-up five times slower

        def __getitem__(self, key: Key[T]) -> T: ...
        def __setitem__(self, key: Key[T], value: T) -> None: ...
        @overload
        def get(self, key: Key[T], default: None = None, /) -> T | None: ...
        @overload
        def get(self, key: Key[T], default: D, /) -> T | D: ...
        def get(self, key: Any, default: Any = None, /) -> Any:
            """Return the value, or the default."""


class Request(Carrier):
    """A request, whichever server read it. Handlers attach values to it by `Key`.

    `headers` are looked up by their lower-case names. `route` is the pattern of the route that
    matches, and `match` has the values of the pattern's names. `peer` is the client's address,
    None for a Unix socket.
    """

    app: "App"
    method: str
    path: str
    route: str
    headers: Mapping[str, str]
    peer: str | None
    query: MultiMapping[str] = NO_QUERY
    match: Mapping[str, str] = NO_MATCH

    @property
    def content_type(self) -> str:
        """The body's media type in lower case, without parameters; empty without one."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def coding(self) -> str:
        """The body's Content-Encoding in lower case."""
        return self.headers.get("content-encoding", "identity").lower()

    @property
    def content_length(self) -> int | None:
        """The body's length in bytes; None where the head does not say it."""
        length = self.headers.get("content-length")
        return None if length is None else int(length)

    async def read(self, limit_s: float) -> bytes:
        """Return the whole body, unpacked.

        Raises UnreadableBody, BodyTooLarge, and TimeoutError if it does not arrive in `limit_s`.
        """
        raise NotImplementedError

    def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it comes, for a route that `streams_body`."""
        raise NotImplementedError

    async def form(self) -> MultipartReader:
        """Return the reader of a multipart body's parts, for a route that `streams_body`."""
        raise NotImplementedError

    async def open_stream(
        self, status: int, headers: Mapping[str, str], write_timeout_s: float
    ) -> "Stream":
        """Begin a streamed reply.

        Its writes raise ClientGone when the client takes nothing for `write_timeout_s`.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Response:
    """A whole reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Stream(Protocol):
    """A reply in pieces."""

    status: int

    async def send(self, piece: bytes) -> None:
        """Write `piece`; wait while the client takes nothing. Raises ClientGone."""

    async def end(self) -> "Stream":
        """End the reply in order."""


Reply = Response | Stream
Handler = Callable[[Request], Awaitable[Reply]]
Gate = Callable[[Request, Handler], Awaitable[Reply]]
Hook = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path pattern, as in `/files/{name}`, and their handler.

    A route that `streams_body` gets the request before its body.
    """

    method: str
    path: str
    handler: Handler
    streams_body: bool = False


class App(Carrier):
    """Routes, the values that they share, and hooks for their server's start and stop.

    `gate` stands before every handler, also before those that raise UnknownRoute and
    MethodNotAllowed. It must not raise.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.routes: list[Route] = []
        self.on_startup: list[Hook] = []
        self.on_shutdown: list[Hook] = []
        self.leaving = asyncio.Event()
        """Set when the server is about to stop, so that clients are sent elsewhere."""
