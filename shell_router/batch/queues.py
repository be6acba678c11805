"""What each worker has yet to do, and which workers take what one of them failed to do, or would do late."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shell_router.batch.planner import ModelWork, Plan, shared_out
from shell_router.batch.prompts import Prompt

TRIES = 3
"""A model that does not load on this many workers, or answers nothing in this many sessions, is given up."""
WORTH_TAKING = 0.9
"""An idle worker helps the busiest one where both are done within this share of its time."""


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
    left: int = 0
    """Prompts of the running share that have no output yet."""
    waiting: deque[Prompt] = field(default_factory=deque)
    """Those of them that its model is about to be asked, in this order; of a barren share none."""
    loads: list[str] = field(default_factory=list)
    """The models of all its sessions."""

    def add(self, share: Share) -> None:
        """Queue it; with another of the same model it becomes one, so that the model is loaded once."""
        for index, other in enumerate(self.shares):
            if other.model == share.model and not other.barren and not share.barren:
                self.shares[index] = replace(other, prompts=[*other.prompts, *share.prompts])
                return
        self.shares.append(share)

    def begin(self) -> Share:
        """Take the first share of the queue."""
        self.running = self.shares.popleft()
        self.left = len(self.running.prompts)
        self.loads.append(self.running.model)
        return self.running

    def give(self, share: Share, count: int) -> Share:
        """Take the last `count` waiting prompts out of one of its shares."""
        kept = replace(share, prompts=share.prompts[:-count])
        if share is self.running:
            self.running, self.left = kept, self.left - count
            for _ in range(count):
                self.waiting.pop()
        else:
            shares = (kept if one is share else one for one in self.shares)
            self.shares = deque(one for one in shares if one.prompts)
        return replace(share, prompts=share.prompts[-count:])


class WorkerQueues:
    """The workers of a plan. `models` have their costs, `prompts` what they are asked. No help exceeds `capacity`."""

    def __init__(
        self, models: Sequence[ModelWork], prompts: Mapping[str, Sequence[Prompt]], plan: Plan, workers: int,
        capacity: int = 0,
    ) -> None:  # fmt: skip
        self._capacity = capacity
        self._models = {model.name: model for model in models}
        self._queues = [WorkerQueue() for _ in range(workers)]
        self._failed_on: dict[str, set[int]] = {name: set() for name in self._models}
        self._barren: Counter[str] = Counter()
        self._worked: set[str] = set()
        taken = dict.fromkeys(prompts, 0)
        for session in plan.sessions:
            begin = taken[session.model]
            taken[session.model] = end = begin + session.prompts
            self._queues[session.worker].add(Share(session.model, prompts[session.model][begin:end]))

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

    def not_loaded(self, worker: int, share: Share) -> bool:
        """The model did not load on `worker`: whether others take the share, or it is to be given up."""
        failed = self._failed_on[share.model]
        failed.add(worker)
        others = self._open_to(share.model, worker)
        return len(failed) < TRIES and self._hand_on(share, others)

    def not_answered(self, worker: int, share: Share, left: Sequence[Prompt]) -> bool:
        """The loaded model left some of the share unanswered: whether others take those, or they are to be given up.

        A share none of which was answered stays whole, so that few loads show whether the model answers any.
        """
        others = self._open_to(share.model, worker)
        if len(left) < len(share.prompts):
            return self._hand_on(replace(share, prompts=left, barren=0), others)
        self._barren[share.model] += 1
        never = share.model not in self._worked and self._barren[share.model] >= TRIES
        if never or share.barren + 1 >= TRIES:
            return False
        first = min(others, key=others.__getitem__)
        return self._hand_on(Share(share.model, left, share.barren + 1), {first: others[first]})

    def worked(self, model: str) -> None:
        """The model answered something."""
        self._worked.add(model)

    def take_over(self, worker: int) -> bool:
        """Whether this idle worker gets prompts that wait for the busiest one, as both are done much earlier so.

        Workers without any session stay idle: the plan spares their engines.
        """
        idle, donor = self._queues[worker], max(self._queues, key=self._busy_s)
        busy_s = self._busy_s(donor)
        for share in filter(None, (donor.running, *donor.shares)):
            waits = len(donor.waiting if share is donor.running else share.prompts)
            may_load = idle.loads and worker not in self._failed_on[share.model]
            work = replace(self._models[share.model], prompts=waits)
            if share.barren or not waits or not may_load or len({*idle.loads, share.model}) > self._capacity:
                continue
            count = shared_out(work, {-1: busy_s - work.session_s(waits), worker: 0.0}).get(worker, 0)
            if count and max(work.session_s(count), busy_s - count * work.per_prompt_s) <= WORTH_TAKING * busy_s:
                idle.add(donor.give(share, count))
                return True
        return False

    def _busy_s(self, queue: WorkerQueue) -> float:
        queued_s = sum(self._models[share.model].session_s(len(share.prompts)) for share in queue.shares)
        running = queue.running
        return queued_s + (self._models[running.model].per_prompt_s * queue.left if running else 0.0)

    def _open_to(self, model: str, worker: int) -> dict[int, float]:
        """How long each worker that may load the model is busy; `worker` is among them only where no other may."""
        failed = self._failed_on[model]
        busy_s = {number: self._busy_s(queue) for number, queue in enumerate(self._queues) if number not in failed}
        return {number: seconds for number, seconds in busy_s.items() if number != worker} or busy_s

    def _hand_on(self, share: Share, others: Mapping[int, float]) -> bool:
        """Put it into the queues of `others`; whether there are any."""
        work = replace(self._models[share.model], prompts=len(share.prompts))
        begin = 0
        for number, count in (shared_out(work, others) if others else {}).items():
            self._queues[number].add(replace(share, prompts=share.prompts[begin : begin + count]))
            begin += count
        return bool(others)
