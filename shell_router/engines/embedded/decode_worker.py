"""Decode with continuous batching: requests join and leave between steps."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shell_router.engines.embedded.adapted_linears import AdaptedRows, Adapter, rows_by_adapter
from shell_router.engines.embedded.causal_lm import CausalLm
from shell_router.engines.embedded.kv_layers import SlotKv
from shell_router.engines.embedded.mailbox import Mailbox
from shell_router.engines.embedded.output import Output, Piece, abort_reason
from shell_router.engines.embedded.sampler import BatchSampler

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeJob:
    """A prompt whose KV has arrived, with its first token; pieces go to `mailbox`.

    `kv` is `[layers, 2, kv_heads, prompt tokens, head_dim]` and is let go once it is copied into the batch.
    """

    kv: Tensor | None
    prompt_tokens: int
    room_tokens: int
    first_token: int
    first_logprob: float | None
    output: Output
    with_logprobs: bool
    mailbox: Mailbox
    adapter: Adapter | None = None


@dataclass(slots=True)
class DecodeWorker:
    """Steps all running requests together; request i of `_active` owns row i of the slots."""

    lm: CausalLm
    slots: SlotKv
    rng: random.Random
    generated_tokens: int = 0
    _active: list[DecodeJob] = field(default_factory=list)
    _news: list[tuple[DecodeJob, Piece]] = field(default_factory=list)
    _sampler: BatchSampler | None = None
    _adapted: tuple[AdaptedRows, ...] = ()

    @property
    def busy(self) -> bool:
        return bool(self._active or self._news)

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV the batch holds."""
        return sum(job.prompt_tokens + job.output.draw.position - 1 for job in tuple(self._active))

    def admit(self, job: DecodeJob) -> None:
        """Take the first token, and a row if there is more to come. Where there is no memory for it, it fails alone."""
        piece = self._accept(job, job.first_token, job.first_logprob)
        if piece.finish_reason is None and job.kv is not None:
            try:
                self._occupy(job, job.kv)
            except (RuntimeError, MemoryError) as error:  # torch says RuntimeError where there is no memory left
                logger.exception("There is no room to decode a request in; it is given up")
                self._news[-1] = job, Piece(finish_reason=abort_reason(f"{type(error).__name__}: {error}", 500))
        job.kv = None

    def _occupy(self, job: DecodeJob, kv: Tensor) -> None:
        row = len(self._active)
        self.slots.ensure(row + 1, job.room_tokens)
        self.slots.fill(row, kv)
        self._active.append(job)
        self._sampler = None

    def drop(self, job: DecodeJob) -> None:
        if job in self._active:
            self._vacate(self._active.index(job))

    def step(self) -> Sequence[tuple[DecodeJob, Piece]]:
        """One token for every running request; first tokens that came with their KV go out before that."""
        if self._active and not self._news:
            self._decode()
        news, self._news = self._news, []
        return news

    def fail(self, message: str) -> Sequence[tuple[DecodeJob, Piece]]:
        """Give up the whole batch: its state after an error is unknown."""
        failed = [(job, Piece(finish_reason=abort_reason(message, 500))) for job in self._active]
        news, self._news = self._news, []
        self._active.clear()
        self._sampler, self._adapted = None, ()
        return [*news, *failed]

    def _decode(self) -> None:
        device = self.lm.kv_shape.device
        last = torch.tensor([job.output.draw.output_ids[-1] for job in self._active], device=device)
        positions = torch.tensor(
            [job.prompt_tokens + job.output.draw.position - 1 for job in self._active], device=device
        )
        if self._sampler is None:
            self._prepare()
        assert self._sampler is not None
        tokens, logprobs = self._sampler(self.lm.decode(self.slots, last, positions, self._adapted))
        ended = [
            row
            for row, job in enumerate(self._active)
            if self._accept(job, tokens[row], logprobs[row] if logprobs else None).finish_reason
        ]
        for row in reversed(ended):
            self._vacate(row)

    def _prepare(self) -> None:
        """What stays the same until the batch changes."""
        self._sampler = BatchSampler(
            [job.output.draw for job in self._active],
            with_logprobs=any(job.with_logprobs for job in self._active),
            rng=self.rng,
        )
        self._adapted = rows_by_adapter([job.adapter for job in self._active], self.lm.kv_shape.device)

    def _accept(self, job: DecodeJob, token_id: int, logprob: float | None) -> Piece:
        piece = job.output.accept(token_id, logprob)
        self.generated_tokens += piece.token_id is not None
        self._news.append((job, piece))
        return piece

    def _vacate(self, row: int) -> None:
        """Free `row` by moving the last row into it."""
        last = len(self._active) - 1
        if row != last:
            moved = self._active[last]
            self.slots.move(last, row, moved.prompt_tokens + moved.output.draw.position)
            self._active[row] = moved
        self._active.pop()
        self._sampler, self._adapted = None, ()
