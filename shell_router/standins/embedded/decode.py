"""The decode side: a prompt's KV comes from its prefill server, and is decoded in a batch."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shell_router.core.drafts import MOST_DRAFTED, Drafter, DraftGate, count_matching
from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.kv_transfer import KvClient, KvTransferError, PrefilledKv
from shell_router.standins.embedded.model import CausalLm, SlotKv
from shell_router.standins.embedded.output import DecodedOutput, Piece, abort_reason
from shell_router.standins.embedded.sampling import BatchSampler, Draw, Drawn
from shell_router.standins.embedded.service import Inflight, Loads, Service
from shell_router.standins.embedded.settings import EmbeddedSettings
from shell_router.standins.embedded.wire import GenerateRequest
from shell_router.standins.kv_capacity import KvCapacity

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeJob:
    """A request whose KV has arrived. `prefilled` is dropped once its KV is in the batch.

    `drafter` is None if the request asks for no drafts.
    """

    inflight: Inflight
    output: DecodedOutput
    prefilled: PrefilledKv | None
    drafter: Drafter | None = None

    @property
    def stored_tokens(self) -> int:
        """The number of tokens whose KV the batch holds: all but the last."""
        return len(self.inflight.request.input_ids) + self.output.draw.position - 1

    def draft(self) -> Sequence[int]:
        """Return tokens that it may write next, no more than its length permits."""
        if self.drafter is None:
            return ()
        left = self.inflight.request.max_new_tokens - self.output.draw.position
        return self.drafter.propose(min(MOST_DRAFTED, left - 1))


@dataclass(slots=True)
class DecodeWorker:
    """A worker that decodes all running requests together; request i owns row i of the slots."""

    lm: CausalLm
    slots: SlotKv
    rng: random.Random
    clock: Callable[[], float] = time.perf_counter
    gate: DraftGate = field(default_factory=DraftGate)
    _active: list[DecodeJob] = field(default_factory=list)
    _news: list[tuple[DecodeJob, Piece]] = field(default_factory=list)
    _sampler: BatchSampler | None = None

    @property
    def busy(self) -> bool:
        """See `ModelWorker`."""
        return bool(self._active or self._news)

    @property
    def running(self) -> int:
        """The number of running requests."""
        return len(self._active)

    @property
    def stored_tokens(self) -> int:
        """The number of tokens whose KV the batch holds."""
        return sum(job.stored_tokens for job in tuple(self._active))

    def admit(self, job: DecodeJob) -> None:
        """Take the first token, and a row if there are more to come.

        Without memory for the row, this request alone fails.
        """
        prefilled = job.prefilled
        job.prefilled = None
        assert prefilled is not None
        if self._accept(job, prefilled.token_id, prefilled.logprob).finish_reason is not None:
            return
        request = job.inflight.request
        row = len(self._active)
        try:
            self.slots.ensure(row + 1, len(request.input_ids) + request.max_new_tokens)
            self.slots.fill(row, prefilled.kv)
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # torch says RuntimeError where there is no memory left
            logger.exception("There is no memory to decode a request in; it is given up")
            self._news[-1] = (
                job,
                Piece(finish_reason=abort_reason(f"{type(error).__name__}: {error}", 500)),
            )
            return
        # a grammar reads what has been written, not what might have been
        if request.sampling.drafts is not None and request.sampling.grammar is None:
            job.drafter = Drafter(request.input_ids, request.sampling.drafts)
            job.drafter.extend(job.output.draw.output_ids)
        self._active.append(job)
        self._sampler = None

    def drop(self, job: DecodeJob) -> None:
        """See `ModelWorker`."""
        if job in self._active:
            self._vacate(self._active.index(job))

    def step(self) -> Sequence[tuple[DecodeJob, Piece]]:
        """Return first tokens that came with their KV; else decode a step of all requests.

        A request has one token of a step, or several that were drafted.
        """
        if self._active and not self._news:
            self._decode()
        news = self._news
        self._news = []
        return news

    def fail(self, message: str) -> Sequence[tuple[DecodeJob, Piece]]:
        """Give up the whole batch: its state after an error is unknown."""
        failed = [(job, Piece(finish_reason=abort_reason(message, 500))) for job in self._active]
        news = self._news
        self._news = []
        self._active.clear()
        self._sampler = None
        return [*news, *failed]

    def _decode(self) -> None:
        rows = len(self._active)
        drafts = [job.draft() for job in self._active]
        jobs = zip(self._active, drafts, strict=True)
        width = self.gate.width(
            rows, [(len(draft), job.drafter.acceptance) for job, draft in jobs if job.drafter]
        )
        drafts = [draft[: width - 1] for draft in drafts]
        began_s = self.clock()
        logits = self._forward(drafts, width)
        if width > 1:
            written = self._verify(logits, drafts)
        else:
            if self._sampler is None:  # the same until the batch changes
                self._sampler = self._sampler_of([job.output.draw for job in self._active])
            written = [[drawn] for drawn in self._sampler(logits[:, 0])]
        ended = [
            row for row in range(rows) if self._write(self._active[row], drafts[row], written[row])
        ]
        for row in reversed(ended):
            self._vacate(row)
        self.gate.note(rows, width, self.clock() - began_s)

    def _forward(self, drafts: Sequence[Sequence[int]], width: int) -> Tensor:
        """Return logits `[rows, width, vocab]` after each row's last token and its draft."""
        device = self.lm.kv_shape.device
        ids = [
            [job.output.draw.output_ids[-1], *draft, *[0] * (width - 1 - len(draft))]
            for job, draft in zip(self._active, drafts, strict=True)
        ]
        positions = torch.tensor([job.stored_tokens for job in self._active], device=device)
        return self.lm.decode(self.slots, torch.tensor(ids, device=device), positions)

    def _sampler_of(self, draws: Sequence[Draw]) -> BatchSampler:
        with_logprobs = any(job.inflight.request.return_logprob for job in self._active)
        return BatchSampler(draws, with_logprobs=with_logprobs, rng=self.rng)

    def _verify(self, logits: Tensor, drafts: Sequence[Sequence[int]]) -> list[list[Drawn]]:
        """Return for each row the tokens up to, and with, the first that is not the drafted one.

        Each place is drawn from as if the draft before it had been written. So the kept tokens are
        those that plain decoding draws, token for token if the request has a seed, and of the same
        distribution if it has none.
        """
        places = [
            (row, place) for row, draft in enumerate(drafts) for place in range(len(draft) + 1)
        ]
        draws = [self._active[row].output.draw.after(drafts[row][:place]) for row, place in places]
        rows, columns = zip(*places, strict=True)
        drawn = iter(self._sampler_of(draws)(logits[list(rows), list(columns)]))
        verified = []
        for draft in drafts:
            row = [next(drawn) for _ in range(len(draft) + 1)]
            verified.append(row[: count_matching(draft, [token for token, _ in row]) + 1])
        return verified

    def _write(self, job: DecodeJob, draft: Sequence[int], written: Sequence[Drawn]) -> bool:
        """Add a pass's tokens to the request's output; return whether that ended it."""
        first = len(self._news)
        ended = False
        for token, logprob in written:
            ended = self._accept(job, token, logprob).finish_reason is not None
            if ended:
                break
        if draft:
            piece = self._news[first][1]
            accepted = min(len(self._news) - first, len(written) - 1)
            self._news[first] = job, replace(piece, drafted=len(draft), accepted=accepted)
        if job.drafter is not None and not ended:
            job.drafter.extend([token for token, _ in written])
        return ended

    def _accept(self, job: DecodeJob, token_id: int, logprob: float | None) -> Piece:
        piece = job.output.accept(token_id, logprob)
        self._news.append((job, piece))
        return piece

    def _vacate(self, row: int) -> None:
        """Free `row` by moving the last row into it."""
        last = len(self._active) - 1
        if row != last:
            moved = self._active[last]
            self.slots.move(last, row, moved.stored_tokens + 1)
            self._active[row] = moved
        self._active.pop()
        self._sampler = None


class DecodeService(Service[DecodeJob, Piece]):
    """The service of a decode server."""

    def __init__(
        self, settings: EmbeddedSettings, lm: CausalLm, kv: KvClient, rng: random.Random
    ) -> None:
        self._lm = lm
        self._kv = kv
        self._capacity = KvCapacity(settings.max_total_tokens, settings.max_running_requests)
        self._worker = DecodeWorker(
            lm, SlotKv(lm.kv_shape), rng, gate=DraftGate(settings.draft_width)
        )
        super().__init__(self._worker, lambda job, piece: job.inflight.put(piece))

    def check(self, request: GenerateRequest) -> None:
        """See `Service.check`."""
        super().check(request)
        if request.prefill_only or request.bootstrap_host is None or request.bootstrap_port is None:
            raise InvalidRequest(
                "A decode server needs the bootstrap_host and bootstrap_port of a prefill server.",
                remedy="Send the same body to both servers of a pair.",
            )

    async def work(self, inflight: Inflight) -> None:
        """Put pieces as they are decoded. KV is allocated before the transfer, as in SGLang."""
        request = inflight.request
        assert (
            request.bootstrap_host and request.bootstrap_port and request.bootstrap_room is not None
        )
        room = request.bootstrap_host, request.bootstrap_port, request.bootstrap_room
        taken = False
        try:
            async with self._capacity.allocate(len(request.input_ids) + request.max_new_tokens):
                inflight.transferring = True
                output = DecodedOutput.of(request, self._lm, inflight.grammar)
                prefilled = await self._kv.fetch(*room)
                inflight.transferring = False
                if (tokens := prefilled.kv.shape[3]) != len(request.input_ids):
                    raise KvTransferError(
                        f"the room holds {tokens} tokens, not {len(request.input_ids)}"
                    )
                inflight.cached_tokens = prefilled.cached_tokens
                taken = True
                job = DecodeJob(inflight, output, prefilled)
                self.thread.submit(job)
                try:
                    await asyncio.Event().wait()  # until its reader has its last piece and cancels
                finally:
                    self.thread.drop(job)
        except KvTransferError as error:
            taken = True
            inflight.fail(
                f"Decode transfer failed for request {request.rid} room_id={room[2]} with "
                f"exception {error}"
            )
        finally:
            if not taken:
                await self._kv.give_up(*room)

    def loads(self) -> Loads:
        """See `Service.loads`."""
        return Loads(
            running=self._worker.running,
            waiting=0,
            used_tokens=self._worker.stored_tokens,
            decode_prealloc=self._capacity.waiting,
            decode_transfer=sum(each.transferring for each in self.inflight.values()),
        )
