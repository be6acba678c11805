"""The decode engine: continuous batching, in which sequences join and leave between two steps.

Steps in which no sequence joins, leaves or reports are taken together: what a run costs the
simulator depends on the chunks its output is sent in, not on its tokens.
"""

import asyncio
import heapq
import math
from collections.abc import Collection

from shell_router.standins.kv_capacity import KvCapacity, Sequence
from shell_router.standins.simulated.costs import DecodeCosts
from shell_router.standins.simulated.processor import Job, Processor


class DecodeEngine:
    """Sequences hold KV from `admit` to `leave`; between them they `join` the batch.

    Where sequences do not claim all their KV at the start (`reserved_tokens`), the engine preempts
    some when a step does not fit: first those that have written least, as SGLang does. It admits
    none before that step is done, if sequences are left for it.

    `host` does the work that each token costs the server's and the router's event loops; without it
    that is free.

    `busy_s` is the time of its steps, had it the processor alone, `batch_s` that time times the
    sequences in them, `written` counts tokens, `preemptions` the times that a sequence lost its KV.
    """

    def __init__(
        self, costs: DecodeCosts, processor: Processor, host: Processor | None = None
    ) -> None:
        self._costs = costs
        self._processor = processor
        self._host = host
        self._kv = KvCapacity(costs.cache_tokens, costs.max_batch_size, costs.reserved_tokens)
        self._joining: list[tuple[Sequence, int]] = []
        self._running: dict[Sequence, None] = {}
        self._due: dict[
            int, list[Sequence]
        ] = {}  # by step, who reports then, unless they left or stopped
        self._due_steps: list[int] = []  # those steps, as a heap
        self._steps = 0
        self._preempted_at = -1  # the step at which a sequence was last preempted
        self._context = 0
        self._computed = 0  # tokens of a step
        self._grows: float = 0  # tokens that a step adds, in the mean
        self._most = 0  # and at most
        self._drafts = False  # whether any sequence ever did
        self._job: Job | None = None
        self._job_steps = 0
        self._job_sequences = 0
        self._left: list[Sequence] = []  # that have left since it began
        self._job_size: tuple[int, int, float] = (
            0,
            0,
            0,
        )  # tokens of a step, of all contexts, and by which these grow
        self._worked_s = 0.0  # on it, before it was last interrupted
        self.busy_s = 0.0
        self.batch_s = 0.0
        self.written = 0
        self.preemptions = 0

    @property
    def used_tokens(self) -> int:
        """KV tokens that are there or, where sequences claim them at the start, will be written."""
        if self._kv.grows:
            meanwhile = int(self._steps_done() * self._grows)
        else:
            meanwhile = 0
        return self._costs.cache_tokens - max(0, self._kv.free_tokens - meanwhile)

    @property
    def waiting_tokens(self) -> int:
        """Tokens, mostly of prompts, of sequences that wait for KV."""
        return self._kv.waiting_tokens

    @property
    def requests(self) -> tuple[int, int]:
        """How many sequences hold KV, and how many wait for it."""
        return self._kv.holders, self._kv.waiting

    async def admit(self, sequence: Sequence) -> None:
        """Wait for KV, in order of arrival; preempted sequences come first."""
        self._kv.enqueue(sequence)
        self._admit_waiting()
        try:
            await sequence.admission
        except asyncio.CancelledError:
            self.leave(sequence)
            raise

    def leave(self, sequence: Sequence) -> None:
        """Free its KV, or its place in the queue, and end what it still writes."""
        if sequence.left:
            return
        sequence.left = True
        if sequence.running:
            self._stop(sequence)
            self._left.append(sequence)
            self._interrupt()
        self._kv.release(sequence)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Where sequences grow, what is free is known between two steps only."""
        if not self._kv.grows:
            self._kv.admit()
        elif self._kv.waiting:
            self._interrupt()

    def _preempt_youngest(self) -> bool:
        """Preempt until the next step fits or one sequence is left; whether any was preempted."""
        before = self.preemptions
        while self._kv.grows and len(self._running) > 1 and self._kv.free_tokens < self._most:
            sequence = max(
                reversed(self._running),
                key=lambda one: (-one.written_by(self._steps), one.prompt_tokens),
            )
            self._stop(sequence)
            self._kv.preempt(sequence)
            sequence.on_preempt()
            self.preemptions += 1
            self._preempted_at = self._steps
        return self.preemptions > before

    def join(self, sequence: Sequence, tokens: int = 1) -> None:
        """Write from the next step on; `tokens` come with its KV: one where it was prefilled."""
        self._joining.append((sequence, tokens))
        self._interrupt()

    def _interrupt(self) -> None:
        """End the steps under way with the one that has begun."""
        if self._job is None:
            self._go_on()
            return
        self._worked_s += self._processor.stop(self._job)
        self._job_steps = self._costs.steps_begun(self._worked_s, self._job_steps, *self._job_size)
        left_s = max(0.0, self._costs.steps_s(self._job_steps, *self._job_size) - self._worked_s)
        self._job = self._processor.start(left_s, self._end_steps)

    def _go_on(self) -> None:
        """Admit, and take all steps up to the next at which a sequence reports or KV runs out."""
        for sequence, tokens in self._joining:
            if not sequence.left:
                self._start(sequence, tokens)
        self._joining.clear()
        if not self._preempt_youngest() and (self._steps > self._preempted_at or not self._running):
            self._kv.admit(self._most if self._kv.grows else 0)
        while self._due_steps and all(
            sequence.due != self._due_steps[0] for sequence in self._due[self._due_steps[0]]
        ):
            del self._due[heapq.heappop(self._due_steps)]
        if not self._running:
            self._job = None
            return
        self._job_steps = self._next_steps()
        self._job_sequences = len(self._running)
        self._job_size = self._computed, self._context, self._grows
        self._worked_s = 0.0
        self._job = self._processor.start(
            self._costs.steps_s(self._job_steps, *self._job_size), self._end_steps
        )

    def _next_steps(self) -> int:
        if self._host is not None or self._steps == self._preempted_at:
            return 1
        due = self._due_steps[0] - self._steps
        if self._kv.grows:
            return max(1, min(due, self._kv.free_tokens // self._most))
        return due

    def _steps_done(self) -> int:
        """Of those taken together at present."""
        if self._job is None:
            return 0
        worked_s = self._worked_s + self._processor.worked_s(self._job)
        return max(0, self._costs.steps_begun(worked_s, self._job_steps, *self._job_size) - 1)

    def _start(self, sequence: Sequence, tokens: int) -> None:
        sequence.running = True
        sequence.written += tokens
        sequence.join(self._steps)
        self._running[sequence] = None
        self._count(sequence, 1)
        self._drafts |= sequence.per_pass > 1
        self._context += sequence.tokens
        self._kv.grow(tokens)
        self.written += tokens
        if tokens:
            self._report(sequence)
        else:
            self._schedule_report(sequence)

    def _stop(self, sequence: Sequence) -> None:
        sequence.running = False
        sequence.due = -1
        sequence.written = sequence.written_by(self._steps)
        del self._running[sequence]
        self._count(sequence, -1)
        self._context -= sequence.tokens

    def _count(self, sequence: Sequence, sign: int) -> None:
        """It joins the batch, or leaves it."""
        self._computed += sign * sequence.width
        if self._running:
            self._grows = self._grows + sign * sequence.per_pass
        else:
            self._grows = 0
        self._most += sign * math.ceil(sequence.per_pass)

    def _report(self, sequence: Sequence) -> None:
        written = sequence.written_by(self._steps)
        if written < sequence.wanted:
            self._schedule_report(sequence)
        else:
            self._stop(sequence)
            self._kv.release(sequence)
        sequence.on_progress(written)

    def _schedule_report(self, sequence: Sequence) -> None:
        sequence.due = sequence.step_of(sequence.next_report(sequence.written_by(self._steps)))
        if sequence.due in self._due:
            self._due[sequence.due].append(sequence)
        else:
            self._due[sequence.due] = [sequence]
            heapq.heappush(self._due_steps, sequence.due)

    def _end_steps(self) -> None:
        sequences = (
            self._job_sequences
        )  # those that left meanwhile were in every step that had begun
        took_s = self._costs.steps_s(self._job_steps, *self._job_size)
        self.busy_s += took_s
        self.batch_s += took_s * sequences
        grown = self._grown(self._running)
        written = grown + self._grown(self._left)
        self._left.clear()
        self.written += written
        if self._host is not None:
            self._host.start(written * self._costs.host_s_per_token, lambda: None)
        self._steps += self._job_steps
        self._context += grown
        self._kv.grow(grown)
        while self._due_steps and self._due_steps[0] <= self._steps:
            step = heapq.heappop(self._due_steps)
            for sequence in self._due.pop(step):
                if sequence.due == step:
                    self._report(sequence)
        self._go_on()

    def _grown(self, sequences: Collection[Sequence]) -> int:
        """Tokens that the steps under way add to these."""
        if not self._drafts:
            return self._job_steps * len(sequences)
        then = self._steps + self._job_steps
        return sum(one.written_by(then) - one.written_by(self._steps) for one in sequences)
