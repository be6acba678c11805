"""Prefill, chunk by chunk, first come first served, over the prefix cache."""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shell_router.engines.embedded.adapted_linears import Adapter
from shell_router.engines.embedded.causal_lm import CausalLm
from shell_router.engines.embedded.kv_layers import PromptKv
from shell_router.engines.embedded.radix import NO_ADAPTER, Match, RadixCache
from shell_router.engines.embedded.sampler import BatchSampler, Draw, token_logprobs


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A computed prompt: its KV `[layers, 2, kv_heads, tokens, head_dim]` and the first output token.

    `input_logprobs` are those of the prompt's tokens from where they were asked for; the first of them has none.
    `adapter` is the fingerprint of the one that computed it.
    """

    kv: Tensor
    cached_tokens: int
    token_id: int
    logprob: float | None
    input_logprobs: tuple[float | None, ...] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The prompt could not be computed."""

    message: str


@dataclass(frozen=True, slots=True, eq=False)
class PrefillJob:
    """A prompt to compute, and to score from `scored_from` on; `outcome` is set in the event loop's thread."""

    input_ids: Sequence[int]
    draw: Draw
    with_logprobs: bool
    scored_from: int | None
    outcome: "asyncio.Future[Prefilled | Failed]"
    adapter: Adapter | None = None

    @property
    def owner(self) -> int:
        """Whose KV it is in the cache."""
        return NO_ADAPTER if self.adapter is None else self.adapter.number

    @property
    def reusable_tokens(self) -> int:
        """How much of the prompt may come from the cache: logits are computed anew."""
        last = len(self.input_ids) - 1
        return last if self.scored_from is None else min(last, self.scored_from)


@dataclass(slots=True)
class _Running:
    job: PrefillJob
    ids: Tensor
    prompt: PromptKv
    match: Match
    done: int
    input_logprobs: list[float | None]


@dataclass(slots=True)
class PrefillCounts:
    """Totals since start, in tokens; `cached` is part of `prompt`."""

    prompt: int = 0
    cached: int = 0


@dataclass(slots=True)
class PrefillWorker:
    """Computes one prompt at a time and keeps every chunk in the prefix cache as soon as it is computed.

    At most all but the last token of a prompt is taken from the cache: the last one must be computed for its logits.
    """

    lm: CausalLm
    cache: RadixCache
    chunk_tokens: int
    rng: random.Random
    counts: PrefillCounts = field(default_factory=PrefillCounts)
    _waiting: deque[PrefillJob] = field(default_factory=deque)
    _running: _Running | None = None

    @property
    def busy(self) -> bool:
        return self._running is not None or bool(self._waiting)

    @property
    def running(self) -> int:
        return int(self._running is not None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def admit(self, job: PrefillJob) -> None:
        self._waiting.append(job)

    def drop(self, job: PrefillJob) -> None:
        if self._running is not None and self._running.job is job:
            self._leave(self._running)
        elif job in self._waiting:
            self._waiting.remove(job)

    def step(self) -> Sequence[tuple[PrefillJob, Prefilled | Failed]]:
        """Compute one chunk; a result when it was the prompt's last."""
        if self._running is None and self._waiting:
            self._running = self._begin(self._waiting[0])
            self._waiting.popleft()
        if self._running is None:
            return ()
        logits = self._compute_chunk(self._running)
        if self._running.done < len(self._running.job.input_ids):
            return ()
        return (self._finish(self._running, logits),)

    def fail(self, message: str) -> Sequence[tuple[PrefillJob, Prefilled | Failed]]:
        """Give up the running prompt, or the one that could not be begun; others that wait have met no error."""
        if self._running is not None:
            job = self._running.job
            self._leave(self._running)
        elif self._waiting:
            job = self._waiting.popleft()
        else:
            return ()
        return ((job, Failed(message)),)

    def _begin(self, job: PrefillJob) -> _Running:
        match = self.cache.match(job.input_ids[: job.reusable_tokens], job.owner)
        prompt = PromptKv(self.lm.kv_shape.empty(len(job.input_ids)))
        match.copy_into(prompt.kv)
        ids = torch.tensor(job.input_ids, device=self.lm.kv_shape.device)
        self.cache.pin(match.node)  # nothing fails after it, so that whoever is pinned is running
        self.counts.prompt += len(job.input_ids)
        self.counts.cached += match.length
        return _Running(job, ids, prompt, match, match.length, [] if job.scored_from is None else [None])

    def _compute_chunk(self, running: _Running) -> Tensor:
        """The logits of the chunk's last token `[1, vocab]`."""
        job, start = running.job, running.done
        stop = min(start + self.chunk_tokens, len(job.input_ids))
        first = stop if job.scored_from is None else max(start, job.scored_from)
        logits = self.lm.prefill(running.prompt, running.ids[start:stop], start, max(1, stop - first), job.adapter)
        self.cache.insert(job.input_ids[:stop], running.prompt.kv, job.owner)
        if first < stop:
            scored = running.ids[first + 1 : stop + 1]
            running.input_logprobs += token_logprobs(logits[: len(scored)], scored)
        running.done = stop
        return logits[-1:]

    def _finish(self, running: _Running, logits: Tensor) -> tuple[PrefillJob, Prefilled]:
        job = running.job
        sampler = BatchSampler([job.draw], with_logprobs=job.with_logprobs, rng=self.rng)
        tokens, logprobs = sampler(logits)
        self._leave(running)
        logprob = None if logprobs is None else logprobs[0]
        fingerprint = "" if job.adapter is None else job.adapter.fingerprint
        return job, Prefilled(
            running.prompt.kv, running.match.length, tokens[0], logprob, tuple(running.input_logprobs), fingerprint
        )

    def _leave(self, running: _Running) -> None:
        self.cache.unpin(running.match.node)
        self._running = None
