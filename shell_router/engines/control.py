"""The routes by which one engine server is controlled, beside those by which it is asked."""

from typing import Any

import aiohttp

from shell_router.core.engine_errors import error_message
from shell_router.engines.wire import rejected
from shell_router.errors import EngineStalled, EngineUnreachable

OK = 200


class ControlClient:
    """The server at `url`, reached through the caller's session; a request may take `limit_s`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None, limit_s: float = 600.0
    ) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._limit = aiohttp.ClientTimeout(total=limit_s)

    async def done(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The answer to what has to succeed. Raises also EngineRejected with the server's words, or PromptTooLong."""
        return self.checked(*await self.asked(method, path, body))

    async def asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body. Raises EngineUnreachable or EngineStalled."""
        try:
            async with self._session.request(
                method, self.url + path, json=body, headers=self._headers, timeout=self._limit
            ) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise EngineUnreachable(
                f"No answer from an engine at {self.url}: {error}.", remedy="Start it, or correct the URL."
            ) from error
        except TimeoutError:
            raise EngineStalled(
                f"The engine at {self.url} did not answer within {self._limit.total:g} s.",
                remedy="Allow more with --timeout-s or limit_s, or look at its log.",
            ) from None

    def checked(self, status: int, body: bytes) -> bytes:
        """The body of a good answer. Raises EngineRejected or PromptTooLong for another."""
        if status != OK:
            raise rejected(f"engine {self.url}", status, error_message(body))
        return body
