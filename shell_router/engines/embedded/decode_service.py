"""The decode side: take a prompt's KV from its prefill server and decode it in the batch."""

import asyncio
import random

from shell_router.engines.embedded.adapted_linears import Adapter
from shell_router.engines.embedded.admission import Admission
from shell_router.engines.embedded.causal_lm import CausalLm
from shell_router.engines.embedded.decode_worker import DecodeJob, DecodeWorker
from shell_router.engines.embedded.inflight import Inflight, InflightRequests
from shell_router.engines.embedded.kv_layers import SlotKv
from shell_router.engines.embedded.kv_transfer import KvClient, KvTransferError, from_bytes
from shell_router.engines.embedded.model_thread import ModelThread
from shell_router.engines.embedded.output import Piece
from shell_router.engines.embedded.prefill_service import missing_room
from shell_router.engines.embedded.service import Loads, new_output
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.embedded.wire import GenerateRequest
from shell_router.errors import InvalidRequest


class DecodeService:
    """Serves the decode side: one event loop, and the model's thread behind it."""

    def __init__(
        self, settings: EmbeddedSettings, lm: CausalLm, kv: KvClient, inflight: InflightRequests, rng: random.Random
    ) -> None:
        self._lm = lm
        self._kv = kv
        self._inflight = inflight
        self._admission = Admission(max_tokens=settings.max_total_tokens, max_requests=settings.max_running_requests)
        self._worker = DecodeWorker(lm, SlotKv(lm.kv_shape), rng)
        self._thread: ModelThread[DecodeJob, Piece] = ModelThread(self._worker, _deliver)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.alive

    async def stop(self) -> None:
        await self._thread.stop()

    def check(self, request: GenerateRequest) -> None:
        if request.bootstrap_room is None:
            raise missing_room(request)
        if request.prefill_only or request.bootstrap_host is None or request.bootstrap_port is None:
            raise InvalidRequest(
                "A decode server needs the bootstrap_host and bootstrap_port of a prefill server.",
                remedy="Send the same body to both servers of a pair.",
            )

    async def work(self, inflight: Inflight) -> None:
        """Pieces as they are decoded. Room in the batch comes before the transfer, as in SGLang."""
        request = inflight.request
        taken = False
        try:
            async with self._admission.hold(len(request.input_ids) + request.max_new_tokens):
                job = await self._receive(inflight)
                taken = True
                await self._decode(job)
        except KvTransferError as error:
            taken = True
            inflight.fail(
                f"Decode transfer failed for request {request.rid} room_id={request.bootstrap_room} "
                f"with exception {error}"
            )
        finally:
            if not taken:
                await self._give_up(request)

    async def forget(self, adapter: Adapter) -> None:
        """Its rows end with their requests: nothing is left once the thread has obeyed."""
        await self._thread.between_steps(lambda: None)

    def loads(self) -> Loads:
        transferring = self._inflight.transferring
        return Loads(
            running=self._worker.running,
            waiting=0,
            used_tokens=self._worker.stored_tokens,
            decode_prealloc=self._admission.waiting,
            decode_transfer=transferring,
            generated_tokens_total=self._worker.generated_tokens,
        )

    async def _receive(self, inflight: Inflight) -> DecodeJob:
        request = inflight.request
        assert request.bootstrap_host and request.bootstrap_port and request.bootstrap_room is not None
        inflight.transferring = True
        parcel, payload = await self._kv.fetch(request.bootstrap_host, request.bootstrap_port, request.bootstrap_room)
        inflight.transferring = False
        inflight.cached_tokens = parcel.cached_tokens
        if parcel.prompt_tokens != len(request.input_ids):
            raise KvTransferError(f"the room holds {parcel.prompt_tokens} tokens, not {len(request.input_ids)}")
        if parcel.adapter != ("" if inflight.adapter is None else inflight.adapter.fingerprint):
            raise KvTransferError(f"prefill holds other weights as LoRA adapter {request.lora_path}")
        return DecodeJob(
            kv=from_bytes(payload, parcel, self._lm.kv_shape),
            prompt_tokens=parcel.prompt_tokens,
            room_tokens=parcel.prompt_tokens + request.max_new_tokens,
            first_token=parcel.token_id,
            first_logprob=parcel.logprob,
            output=new_output(request, self._lm),
            with_logprobs=request.return_logprob,
            mailbox=inflight.mailbox,
            adapter=inflight.adapter,
        )

    async def _decode(self, job: DecodeJob) -> None:
        """Keep the request in the batch until its reader has its last piece and cancels."""
        self._thread.submit(job)
        try:
            await asyncio.Event().wait()
        finally:
            self._thread.drop(job)

    async def _give_up(self, request: GenerateRequest) -> None:
        assert request.bootstrap_host and request.bootstrap_port and request.bootstrap_room is not None
        await self._kv.give_up(request.bootstrap_host, request.bootstrap_port, request.bootstrap_room)


def _deliver(job: DecodeJob, piece: Piece) -> None:
    job.mailbox.put(piece)
