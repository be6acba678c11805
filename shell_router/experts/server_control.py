"""The control routes by which an SGLang server records which experts its tokens choose."""

from collections.abc import Awaitable, Callable

import aiohttp
import orjson

from shell_router.core.engine import error_message
from shell_router.engines.server_client import describe_failure
from shell_router.engines.wire import refusal_error
from shell_router.errors import ConfigError, EngineStalled, EngineUnreachable, hide_user

OK = 200
NOT_FOUND = 404

START = (
    "Start it with --expert-distribution-recorder-mode stat and SHELL_ROUTER_EXPERT_RECORD=FILE "
    "in its environment, where the router's plugin is installed."
)


class ExpertRecorder:
    """A client of the server at `url`, through the caller's session.

    A request may take `limit_s`. All methods raise EngineUnreachable, EngineStalled, or
    EngineRejected.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None, limit_s: float
    ) -> None:
        self._url = url.rstrip("/")
        self.url = hide_user(self._url)
        self._session = session
        self._headers = {}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._limit = aiohttp.ClientTimeout(total=limit_s)

    async def require_recording(self) -> None:
        """Raise ConfigError if the server records no experts."""
        status, body = await self._request("GET", "/shell_router/capabilities")
        if status == NOT_FOUND:
            raise ConfigError(f"{self.url} has no plugin of the router.", remedy=START)
        if not orjson.loads(self._require_ok(status, body)).get("expert_record"):
            raise ConfigError(f"{self.url} does not record experts.", remedy=START)

    async def record(self, work: Callable[[], Awaitable[None]]) -> bytes:
        """Record while `work` runs; return the plugin's archive.

        Earlier counts are dropped. The server stops recording however `work` ends.
        """
        await self._call("POST", "/start_expert_distribution_record")
        try:
            await work()
        finally:
            await self._call("POST", "/stop_expert_distribution_record")
        await self._call("POST", "/dump_expert_distribution_record")
        return await self._call("GET", "/shell_router/expert_record")

    async def _call(self, method: str, path: str) -> bytes:
        """Return the body of an answer that has to be good."""
        return self._require_ok(*await self._request(method, path))

    async def _request(self, method: str, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.request(
                method, self._url + path, headers=self._headers, timeout=self._limit
            ) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnreachable(
                f"No answer from an engine at {self.url}: {describe_failure(error)}.",
                remedy="Start it, or correct the URL.",
            ) from error
        except TimeoutError:
            raise EngineStalled(
                f"The engine at {self.url} did not answer within {self._limit.total:g} s.",
                remedy="Allow more with --timeout-s, or look at its log.",
            ) from None

    def _require_ok(self, status: int, body: bytes) -> bytes:
        if status != OK:
            raise refusal_error(f"engine {self.url}", status, error_message(body))
        return body
