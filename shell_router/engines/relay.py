"""Native requests passed through: the client's bytes there, the engine's bytes back."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from shell_router.core.relay import NativeRoute, Relayed
from shell_router.engines.adapters.lease import Lease
from shell_router.engines.address import Bootstrap
from shell_router.engines.answer import refused
from shell_router.engines.http import Exchange
from shell_router.engines.input_logprobs import InputLogprobs, StreamWithInputLogprobs
from shell_router.engines.legs import LegBodies, Legs
from shell_router.engines.native import NativeBody, NativeRules, read_native
from shell_router.engines.pairing import Attempts, Pair, Pairing
from shell_router.engines.place import Wanted
from shell_router.engines.prefill_only import PrefillOnly
from shell_router.engines.retries import INTERNAL_ERROR, PASSING_STATUSES
from shell_router.engines.server_client import HTTP_OK, ServerClient
from shell_router.engines.wire import missing_adapter, tells_missing_adapter
from shell_router.errors import AdapterMissing, EngineError


class PairRelay:
    """Implements `Relay` for a model's servers. `rid` gives fresh request ids, `attempts` a new request's attempts."""

    def __init__(
        self,
        pairing: Pairing,
        prefill_only: Mapping[ServerClient, PrefillOnly],
        attempts: Callable[[Wanted], Attempts],
        rid: Callable[[], str],
        rules: NativeRules,
    ) -> None:
        self._pairing = pairing
        self._prefill_only = prefill_only
        self._attempts = attempts
        self._rid = rid
        self._rules = rules

    @asynccontextmanager
    async def forward(
        self, route: NativeRoute, body: bytes, affinity: str | None, adapter: str | None
    ) -> AsyncIterator[Relayed]:
        """See `PairPool.forward`. The answer relayed is decode's, or for `prefill_only` the prefill server's."""
        native = read_native(body, self._rid(), self._rules, adapter)
        wanted = Wanted(_tokens_in(body), affinity=affinity, update=route == "prefill_only", adapter=adapter)
        if route == "prefill_only" and all(only.way != "pair" for only in self._prefill_only.values()):
            async with self._prefilled_alone(native, wanted) as relayed:
                yield relayed
            return
        pair, legs, relayed = await self._begun(route, body, native, wanted)
        try:
            yield relayed
        finally:
            legs.close()
            pair.close()

    @asynccontextmanager
    async def _prefilled_alone(self, native: NativeBody, wanted: Wanted) -> AsyncIterator[Relayed]:
        place = await self._pairing.prefills.place(wanted)
        try:
            async with (
                self._pairing.adapters.leased(place.engine, wanted.adapter) as lease,
                self._prefill_only[place.engine].forward(native) as response,
            ):
                if wanted.adapter is not None and response.status != HTTP_OK:
                    await self._refused_alone(place.engine, response, lease)
                placed = replace(place.placed, adapter_s=lease.waited_s)
                yield Relayed(response.status, response.content_type, place.engine.body(response), (placed,))
        finally:
            place.close()

    async def _refused_alone(self, server: ServerClient, response: Exchange, lease: Lease) -> None:
        """Raises EngineRejected with the server's words, or AdapterMissing; the adapter is then loaded again."""
        try:
            await server.read_all(response)
        except AdapterMissing:
            await self._pairing.adapters.missing(server, lease)
            raise

    async def _begun(
        self, route: NativeRoute, body: bytes, native: NativeBody, wanted: Wanted
    ) -> tuple[Pair, Legs, Relayed]:
        """The first attempt whose answer began, its legs running on. Raises EngineError and PromptTooLong."""
        attempts = self._attempts(wanted)
        while True:
            pair = await attempts.pick()
            try:
                bodies = self._bodies(route, native, pair.bootstrap)
                legs = Legs(pair.prefill.engine, pair.decode.engine, bodies, pair.prefilled)
            except BaseException:
                pair.close()
                raise
            try:
                return pair, legs, replace(await _beginning(legs, native, wanted.adapter), placed=pair.placed)
            except BaseException as error:
                legs.close()
                pair.close()
                if isinstance(error, AdapterMissing):
                    await self._pairing.adapter_missing(pair, legs.suspects)
                # a client's own id cannot be used again: the engines may not have let go of it yet
                if native.named or not isinstance(error, EngineError):
                    raise
                await attempts.failed(error, legs.suspects)
            native = read_native(body, self._rid(), self._rules, wanted.adapter)

    def _bodies(self, route: NativeRoute, native: NativeBody, bootstrap: Bootstrap) -> LegBodies:
        fields = bootstrap.fields()
        if route == "prefill_only":
            sent = native.replaced({**fields, "stream": False, "sampling_params": {"max_new_tokens": 1}})
        else:
            sent = native.with_fields(fields)
        limits = self._pairing.limits
        return LegBodies(native.rids, sent, sent, limits.stall_s if native.stream else limits.answer_s)


def _tokens_in(body: bytes) -> int:
    """About four characters a token: what a client sent is not tokenized here."""
    return max(1, len(body) // 4)


async def _beginning(legs: Legs, native: NativeBody, adapter: str | None) -> Relayed:
    """Decode's answer once its first bytes are here: what fails before can still be sent again."""
    head = await legs.head()
    if head.status in PASSING_STATUSES or head.status >= INTERNAL_ERROR:
        await refused(legs, head.status)
    first = await legs.read()
    if adapter is not None and (head.status != HTTP_OK or _tells_failure(first)):
        _refuse_missing_adapter(legs, first)
    if head.status == HTTP_OK and not _tells_failure(first):
        legs.begun_well()
    chunks: AsyncIterator[bytes] = _PairBody(legs, head.status, first)
    if native.input_logprobs and head.status == HTTP_OK:
        found = InputLogprobs(legs.prefill_name, await legs.prefilled())
        merge = _merged_stream if head.content_type.startswith("text/event-stream") else _merged_whole
        chunks = merge(found, legs.decode_name, chunks)
    return Relayed(head.status, head.content_type, chunks)


async def _merged_whole(found: InputLogprobs, where: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield found.in_whole(where, b"".join([chunk async for chunk in chunks]))


async def _merged_stream(found: InputLogprobs, where: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    stream = StreamWithInputLogprobs(found, where)
    async for chunk in chunks:
        if merged := stream.feed(chunk):
            yield merged


def _tells_failure(piece: bytes) -> bool:
    """Whether it may be an error or an abort told inside a good answer: then it is no sign that decode serves."""
    return b'"error"' in piece or b'"abort"' in piece


def _refuse_missing_adapter(legs: Legs, piece: bytes) -> None:
    """What the engine lost is loaded again, so that it is no answer yet."""
    message = piece.decode("utf-8", "replace")
    if tells_missing_adapter(message):
        error = missing_adapter(legs.decode_name, message)
        legs.refused(error)
        raise error


class _PairBody:
    """Decode's answer from `first` on. Its end does not wait for the prefill leg's."""

    def __init__(self, legs: Legs, status: int, first: bytes) -> None:
        self._legs = legs
        self._status = status
        self._first = first

    def __aiter__(self) -> "_PairBody":
        return self

    async def __anext__(self) -> bytes:
        chunk, self._first = self._first, b""
        if chunk := chunk or await self._legs.read():
            return chunk
        if self._status == HTTP_OK:
            self._legs.settle_later()
        raise StopAsyncIteration
