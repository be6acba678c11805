"""An engine's KV capacity: which sequences hold some, and which wait for it in order of arrival."""

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
    """A prompt that writes `wanted` tokens; `on_progress` gets their number at the first and then
    every `interval`.

    `on_preempt` is called when its KV is dropped in favor of others: it then waits at the head of
    the queue, and has to be admitted and to join the batch again. `written` counts the tokens it
    had when it last joined or stopped, `joined` is the step at which it would have begun to write,
    had it never stopped. `due` is the step at which its progress is next reported, below 0 while it
    does not run. With drafts a step gives `per_pass` tokens in the mean, and computes `width`.
    """

    prompt_tokens: int
    wanted: int = 0
    interval: int = 1
    on_progress: Callable[[int], None] = _ignore
    on_preempt: Callable[[], None] = _ignore
    admission: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    written: int = 0
    joined: float = 0
    due: int = -1
    admitted: bool = False
    running: bool = False
    left: bool = False
    per_pass: float = 1
    width: int = 1

    @property
    def tokens(self) -> int:
        """Of its prompt, and those that it had written when it last joined or stopped."""
        return self.prompt_tokens + self.written

    def written_by(self, step: int) -> int:
        """Tokens that are there after that step, if it has not stopped since it joined."""
        return min(self.wanted, int((step - self.joined) * self.per_pass + _ROUNDING))

    def join(self, step: int) -> None:
        """It goes on writing after that step."""
        self.joined = step - self.written / self.per_pass

    def step_of(self, written: int) -> int:
        """The step after which that many tokens are there."""
        return math.ceil(self.joined + written / self.per_pass - _ROUNDING**2)

    def next_report(self, written: int) -> int:
        """The number of written tokens at which progress is next reported: 1, 1 + interval, ...,
        wanted.
        """
        return min(written + self.interval - (written - 1) % self.interval, self.wanted)


class KvCapacity:
    """At most `max_batch_size` sequences with `tokens` tokens of KV; a sequence that would never
    fit runs alone.

    Without `reserved_tokens` a sequence holds all that it will write from its admission to its
    release. With it, a sequence holds what it has, is admitted where that many tokens more are free
    for it and for every other, and `grow`s.
    """

    def __init__(
        self, tokens: int, max_batch_size: int, reserved_tokens: int | None = None
    ) -> None:
        self.tokens = tokens
        self.free_tokens = tokens
        self.waiting_tokens = 0
        self.holders = 0
        self._max_batch_size = max_batch_size
        self._reserved_tokens = reserved_tokens
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()

    @property
    def grows(self) -> bool:
        """Whether sequences take KV as they write."""
        return self._reserved_tokens is not None

    @property
    def used_tokens(self) -> int:
        """Tokens that are held."""
        return self.tokens - self.free_tokens

    @property
    def waiting(self) -> int:
        """How many sequences wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, tokens: int) -> AsyncIterator[None]:
        """Wait for `tokens` of KV, and hold them for the length of the block."""
        sequence = Sequence(tokens)
        self.enqueue(sequence)
        self.admit()
        try:
            await sequence.admission
            yield
        finally:
            self.release(sequence)
            self.admit()

    def enqueue(self, sequence: Sequence) -> None:
        """Queue up, unless it waits already or is admitted."""
        if sequence not in self._waiting and not sequence.admitted:
            self._queue(sequence)

    def admit(self, next_step: int = 0) -> None:
        """Admit those at the head of the queue that fit, leaving the tokens of the next step
        free."""
        while self._waiting and self._fits(sequence := next(iter(self._waiting)), next_step):
            self._unqueue(sequence)
            sequence.admitted = True
            self.holders += 1
            self.free_tokens -= self._held(sequence)
            if not sequence.admission.done():
                sequence.admission.set_result(None)

    def grow(self, tokens: int) -> None:
        """Sequences have written this many tokens."""
        if self.grows:
            self.free_tokens -= tokens

    def release(self, sequence: Sequence) -> None:
        """Free its KV, or its place in the queue."""
        if sequence in self._waiting:
            self._unqueue(sequence)
        if sequence.admitted:
            sequence.admitted = False
            self.holders -= 1
            self.free_tokens += self._held(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free its KV and put it at the head of the queue."""
        self.release(sequence)
        sequence.admission = asyncio.get_running_loop().create_future()
        self._queue(sequence)
        self._waiting.move_to_end(sequence, last=False)

    def _queue(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self.waiting_tokens += sequence.tokens

    def _unqueue(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        self.waiting_tokens -= sequence.tokens

    def _held(self, sequence: Sequence) -> int:
        if self.grows:
            return sequence.tokens
        return sequence.prompt_tokens + sequence.wanted

    def _fits(self, sequence: Sequence, next_step: int) -> bool:
        if self.holders >= self._max_batch_size:
            return False
        ahead = (self._reserved_tokens or 0) * (self.holders + 1)
        return not self.holders or self._held(sequence) + max(ahead, next_step) <= self.free_tokens
