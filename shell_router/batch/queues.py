"""What each worker has yet to do, and which workers take what one of them failed to do."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shell_router.batch.planner import ModelWork, Plan, Shares, Workload, shared_out
from shell_router.batch.prompts import Prompt

TRIES = 3
"""A model that does not load on this many workers, or answers nothing in this many sessions, is
given up.
"""
ENOUGH = 16
"""Answers that show how fast a session is."""


@dataclass(frozen=True, slots=True)
class Share:
    """Prompts of one model, meant for one worker.

    `barren` is how many sessions in a row answered none of them, although the model was loaded.
    """

    model: str
    prompts: Sequence[Prompt]
    barren: int = 0


@dataclass(slots=True)
class WorkerQueue:
    """One worker: what it has yet to do, and what it does now."""

    shares: deque[Share] = field(default_factory=deque)
    running: Share | None = None
    waiting: deque[Prompt] = field(default_factory=deque)
    """Prompts of the running share that its engine does not have yet: another worker may take them.
    """
    left: int = 0
    """Prompts of the running share that have no output yet."""
    answered: int = 0
    since_s: float | None = None
    """When the engine was given the first of them."""
    loads: int = 0

    def add(self, share: Share) -> None:
        """Queue it; with another of the same model it becomes one, so that the model is loaded
        once.
        """
        if share.barren:
            other = None
        else:
            other = self._queued(share.model)
        if other is None:
            self.shares.append(share)
        else:
            self.shares[self.shares.index(other)] = replace(
                other, prompts=[*other.prompts, *share.prompts]
            )

    def holds(self, model: str) -> bool:
        """Whether its session has the model loaded, or loads it."""
        return self.running is not None and self.running.model == model

    def with_engine(self, model: str) -> int:
        """Prompts of the model that it has begun, without an output yet."""
        if self.holds(model):
            return self.left - len(self.waiting)
        return 0

    def movable(self, model: str) -> int:
        """Prompts of the model that another worker may answer instead: those that this one's engine
        does not have.
        """
        queued = self._queued(model)
        return len(queued.prompts if queued else ()) + (
            len(self.waiting) if self.holds(model) else 0
        )

    def give(self, model: str, number: int) -> list[Prompt]:
        """Take out at most `number` of the movable prompts, first those for which it would have to
        load the model.
        """
        given: list[Prompt] = []
        if number and (queued := self._queued(model)):
            kept = max(0, len(queued.prompts) - number)
            given += queued.prompts[kept:]
            place = self.shares.index(queued)
            if kept:
                self.shares[place] = replace(queued, prompts=queued.prompts[:kept])
            else:
                del self.shares[place]
        while self.holds(model) and self.waiting and len(given) < number:
            given.append(self.waiting.pop())
            self.left -= 1
        return given

    def begin(self, model: str | None = None) -> Share | None:
        """Take the first share of the queue, or that of the `model`, if there is one."""
        if model:
            share = self._queued(model)
        else:
            share = next(iter(self.shares), None)
        if share is None:
            return None
        self.shares.remove(share)
        return self.run(share)

    def run(self, share: Share) -> Share:
        """The share is what the worker does now."""
        self.running, self.left, self.answered, self.since_s = share, len(share.prompts), 0, None
        self.waiting = deque(() if share.barren else share.prompts)
        return share

    def output(self) -> None:
        """A prompt of the running share has its output."""
        self.answered += 1
        self.left -= 1

    def end(self) -> list[Prompt]:
        """Nothing runs; the prompts that the session's engine never had."""
        waiting, self.running, self.waiting, self.left = list(self.waiting), None, deque(), 0
        return waiting

    def _queued(self, model: str) -> Share | None:
        return next(
            (share for share in self.shares if share.model == model and not share.barren), None
        )


class WorkerQueues:
    """The workers of a plan. `models` have their costs, `prompts` what each of them is asked."""

    def __init__(
        self,
        models: Sequence[ModelWork],
        prompts: Mapping[str, Sequence[Prompt]],
        plan: Plan,
        workers: int,
    ) -> None:
        self._profiled = {model.name: model for model in models}
        self._models = dict(self._profiled)
        """At the costs measured so far."""
        self._ran = {model.name: [0.0, 0.0] for model in models}
        """Seconds of all its sessions without loads, as measured and as profiled."""
        self._queues = [WorkerQueue() for _ in range(workers)]
        self._failed_on: dict[str, set[int]] = {name: set() for name in self._models}
        self._barren: Counter[str] = Counter()
        self._worked: set[str] = set()
        taken = dict.fromkeys(prompts, 0)
        for session in plan.sessions:
            begin = taken[session.model]
            taken[session.model] = end = begin + session.prompts
            self._queues[session.worker].add(
                Share(session.model, prompts[session.model][begin:end])
            )

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
        """How long the rest will take, by the models' costs."""
        return max((self._busy_s(queue) for queue in self._queues), default=0.0)

    def measured(self, worker: int, load_s: float | None, run_s: float, bound: float) -> bool:
        """The worker's session has answered its share in `run_s`: whether that is off the costs by
        more than `bound`.

        Then its model costs from now on what its sessions took so far. `load_s` is None where no
        load is compared.
        """
        queue = self._queues[worker]
        assert queue.running is not None
        name = queue.running.model
        prompts = queue.answered
        work = self._models[name]
        ran = self._ran[name]
        ran[0] += run_s
        ran[1] += self._profiled[name].run_s(prompts)
        planned_load_s = 0.0 if load_s is None else work.load_s
        planned_s = planned_load_s + work.run_s(prompts)
        if abs((load_s or 0.0) + run_s - planned_s) <= bound * planned_s:
            return False
        self._cost(name, ran[0], ran[1], work.load_s if load_s is None else load_s)
        return True

    def off(self, now_s: float, bound: float) -> bool:
        """Whether a session that runs is off the costs by more than `bound`; its model's change as
        in `measured`.

        Prompts that its engine has begun count as half done once more are answered than that, and
        `ENOUGH` at least. Before, a session can only be late.
        """
        found = False
        for queue in self._queues:
            if queue.running is not None and queue.since_s is not None:
                name = queue.running.model
                took_s = now_s - queue.since_s
                begun = queue.with_engine(name)
                steady = queue.answered >= max(ENOUGH, begun)
                known = queue.answered + (begun / 2 if steady else begun)
                planned_s = self._models[name].run_s(known)
                if took_s > (1 + bound) * planned_s or (
                    steady and took_s < (1 - bound) * planned_s
                ):
                    self._cost(
                        name, took_s, self._profiled[name].run_s(known), self._models[name].load_s
                    )
                    found = True
        return found

    def _cost(self, model: str, took_s: float, profiled_s: float, load_s: float) -> None:
        """What was profiled as `profiled_s` took `took_s`: the model's costs change by that
        ratio."""
        first = self._profiled[model]
        rate = took_s / profiled_s if profiled_s else 1.0
        fixed_s = rate * first.fixed_s
        per_prompt_s = rate * first.per_prompt_s
        self._models[model] = replace(
            first, fixed_s=fixed_s, per_prompt_s=per_prompt_s, load_s=load_s
        )

    def rest(self, capacity: int, first_s: float) -> tuple[Workload, Shares]:
        """What can still be planned, at the costs measured so far, and where it is now.

        A worker is free when its engine has answered what it has begun, and holds the model of its
        session. One that has had none yet starts an engine, which takes `first_s`.
        """
        shares = [{name: queue.movable(name) for name in self._models} for queue in self._queues]
        models = []
        for work in self._models.values():
            left = replace(work, prompts=sum(share[work.name] for share in shares))
            held = sum(queue.holds(work.name) for queue in self._queues)
            models.append(replace(left, most_workers=max(left.replicas(len(self)), held)))
        ready_s = tuple(self._begun_s(queue) if queue.loads else first_s for queue in self._queues)
        holds = tuple(queue.running.model if queue.running else "" for queue in self._queues)
        return Workload(tuple(models), len(self), capacity, ready_s=ready_s, holds=holds), shares

    def move(self, plan: Plan, before: Shares) -> int:
        """Change what a plan of the rest changes, and say how many prompts go to other workers.

        `before` is where they were when it was planned: what was begun or taken meanwhile stays
        where it is.
        """
        moved = 0
        for model, failed in self._failed_on.items():
            change = Counter(
                {one.worker: one.prompts for one in plan.sessions if one.model == model}
            )
            change.subtract({worker: share[model] for worker, share in enumerate(before)})
            into = {
                worker: more for worker, more in change.items() if more > 0 and worker not in failed
            }
            given: list[Prompt] = []
            for worker, more in change.items():
                if more < 0:
                    given += self._queues[worker].give(
                        model, min(-more, sum(into.values()) - len(given))
                    )
            moved += len(given)
            for worker, more in into.items():
                part = given[:more]
                given = given[more:]
                if part:
                    self._queues[worker].add(Share(model, part))
        return moved

    def not_loaded(self, worker: int, share: Share) -> bool:
        """The model did not load on `worker`: whether others take the share, or it is to be given
        up.
        """
        failed = self._failed_on[share.model]
        failed.add(worker)
        others = self._open_to(share.model, worker)
        return len(failed) < TRIES and self._hand_on(share, others)

    def take(self, worker: int, model: str) -> tuple[Share, int] | None:
        """What a `worker` that is done takes of the model that it holds, and from which worker, if
        from any.

        That is the one that is busy longest. Both are then done at the same time: it takes half of
        what is left of a session, and more of a share that is queued, for which the other worker
        would have to load the model.
        """
        busy_s = {
            number: self._busy_s(queue)
            for number, queue in enumerate(self._queues)
            if number != worker
        }
        for other in sorted(busy_s, key=lambda number: -busy_s[number]):
            queue = self._queues[other]
            work = self._models[model]
            prompts = replace(work, prompts=queue.movable(model) + queue.with_engine(model))
            begins_s = {
                worker: -work.load_s,
                other: self._busy_s(queue, but=model) - queue.holds(model) * work.load_s,
            }
            if queue.movable(model):
                most = shared_out(prompts, begins_s).get(worker, 0)
            else:
                most = 0
            if given := queue.give(model, most):
                return self._queues[worker].run(Share(model, given)), other
        return None

    def not_answered(
        self, worker: int, share: Share, left: Sequence[Prompt], *, answered: bool
    ) -> bool:
        """The loaded model left some of the share unanswered: whether others take those, or they
        are to be given up.

        A share none of which was answered stays whole, so that few loads show whether the model
        answers any.
        """
        others = self._open_to(share.model, worker)
        if answered:
            return self._hand_on(replace(share, prompts=left, barren=0), others)
        self._barren[share.model] += 1
        never = share.model not in self._worked and self._barren[share.model] >= TRIES
        if never or share.barren + 1 >= TRIES or not others:
            return False
        first = min(others, key=others.__getitem__)
        return self._hand_on(Share(share.model, left, share.barren + 1), {first: others[first]})

    def worked(self, model: str) -> None:
        """The model answered something."""
        self._worked.add(model)

    def _busy_s(self, queue: WorkerQueue, *, but: str | None = None) -> float:
        """How long its worker is busy with models other than `but`."""
        queued = (share for share in queue.shares if share.model != but)
        queued_s = sum(self._models[share.model].session_s(len(share.prompts)) for share in queued)
        name = (queue.running.model) if (queue.running) else (but)
        return queued_s + (
            0.0 if name is None or name == but else self._models[name].per_prompt_s * queue.left
        )

    def _begun_s(self, queue: WorkerQueue) -> float:
        """How long its worker is busy with what no other can take."""
        barren_s = sum(
            self._models[one.model].session_s(len(one.prompts))
            for one in queue.shares
            if one.barren
        )
        return barren_s + sum(
            work.per_prompt_s * queue.with_engine(name) for name, work in self._models.items()
        )

    def _open_to(self, model: str, worker: int) -> dict[int, float]:
        """How long each worker that may load the model is busy; `worker` is among them only where
        no other may.
        """
        failed = self._failed_on[model]
        busy_s = {
            number: self._busy_s(queue)
            for number, queue in enumerate(self._queues)
            if number not in failed
        }
        return {number: seconds for number, seconds in busy_s.items() if number != worker} or busy_s

    def _hand_on(self, share: Share, others: Mapping[int, float]) -> bool:
        """Put it into the queues of `others`; whether there are any."""
        work = replace(self._models[share.model], prompts=len(share.prompts))
        begin = 0
        for number, count in (shared_out(work, others) if others else {}).items():
            self._queues[number].add(replace(share, prompts=share.prompts[begin : begin + count]))
            begin += count
        return bool(others)
