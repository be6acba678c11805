"""The simulated decode engine, with continuous batching.

Steps between two changes of the decode batch, or two reports of progress, are simulated together:
a run costs the simulator time by the chunks that its output is sent in, not by its tokens.
"""

import asyncio
import heapq
import math
from collections.abc import Collection

from shell_router.standins.kv_capacity import KvCapacity, Sequence
from shell_router.standins.simulated.costs import DecodeCosts
from shell_router.standins.simulated.processor import Job, Processor


class DecodeEngine:
    """A scheduler of sequences: `allocate` their KV, `add` them to the decode batch, `free` them.

    With `reserved_tokens` the engine preempts sequences when KV runs out: first those that have
    written least, as SGLang does. It allocates none before the next step is done, unless the batch
    is empty. `host` does the work that each token costs the event loops of the server and the
    router; without it that work is free.

    Attributes:
        busy_s: The time of all steps, had they the processor alone.
        batch_s: That time, times the sequences in the steps.
        written: Tokens.
        preemptions: How often a sequence lost its KV.
    """

    def __init__(
        self, costs: DecodeCosts, processor: Processor, host: Processor | None = None
    ) -> None:
        self._costs = costs
        self._processor = processor
        self._host = host
        self._kv = KvCapacity(costs.cache_tokens, costs.max_batch_size, costs.reserved_tokens)
        self._added: list[tuple[Sequence, int]] = []
        self._running: dict[Sequence, None] = {}
        # by step, the sequences that report then, unless they were removed from the batch
        self._due: dict[int, list[Sequence]] = {}
        self._due_steps: list[int] = []  # those steps, as a heap
        self._steps = 0
        self._preempted_at = -1  # the step at which a sequence was last preempted
        self._context_tokens = 0
        self._step_width = 0  # tokens that a step computes
        self._mean_growth: float = 0  # tokens that a step adds, in the mean
        self._most_growth = 0  # and at most
        self._has_drafted = False
        self._job: Job | None = None
        self._job_steps = 0
        self._job_sequences = 0
        self._freed_in_job: list[Sequence] = []
        # tokens of a step, of all contexts, and by which these grow
        self._job_size: tuple[int, int, float] = (0, 0, 0)
        self._worked_s = 0.0  # on the job, before it was last interrupted
        self.busy_s = 0.0
        self.batch_s = 0.0
        self.written = 0
        self.preemptions = 0

    @property
    def used_tokens(self) -> int:
        """Tokens whose KV is allocated."""
        if self._kv.allocates_per_step:
            meanwhile = int(self._steps_done() * self._mean_growth)
        else:
            meanwhile = 0
        return self._costs.cache_tokens - max(0, self._kv.free_tokens - meanwhile)

    @property
    def waiting_tokens(self) -> int:
        """Tokens, mostly of prompts, of sequences that wait for KV."""
        return self._kv.waiting_tokens

    @property
    def requests(self) -> tuple[int, int]:
        """The number of sequences with KV, and of those that wait for it."""
        return self._kv.running, self._kv.waiting

    async def allocate(self, sequence: Sequence) -> None:
        """Wait for KV, in order of arrival; preempted sequences come first."""
        self._kv.enqueue(sequence)
        self._allocate_waiting()
        try:
            await sequence.allocation
        except asyncio.CancelledError:
            self.free(sequence)
            raise

    def add(self, sequence: Sequence, tokens: int = 1) -> None:
        """Add the sequence to the batch with its next step.

        `tokens` come with its KV: one if it was prefilled.
        """
        self._added.append((sequence, tokens))
        self._interrupt()

    def free(self, sequence: Sequence) -> None:
        """Free the sequence's KV, or its place in the queue, and remove it from the batch."""
        if sequence.finished:
            return
        sequence.finished = True
        if sequence.running:
            self._remove(sequence)
            self._freed_in_job.append(sequence)
            self._interrupt()
        self._kv.free(sequence)
        self._allocate_waiting()

    def _allocate_waiting(self) -> None:
        """Allocate KV now, or between two steps if only then is known how much is free."""
        if not self._kv.allocates_per_step:
            self._kv.allocate_waiting()
        elif self._kv.waiting:
            self._interrupt()

    def _preempt_until_step_fits(self) -> bool:
        """Preempt until the next step fits or one sequence remains; return whether any was."""
        before = self.preemptions
        while (
            self._kv.allocates_per_step
            and len(self._running) > 1
            and self._kv.free_tokens < self._most_growth
        ):
            sequence = max(
                reversed(self._running),
                key=lambda running: (-running.written_by(self._steps), running.prompt_tokens),
            )
            self._remove(sequence)
            self._kv.preempt(sequence)
            sequence.on_preempt()
            self.preemptions += 1
            self._preempted_at = self._steps
        return self.preemptions > before

    def _interrupt(self) -> None:
        """End the job with the step that has begun."""
        if self._job is None:
            self._schedule()
            return
        self._worked_s += self._processor.stop(self._job)
        self._job_steps = self._costs.steps_begun(self._worked_s, self._job_steps, *self._job_size)
        left_s = max(0.0, self._costs.steps_s(self._job_steps, *self._job_size) - self._worked_s)
        self._job = self._processor.start(left_s, self._end_steps)

    def _schedule(self) -> None:
        """Begin the steps up to the next report of progress, or until KV runs out."""
        for sequence, tokens in self._added:
            if not sequence.finished:
                self._start(sequence, tokens)
        self._added.clear()
        preempted = self._preempt_until_step_fits()
        if not preempted and (self._steps > self._preempted_at or not self._running):
            self._kv.allocate_waiting(self._most_growth if self._kv.allocates_per_step else 0)
        self._drop_empty_due_steps()
        if not self._running:
            self._job = None
            return
        self._job_steps = self._next_steps()
        self._job_sequences = len(self._running)
        self._job_size = self._step_width, self._context_tokens, self._mean_growth
        self._worked_s = 0.0
        self._job = self._processor.start(
            self._costs.steps_s(self._job_steps, *self._job_size), self._end_steps
        )

    def _drop_empty_due_steps(self) -> None:
        """Forget the next steps in which no sequence is due any more."""
        while self._due_steps and all(
            sequence.due != self._due_steps[0] for sequence in self._due[self._due_steps[0]]
        ):
            del self._due[heapq.heappop(self._due_steps)]

    def _next_steps(self) -> int:
        if self._host is not None or self._steps == self._preempted_at:
            return 1
        due = self._due_steps[0] - self._steps
        if self._kv.allocates_per_step:
            return max(1, min(due, self._kv.free_tokens // self._most_growth))
        return due

    def _steps_done(self) -> int:
        """Return how many steps of the job are done."""
        if self._job is None:
            return 0
        worked_s = self._worked_s + self._processor.worked_s(self._job)
        return max(0, self._costs.steps_begun(worked_s, self._job_steps, *self._job_size) - 1)

    def _start(self, sequence: Sequence, tokens: int) -> None:
        sequence.running = True
        sequence.written += tokens
        sequence.resume(self._steps)
        self._running[sequence] = None
        self._count_in_step(sequence, 1)
        self._has_drafted |= sequence.per_pass > 1
        self._context_tokens += sequence.tokens
        self._kv.allocate_written(tokens)
        self.written += tokens
        if tokens:
            self._report(sequence)
        else:
            self._schedule_report(sequence)

    def _remove(self, sequence: Sequence) -> None:
        sequence.running = False
        sequence.due = -1
        sequence.written = sequence.written_by(self._steps)
        del self._running[sequence]
        self._count_in_step(sequence, -1)
        self._context_tokens -= sequence.tokens

    def _count_in_step(self, sequence: Sequence, sign: int) -> None:
        """Add the sequence to the size of a step, or subtract it."""
        self._step_width += sign * sequence.width
        if self._running:
            self._mean_growth = self._mean_growth + sign * sequence.per_pass
        else:
            self._mean_growth = 0
        self._most_growth += sign * math.ceil(sequence.per_pass)

    def _report(self, sequence: Sequence) -> None:
        written = sequence.written_by(self._steps)
        if written < sequence.wanted:
            self._schedule_report(sequence)
        else:
            self._remove(sequence)
            self._kv.free(sequence)
        sequence.on_progress(written)

    def _schedule_report(self, sequence: Sequence) -> None:
        sequence.due = sequence.step_of(sequence.next_report(sequence.written_by(self._steps)))
        if sequence.due in self._due:
            self._due[sequence.due].append(sequence)
        else:
            self._due[sequence.due] = [sequence]
            heapq.heappush(self._due_steps, sequence.due)

    def _end_steps(self) -> None:
        # a sequence that was freed meanwhile was in every step that had begun
        sequences = self._job_sequences
        took_s = self._costs.steps_s(self._job_steps, *self._job_size)
        self.busy_s += took_s
        self.batch_s += took_s * sequences
        growth = self._count_written(self._running)
        written = growth + self._count_written(self._freed_in_job)
        self._freed_in_job.clear()
        self.written += written
        if self._host is not None:
            self._host.start(written * self._costs.host_s_per_token, lambda: None)
        self._steps += self._job_steps
        self._context_tokens += growth
        self._kv.allocate_written(growth)
        while self._due_steps and self._due_steps[0] <= self._steps:
            step = heapq.heappop(self._due_steps)
            for sequence in self._due.pop(step):
                if sequence.due == step:
                    self._report(sequence)
        self._schedule()

    def _count_written(self, sequences: Collection[Sequence]) -> int:
        """Return the tokens that the job's steps add to these sequences."""
        if not self._has_drafted:
            return self._job_steps * len(sequences)
        then = self._steps + self._job_steps
        return sum(
            sequence.written_by(then) - sequence.written_by(self._steps) for sequence in sequences
        )
