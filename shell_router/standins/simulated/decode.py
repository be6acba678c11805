"""The decode engine: continuous batching, in which sequences join and leave between two steps.

Steps in which no sequence joins, leaves or reports are taken together: what a run costs the simulator depends on the
chunks its output is sent in, not on its tokens.
"""

import asyncio
import heapq

from shell_router.standins.kv_capacity import KvCapacity, Sequence
from shell_router.standins.simulated.costs import DecodeCosts
from shell_router.standins.simulated.processor import Job, Processor


class DecodeEngine:
    """Sequences hold KV from `admit` to `leave`; between them they `join` the batch.

    Where sequences do not claim all their KV at the start (`reserved_tokens`), the engine preempts some when a step
    does not fit: first those that have written least, as SGLang does. It admits none before that step is done, if
    sequences are left for it.

    `host` does the work that each token costs the server's and the router's event loops; without it that is free.

    `busy_s` is the time of its steps, had it the processor alone, `batch_s` that time times the sequences in them,
    `written` counts tokens, `preemptions` the times that a sequence lost its KV.
    """

    def __init__(self, costs: DecodeCosts, processor: Processor, host: Processor | None = None) -> None:
        self._costs = costs
        self._processor = processor
        self._host = host
        self._kv = KvCapacity(costs.cache_tokens, costs.max_batch_size, costs.reserved_tokens)
        self._joining: list[tuple[Sequence, int]] = []
        self._running: dict[Sequence, None] = {}
        self._due: dict[int, list[Sequence]] = {}  # by step, who reports then, unless they left or stopped
        self._due_steps: list[int] = []  # those steps, as a heap
        self._steps = 0
        self._preempted_at = -1  # the step at which a sequence was last preempted
        self._context = 0
        self._job: Job | None = None
        self._job_steps = 0
        self._job_size = (0, 0)  # sequences and the sum of their lengths, when it began
        self._worked_s = 0.0  # on it, before it was last interrupted
        self.busy_s = 0.0
        self.batch_s = 0.0
        self.written = 0
        self.preemptions = 0

    @property
    def used_tokens(self) -> int:
        """KV tokens that are there or, where sequences claim them at the start, will be written."""
        meanwhile = self._steps_done() * len(self._running) if self._kv.grows else 0
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
        while self._kv.grows and len(self._running) > 1 and self._kv.free_tokens < len(self._running):
            sequence = max(reversed(self._running), key=lambda one: (one.joined, one.prompt_tokens))
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
        sequences, context = self._job_size
        self._job_steps = self._costs.steps_begun(self._worked_s, sequences, context, self._job_steps)
        left_s = max(0.0, self._costs.steps_s(self._job_steps, sequences, context) - self._worked_s)
        self._job = self._processor.start(left_s, self._end_steps)

    def _go_on(self) -> None:
        """Admit, and take all steps up to the next at which a sequence reports or KV runs out."""
        for sequence, tokens in self._joining:
            if not sequence.left:
                self._start(sequence, tokens)
        self._joining.clear()
        if not self._preempt_youngest() and (self._steps > self._preempted_at or not self._running):
            self._kv.admit(len(self._running) if self._kv.grows else 0)
        while self._due_steps and all(sequence.due != self._due_steps[0] for sequence in self._due[self._due_steps[0]]):
            del self._due[heapq.heappop(self._due_steps)]
        if not self._running:
            self._job = None
            return
        self._job_steps = self._next_steps()
        self._job_size = (len(self._running), self._context)
        self._worked_s = 0.0
        self._job = self._processor.start(self._costs.steps_s(self._job_steps, *self._job_size), self._end_steps)

    def _next_steps(self) -> int:
        if self._host is not None or self._steps == self._preempted_at:
            return 1
        due = self._due_steps[0] - self._steps
        return max(1, min(due, self._kv.free_tokens // len(self._running))) if self._kv.grows else due

    def _steps_done(self) -> int:
        """Of those taken together at present."""
        if self._job is None:
            return 0
        worked_s = self._worked_s + self._processor.worked_s(self._job)
        return max(0, self._costs.steps_begun(worked_s, *self._job_size, self._job_steps) - 1)

    def _start(self, sequence: Sequence, tokens: int) -> None:
        sequence.running = True
        sequence.written += tokens
        sequence.joined = self._steps - sequence.written
        self._running[sequence] = None
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
        sequence.written = self._steps - sequence.joined
        del self._running[sequence]
        self._context -= sequence.tokens

    def _report(self, sequence: Sequence) -> None:
        written = self._steps - sequence.joined
        if written < sequence.wanted:
            self._schedule_report(sequence)
        else:
            self._stop(sequence)
            self._kv.release(sequence)
        sequence.on_progress(written)

    def _schedule_report(self, sequence: Sequence) -> None:
        sequence.due = sequence.joined + sequence.next_report(self._steps - sequence.joined)
        if sequence.due in self._due:
            self._due[sequence.due].append(sequence)
        else:
            self._due[sequence.due] = [sequence]
            heapq.heappush(self._due_steps, sequence.due)

    def _end_steps(self) -> None:
        sequences = self._job_size[0]  # those that left meanwhile were in every step that had begun
        took_s = self._costs.steps_s(self._job_steps, *self._job_size)
        self.busy_s += took_s
        self.batch_s += took_s * sequences
        self.written += self._job_steps * sequences
        if self._host is not None:
            self._host.start(self._job_steps * sequences * self._costs.host_s_per_token, lambda: None)
        self._steps += self._job_steps
        self._context += self._job_steps * len(self._running)
        self._kv.grow(self._job_steps * len(self._running))
        while self._due_steps and self._due_steps[0] <= self._steps:
            step = heapq.heappop(self._due_steps)
            for sequence in self._due.pop(step):
                if sequence.due == step:
                    self._report(sequence)
        self._go_on()
