"""Forwarding a native request to a pair without reading more of it than needed."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from shell_router.core.placement import Placed

NativeRoute = Literal["generate", "prefill_only"]


@dataclass(frozen=True, slots=True)
class Relayed:
    """An engine's answer on its way through: bytes as they came, and where they come from."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    placed: tuple[Placed, ...] = ()


class Relay(Protocol):
    """Sends a client's native body to a pair, unknown fields intact, and its answer back."""

    def forward(
        self, route: NativeRoute, body: bytes, *, affinity: str | None = None
    ) -> AbstractAsyncContextManager[Relayed]:
        """Forward `body`, a JSON object in SGLang's native shape. `affinity` is as in `Generation`.

        Raises InvalidRequest for a body that is not an object or that sets `bootstrap_*` itself, and EngineError.
        Leaving the context before the answer ended aborts the request on both engines.
        """
        ...
