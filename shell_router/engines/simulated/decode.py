"""The decode engine: continuous batching, in which sequences join and leave between two steps.

Steps in which nobody joins, leaves or is heard of are taken together: what a run costs the simulator depends on the
pieces its output is sent in, not on its tokens.
"""

import asyncio
import heapq

from shell_router.engines.simulated.costs import DecodeCosts
from shell_router.engines.simulated.processor import Job, Processor
from shell_router.engines.simulated.room import Room, Writing


class DecodeEngine:
    """Sequences have their room from `admit` to `leave`; between them they `join` the batch.

    Where sequences do not claim all their room at the start (`reserved_tokens`), the engine takes some back when a step
    does not fit: first of who has written least, as SGLang does. It lets nobody in before that step is done, if anybody
    is left for it.

    `beside` does what tokens cost beside the engine; without it that is free.

    `busy_s` is the time of its steps, had it the processor alone, `batch_s` that time times the sequences in them,
    `written` counts tokens, and `taken_back` how often a sequence lost its room.
    """

    def __init__(self, costs: DecodeCosts, processor: Processor, beside: Processor | None = None) -> None:
        self._costs = costs
        self._processor = processor
        self._beside = beside
        self._room = Room(costs)
        self._joining: list[tuple[Writing, int]] = []
        self._running: dict[Writing, None] = {}
        self._due: dict[int, list[Writing]] = {}  # by step, who is heard of then, unless they left or stopped
        self._due_steps: list[int] = []  # those steps, as a heap
        self._steps = 0
        self._taken_at = -1  # the step at which room was last taken
        self._context = 0
        self._job: Job | None = None
        self._job_steps = 0
        self._job_size = (0, 0)  # writings and the sum of their lengths, when it began
        self._worked_s = 0.0  # on it, before it was last interrupted
        self.busy_s = 0.0
        self.batch_s = 0.0
        self.written = 0
        self.taken_back = 0

    @property
    def taken_tokens(self) -> int:
        """Room that is taken: by what is there, and where sequences claim it, by what will be written."""
        meanwhile = self._steps_done() * len(self._running) if self._room.grows else 0
        return self._costs.cache_tokens - max(0, self._room.free_tokens - meanwhile)

    @property
    def waiting_tokens(self) -> int:
        """Tokens, mostly of prompts, of those who wait for room."""
        return self._room.waiting_tokens

    @property
    def requests(self) -> tuple[int, int]:
        """How many have room, and how many wait for it."""
        return self._room.holders, self._room.waiting

    # --- room

    async def admit(self, writing: Writing) -> None:
        """Wait for room, in the order of asking; whoever lost it is before all others."""
        self._room.ask(writing)
        self._let_in()
        try:
            await writing.turn
        except asyncio.CancelledError:
            self.leave(writing)
            raise

    def leave(self, writing: Writing) -> None:
        """Give the room back, or the place in the queue, and end what it still writes."""
        if writing.left:
            return
        writing.left = True
        if writing.running:
            self._stop(writing)
            self._interrupt()
        self._room.give_back(writing)
        self._let_in()

    def _let_in(self) -> None:
        """Where sequences grow, what is free is known between two steps only."""
        if not self._room.grows:
            self._room.let_in()
        elif self._room.waiting:
            self._interrupt()

    def _take_back(self) -> bool:
        """Until the next step fits, or one sequence is left; whether that took anybody's room."""
        taken = 0
        while self._room.grows and len(self._running) > 1 and self._room.free_tokens < len(self._running):
            writing = max(reversed(self._running), key=lambda one: (one.joined, one.prompt_tokens))
            self._stop(writing)
            self._room.take_back(writing)
            writing.taken_back()
            taken += 1
        if taken:
            self.taken_back += taken
            self._taken_at = self._steps
        return taken > 0

    # --- steps

    def join(self, writing: Writing, tokens: int = 1) -> None:
        """Write from the next step on; so many tokens come with its KV: one where it was prefilled."""
        self._joining.append((writing, tokens))
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
        """Let in who waits, and take all steps up to the next at which somebody is heard of, or room runs out."""
        for writing, tokens in self._joining:
            if not writing.left:
                self._start(writing, tokens)
        self._joining.clear()
        if not self._take_back() and (self._steps > self._taken_at or not self._running):
            self._room.let_in(len(self._running) if self._room.grows else 0)
        while self._due_steps and all(writing.due != self._due_steps[0] for writing in self._due[self._due_steps[0]]):
            del self._due[heapq.heappop(self._due_steps)]
        if not self._running:
            self._job = None
            return
        self._job_steps = self._next_steps()
        self._job_size = (len(self._running), self._context)
        self._worked_s = 0.0
        self._job = self._processor.start(self._costs.steps_s(self._job_steps, *self._job_size), self._end_steps)

    def _next_steps(self) -> int:
        if self._beside is not None or self._steps == self._taken_at:
            return 1
        due = self._due_steps[0] - self._steps
        return max(1, min(due, self._room.free_tokens // len(self._running))) if self._room.grows else due

    def _steps_done(self) -> int:
        """Of those taken together at present."""
        if self._job is None:
            return 0
        worked_s = self._worked_s + self._processor.worked_s(self._job)
        return max(0, self._costs.steps_begun(worked_s, *self._job_size, self._job_steps) - 1)

    def _start(self, writing: Writing, tokens: int) -> None:
        writing.running = True
        writing.written += tokens
        writing.joined = self._steps - writing.written
        self._running[writing] = None
        self._context += writing.tokens
        self._room.grow(tokens)
        self.written += tokens
        if tokens:
            self._hear(writing)
        else:
            self._appoint(writing)

    def _stop(self, writing: Writing) -> None:
        writing.running = False
        writing.due = -1
        writing.written = self._steps - writing.joined
        del self._running[writing]
        self._context -= writing.tokens

    def _hear(self, writing: Writing) -> None:
        written = self._steps - writing.joined
        if written < writing.wanted:
            self._appoint(writing)
        else:
            self._stop(writing)
            self._room.give_back(writing)
        writing.heard(written)

    def _appoint(self, writing: Writing) -> None:
        writing.due = writing.joined + writing.next_heard(self._steps - writing.joined)
        if writing.due in self._due:
            self._due[writing.due].append(writing)
        else:
            self._due[writing.due] = [writing]
            heapq.heappush(self._due_steps, writing.due)

    def _end_steps(self) -> None:
        sequences = self._job_size[0]  # whoever left meanwhile was in every step that had begun
        took_s = self._costs.steps_s(self._job_steps, *self._job_size)
        self.busy_s += took_s
        self.batch_s += took_s * sequences
        self.written += self._job_steps * sequences
        if self._beside is not None:
            self._beside.start(self._job_steps * sequences * self._costs.beside_s, lambda: None)
        self._steps += self._job_steps
        self._context += self._job_steps * len(self._running)
        self._room.grow(self._job_steps * len(self._running))
        while self._due_steps and self._due_steps[0] <= self._steps:
            step = heapq.heappop(self._due_steps)
            for writing in self._due.pop(step):
                if writing.due == step:
                    self._hear(writing)
        self._go_on()
