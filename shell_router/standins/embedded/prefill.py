"""The prefill side: a prompt is computed in chunks over the prefix cache, then handed over."""

import asyncio
import random
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.kv_transfer import (
    BootstrapRoom,
    BootstrapRooms,
    KvTransferError,
    PrefilledKv,
)
from shell_router.standins.embedded.model import CausalLm, PromptKv
from shell_router.standins.embedded.output import DecodedOutput, Piece
from shell_router.standins.embedded.sampling import BatchSampler, token_logprobs
from shell_router.standins.embedded.service import Inflight, Loads, Service
from shell_router.standins.embedded.settings import EmbeddedSettings
from shell_router.standins.embedded.wire import GenerateRequest
from shell_router.standins.kv_capacity import KvCapacity
from shell_router.standins.prefix_cache import Node, PrefixCache, iterate_upwards

SHORT_LEAF_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix of `length` tokens that ends with `node`, the node to pin."""

    length: int
    node: Node

    def copy_into(self, kv: Tensor) -> None:
        """Write the prefix's KV to the first `length` positions of `kv`."""
        end = self.length
        for node in iterate_upwards(self.node):
            kv[:, :, :, end - len(node.ids) : end] = node.kv
            end -= len(node.ids)


class KvCache(PrefixCache):
    """A prefix cache whose nodes hold KV, `[layers, 2, kv_heads, tokens, head_dim]`.

    Prompts are tuples of ids. SGLang keeps indices into a paged pool instead; on a CPU gathering a
    prefix is one cheap concatenation, and no attention kernel reads pages. A leaf shorter than
    `short_leaf_tokens` is extended in place: a prompt that grows by a few tokens at a time would
    otherwise become a chain of that many nodes, and every match would walk it.
    """

    def __init__(self, capacity: int, *, short_leaf_tokens: int = SHORT_LEAF_TOKENS) -> None:
        super().__init__(capacity)
        self._short_leaf_tokens = short_leaf_tokens

    def find(self, ids: tuple[int, ...], owner: Hashable = None) -> Match:
        """Return the longest prefix of `ids` that `owner` has cached, and count it as used."""
        node, length = self._descend(ids, owner)
        self._touch(node)
        return Match(length, node)

    def pin(self, node: Node) -> None:
        """Keep `node` and all above it from eviction until `unpin`."""
        for each in iterate_upwards(node):
            each.pins += 1

    def unpin(self, node: Node) -> None:
        """Undo one `pin` of `node`."""
        for each in iterate_upwards(node):
            each.pins -= 1

    def keep(self, ids: tuple[int, ...], kv: Tensor, owner: Hashable = None) -> None:
        """Copy the part of `owner`'s KV that is not cached yet.

        If pinned nodes leave too little room, a leading part of it is copied.
        """
        node, start, stop = self._make_room(ids, owner)
        if start < stop:
            new = kv[:, :, :, start:stop]
            if node.parent is None or node.children or len(node.ids) >= self._short_leaf_tokens:
                kept = (
                    new.clone()
                )  # before it has a node: where there is no memory for it, nothing has changed
                node = self._grow(node, ids[start:stop])
                node.kv = kept
            else:
                node.ids, node.kv = (*node.ids, *ids[start:stop]), torch.cat((node.kv, new), dim=3)
                self.tokens += stop - start
        self._touch(node)

    def _split(self, node: Node, at: int) -> Node:
        # copies, not views: a view would keep the whole storage alive after the other half is
        # evicted
        halves = node.kv[:, :, :, :at].clone(), node.kv[:, :, :, at:].clone()
        before = super()._split(node, at)
        before.kv, node.kv = halves
        return before


@dataclass(frozen=True, slots=True, eq=False)
class PrefillJob:
    """A request whose prompt is to be computed; `outcome` is set in the event loop's thread."""

    inflight: Inflight
    output: DecodedOutput
    outcome: "asyncio.Future[PrefilledKv]"

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.inflight.request.input_ids

    @property
    def owner(self) -> str | None:
        """The owner of the prefixes that the request may use."""
        return self.inflight.request.extra_key

    def settle(self, outcome: PrefilledKv | KvTransferError) -> None:
        """Set the outcome, unless its waiter has left."""
        if not self.outcome.done():
            if isinstance(outcome, PrefilledKv):
                self.outcome.set_result(outcome)
            else:
                self.outcome.set_exception(outcome)
                self.outcome.exception()  # seen: there may be no waiter


@dataclass(slots=True)
class _RunningPrefill:
    job: PrefillJob
    ids: Tensor
    prompt: PromptKv
    match: Match
    done: int
    input_logprobs: list[float | None]


@dataclass(slots=True)
class PrefillWorker:
    """A worker that computes one prompt at a time, and caches every chunk at once.

    `prompt_tokens` count since the start, and so do `cached_tokens`, which are part of them.
    """

    lm: CausalLm
    cache: KvCache
    chunk_tokens: int
    rng: random.Random
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _waiting: deque[PrefillJob] = field(default_factory=deque)
    _running: _RunningPrefill | None = None

    @property
    def busy(self) -> bool:
        """See `ModelWorker`."""
        return self._running is not None or bool(self._waiting)

    @property
    def requests(self) -> tuple[int, int]:
        """The number of prompts that run, and of those that wait."""
        return int(self._running is not None), len(self._waiting)

    def admit(self, job: PrefillJob) -> None:
        """See `ModelWorker`."""
        self._waiting.append(job)

    def drop(self, job: PrefillJob) -> None:
        """See `ModelWorker`."""
        if self._running is not None and self._running.job is job:
            self._leave(self._running)
        elif job in self._waiting:
            self._waiting.remove(job)

    def step(self) -> Sequence[tuple[PrefillJob, PrefilledKv | KvTransferError]]:
        """Compute one chunk; return a result if it was the prompt's last."""
        if self._running is None and self._waiting:
            self._running = self._begin(self._waiting[0])
            self._waiting.popleft()
        if self._running is None:
            return ()
        running = self._running
        job = self._running.job
        logits = self._compute_chunk(running)
        if running.done < len(job.ids):
            return ()
        sample = BatchSampler(
            [job.output.draw], with_logprobs=job.inflight.request.return_logprob, rng=self.rng
        )
        ((token_id, logprob),) = sample(logits)
        self._leave(running)
        scored = tuple(running.input_logprobs)
        return (
            (job, PrefilledKv(running.prompt.kv, running.match.length, token_id, logprob, scored)),
        )

    def fail(self, message: str) -> Sequence[tuple[PrefillJob, PrefilledKv | KvTransferError]]:
        """Give up the running prompt, or the one that could not be begun, but none that wait."""
        if self._running is not None:
            job = self._running.job
            self._leave(self._running)
        elif self._waiting:
            job = self._waiting.popleft()
        else:
            return ()
        return ((job, KvTransferError(message)),)

    def _begin(self, job: PrefillJob) -> _RunningPrefill:
        last = len(job.ids) - 1
        scored_from = job.inflight.request.scored_from
        # the last logits are computed anew, and all that are asked for
        match = self.cache.find(
            job.ids[: last if scored_from is None else min(last, scored_from)], job.owner
        )
        prompt = PromptKv(self.lm.kv_shape.empty(len(job.ids)))
        match.copy_into(prompt.kv)
        ids = torch.tensor(job.ids, device=self.lm.kv_shape.device)
        self.cache.pin(
            match.node
        )  # nothing fails after it, so that every pin belongs to a running prompt
        self.prompt_tokens += len(job.ids)
        self.cached_tokens += match.length
        return _RunningPrefill(
            job, ids, prompt, match, match.length, [] if scored_from is None else [None]
        )

    def _compute_chunk(self, running: _RunningPrefill) -> Tensor:
        """Return the logits of the chunk's last token, `[1, vocab]`."""
        job = running.job
        start = running.done
        stop = min(start + self.chunk_tokens, len(job.ids))
        scored_from = job.inflight.request.scored_from
        if scored_from is None:
            first = stop
        else:
            first = max(start, scored_from)
        kept = max(1, stop - first)
        logits = self.lm.prefill(running.prompt, running.ids[start:stop], start, kept)
        self.cache.keep(job.ids[:stop], running.prompt.kv, job.owner)
        if first < stop:
            scored = running.ids[first + 1 : stop + 1]
            running.input_logprobs += token_logprobs(logits[: len(scored)], scored)
        running.done = stop
        return logits[-1:]

    def _leave(self, running: _RunningPrefill) -> None:
        self.cache.unpin(running.match.node)
        self._running = None


# SGLang ends a prefill leg so, whatever was asked for: the length is the decode side's business.
HANDED_OVER = {"type": "length", "length": 0}
NO_LIMIT = 1 << 31


class PrefillService(Service[PrefillJob, PrefilledKv | KvTransferError]):
    """The service of a prefill server."""

    def __init__(
        self, settings: EmbeddedSettings, lm: CausalLm, rooms: BootstrapRooms, rng: random.Random
    ) -> None:
        self._lm = lm
        self._rooms = rooms
        self._capacity = KvCapacity(settings.max_total_tokens, NO_LIMIT)
        self._worker = PrefillWorker(
            lm, KvCache(settings.max_total_tokens), settings.chunked_prefill_size, rng
        )
        super().__init__(self._worker, PrefillJob.settle)

    async def stop(self) -> None:
        """Fail all rooms and stop the model's thread."""
        self._rooms.close_all()
        await super().stop()

    def check(self, request: GenerateRequest) -> None:
        """See `Service.check`."""
        if request.prefill_only:
            return
        super().check(request)
        if self._room(request).claimed:
            raise InvalidRequest(
                f"bootstrap_room {request.bootstrap_room} is in use.",
                remedy="Draw a new room for every attempt.",
            )

    async def work(self, inflight: Inflight) -> None:
        """Put one piece, the first token, once the decode partner has the KV.

        With the fake host the piece comes at once.
        """
        if inflight.request.prefill_only:
            inflight.put(await self._compute(inflight, None))
            return
        room = self._room(inflight.request)
        room.claimed = True
        try:
            inflight.put(await self._compute(inflight, room))
        except KvTransferError as error:
            room_id = inflight.request.bootstrap_room
            inflight.fail(
                f"Prefill transfer failed for request {inflight.request.rid} {room_id=} with "
                f"{error}"
            )
        finally:
            room.fail("Aborted by AbortReq.")

    def loads(self) -> Loads:
        """See `Service.loads`."""
        running, waiting = self._worker.requests
        return Loads(
            running=running,
            waiting=waiting + self._capacity.waiting,
            used_tokens=self._capacity.used_tokens,
            prefill_inflight=self._rooms.awaiting_decode,
            prompt_tokens_total=self._worker.prompt_tokens,
            cached_tokens_total=self._worker.cached_tokens,
        )

    def _room(self, request: GenerateRequest) -> BootstrapRoom:
        assert request.bootstrap_room is not None
        return self._rooms.open(request.bootstrap_room)

    async def _compute(self, inflight: Inflight, room: BootstrapRoom | None) -> Piece:
        """Compute the prompt, unless the room fails, and wait until its KV was taken.

        Raises `KvTransferError`.
        """
        async with self._capacity.allocate(len(inflight.request.input_ids)):
            output = DecodedOutput.of(inflight.request, self._lm, inflight.grammar)
            job = PrefillJob(inflight, output, asyncio.get_running_loop().create_future())
            self.thread.submit(job)
            try:
                failed = {room.taken} if room else set()
                await asyncio.wait({job.outcome} | failed, return_when=asyncio.FIRST_COMPLETED)
                if room is not None and room.taken.done():
                    room.taken.result()
                prefilled = await job.outcome
            finally:
                self.thread.drop(job)
            inflight.cached_tokens = prefilled.cached_tokens
            if room is not None:
                inflight.transferring = True
                room.offer(prefilled)
                await asyncio.shield(room.taken)
        piece = output.accept(prefilled.token_id, prefilled.logprob)
        return Piece(
            piece.token_id, piece.logprob, piece.text, HANDED_OVER, prefilled.input_logprobs
        )
