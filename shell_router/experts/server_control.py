"""Recording which experts the tokens of an SGLang server choose, over its control routes."""

from collections.abc import Awaitable, Callable

import aiohttp
import orjson

from shell_router.core.engine import error_message
from shell_router.engines.wire import rejected
from shell_router.errors import ConfigError, EngineStalled, EngineUnreachable

OK = 200
NOT_FOUND = 404


START = (
    "Start it with --expert-distribution-recorder-mode stat and SHELL_ROUTER_EXPERT_RECORD=FILE "
    "in its environment, "
    "where the router's plugin is installed."
)


class ExpertRecorder:
    """The server at `url`, which records; it is reached through the caller's session.

    A request may take `limit_s`. All methods raise EngineUnreachable, EngineStalled, or
    EngineRejected.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None, limit_s: float
    ) -> None:
        self.url = url.rstrip("/")
        self._session = session
        if api_key:
            self._headers = {"Authorization": f"Bearer {api_key}"}
        else:
            self._headers = {}
        self._limit = aiohttp.ClientTimeout(total=limit_s)

    async def require_recording(self) -> None:
        """ConfigError where it records no experts."""
        status, body = await self._asked("GET", "/shell_router/capabilities")
        if status == NOT_FOUND:
            raise ConfigError(f"{self.url} has no plugin of the router.", remedy=START)
        if not orjson.loads(self._checked(status, body)).get("expert_record"):
            raise ConfigError(f"{self.url} does not record experts.", remedy=START)

    async def record(self, work: Callable[[], Awaitable[None]]) -> bytes:
        """What is recorded while `work` is done, as the plugin's archive; what was recorded before
        is dropped.

        The server stops recording however `work` ends.
        """
        await self._done("POST", "/start_expert_distribution_record")
        try:
            await work()
        finally:
            await self._done("POST", "/stop_expert_distribution_record")
        await self._done("POST", "/dump_expert_distribution_record")
        return await self._done("GET", "/shell_router/expert_record")

    async def _done(self, method: str, path: str) -> bytes:
        """The answer to what has to succeed."""
        return self._checked(*await self._asked(method, path))

    async def _asked(self, method: str, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.request(
                method, self.url + path, headers=self._headers, timeout=self._limit
            ) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnreachable(
                f"No answer from an engine at {self.url}: {error}.",
                remedy="Start it, or correct the URL.",
            ) from error
        except TimeoutError:
            raise EngineStalled(
                f"The engine at {self.url} did not answer within {self._limit.total:g} s.",
                remedy="Allow more with --timeout-s, or look at its log.",
            ) from None

    def _checked(self, status: int, body: bytes) -> bytes:
        if status != OK:
            raise rejected(f"engine {self.url}", status, error_message(body))
        return body
