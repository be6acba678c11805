"""The prefill side: compute a prompt, keep its KV in the prefix cache, hand it to the decode partner."""

import asyncio
import random

from shell_router.engines.embedded.adapted_linears import Adapter
from shell_router.engines.embedded.admission import Admission
from shell_router.engines.embedded.causal_lm import CausalLm
from shell_router.engines.embedded.inflight import Inflight
from shell_router.engines.embedded.kv_transfer import KvTransferError
from shell_router.engines.embedded.model_thread import ModelThread
from shell_router.engines.embedded.output import Piece
from shell_router.engines.embedded.prefill_worker import Failed, Prefilled, PrefillJob, PrefillWorker
from shell_router.engines.embedded.radix import RadixCache
from shell_router.engines.embedded.rooms import Room, Rooms
from shell_router.engines.embedded.service import Loads, new_output
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.embedded.wire import GenerateRequest
from shell_router.errors import InvalidRequest

# SGLang ends a prefill leg so, whatever was asked for: the length is the decode side's business.
HANDED_OVER = {"type": "length", "length": 0}
NO_LIMIT = 1 << 31


class PrefillService:
    """Serves the prefill side: one event loop, and the model's thread behind it."""

    def __init__(self, settings: EmbeddedSettings, lm: CausalLm, rooms: Rooms, rng: random.Random) -> None:
        self._lm = lm
        self._rooms = rooms
        self._admission = Admission(max_tokens=settings.max_total_tokens, max_requests=NO_LIMIT)
        cache = RadixCache(settings.max_total_tokens)
        self._worker = PrefillWorker(lm, cache, settings.chunked_prefill_size, rng)
        self._thread: ModelThread[PrefillJob, Prefilled | Failed] = ModelThread(self._worker, _deliver)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.alive

    async def stop(self) -> None:
        self._rooms.close_all()
        await self._thread.stop()

    def check(self, request: GenerateRequest) -> None:
        if request.bootstrap_room is None and not request.prefill_only:
            raise missing_room(request)
        if not request.prefill_only and self._room(request).claimed:
            raise InvalidRequest(
                f"bootstrap_room {request.bootstrap_room} is in use.", remedy="Draw a new room for every attempt."
            )

    async def work(self, inflight: Inflight) -> None:
        """One piece: the first token, once the decode partner has the KV (at once with the fake host)."""
        if inflight.request.prefill_only:
            inflight.mailbox.put(await self._compute(inflight, None))
            return
        room = self._room(inflight.request)
        room.claimed = True
        try:
            inflight.mailbox.put(await self._compute(inflight, room))
        except KvTransferError as error:
            room_id = inflight.request.bootstrap_room
            inflight.fail(f"Prefill transfer failed for request {inflight.request.rid} {room_id=} with {error}")
        finally:
            room.fail("Aborted by AbortReq.")

    async def forget(self, adapter: Adapter) -> None:
        await self._thread.between_steps(lambda: self._worker.cache.forget(adapter.number))

    def loads(self) -> Loads:
        counts = self._worker.counts
        return Loads(
            running=self._worker.running,
            waiting=self._worker.waiting + self._admission.waiting,
            used_tokens=self._admission.used_tokens,
            evictable_tokens=self._worker.cache.tokens,
            prefill_inflight=self._rooms.awaiting_decode,
            prompt_tokens_total=counts.prompt,
            cached_tokens_total=counts.cached,
        )

    def _room(self, request: GenerateRequest) -> Room:
        assert request.bootstrap_room is not None
        return self._rooms.open(request.bootstrap_room)

    async def _compute(self, inflight: Inflight, room: Room | None) -> Piece:
        """Compute the prompt and, given a room, wait until its KV was taken. Raises `KvTransferError`."""
        request = inflight.request
        async with self._admission.hold(len(request.input_ids)):
            output = new_output(request, self._lm)
            outcome: asyncio.Future[Prefilled | Failed] = asyncio.get_running_loop().create_future()
            job = PrefillJob(
                request.input_ids,
                output.draw,
                request.return_logprob,
                request.scored_from,
                outcome,
                inflight.adapter,
            )
            prefilled = await self._run(job, room)
            inflight.cached_tokens = prefilled.cached_tokens
            if room is not None:
                inflight.transferring = True
                room.offer(prefilled)
                await asyncio.shield(room.taken)
        piece = output.accept(prefilled.token_id, prefilled.logprob)
        return Piece(piece.token_id, piece.logprob, piece.text, HANDED_OVER, prefilled.input_logprobs)

    async def _run(self, job: PrefillJob, room: Room | None) -> Prefilled:
        """Compute in the model's thread, giving up when the room fails."""
        self._thread.submit(job)
        try:
            await asyncio.wait({job.outcome} | ({room.taken} if room else set()), return_when="FIRST_COMPLETED")
            if room is not None and room.taken.done():
                room.taken.result()
            outcome = await job.outcome
        finally:
            self._thread.drop(job)
        if isinstance(outcome, Failed):
            raise KvTransferError(outcome.message)
        return outcome


def missing_room(request: GenerateRequest) -> InvalidRequest:
    """SGLang's words for it."""
    return InvalidRequest(
        f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={request.rid!r}"
    )


def _deliver(job: PrefillJob, outcome: Prefilled | Failed) -> None:
    if not job.outcome.done():
        job.outcome.set_result(outcome)
