"""Loads and unloads adapters on one server, by SGLang's routes."""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import orjson

from shell_router.engines.server_client import ServerClient
from shell_router.engines.server_state import server_info
from shell_router.engines.wire import broken_wire
from shell_router.errors import AdapterFailed, EngineError, EngineRejected

log = logging.getLogger(__name__)

_LOADED_ALREADY = re.compile(r"already (?:loaded|exists)")
"""In what SGLang says of an adapter whose name it has: `it is already loaded`, `already exists`."""
_NOT_THERE = "does not exist"
NOT_FOUND, INTERNAL_ERROR = 404, 500


class ServerLoader:
    """The adapters of `folders` on `server`, each load and each unload within `limit_s`. Meets `Loader`."""

    def __init__(self, server: ServerClient, folders: Mapping[str, Path], limit_s: float) -> None:
        self._server = server
        self._folders = folders
        self._limit_s = limit_s
        self._unsettled: set[str] = set()

    async def load(self, adapter: str) -> None:
        """Raises AdapterFailed where the server refuses it, and EngineError where the server fails.

        One that the server has already, which it should not have, is taken as it is, with a warning.
        """
        for left in tuple(self._unsettled):  # it takes up memory, and SGLang refuses to load it again before
            await self.unload(left)
        self._unsettled.add(adapter)  # without an answer it may still be loaded, later
        try:
            await self._post("load_lora_adapter", {"lora_name": adapter, "lora_path": str(self._folders[adapter])})
        except EngineRejected as refusal:
            if refusal.status >= INTERNAL_ERROR:
                raise
            self._unsettled.discard(adapter)
            if not _LOADED_ALREADY.search(str(refusal)):
                raise AdapterFailed(
                    f"The adapter {adapter!r} could not be loaded: {str(refusal).removesuffix('.')}.",
                    remedy=f"Check {self._folders[adapter]}, and what the server was started with for adapters.",
                ) from refusal
            log.warning("the %s had the adapter %r before this router loaded it: used as it is", self._server, adapter)
        self._unsettled.discard(adapter)

    async def unload(self, adapter: str) -> None:
        """One that is not there is gone already. Raises EngineError; then it is tried again before the next load."""
        self._unsettled.add(adapter)
        try:
            await self._post("unload_lora_adapter", {"lora_name": adapter})
        except EngineRejected as refusal:
            if _NOT_THERE not in str(refusal):
                raise
        self._unsettled.discard(adapter)

    async def clear(self) -> None:
        """Unload what an earlier router left of these adapters: their files may have changed.

        Raises EngineRejected where the server takes no adapters, and EngineError.
        """
        if not (await server_info(self._server)).get("enable_lora", True):  # one that says nothing of it may
            raise EngineRejected(
                f"The {self._server.name} takes no adapters.",
                status=501,
                remedy="Start it with --enable-lora, or take adapters out of the model's settings.",
            )
        held = await self._held()
        for name in held:
            if name in self._folders:
                await self._post("unload_lora_adapter", {"lora_name": name})
        if others := sorted(set(held) - self._folders.keys()):
            log.warning("the %s holds adapters of others, which take up places: %s", self._server, others)

    async def _held(self) -> Collection[str]:
        """The adapters that the server lists with its model: those that name it as their parent."""
        try:
            answer = await self._server.get("v1/models", limit_s=self._limit_s)
        except EngineRejected as refusal:
            if refusal.status != NOT_FOUND:
                raise
            log.info("the %s does not list its adapters: it is taken to hold none", self._server)
            return ()
        try:
            return [one["id"] for one in orjson.loads(answer)["data"] if one.get("parent")]
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise broken_wire(self._server.name, f"{answer[:200]!r}") from error

    async def _post(self, route: str, fields: Mapping[str, str]) -> None:
        try:
            await self._server.post(route, orjson.dumps(fields), limit_s=self._limit_s)
        except EngineError as error:
            self._server.failed(error)
            raise
