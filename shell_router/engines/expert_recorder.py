"""Has an SGLang server record which experts its tokens choose: its own recorder's routes, and the plugin's."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import orjson

from shell_router.engines.control import ControlClient
from shell_router.errors import ConfigError

NOT_FOUND = 404
START = (
    "Start it with --expert-distribution-recorder-mode stat and SHELL_ROUTER_EXPERT_RECORD=FILE in its environment, "
    "where the router's plugin is installed."
)


class ExpertRecorder:
    """One server at `url`, reached through the caller's session; a request may take `limit_s`.

    All methods raise EngineUnreachable, EngineStalled, or EngineRejected with the server's words.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None = None, limit_s: float = 600.0
    ) -> None:
        self._control = ControlClient(session, url, api_key=api_key, limit_s=limit_s)
        self._url = self._control.url

    async def mode(self) -> str:
        """The server's disaggregation mode: prefill, decode or null. ConfigError where it records no experts."""
        status, body = await self._control.asked("GET", "/shell_router/capabilities")
        if status == NOT_FOUND:
            raise ConfigError(f"{self._url} has no plugin of the router.", remedy=START)
        found = orjson.loads(self._control.checked(status, body))
        if not found.get("expert_record"):
            raise ConfigError(f"{self._url} does not record experts.", remedy=START)
        return str(found["disaggregation_mode"])

    async def record(self, work: Callable[[], Awaitable[None]]) -> bytes:
        """What is recorded while `work` is done, as the plugin's archive; what was recorded before is dropped.

        The server stops recording however `work` ends.
        """
        await self._done("/start_expert_distribution_record")
        try:
            await work()
        finally:
            await self._done("/stop_expert_distribution_record")
        await self._done("/dump_expert_distribution_record")
        return await self._control.done("GET", "/shell_router/expert_record")

    async def asking(self, prompts: Sequence[str], *, new_tokens: int, at_once: int) -> Callable[[], Awaitable[None]]:
        """The work of having all `prompts` answered greedily, `at_once` at a time; a prefill server only prefills them.

        It raises also PromptTooLong. ConfigError at once for a decode server, which cannot be asked by itself.
        """
        mode = await self.mode()
        if mode == "decode":
            raise ConfigError(
                f"{self._url} is a decode server and cannot be asked by itself.",
                remedy="Record what it serves anyway with --seconds, or record its prefill server.",
            )
        path = "/prefill_only" if mode == "prefill" else "/generate"
        sampling = {"max_new_tokens": new_tokens, "temperature": 0}
        return lambda: self._ask_all(path, sampling, prompts, at_once)

    async def _ask_all(self, path: str, sampling: dict[str, Any], prompts: Sequence[str], at_once: int) -> None:
        slots = asyncio.Semaphore(at_once)

        async def ask(prompt: str) -> None:
            async with slots:
                await self._control.done("POST", path, {"text": prompt, "sampling_params": sampling})

        try:
            async with asyncio.TaskGroup() as asked:
                for prompt in prompts:
                    asked.create_task(ask(prompt))
        except BaseExceptionGroup as failed:  # the first that failed has ended the others
            raise failed.exceptions[0] from failed

    async def _done(self, path: str) -> None:
        await self._control.done("POST", path)
