"""The decode engine: continuous batching, in which sequences join and leave between two steps.

Steps in which nobody joins, leaves or is heard of are taken together: what a run costs the simulator depends on the
pieces its output is sent in, not on its tokens.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from shell_router.engines.simulated.costs import DecodeCosts
from shell_router.engines.simulated.processor import Job, Processor

Heard = Callable[[int], None]
"""Told how many tokens a writing has written so far."""


@dataclass(slots=True, eq=False)
class Writing:
    """A prompt that writes `wanted` tokens, and is heard of at the first and then every `interval`.

    The first comes with the prompt's KV: it joined when `joined` + 1 steps were done.
    """

    prompt_tokens: int
    wanted: int
    interval: int
    heard: Heard
    joined: int = 0
    running: bool = False
    left: bool = False

    @property
    def room(self) -> int:
        """The tokens it will hold in the end."""
        return self.prompt_tokens + self.wanted

    def next_heard(self, written: int) -> int:
        """The number of written tokens at which it is next heard of: 1, 1 + interval, ..., wanted."""
        return min(written + self.interval - (written - 1) % self.interval, self.wanted)


class DecodeEngine:
    """Sequences have their room from `admit` to `leave`; between them they `join` the batch.

    `beside` does what tokens cost beside the engine; without it that is free.

    `busy_s` is the time of its steps, had it the processor alone, `batch_s` that time times the sequences in them, and
    `written` counts tokens.
    """

    def __init__(self, costs: DecodeCosts, processor: Processor, beside: Processor | None = None) -> None:
        self._costs = costs
        self._processor = processor
        self._beside = beside
        self._loop = asyncio.get_running_loop()
        self._free_tokens = costs.cache_tokens
        self._free_places = costs.at_once
        self._waiting: deque[tuple[Writing, asyncio.Future[None]]] = deque()
        self._joining: list[Writing] = []
        self._due: list[tuple[int, int, Writing]] = []
        self._order = count()
        self._steps = 0
        self._sequences = 0
        self._context = 0
        self._job: Job | None = None
        self._job_steps = 0
        self._job_size = (0, 0)  # writings and the sum of their lengths, when it began
        self._worked_s = 0.0  # on it, before it was last interrupted
        self.busy_s = 0.0
        self.batch_s = 0.0
        self.written = 0

    @property
    def taken_tokens(self) -> int:
        """Room that is taken, by what is written and by what will be."""
        return self._costs.cache_tokens - self._free_tokens

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of those who wait for room."""
        return sum(writing.prompt_tokens for writing, turn in self._waiting if not turn.cancelled())

    @property
    def requests(self) -> tuple[int, int]:
        """How many have room, and how many wait for it."""
        return self._costs.at_once - self._free_places, len(self._waiting)

    # --- room

    async def admit(self, writing: Writing) -> None:
        """Wait for the room that the writing will need in the end, in the order of asking."""
        turn = self._loop.create_future()
        self._waiting.append((writing, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._let_in()
            else:
                self.leave(writing)
            raise

    def leave(self, writing: Writing) -> None:
        """Give the room back, and end what it still writes."""
        if writing.left:
            return
        writing.left = True
        if writing.running:
            self._stop(writing)
            self._interrupt()
        self._free_tokens += min(writing.room, self._costs.cache_tokens)
        self._free_places += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            writing, turn = self._waiting[0]
            needed = min(writing.room, self._costs.cache_tokens)  # one that would never fit goes alone
            if not turn.cancelled():
                if needed > self._free_tokens or self._free_places < 1:
                    return
                self._free_tokens -= needed
                self._free_places -= 1
                turn.set_result(None)
            self._waiting.popleft()

    # --- steps

    def join(self, writing: Writing) -> None:
        """Write from the next step on."""
        self._joining.append(writing)
        self._interrupt()

    def _interrupt(self) -> None:
        """End the steps under way with the one that has begun."""
        if self._job is None:
            self._go_on()
            return
        self._worked_s += self._processor.stop(self._job)
        sequences, context = self._job_size
        self._job_steps = self._costs.steps_begun(self._worked_s, sequences, context, self._job_steps)
        left_s = max(0.0, self._costs.steps_s(self._job_steps, sequences, context) - self._worked_s)
        self._job = self._processor.start(left_s, self._end_steps)

    def _go_on(self) -> None:
        """Let in who waits, and take all steps up to the next at which somebody is heard of."""
        for writing in self._joining:
            if not writing.left:
                self._start(writing)
        self._joining.clear()
        while self._due and self._due[0][2].left:
            heapq.heappop(self._due)
        if not self._due:
            self._job = None
            return
        self._job_steps = 1 if self._beside is not None else self._due[0][0] - self._steps
        self._job_size = (self._sequences, self._context)
        self._worked_s = 0.0
        self._job = self._processor.start(self._costs.steps_s(self._job_steps, *self._job_size), self._end_steps)

    def _start(self, writing: Writing) -> None:
        writing.running = True
        writing.joined = self._steps - 1
        self._sequences += 1
        self._context += writing.prompt_tokens + 1
        self.written += 1
        self._hear(writing)

    def _stop(self, writing: Writing) -> None:
        writing.running = False
        self._sequences -= 1
        self._context -= writing.prompt_tokens + self._steps - writing.joined

    def _hear(self, writing: Writing) -> None:
        written = self._steps - writing.joined
        if written < writing.wanted:
            at_step = writing.joined + writing.next_heard(written)
            heapq.heappush(self._due, (at_step, next(self._order), writing))
        else:
            self._stop(writing)
        writing.heard(written)

    def _end_steps(self) -> None:
        sequences = self._job_size[0]  # whoever left meanwhile was in every step that had begun
        took_s = self._costs.steps_s(self._job_steps, *self._job_size)
        self.busy_s += took_s
        self.batch_s += took_s * sequences
        self.written += self._job_steps * sequences
        if self._beside is not None:
            self._beside.start(self._job_steps * sequences * self._costs.beside_s, lambda: None)
        self._steps += self._job_steps
        self._context += self._job_steps * self._sequences
        while self._due and self._due[0][0] <= self._steps:
            _, _, writing = heapq.heappop(self._due)
            if not writing.left:
                self._hear(writing)
        self._go_on()
