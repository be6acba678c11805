"""SGLang's routes for LoRA adapters: load one, unload one, and list the models that may be asked for."""

import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from shell_router.engines.embedded import answers
from shell_router.engines.embedded.adapter_config import AdapterRefused
from shell_router.engines.embedded.answers import json_response
from shell_router.engines.embedded.loaded_adapters import LoadedAdapters
from shell_router.engines.embedded.wire import MalformedBody, parse_object


@dataclass(frozen=True, slots=True)
class AdapterRoutes:
    """Routes over `adapters` of the model that is served as `model`."""

    adapters: LoadedAdapters
    model: str
    context_length: int

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/load_lora_adapter", self._load)
        app.router.add_post("/unload_lora_adapter", self._unload)
        app.router.add_get("/v1/models", self._models)

    async def _load(self, request: web.Request) -> web.Response:
        try:
            body = parse_object(await request.read())
            change = self.adapters.load(_text(body, "lora_name"), _text(body, "lora_path"))
        except MalformedBody as error:
            return answers.malformed(str(error))
        return await self._told(change)

    async def _unload(self, request: web.Request) -> web.Response:
        try:
            change = self.adapters.unload(_text(parse_object(await request.read()), "lora_name"))
        except MalformedBody as error:
            return answers.malformed(str(error))
        return await self._told(change)

    async def _told(self, change: Awaitable[None]) -> web.Response:
        """SGLang's answer to a change, which has the adapters that are loaded after it."""
        message = ""
        try:
            await change
        except AdapterRefused as error:
            message = str(error)
        result = {
            "rid": None,
            "http_worker_ipc": None,
            "success": not message,
            "error_message": message,
            "loaded_adapters": self.adapters.paths,
        }
        return json_response(result, 400 if message else 200)

    async def _models(self, _: web.Request) -> web.Response:
        cards = [self._card(self.model, self.model, None, self.context_length)]
        cards += [self._card(name, path, self.model, None) for name, path in self.adapters.paths.items()]
        return json_response({"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, context_length: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "shell-router",
            "root": root,
            "parent": parent,
            "max_model_len": context_length,
        }


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise MalformedBody(f"{name}: expected a string that is not empty.", remedy=f"Send {name}.")
    return value
