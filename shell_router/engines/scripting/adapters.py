"""The adapters of a scripted server: folders that are looked at, and names that change outputs."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from shell_router.engines.scripting.http import Exchange
from shell_router.engines.scripting.prefix_cache import PrefixCache
from shell_router.engines.scripting.run import BadRequest
from shell_router.engines.scripting.script import ScriptedSettings

MAX_RANK = 64


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter from one load to its unloading, with the KV of its prompts. `running` requests use it."""

    name: str
    folder: str
    cache: PrefixCache
    running: int = 0
    idle: list[Callable[[], None]] = field(default_factory=list)

    def leave(self) -> None:
        """A request for it has ended."""
        self.running -= 1
        if not self.running:
            while self.idle:
                self.idle.pop()()


class ScriptedAdapters:
    """Loads and unloads as SGLang does, one at a time, but never evicts by itself: that would hide a router's mistake.

    `loads` counts them, `unloads` names those that were asked for, `most` is the most that were loaded at a time.
    """

    def __init__(self, settings: Callable[[], ScriptedSettings]) -> None:
        self.loaded: dict[str, LoadedAdapter] = {}
        self.loads = 0
        self.unloads: list[str] = []
        self.most = 0
        self._settings = settings
        self._under_way: set[str] = set()

    def taken(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a request, which uses it from now on. Raises BadRequest for one that is not loaded."""
        if name is None:
            return None
        if name not in self.loaded:
            raise BadRequest(
                f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {list(self.loaded)}."
            )
        self.loaded[name].running += 1
        return self.loaded[name]

    def load(self, exchange: Exchange) -> None:
        """`POST /load_lora_adapter`."""
        asked = orjson.loads(exchange.body)
        name, folder = str(asked["lora_name"]), str(asked["lora_path"])
        wrong = self._wrong(name, folder)
        if wrong is not None:
            self._answer(exchange, wrong)
            return
        self._under_way.add(name)
        asyncio.get_running_loop().call_later(self._settings().adapter_load_s, self._loaded, exchange, name, folder)

    def _loaded(self, exchange: Exchange, name: str, folder: str) -> None:
        self._under_way.discard(name)
        self.loaded[name] = LoadedAdapter(name, folder, PrefixCache(self._settings().cache_prompts))
        self.loads += 1
        self.most = max(self.most, len(self.loaded))
        self._answer(exchange)

    def _wrong(self, name: str, folder: str) -> str | None:
        if not self._settings().adapter_room:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        if name in self.loaded or name in self._under_way:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        if len(self.loaded) + len(self._under_way) >= self._settings().adapter_room:
            return f"There is room for {self._settings().adapter_room} adapters, and {list(self.loaded)} are loaded"
        try:
            rank = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{folder}: {error}"
        return None if rank <= MAX_RANK else f"LoRA adapter {name} with rank {rank} is incompatible"

    def unload(self, exchange: Exchange) -> None:
        """`POST /unload_lora_adapter`: no request is let in any more, and it ends with the last that was."""
        name = str(orjson.loads(exchange.body)["lora_name"])
        self.unloads.append(name)
        adapter = self.loaded.pop(name, None)
        if adapter is None:
            self._answer(exchange, f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.loaded)}")
        elif adapter.running:
            adapter.idle.append(lambda: self._answer(exchange))
        else:
            self._answer(exchange)

    def _answer(self, exchange: Exchange, error: str = "") -> None:
        found = {name: adapter.folder for name, adapter in self.loaded.items()}
        answer = {"success": not error, "error_message": error, "loaded_adapters": found}
        exchange.answer_json(answer, 400 if error else 200)

    def listed(self, exchange: Exchange) -> None:
        """`GET /v1/models`."""
        base: dict[str, Any] = {"id": "scripted", "object": "model", "root": "scripted", "parent": None}
        adapters = [
            {"id": name, "object": "model", "root": adapter.folder, "parent": "scripted"}
            for name, adapter in self.loaded.items()
        ]
        exchange.answer_json({"object": "list", "data": [base, *adapters]})
