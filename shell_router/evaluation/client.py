"""Asks the router over HTTP as any client would."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import aiohttp
import orjson

from shell_router.errors import EngineStalled, EngineUnreachable, ShellRouterError, Unauthorized
from shell_router.evaluation.replies import Reply, read_reply
from shell_router.evaluation.settings import Served

START_LIMIT_S = 180.0
"""What a router may take to get ready after its start."""
OK, UNAUTHORIZED, UNAVAILABLE = 200, 401, 503


class Asks(Protocol):
    """Gets one request answered."""

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """The answer to a chat completion's `body`. Raises ShellRouterError."""
        ...


class Client:
    """One router at `url`, reached through the caller's session; a request may take `limit_s`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        api_key: str | None = None,
        limit_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._limit = aiohttp.ClientTimeout(total=limit_s)
        self._clock = clock

    async def wait_until_ready(self, *, limit_s: float = START_LIMIT_S) -> None:
        """Return when `/ready` says yes. Raises EngineUnreachable where nobody listens, EngineStalled in the end."""
        try:
            async with asyncio.timeout(limit_s):
                while not await self._ready():  # noqa: ASYNC110 - readiness over HTTP can only be asked for
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise EngineStalled(
                f"The router at {self._url} was not ready within {limit_s:g} s.",
                remedy="Ask its /ready, or look at its log, for the reason.",
            ) from None

    async def _ready(self) -> bool:
        try:
            async with self._session.get(f"{self._url}/ready", timeout=self._limit) as response:
                if response.status not in (OK, UNAVAILABLE):
                    raise _no_router(self._url, f"its /ready answered {response.status}")
                return response.status == OK
        except aiohttp.ClientError as error:
            raise _unreachable(self._url, error) from error

    async def served(self) -> list[Served]:
        """What the router serves, in its own order. Raises ShellRouterError."""
        listed, _ = await self._fetched("GET", "/v1/models")
        if not all("kind" in one for one in listed["data"]):
            raise _no_router(self._url, "it does not tell models from topologies")
        return [Served(one["id"], one["kind"], one.get("engine", "")) for one in listed["data"]]

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """See `Asks.ask`. The trace is fetched once the answer has been timed."""
        sent_s = self._clock()
        completion, headers = await self._fetched("POST", "/v1/chat/completions", body)
        latency_s = self._clock() - sent_s
        trace, _ = await self._fetched("GET", f"/v1/traces/{headers['x-trace-id']}")
        return read_reply(completion, trace, latency_s)

    async def _fetched(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        try:
            async with self._session.request(
                method, self._url + path, json=body, headers=self._headers, timeout=self._limit
            ) as response:
                return _checked(response.status, await response.read()), response.headers
        except aiohttp.ClientError as error:
            raise _unreachable(self._url, error) from error
        except TimeoutError:
            raise EngineStalled(
                f"The router did not answer within {self._limit.total:g} s.", remedy="Allow more with --timeout-s."
            ) from None


def _unreachable(url: str, error: aiohttp.ClientError) -> EngineUnreachable:
    return EngineUnreachable(f"No answer from a router at {url}: {error}.", remedy="Start one, or correct the URL.")


def _no_router(url: str, why: str) -> ShellRouterError:
    return ShellRouterError(f"What listens at {url} is no shell-router: {why}.", remedy="Correct the URL.")


def _checked(status: int, answer: bytes) -> dict[str, Any]:
    """The answer's object; ShellRouterError with the router's own words where it is an error."""
    try:
        found = orjson.loads(answer)
    except orjson.JSONDecodeError:
        found = None
    if status == OK and isinstance(found, dict):
        return found
    said = found.get("error") if isinstance(found, dict) else None
    words = str(said["message"]) if isinstance(said, dict) and "message" in said else repr(answer[:200])
    if status == UNAUTHORIZED:
        raise Unauthorized(words, remedy="Name the variable that holds the key with --api-key-env.")
    raise ShellRouterError(f"The router answered {status}: {words}")
