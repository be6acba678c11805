"""One SGLang server whose weights are replaced while it runs, by its native routes."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import orjson

from shell_router.core.engine_errors import error_message
from shell_router.core.generation import Finish, Generation, Tokens
from shell_router.engines.control import OK, ControlClient
from shell_router.engines.wire import OutputReader, body_fields
from shell_router.errors import EngineRejected, EngineStalled

NOT_FLUSHED = "cache was not flushed"
FLUSH_LIMIT_S, FLUSH_EVERY_S = 10.0, 0.05


class WeightServer:
    """The server at `url`, reached through the caller's session; a request may take `limit_s`.

    All methods raise EngineUnreachable, EngineStalled, or EngineRejected with the server's words.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None, limit_s: float = 600.0
    ) -> None:
        self._control = ControlClient(session, url, api_key=api_key, limit_s=limit_s)
        self._name = f"engine {self._control.url}"

    async def model_path(self) -> Path:
        """The folder of the weights that it serves."""
        return Path(orjson.loads(await self._control.done("GET", "/model_info"))["model_path"])

    async def swap(self, folder: Path) -> None:
        """Replace the weights by those of `folder`, and drop all KV that was computed with those before.

        It waits for requests that run. Some of a pair's end a moment after they were answered, and a server does not
        drop its KV before: it is asked again then.
        """
        wanted = {"model_path": str(folder), "flush_cache": True}
        status, body = await self._control.asked("POST", "/update_weights_from_disk", wanted)
        if status != OK and NOT_FLUSHED in error_message(body):
            await self._flush()
        else:
            self._control.checked(status, body)

    async def _flush(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_LIMIT_S):
                while True:
                    status, _ = await self._control.asked("POST", "/flush_cache")
                    if status == OK:
                        return
                    await asyncio.sleep(FLUSH_EVERY_S)
        except TimeoutError:
            raise EngineStalled(
                f"The {self._name} did not drop its KV within {FLUSH_LIMIT_S:g} s.",
                remedy="Let nobody else ask an engine whose weights are swapped.",
            ) from None

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`, of a server that both prefills and decodes. It aborts what is abandoned."""
        reader = OutputReader(self._name, logprobs=request.logprobs)
        body = await self._control.done("POST", "/generate", body_fields(request))
        tokens = reader.take(body)
        if tokens is not None:
            yield tokens
        if reader.finish is None:
            raise EngineRejected(f"The {self._name} answered without an end.", status=502)
        yield reader.finish
