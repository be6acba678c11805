"""Native requests passed through to a pair: the client's bytes there, the engine's bytes back."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shell_router.core.relay import NativeRoute, Relayed
from shell_router.engines.address import Bootstrap
from shell_router.engines.leg_client import HTTP_OK, LegClient
from shell_router.engines.legs import LegBodies, Legs
from shell_router.engines.native import NativeBody, read_native
from shell_router.engines.prefill_only import PrefillOnly


class PairRelay:
    """Implements `Relay` for one pair."""

    def __init__(
        self,
        client: LegClient,
        bootstrap: Bootstrap,
        prefill_only: PrefillOnly,
        rid: Callable[[], str],
        vocabulary: int | None,
    ) -> None:
        self._client = client
        self._bootstrap = bootstrap
        self._prefill_only = prefill_only
        self._rid = rid
        self._vocabulary = vocabulary

    @asynccontextmanager
    async def forward(self, route: NativeRoute, body: bytes) -> AsyncIterator[Relayed]:
        """See `Relay.forward`. The answer relayed is decode's, or for `prefill_only` the prefill server's."""
        native = read_native(body, self._rid(), self._vocabulary)
        if route == "prefill_only" and self._prefill_only.way != "pair":
            async with self._prefill_only.forward(native) as response:
                yield Relayed(response.status, response.content_type, self._client.body(self._client.prefill, response))
            return
        legs = Legs(self._client, self._bodies(route, native))
        try:
            response = await legs.head()
            yield Relayed(response.status, response.content_type, _PairBody(legs, response.status))
        finally:
            legs.close()

    def _bodies(self, route: NativeRoute, native: NativeBody) -> LegBodies:
        fields = self._bootstrap.fields()
        if route == "prefill_only":
            sent = native.replaced({**fields, "stream": False, "sampling_params": {"max_new_tokens": 1}})
        else:
            sent = native.with_fields(fields)
        quiet_s = self._client.limits.stall_s if native.stream else self._client.limits.answer_s
        return LegBodies(native.rids, sent, sent, quiet_s)


class _PairBody:
    """Decode's answer as it comes. Its end does not wait for the prefill leg's."""

    def __init__(self, legs: Legs, status: int) -> None:
        self._legs = legs
        self._status = status

    def __aiter__(self) -> "_PairBody":
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._legs.read()
        if chunk:
            return chunk
        if self._status == HTTP_OK:
            self._legs.settle_later()
        raise StopAsyncIteration
