"""Pass native requests through: the client's bytes there, the engine's bytes back."""

import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import orjson

from shell_router.core.engine import NO_HINTS, Hints, NativeRoute, Relayed
from shell_router.engines.legs import Leg
from shell_router.engines.native_body import (
    ADAPTER,
    CACHE_KEY,
    NativeBody,
    NativeRules,
    as_list,
    read_native,
)
from shell_router.engines.pair_fleet import PairFleet
from shell_router.engines.pairing import Attempts, Pair
from shell_router.engines.server_client import HTTP_OK, ServerClient, take_slot
from shell_router.engines.wire import MAX_EVENT_BYTES, EventSplitter, index_of, wire_error
from shell_router.errors import EngineError
from shell_router.http.client import Exchange
from shell_router.routing.dispatcher import EngineSlot
from shell_router.routing.failures import INTERNAL_ERROR, RETRYABLE_STATUSES
from shell_router.routing.placement import PlacementRequest

_DONE = b"[DONE]"
_REPORTED = re.compile(rb'"completion_tokens": ?([0-9]{1,9})')
"""The counts that engines write. In text that a model writes, quotes are escaped."""
_NO_OUTPUT = (orjson.JSONDecodeError, KeyError, TypeError, AttributeError)


class InputLogprobs:
    """The `input_*logprobs*` fields of each output in a prefill server's answer.

    Outputs are matched by their place in the body, not by `id`: for parallel samples each server
    makes ids of its own. `where` names the decode server in errors, which are EngineRejected for a
    wrong format.
    """

    def __init__(self, prefill: str, answer: bytes) -> None:
        """Read `answer`, whole or a stream to its end; raises EngineRejected, naming `prefill`."""
        self._events = EventSplitter()
        try:
            if answer.startswith(b"data:"):  # only a batch's events have an `index`
                events = [
                    orjson.loads(payload)
                    for payload in EventSplitter().feed(answer)
                    if payload != _DONE
                ]
                outputs = [(event.get("index", 0), event) for event in events]
            else:
                outputs = list(enumerate(as_list(orjson.loads(answer))))
            self._fields = {
                index: {  # encoded once: a stream repeats them in each of its events
                    name: orjson.Fragment(orjson.dumps(value))
                    for name, value in output["meta_info"].items()
                    if name.startswith("input_") and "logprobs" in name
                }
                for index, output in outputs
            }
        except _NO_OUTPUT as error:
            raise wire_error(prefill, f"{answer[:200]!r}") from error

    def in_whole(self, where: str, answer: bytes) -> bytes:
        """Add these fields to decode's whole answer; all others keep their values."""
        try:
            content = orjson.loads(answer)
            outputs = as_list(content)
            if len(outputs) != len(self._fields):
                raise wire_error(where, f"{len(outputs)} outputs of {len(self._fields)} prefilled")
            for index, output in enumerate(outputs):
                output["meta_info"].update(self._fields[index])
        except _NO_OUTPUT as error:
            raise wire_error(where, f"{answer[:200]!r}") from error
        return orjson.dumps(content)

    def in_event(self, where: str, payload: bytes) -> bytes:
        """Add these fields to an event of decode's stream; errors and the end are unchanged."""
        if payload == _DONE:
            return payload
        try:
            event = orjson.loads(payload)
            if "error" in event:
                return payload
            event["meta_info"].update(self._fields[event.get("index", 0)])
        except _NO_OUTPUT as error:
            raise wire_error(where, f"{payload[:200]!r}") from error
        return orjson.dumps(event)

    def in_chunk(self, where: str, chunk: bytes) -> bytes:
        """Return the events that the stream's next `chunk` completes, with these fields."""
        return b"".join(
            [
                b"data: %b\n\n" % self.in_event(where, payload)
                for payload in self._events.feed(chunk)
            ]
        )


@dataclass(frozen=True, slots=True, eq=False)
class PairRelay:
    """Forwards bodies to a model's servers.

    Attributes:
        fleet: The servers.
        rid: Gives fresh request ids.
        rules: Check bodies.
        isolates: Each tenant has a prefix cache of its own.
        chosen: Fields that the router sets, so no client may.
    """

    fleet: PairFleet
    rid: Callable[[], str]
    rules: NativeRules
    isolates: bool
    chosen: frozenset[str]

    def forward(
        self,
        route: NativeRoute,
        body: bytes,
        *,
        hints: Hints = NO_HINTS,
        fields: Collection[str] = (),
        admit: Callable[[int], None] = lambda requests: None,
        adapter: str | None = None,
    ) -> AbstractAsyncContextManager[Relayed]:
        """See `Relay.forward`; the answer is decode's, or for `prefill_only` the prefill server's.

        `adapter` names the LoRA adapter that answers.
        """
        own = {} if adapter is None else {ADAPTER: adapter}
        if self.isolates and hints.user is not None:
            own[CACHE_KEY] = hints.user
        rules = self.rules
        if more := frozenset(fields) - self.chosen:
            rules = replace(rules, fields=rules.fields | more)
        native = read_native(body, self.rid(), rules, own, route)
        if native.batch is not None:
            admit(native.batch)
        update = route == "prefill_only"
        requests = native.batch or 1
        # about: it is not tokenized here, and an image has many more bytes than a context
        tokens = max(1, min(len(body) // 4, (rules.context_length or len(body)) * requests))
        most = 0 if update else native.max_output_tokens
        request = PlacementRequest(
            tokens, None, most, hints, None, update, adapter, requests=requests
        )
        if update and all(way == "route" for way in self.fleet.prefill_ways):
            return self._forward_to_prefill(native, request)
        return _ByPair(self, route, native, request)

    @asynccontextmanager
    async def _forward_to_prefill(
        self, native: NativeBody, request: PlacementRequest
    ) -> AsyncIterator[Relayed]:
        slot = await take_slot(self.fleet.prefills, request)
        server = slot.engine
        body = native.with_fields({})
        try:
            async with self.fleet.prefill_only[server].forward(body, native.rids) as response:
                yield Relayed(
                    response.status, response.content_type, _body(response), (slot.placement(),)
                )
        finally:
            slot.close()

    async def begin(
        self, route: NativeRoute, native: NativeBody, request: PlacementRequest
    ) -> tuple[Pair, Relayed]:
        """Return the first attempt whose answer began; its legs run on.

        Raises:
            EngineError: The attempts failed.
            PromptTooLong: An engine says so.
        """
        attempts = Attempts(self.fleet, request, native.odd_fields)
        while True:
            pair = await attempts.pick()
            try:
                legs = self._start_legs(route, native, pair, attempts)
                relayed = await _await_answer(legs, native, pair)
                attempts.count_statuses()
                return pair, relayed
            except BaseException as error:
                pair.close()
                if not isinstance(error, EngineError):
                    raise
                await attempts.wait_after(pair, error)
            native = replace(native, rid=self.rid())  # the engines may still hold the id before

    def _start_legs(
        self, route: NativeRoute, native: NativeBody, pair: Pair, attempts: Attempts
    ) -> Leg:
        if route == "prefill_only":
            route = "generate"
            fields = {**pair.fields, "stream": False, "sampling_params": {"max_new_tokens": 1}}
            sent = native.replace_fields(fields)
        else:
            sent = native.with_fields(pair.fields)
        limits = self.fleet.transport.limits
        read_timeout_s = limits.stall_s if native.stream else limits.answer_s
        return pair.start(native.rids, (sent, sent), read_timeout_s, attempts.blame, route)


class _ByPair(AbstractAsyncContextManager[Relayed]):
    """A native request on a pair while the context is open."""

    def __init__(
        self, relay: PairRelay, route: NativeRoute, native: NativeBody, request: PlacementRequest
    ) -> None:
        self._relay = relay
        self._request = (route, native, request)
        self._pair: Pair

    async def __aenter__(self) -> Relayed:
        self._pair, relayed = await self._relay.begin(*self._request)
        return relayed

    async def __aexit__(self, *_: object) -> None:
        self._pair.close()


async def _await_answer(legs: Leg, native: NativeBody, pair: Pair) -> Relayed:
    """Return decode's answer once its first bytes are here; earlier failures can be repeated."""
    decode = legs.decode
    await decode.wait_for_head()
    good = decode.status == HTTP_OK
    if decode.status in RETRYABLE_STATUSES or decode.status >= INTERNAL_ERROR:
        await legs.raise_refusal()
    first = await decode.read()
    # an error or an abort inside a good answer is no sign that decode serves
    fails = b'"error"' in first or b'"abort"' in first
    if good and not fails:
        legs.decode_server.note_success()
    chunks: AsyncIterator[bytes] = _DecodeBody(legs, first, pair.decode)
    if native.input_logprobs and good and (prefill_answer := await legs.read_prefill()) is not None:
        logprobs = InputLogprobs(pair.prefill.engine.name, prefill_answer)
        streamed = decode.content_type.startswith("text/event-stream")
        chunks = _merge(logprobs, legs.decode_server.name, chunks, streamed=streamed)
    return Relayed(decode.status, decode.content_type, chunks, pair.placed)


class _DecodeBody(AsyncIterator[bytes]):
    """Decode's answer from `first` on; its end does not wait for the prefill leg's.

    Tokens that decode reports count on its `slot`; in a stream without reports its events do. It is
    no generator: the loop keeps a weak reference to each, which costs more than a chunk.
    """

    def __init__(self, legs: Leg, first: bytes, slot: EngineSlot[ServerClient]) -> None:
        self._legs = legs
        self._first: bytes | None = first
        self._slot = slot
        self._streamed = legs.decode.content_type.startswith("text/event-stream")
        self._uncounted: list[bytes] = []
        self._uncounted_bytes = 0
        self._reported: dict[int, int] = {}  # by output
        self._events = self._counted = 0

    async def __anext__(self) -> bytes:
        chunk = self._first
        self._first = None
        if chunk := await self._legs.decode.read() if chunk is None else chunk:
            self._note(chunk)
            return chunk
        if self._legs.decode.status == HTTP_OK:
            self._count()
            if self._counted and not self._slot.features.update:
                self._slot.note_completion()
            self._legs.settle_later()
        raise StopAsyncIteration

    def _note(self, chunk: bytes) -> None:
        """Keep `chunk` until it is counted; raise EngineRejected for an event without an end."""
        if self._streamed and chunk.endswith(b"\n"):
            self._uncounted.append(chunk)
            self._count()
            return
        lines, newline, rest = chunk.rpartition(b"\n")
        if self._streamed and newline:
            self._uncounted.append(lines + newline)
            self._count()
            chunk = rest
        self._uncounted.append(chunk)
        self._uncounted_bytes += len(chunk)
        if self._streamed and self._uncounted_bytes > MAX_EVENT_BYTES:
            raise wire_error(
                self._legs.decode_server.name, f"an event of more than {MAX_EVENT_BYTES} bytes"
            )

    def _count(self) -> None:
        answer = b"".join(self._uncounted)
        self._uncounted = []
        self._uncounted_bytes = 0
        if self._streamed:
            # counts are totals, and each event may repeat the whole output
            for event in answer.split(b"\n\n"):
                at = event.rfind(b'"completion_tokens"')
                if at >= 0 and (count := _REPORTED.match(event, at)):
                    self._reported[index_of(event)] = int(count[1])
                self._events += event.startswith(b"data:")
        else:
            self._reported = {0: sum(map(int, _REPORTED.findall(answer)))}
        more = (sum(self._reported.values()) or self._events) - self._counted
        if more > 0:
            self._counted += more
            self._slot.note_tokens(more)


async def _body(response: Exchange) -> AsyncIterator[bytes]:
    while chunk := await response.read():
        yield chunk


async def _merge(
    logprobs: InputLogprobs, where: str, chunks: AsyncIterator[bytes], *, streamed: bool
) -> AsyncIterator[bytes]:
    if not streamed:
        yield logprobs.in_whole(where, b"".join([chunk async for chunk in chunks]))
        return
    async for chunk in chunks:
        if merged := logprobs.in_chunk(where, chunk):
            yield merged
