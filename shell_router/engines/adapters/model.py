"""One adapter of a model, as a model of its own."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from shell_router.core.generation import Engine, Finish, Generation, Prefilled, Tokens
from shell_router.core.relay import NativeRoute, Relayed


class AdaptablePool(Engine, Protocol):
    """What serves a model and its adapters: `PairPool`."""

    def forward(
        self, route: NativeRoute, body: bytes, *, affinity: str | None = None, adapter: str | None = None
    ) -> AbstractAsyncContextManager[Relayed]:
        """See `Relay.forward`; with `adapter` that one answers."""
        ...


class AdaptedModel:
    """Every request is one for the same adapter. Implements `Engine` and `Relay`."""

    def __init__(self, pool: AdaptablePool, adapter: str) -> None:
        self._pool = pool
        self._adapter = adapter

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        return self._pool.generate(replace(request, adapter=self._adapter))

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        return await self._pool.prefill(replace(request, adapter=self._adapter))

    def forward(
        self, route: NativeRoute, body: bytes, *, affinity: str | None = None
    ) -> AbstractAsyncContextManager[Relayed]:
        """See `Relay.forward`. Raises InvalidRequest for a body that names an adapter itself."""
        return self._pool.forward(route, body, affinity=affinity, adapter=self._adapter)
