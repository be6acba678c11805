"""An engine's KV capacity: sequences wait for it in order of arrival, and are allocated it."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_ROUNDING = 1e-5  # of a token


def _ignore(*_: object) -> None:
    """Do nothing."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt for which `wanted` tokens are decoded.

    `on_progress` gets the number of decoded tokens at the first and then every `interval`.
    `on_preempt` is called when the KV is freed in favor of other sequences: the sequence then waits
    at the head of the queue, and has to be allocated KV and added to the decode batch again.

    Attributes:
        written: Tokens decoded when the sequence was last added to the batch or removed from it.
        first_step: The step at which it would have begun to write, had it never been removed.
        due: The step at which its progress is next reported; below 0 while it is not in the batch.
        allocated: Whether it has KV.
        running: Whether it is in the batch.
        finished: Whether its KV is freed for good.
        per_pass: Tokens that a step gives in the mean; more than 1 with drafts.
        width: Tokens that a step computes.
    """

    prompt_tokens: int
    wanted: int = 0
    interval: int = 1
    on_progress: Callable[[int], None] = _ignore
    on_preempt: Callable[[], None] = _ignore
    allocation: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    written: int = 0
    first_step: float = 0
    due: int = -1
    allocated: bool = False
    running: bool = False
    finished: bool = False
    per_pass: float = 1
    width: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and those in `written`."""
        return self.prompt_tokens + self.written

    def written_by(self, step: int) -> int:
        """Return the tokens that are decoded after `step`, if it stays in the batch until then."""
        return min(self.wanted, int((step - self.first_step) * self.per_pass + _ROUNDING))

    def resume(self, step: int) -> None:
        """Go on writing after `step`."""
        self.first_step = step - self.written / self.per_pass

    def step_of(self, written: int) -> int:
        """Return the step after which that many tokens are decoded."""
        return math.ceil(self.first_step + written / self.per_pass - _ROUNDING**2)

    def next_report(self, written: int) -> int:
        """Return the number of tokens at the next report: 1, 1 + interval, ..., wanted."""
        return min(written + self.interval - (written - 1) % self.interval, self.wanted)


class KvCapacity:
    """The KV of `tokens` tokens, for `max_batch_size` sequences at most.

    A sequence that would never fit runs alone. Without `reserved_tokens` a sequence is allocated KV
    for all tokens that it will write. With it, a sequence is allocated KV for the tokens it has,
    once that many more are free for it and for every running one; later steps allocate more.
    """

    def __init__(
        self, tokens: int, max_batch_size: int, reserved_tokens: int | None = None
    ) -> None:
        self.tokens = tokens
        self.free_tokens = tokens
        self.waiting_tokens = 0
        self.running = 0
        self._max_batch_size = max_batch_size
        self._reserved_tokens = reserved_tokens
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()

    @property
    def allocates_per_step(self) -> bool:
        """Whether sequences are allocated KV as they write."""
        return self._reserved_tokens is not None

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV is allocated."""
        return self.tokens - self.free_tokens

    @property
    def waiting(self) -> int:
        """The number of sequences that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def allocate(self, tokens: int) -> AsyncIterator[None]:
        """Wait for KV of `tokens` tokens, and free it at the end of the block."""
        sequence = Sequence(tokens)
        self.enqueue(sequence)
        self.allocate_waiting()
        try:
            await sequence.allocation
            yield
        finally:
            self.free(sequence)
            self.allocate_waiting()

    def enqueue(self, sequence: Sequence) -> None:
        """Add the sequence to the queue, unless it waits already or has KV."""
        if sequence not in self._waiting and not sequence.allocated:
            self._add_waiting(sequence)

    def allocate_waiting(self, step_tokens: int = 0) -> None:
        """Allocate KV from the head of the queue, but leave `step_tokens` free for a step."""
        while self._waiting:
            sequence = next(iter(self._waiting))
            if not self._can_allocate(sequence, step_tokens):
                return
            self._remove_waiting(sequence)
            sequence.allocated = True
            self.running += 1
            self.free_tokens -= self._count_needed(sequence)
            if not sequence.allocation.done():
                sequence.allocation.set_result(None)

    def allocate_written(self, tokens: int) -> None:
        """Allocate KV for tokens that running sequences have written."""
        if self.allocates_per_step:
            self.free_tokens -= tokens

    def free(self, sequence: Sequence) -> None:
        """Free the sequence's KV, or its place in the queue."""
        if sequence in self._waiting:
            self._remove_waiting(sequence)
        if sequence.allocated:
            sequence.allocated = False
            self.running -= 1
            self.free_tokens += self._count_needed(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free the sequence's KV and put it at the head of the queue."""
        self.free(sequence)
        sequence.allocation = asyncio.get_running_loop().create_future()
        self._add_waiting(sequence)
        self._waiting.move_to_end(sequence, last=False)

    def _add_waiting(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self.waiting_tokens += sequence.tokens

    def _remove_waiting(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        self.waiting_tokens -= sequence.tokens

    def _count_needed(self, sequence: Sequence) -> int:
        if self.allocates_per_step:
            return sequence.tokens
        return sequence.prompt_tokens + sequence.wanted

    def _can_allocate(self, sequence: Sequence, step_tokens: int) -> bool:
        if self.running >= self._max_batch_size:
            return False
        if not self.running:
            return True
        reserved = (self._reserved_tokens or 0) * (self.running + 1)
        return self._count_needed(sequence) + max(reserved, step_tokens) <= self.free_tokens
