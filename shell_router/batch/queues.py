"""The queue of each worker, and how prompts move between workers."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shell_router.batch.planner import Allocation, BatchPlan, ModelWork, Workload, split_prompts
from shell_router.batch.prompts import BatchPrompt

TRIES = 3
"""Workers on which a model may fail to load, and sessions in which it may answer nothing."""
STEADY_ANSWERS = 16
"""Answers after which a running session shows its speed."""


@dataclass(frozen=True, slots=True)
class Share:
    """Prompts of one model for one worker.

    `failed_sessions` counts the sessions in a row that loaded the model and answered none of them.
    """

    model: str
    prompts: Sequence[BatchPrompt]
    failed_sessions: int = 0


@dataclass(slots=True)
class WorkerQueue:
    """The shares that one worker has yet to run, and the one that runs."""

    shares: deque[Share] = field(default_factory=deque)
    running: Share | None = None
    waiting: deque[BatchPrompt] = field(default_factory=deque)
    """The running share's prompts that its engine does not have yet; other workers may take them.
    """
    left: int = 0
    """The running share's prompts without an output."""
    answered: int = 0
    since_s: float | None = None
    """The time at which the engine got the first prompts of the running share."""
    loads: int = 0

    @property
    def in_flight(self) -> int:
        """The running share's prompts that its engine has, without an output."""
        return self.left - len(self.waiting)

    def add(self, share: Share) -> None:
        """Queue a share. It joins a queued one of its model, so that the model loads once."""
        queued = None if share.failed_sessions else self._find_queued(share.model)
        if queued is None:
            self.shares.append(share)
        else:
            prompts = [*queued.prompts, *share.prompts]
            self.shares[self.shares.index(queued)] = replace(queued, prompts=prompts)

    def holds(self, model: str) -> bool:
        """Return whether the running session has the model loaded, or loads it."""
        return self.running is not None and self.running.model == model

    def count_movable(self, model: str) -> int:
        """Return how many prompts of the model other workers may take."""
        queued = self._find_queued(model)
        movable = len(queued.prompts) if queued else 0
        if self.holds(model):
            movable += len(self.waiting)
        return movable

    def release_prompts(self, model: str, most: int) -> list[BatchPrompt]:
        """Remove and return up to `most` movable prompts, first those that still need a load."""
        released: list[BatchPrompt] = []
        queued = self._find_queued(model)
        if most and queued:
            kept = max(0, len(queued.prompts) - most)
            released += queued.prompts[kept:]
            index = self.shares.index(queued)
            if kept:
                self.shares[index] = replace(queued, prompts=queued.prompts[:kept])
            else:
                del self.shares[index]
        while self.holds(model) and self.waiting and len(released) < most:
            released.append(self.waiting.pop())
            self.left -= 1
        return released

    def begin_next(self, model: str | None = None) -> Share | None:
        """Begin and return the first queued share, or that of `model`; None if there is none."""
        if model:
            share = self._find_queued(model)
        else:
            share = self.shares[0] if self.shares else None
        if share is None:
            return None
        self.shares.remove(share)
        return self.begin(share)

    def begin(self, share: Share) -> Share:
        """Begin a share that is not queued, and return it."""
        self.running = share
        self.left = len(share.prompts)
        self.answered = 0
        self.since_s = None
        self.waiting = deque(() if share.failed_sessions else share.prompts)
        return share

    def end(self) -> list[BatchPrompt]:
        """End the running share; return its prompts that the engine never had."""
        waiting = list(self.waiting)
        self.running = None
        self.waiting = deque()
        self.left = 0
        return waiting

    def _find_queued(self, model: str) -> Share | None:
        for share in self.shares:
            if share.model == model and not share.failed_sessions:
                return share
        return None


class WorkerQueues:
    """The queues of all workers, filled by a plan.

    Args:
        models: The models with their profiled costs.
        prompts: The prompts of each model.
        plan: The sessions, which take the prompts in order.
        workers: The number of workers.
    """

    def __init__(
        self,
        models: Sequence[ModelWork],
        prompts: Mapping[str, Sequence[BatchPrompt]],
        plan: BatchPlan,
        workers: int,
    ) -> None:
        self._profiled = {model.name: model for model in models}
        self._models = dict(self._profiled)
        """The models at the costs measured so far."""
        self._run_s = {model.name: [0.0, 0.0] for model in models}
        """Seconds of a model's sessions without loads, as measured and as profiled."""
        self._queues = [WorkerQueue() for _ in range(workers)]
        self._failed_on: dict[str, set[int]] = {name: set() for name in self._models}
        """The workers on which a model failed to load."""
        self._failed_sessions: Counter[str] = Counter()
        self.answering: set[str] = set()
        """The models that have answered something."""
        assigned = dict.fromkeys(prompts, 0)
        for session in plan.sessions:
            name = session.model
            begin = assigned[name]
            assigned[name] += session.prompts
            share = Share(name, prompts[name][begin : assigned[name]])
            self._queues[session.worker].add(share)

    def __len__(self) -> int:
        return len(self._queues)

    def __getitem__(self, worker: int) -> WorkerQueue:
        return self._queues[worker]

    @property
    def busy(self) -> bool:
        """Whether any worker has anything left."""
        return any(queue.shares or queue.running for queue in self._queues)

    @property
    def left_s(self) -> float:
        """The seconds that the rest takes, by the models' costs."""
        return max((self._busy_s(queue) for queue in self._queues), default=0.0)

    def record_session(self, worker: int, load_s: float | None, run_s: float, bound: float) -> bool:
        """Compare a worker's session, which has ended, with the costs.

        If it is off by more than the share `bound`, its model costs from now on what its sessions
        took so far. With `load_s` None the load is not compared. Returns whether it was off.
        """
        queue = self._queues[worker]
        assert queue.running is not None
        name = queue.running.model
        model = self._models[name]
        total_s = self._run_s[name]
        total_s[0] += run_s
        total_s[1] += self._profiled[name].run_s(queue.answered)
        session_s = run_s
        planned_s = model.run_s(queue.answered)
        if load_s is None:
            load_s = model.load_s
        else:
            session_s = load_s + run_s
            planned_s = model.load_s + planned_s
        if abs(session_s - planned_s) <= bound * planned_s:
            return False
        self._scale_cost(name, total_s[0], total_s[1], load_s)
        return True

    def compare_running(self, now_s: float, bound: float) -> bool:
        """Compare the running sessions with the costs, as `record_session` does.

        A session can only be late until it has answered `STEADY_ANSWERS` and more than are in
        flight. From then on prompts in flight count as half done. Returns whether one was off.
        """
        any_off = False
        for queue in self._queues:
            if queue.running is not None and queue.since_s is not None:
                run_s = now_s - queue.since_s
                if self._compare_session(queue.running.model, queue, run_s, bound):
                    any_off = True
        return any_off

    def _compare_session(self, model: str, queue: WorkerQueue, run_s: float, bound: float) -> bool:
        """Compare the queue's session, of `model`; scale its cost and return True if it is off."""
        is_steady = queue.answered >= max(STEADY_ANSWERS, queue.in_flight)
        in_flight = queue.in_flight / 2 if is_steady else queue.in_flight
        done = queue.answered + in_flight
        planned_s = self._models[model].run_s(done)
        is_late = run_s > (1 + bound) * planned_s
        is_early = is_steady and run_s < (1 - bound) * planned_s
        if not is_late and not is_early:
            return False
        profiled_s = self._profiled[model].run_s(done)
        self._scale_cost(model, run_s, profiled_s, self._models[model].load_s)
        return True

    def _scale_cost(self, model: str, run_s: float, profiled_s: float, load_s: float) -> None:
        """Scale the model's profiled cost: sessions profiled as `profiled_s` took `run_s`."""
        profiled = self._profiled[model]
        ratio = run_s / profiled_s if profiled_s else 1.0
        self._models[model] = replace(
            profiled,
            fixed_s=ratio * profiled.fixed_s,
            per_prompt_s=ratio * profiled.per_prompt_s,
            load_s=load_s,
        )

    def build_rest(self, capacity: int, first_s: float) -> tuple[Workload, Allocation]:
        """Return the workload that is left to plan, at the measured costs, and where it is now.

        A worker is free when its engine has answered what it has in flight, and holds the model of
        its session. A worker without a load so far is free after `first_s`, its engine's start.
        """
        allocation = [
            {name: queue.count_movable(name) for name in self._models} for queue in self._queues
        ]
        models = []
        for name, model in self._models.items():
            left = replace(model, prompts=sum(movable[name] for movable in allocation))
            held = sum(queue.holds(name) for queue in self._queues)
            cap = max(left.replica_cap(len(self)), held)
            models.append(replace(left, most_workers=cap))
        ready_s = [self._committed_s(queue) if queue.loads else first_s for queue in self._queues]
        holds = [queue.running.model if queue.running else "" for queue in self._queues]
        workload = Workload(
            tuple(models), len(self), capacity, ready_s=tuple(ready_s), holds=tuple(holds)
        )
        return workload, allocation

    def apply_plan(self, plan: BatchPlan, before: Allocation) -> int:
        """Move prompts as a plan of the rest says; return how many go to other workers.

        `before` is the allocation that was planned. A prompt that was begun or taken meanwhile
        stays where it is.
        """
        moved = 0
        for model in self._models:
            change: Counter[int] = Counter()
            for session in plan.sessions:
                if session.model == model:
                    change[session.worker] = session.prompts
            change.subtract({worker: share[model] for worker, share in enumerate(before)})
            moved += self._move_prompts(model, change)
        return moved

    def _move_prompts(self, model: str, change: Mapping[int, int]) -> int:
        """Change the workers' prompts of a model by `change`; return how many moved."""
        failed_on = self._failed_on[model]
        gains = {
            worker: more for worker, more in change.items() if more > 0 and worker not in failed_on
        }
        released: list[BatchPrompt] = []
        for worker, more in change.items():
            if more < 0:
                most = min(-more, sum(gains.values()) - len(released))
                released += self._queues[worker].release_prompts(model, most)
        begin = 0
        for worker, more in gains.items():
            prompts = released[begin : begin + more]
            begin += more
            if prompts:
                self._queues[worker].add(Share(model, prompts))
        return len(released)

    def reassign_unloaded(self, worker: int, share: Share) -> bool:
        """Queue a share that failed to load on `worker` elsewhere; return False if nowhere."""
        failed_on = self._failed_on[share.model]
        failed_on.add(worker)
        others = self._list_candidates(share.model, worker)
        return len(failed_on) < TRIES and self._distribute(share, others)

    def reassign_unanswered(
        self, worker: int, share: Share, left: Sequence[BatchPrompt], *, answered: bool
    ) -> bool:
        """Queue the prompts that a session left unanswered elsewhere; return False if nowhere.

        Without any answer they stay together, so that few loads show whether the model answers any.
        """
        others = self._list_candidates(share.model, worker)
        if answered:
            return self._distribute(Share(share.model, left), others)
        self._failed_sessions[share.model] += 1
        never_answered = share.model not in self.answering
        is_given_up = never_answered and self._failed_sessions[share.model] >= TRIES
        failed_sessions = share.failed_sessions + 1
        if is_given_up or failed_sessions >= TRIES or not others:
            return False
        least_busy = min(others, key=others.__getitem__)
        self._queues[least_busy].add(Share(share.model, left, failed_sessions))
        return True

    def steal_prompts(self, worker: int, model: str) -> tuple[Share, int] | None:
        """Begin prompts of other workers on an idle `worker`, which holds the model.

        They come from the busiest worker that has any, so that both are done at the same time:
        half of what is left of a session, and more of a queued share, for which the other would
        have to load the model. Returns the share and the other worker.
        """
        busy_s = {
            other: self._busy_s(queue)
            for other, queue in enumerate(self._queues)
            if other != worker
        }
        for other in sorted(busy_s, key=lambda other: -busy_s[other]):
            queue = self._queues[other]
            movable = queue.count_movable(model)
            if not movable:
                continue
            work = self._models[model]
            other_s = self._busy_s(queue, but=model)
            if queue.holds(model):
                movable += queue.in_flight
                other_s -= work.load_s
            begin_s = {worker: -work.load_s, other: other_s}
            split = split_prompts(replace(work, prompts=movable), begin_s)
            prompts = queue.release_prompts(model, split.get(worker, 0))
            if prompts:
                return self._queues[worker].begin(Share(model, prompts)), other
        return None

    def _busy_s(self, queue: WorkerQueue, *, but: str | None = None) -> float:
        """Return the seconds that a queue takes, without the shares of the model `but`."""
        busy_s = 0.0
        for share in queue.shares:
            if share.model != but:
                busy_s += self._models[share.model].session_s(len(share.prompts))
        if queue.running is not None and queue.running.model != but:
            busy_s += self._models[queue.running.model].per_prompt_s * queue.left
        return busy_s

    def _committed_s(self, queue: WorkerQueue) -> float:
        """Return the seconds of the prompts that no other worker may take."""
        seconds = 0.0
        for share in queue.shares:
            if share.failed_sessions:
                seconds += self._models[share.model].session_s(len(share.prompts))
        if queue.running is not None:
            seconds += self._models[queue.running.model].per_prompt_s * queue.in_flight
        return seconds

    def _list_candidates(self, model: str, worker: int) -> dict[int, float]:
        """Return the busy seconds of each worker that may load the model.

        `worker` is among them only if no other may.
        """
        failed_on = self._failed_on[model]
        busy_s = {
            number: self._busy_s(queue)
            for number, queue in enumerate(self._queues)
            if number not in failed_on
        }
        if len(busy_s) > 1:
            busy_s.pop(worker, None)
        return busy_s

    def _distribute(self, share: Share, busy_s: Mapping[int, float]) -> bool:
        """Split a share over the queues of workers; return False if there are none."""
        if not busy_s:
            return False
        work = replace(self._models[share.model], prompts=len(share.prompts))
        begin = 0
        for worker, count in split_prompts(work, busy_s).items():
            prompts = share.prompts[begin : begin + count]
            begin += count
            self._queues[worker].add(replace(share, prompts=prompts))
        return True
