"""The adapters that a server holds: loaded and unloaded while it serves, and never under a request that uses one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shell_router.engines.embedded.adapted_linears import Adapter
from shell_router.engines.embedded.adapter_config import AdapterRefused
from shell_router.errors import InvalidRequest

logger = logging.getLogger(__name__)

Read = Callable[[str, str], Adapter]
Forget = Callable[[Adapter], Awaitable[None]]


class _Held:
    """An adapter in memory, and how many requests use it."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.users = 0
        self.unused = asyncio.Event()
        self.unused.set()

    def count(self, change: int) -> None:
        self.users += change
        if self.users:
            self.unused.clear()
        else:
            self.unused.set()


class LoadedAdapters:
    """At most `room` adapters by name; room for none means that LoRA is off. One event loop only.

    `read` makes an adapter of its name and folder in a thread, so that the server goes on meanwhile; `forget` lets go
    of what was computed with one. Changes come one after the other, and end though whoever asked for them has left.
    """

    def __init__(self, room: int, read: Read, forget: Forget) -> None:
        self.room = room
        self._read = read
        self._forget = forget
        self._held: dict[str, _Held] = {}
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()

    @property
    def paths(self) -> Mapping[str, str]:
        """The folders of the adapters that requests may name, by name."""
        return {name: held.adapter.path for name, held in self._held.items()}

    @contextmanager
    def used(self, name: str | None) -> Iterator[Adapter | None]:
        """The adapter `name`, which stays for the length of the block; None for no name.

        Raises `InvalidRequest` where no such adapter is loaded.
        """
        if not name:
            yield None
            return
        held = self._find(name)
        held.count(+1)
        try:
            yield held.adapter
        finally:
            held.count(-1)

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in folder `path`; requests may name it from then on. Raises `AdapterRefused`."""
        self._require_on()
        await self._to_the_end(self._load(name, path))

    async def unload(self, name: str) -> None:
        """Refuse further requests for the adapter at once, wait for those in work, and free its memory.

        Raises `AdapterRefused` where it is not loaded.
        """
        self._require_on()
        await self._to_the_end(self._unload(name))

    async def stop(self) -> None:
        """Give up changes that have not ended."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _to_the_end(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, path: str) -> None:
        async with self._changing:
            if name in self._held:
                raise AdapterRefused(
                    f"Failed to load LoRA adapter {name} because it is already loaded.", remedy="Unload it first."
                )
            if len(self._held) >= self.room:
                raise AdapterRefused(
                    f"Failed to load LoRA adapter {name}: there is room for {self.room}, and as many are loaded "
                    f"({', '.join(self._held)}).",
                    remedy="Unload one first, or start the server with more room (--max-loaded-loras).",
                )
            self._held[name] = _Held(await asyncio.to_thread(self._read, name, path))
            logger.info("LoRA adapter %s is loaded from %s", name, path)

    async def _unload(self, name: str) -> None:
        async with self._changing:
            held = self._held.pop(name, None)
            if held is None:
                raise AdapterRefused(f"LoRA with name {name} does not exist. {self._listing()}")
            await held.unused.wait()
            await self._forget(held.adapter)
            logger.info("LoRA adapter %s is unloaded", name)

    def _find(self, name: str) -> _Held:
        if not self.room:
            raise InvalidRequest(
                f"LoRA adapter '{name}' was requested, but LoRA is not enabled.",
                remedy="Start the server with room for adapters (--enable-lora).",
            )
        if name not in self._held:
            raise InvalidRequest(
                f"The following requested LoRA adapters are not loaded: {name}. {self._listing()}",
                remedy="Load it with /load_lora_adapter.",
            )
        return self._held[name]

    def _require_on(self) -> None:
        if not self.room:
            raise AdapterRefused("LoRA is not enabled.", remedy="Start the server with --enable-lora.")

    def _listing(self) -> str:
        return f"Loaded adapters: {', '.join(self._held) or 'none'}."
