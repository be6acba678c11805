"""What each worker has yet to do, and who takes what one of them failed to do."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shell_router.batch.answering import Prompt
from shell_router.batch.plan import Expert, Plan
from shell_router.batch.requeue import shared_out

TRIES = 3
"""A model that does not load on so many workers, or answers nothing in so many sessions, is given up."""


@dataclass(frozen=True, slots=True)
class Share:
    """Prompts of one model, meant for one worker.

    `barren` is how many sessions in a row answered none of them, although the model was loaded.
    """

    model: str
    prompts: Sequence[Prompt]
    barren: int = 0


@dataclass(slots=True)
class Place:
    """One worker: what it has yet to do, and what it does now."""

    queue: deque[Share] = field(default_factory=deque)
    running: Share | None = None
    left: int = 0
    """Prompts of the running share that have no output yet."""

    def add(self, share: Share) -> None:
        """Put it in the queue; with another of the same model it becomes one, so that the model is loaded once."""
        for place, other in enumerate(self.queue):
            if other.model == share.model and not other.barren and not share.barren:
                self.queue[place] = replace(other, prompts=[*other.prompts, *share.prompts])
                return
        self.queue.append(share)

    def begin(self) -> Share:
        """Take the first share of the queue."""
        self.running = self.queue.popleft()
        self.left = len(self.running.prompts)
        return self.running


class Places:
    """The workers of a plan. `experts` are its models with their costs, `prompts` what each of them is asked."""

    def __init__(
        self, experts: Sequence[Expert], prompts: Mapping[str, Sequence[Prompt]], plan: Plan, workers: int
    ) -> None:
        self._experts = {expert.name: expert for expert in experts}
        self._places = [Place() for _ in range(workers)]
        self._failed_on: dict[str, set[int]] = {name: set() for name in self._experts}
        self._barren: Counter[str] = Counter()
        self._worked: set[str] = set()
        taken = dict.fromkeys(prompts, 0)
        for session in plan.sessions:
            begin = taken[session.expert]
            taken[session.expert] = end = begin + session.prompts
            self._places[session.worker].add(Share(session.expert, prompts[session.expert][begin:end]))

    def __getitem__(self, worker: int) -> Place:
        return self._places[worker]

    @property
    def busy(self) -> bool:
        """Whether anybody has anything left."""
        return any(place.queue or place.running for place in self._places)

    @property
    def left_s(self) -> float:
        """How long the rest will take, as far as costs tell."""
        return max((self._busy_s(place) for place in self._places), default=0.0)

    def not_loaded(self, worker: int, share: Share) -> bool:
        """The model did not load on `worker`: whether others take the share, or it is to be given up."""
        failed = self._failed_on[share.model]
        failed.add(worker)
        others = self._open_to(share.model, worker)
        return len(failed) < TRIES and self._hand_on(share, others)

    def not_answered(self, worker: int, share: Share, left: Sequence[Prompt]) -> bool:
        """The loaded model left some of the share unanswered: whether others take those, or they are to be given up.

        A share none of which was answered stays whole, so that few loads tell whether anybody answers any.
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

    def _busy_s(self, place: Place) -> float:
        queued_s = sum(self._experts[share.model].session_s(len(share.prompts)) for share in place.queue)
        running = place.running
        return queued_s + (self._experts[running.model].per_prompt_s * place.left if running else 0.0)

    def _open_to(self, model: str, worker: int) -> dict[int, float]:
        """How long each worker that may load the model is busy; `worker` is among them only where no other may."""
        failed = self._failed_on[model]
        busy_s = {number: self._busy_s(place) for number, place in enumerate(self._places) if number not in failed}
        return {number: seconds for number, seconds in busy_s.items() if number != worker} or busy_s

    def _hand_on(self, share: Share, others: Mapping[int, float]) -> bool:
        """Put it into the queues of `others`; whether there are any."""
        expert = replace(self._experts[share.model], prompts=len(share.prompts))
        begin = 0
        for number, count in (shared_out(expert, others) if others else {}).items():
            self._places[number].add(replace(share, prompts=share.prompts[begin : begin + count]))
            begin += count
        return bool(others)
