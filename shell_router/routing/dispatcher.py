"""Dispatch requests to engines: filter, score, pick, and queue; for servers and simulated pairs."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

from shell_router.core.durations import Durations
from shell_router.core.engine import Placement
from shell_router.errors import EngineUnavailable, Overloaded, require
from shell_router.files.types import CODE_ONLY, Seconds
from shell_router.routing.engine_selection import (
    POLICIES,
    EngineScene,
    SelectionSettings,
)
from shell_router.routing.failures import Breaker
from shell_router.routing.placement import (
    Choice,
    ChoiceMemory,
    EngineReport,
    EngineState,
    PlacementRequest,
    PrefixIndex,
    PromptIndex,
    RoutingFeatures,
)
from shell_router.routing.queue import Program, QueueEntry, QueueSettings, RequestQueue

E = TypeVar("E")

METRICS_POLL_S = 5.0
"""Seconds between polls of engines whose reports only metrics show."""


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """Settings of the choice of engines and of the queue for them.

    Engines are polled every `poll_s`; reports older than `stale_s` are ignored.
    """

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    poll_s: Annotated[Seconds, "Seconds between polls of the engines, below 5."] = 1.0
    stale_s: Annotated[float, CODE_ONLY] = 5.0

    def __post_init__(self) -> None:
        require(
            self.stale_s > self.poll_s,
            f"poll_s must be below {self.stale_s:g}, not {self.poll_s:g}: older reports are "
            "ignored",
        )


@dataclass(slots=True, eq=False)
class TrackedEngine(Generic[E]):
    """An engine, and the facts known of it.

    Attributes:
        load: The router's load on it.
        reported: Its last report.
        reported_s: The time of that report.
        failed_polls: Polls that it did not answer.
    """

    engine: E
    name: str
    breaker: Breaker
    load: EngineState
    reported: EngineReport | None = None
    reported_s: float = 0.0
    failed_polls: int = 0

    @property
    def index(self) -> int:
        """Its number among all engines that there ever were."""
        return self.load.index

    def age_s(self, now_s: float) -> float | None:
        """Return the age of its last report; None without one."""
        if self.reported is None:
            return None
        return now_s - self.reported_s


class EngineSlot(Generic[E]):
    """A request's slot on `engine`, from the moment it may be sent there until `close`.

    The caller must close it. `note_prefill` and `note_tokens` keep the engine's load true; after
    `close` they have no effect.
    """

    def __init__(
        self,
        dispatcher: "Dispatcher[E]",
        at: TrackedEngine[E],
        features: RoutingFeatures,
        why: str,
        waited_s: float = 0.0,
        program: Program | None = None,
    ) -> None:
        self.engine = at.engine
        self.name = at.name
        self.why = why
        self.waited_s = waited_s
        self._dispatcher = dispatcher
        self.features = features
        self._program = program
        self._load = load = at.load
        self._prefill = features.new_tokens if features.prefills else 0
        self._output = features.output_tokens
        self._held = self._written = 0
        self._closed = False
        load.running += features.requests
        load.updates += features.requests * features.update
        load.prefill_tokens += self._prefill
        load.output_tokens += self._output

    def placement(self) -> Placement:
        """Return the engine that the request went to, and why."""
        return Placement(self.name, self._dispatcher.policy, self.why, self.waited_s)

    def note_prefill(self) -> None:
        """Count its prompt as prefilled; idempotent."""
        if self._closed or self._held:
            return
        load = self._load
        load.prefill_tokens -= self._prefill
        self._prefill = 0
        self._held = self.features.prompt_tokens
        load.held_tokens += self._held
        if self._dispatcher.holds:
            self._dispatcher.grant()

    def note_tokens(self, tokens: int) -> None:
        """Count `tokens` more output tokens, which may exceed the expected ones.

        The first tokens show that the prompt is prefilled.
        """
        if self._closed:
            return
        if not self._held:
            self.note_prefill()
        load = self._load
        output = self._output
        expected = tokens if tokens < output else output
        self._output = output - expected
        load.output_tokens -= expected
        self._written += tokens
        self._held += tokens
        load.held_tokens += tokens
        if self._program is not None:
            self._dispatcher.queue.count_tokens(self._program, 0, tokens)

    def note_completion(self) -> None:
        """Count its output as complete."""
        self._dispatcher.prompts.note_tokens(self._written / self.features.requests)

    def close(self) -> None:
        """Free the slot, however the request ended; idempotent."""
        if self._closed:
            return
        self._closed = True
        load = self._load
        load.running -= self.features.requests
        load.updates -= self.features.requests * self.features.update
        load.prefill_tokens -= self._prefill
        load.output_tokens -= self._output
        load.held_tokens -= self._held
        if self._program is not None:
            self._dispatcher.end(self._program)


class Dispatcher(Generic[E]):
    """The engines of one role, each of which can serve every request.

    An engine whose breaker is open gets none. Requests of one affinity keep the engine that holds
    their KV; requests of one session keep their engine while it has room. All others go where the
    policy says, and wait while engines are full, if settings limit them (`holds`). It never waits
    and does no I/O:
    `engines.server_client.take_slot` awaits what `submit` returns.

    Attributes:
        choices: Choices by reason.
        waits: Waits of the requests that had to wait.
        prompts: The index of prompts.
        ever: The number of engines that there ever were.

    Args:
        engines: Each engine with its name and its breaker.
        settings: The policy, the order and the limits.
        clock: Gives monotonic seconds.
        prefills: Whether the engines prefill, or get KV from others.
        decodes: Whether the engines write outputs.
    """

    def __init__(
        self,
        engines: Sequence[tuple[E, str, Breaker]],
        settings: SchedulingSettings,
        clock: Callable[[], float],
        *,
        prefills: bool = True,
        decodes: bool = True,
    ) -> None:
        self.settings = settings
        self.policy = settings.selection.policy
        self.holds = settings.queue.holds
        self.choices: Counter[str] = Counter()
        self.waits = Durations()
        self._prefills = prefills
        self._decodes = decodes
        self._clock = clock
        self._memory = ChoiceMemory(settings.selection.affinity_s)
        self.prompts = PromptIndex()
        self.queue = RequestQueue(settings.queue)
        self.ever = len(engines)  # the index of the next
        self._track(
            [TrackedEngine(*engine, EngineState(index)) for index, engine in enumerate(engines)]
        )

    def _track(self, tracked: list[TrackedEngine[E]]) -> None:
        """Send requests to these engines from now on."""
        self.tracked = tracked
        self.engines = tuple(at.engine for at in tracked)
        self._by_index = {at.index: at for at in tracked}
        chooses = len(tracked) > 1
        self._only = None if chooses or not tracked else Choice(tracked[0].index, "only_engine")
        policy = POLICIES[self.policy]
        self.reads_reports = chooses and policy.reads_reports
        """Whether choices depend on engines' reports."""
        self.poll_s = self.settings.poll_s
        """Seconds between polls of the engines."""
        if not self.reads_reports:
            self.poll_s = max(METRICS_POLL_S, self.poll_s)
        self._memory.remembers = self.reads_reports
        if not (chooses and policy.reads_prefixes):
            self.prompts.prefixes = None
        elif self.prompts.prefixes is None:
            self.prompts.prefixes = PrefixIndex()

    def add(self, engine: E, name: str, breaker: Breaker) -> None:
        """Send requests to this engine, too."""
        self._track([*self.tracked, TrackedEngine(engine, name, breaker, EngineState(self.ever))])
        self.ever += 1
        self.grant()

    def drain(self, engine: E) -> TrackedEngine[E]:
        """Send no more requests to this engine, which is not the only one.

        Returns:
            The engine, whose running requests stay counted.
        """
        (at,) = (tracked for tracked in self.tracked if tracked.engine is engine)
        for entry in self.queue.entries:
            if entry.bound is not None and entry.bound.index == at.index:
                self._count_held_back(entry, -1)
                entry.bound = None
        self._track([tracked for tracked in self.tracked if tracked is not at])
        self.grant()
        return at

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self.queue.entries)

    def report(self, index: int, reported: EngineReport) -> None:
        """Take in an engine's report."""
        if at := self._by_index.get(index):
            at.reported = reported
            at.reported_s = self._clock()

    def serving(self) -> list[TrackedEngine[E]]:
        """Return the engines whose breakers are closed, or that may be probed now.

        Raises:
            EngineUnavailable: There are none.
        """
        now_s = self._clock()
        serving = [at for at in self.tracked if at.breaker.blocked_until_s <= now_s]
        if serving:
            return serving
        wait_s = min(at.breaker.wait_s(now_s) for at in self.tracked)
        names = " and ".join(at.name for at in self.tracked)
        raise EngineUnavailable(
            f"The circuit breaker of {names} is open: no request is sent there for another "
            f"{wait_s:.1f} s.",
            remedy="Look at the engine's log, and ask again later.",
            retry_s=wait_s,
        )

    def submit(
        self, request: PlacementRequest, avoid: Collection[E] = ()
    ) -> EngineSlot[E] | QueueEntry:
        """Return a slot if the request is sent at once, else its queue entry.

        Args:
            request: The request.
            avoid: Engines that get it only if no other serves.

        Raises:
            EngineUnavailable: The breakers of all engines are open.
            Overloaded: Too many requests wait.
        """
        serving = self.serving()
        now_s = self._clock()
        excluded = _NONE
        if avoid:
            excluded = frozenset(at.index for at in self.tracked if at.engine in avoid)
        features = self.prompts.features(request, prefills=self._prefills, decodes=self._decodes)
        if not self.holds:
            choice = self._choose(features, _not_excluded(serving, excluded))
            self._memory.note(features, choice.index, now_s)
            return self._take(choice, features, now_s)
        most = self.settings.queue.max_waiting
        if self.waiting >= most and not features.update:  # no client waits for an update
            raise Overloaded(
                f"{self.waiting} requests wait for an engine.",
                remedy=f"Try again; {most} may wait.",
            )
        entry = QueueEntry(features, now_s, excluded=excluded)
        self._bind(entry, _not_excluded(serving, excluded))
        self.queue.join(entry)
        self.grant()
        if entry.slot is not None:
            slot: EngineSlot[E] = entry.slot
            return slot
        entry.waits = True
        return entry

    def withdraw(self, entry: QueueEntry) -> None:
        """Remove a request from the queue; a slot that it has got in this moment is closed."""
        if entry in self.queue.entries:
            self.queue.entries.remove(entry)
        if entry.slot is not None:
            entry.slot.close()
        else:
            self._count_held_back(entry, -1)
            self.queue.leave(entry.program)

    def grant(self) -> None:
        """Give free slots to waiting requests, in their order."""
        if not self.queue.entries:
            return
        try:
            serving = self.serving()
        except EngineUnavailable as error:
            entries = self.queue.entries
            self.queue.entries = []
            for entry in entries:
                entry.error = error
                entry.decided()
            return
        up = {at.index for at in serving}
        while True:
            free = [at for at in serving if self._has_capacity(at, update=False)]
            free_for_updates = [at for at in serving if self._has_capacity(at, update=True)]
            if not free_for_updates:
                return

            def able(entry: QueueEntry) -> list[TrackedEngine[E]]:
                engines = free_for_updates if entry.features.update else free  # noqa: B023
                if entry.bound is None or entry.bound.index not in up:
                    return engines
                return [at for at in engines if at.index == entry.bound.index]

            first = self.queue.next(lambda entry: bool(able(entry)), self._clock())
            if first is None:
                return
            self._grant_to(first, able(first))
            first.decided()

    def end(self, program: Program) -> None:
        """A request of the program is over.

        It still counts as running in the choice of the next, so that programs that were served as
        much go before its own.
        """
        self.grant()
        self.queue.end(program)

    def _has_capacity(self, at: TrackedEngine[E], *, update: bool) -> bool:
        """Tell whether the engine takes a request now.

        Updates are limited only by tokens to prefill, because their KV need not stay. An engine
        that is being probed gets no second request until its breaker allows one.
        """
        if at.breaker.blocked_until_s > self._clock():
            return False
        limits = self.settings.queue
        load = at.load
        if (
            limits.max_prefill_tokens is not None
            and load.prefill_tokens >= limits.max_prefill_tokens
        ):
            return False
        if update:
            return True
        if limits.max_tokens is not None and load.tokens >= limits.max_tokens:
            return False
        return limits.max_running is None or load.running - load.updates < limits.max_running

    def _choose(self, features: RoutingFeatures, among: Sequence[TrackedEngine[E]]) -> Choice:
        if self._only is not None:
            return self._only
        home = self.prompts.home(features)
        if home is not None and any(at.index == home for at in among):
            return Choice(home, "growing_prompt")
        now_s = self._clock()
        home = self._memory.home(features.session, now_s)
        if home is not None and any(at.index == home for at in among):
            return Choice(home, "session")
        if len(among) == 1:
            return Choice(among[0].index, "only_one_free")
        stale_s = self.settings.stale_s
        for at in among:
            is_fresh = now_s - at.reported_s < stale_s
            at.load.reported = at.reported if is_fresh else None
        scene = EngineScene(
            features, [at.load for at in among], self._memory, self.settings.selection, now_s
        )
        return POLICIES[self.policy].choose(scene)

    def _bind(self, entry: QueueEntry, among: Sequence[TrackedEngine[E]]) -> None:
        """Choose the engine now, if settings say so or an engine holds the prompt's beginning."""
        home = self.prompts.home(entry.features)
        if self.settings.queue.bind == "arrival" or any(at.index == home for at in among):
            entry.bound = self._choose(entry.features, among)
            self._memory.note(entry.features, entry.bound.index, entry.arrived_s)
            self._count_held_back(entry, 1)

    def _count_held_back(self, entry: QueueEntry, more: int) -> None:
        """Count the entry as held back for its bound engine, or no longer if `more` is -1."""
        if entry.bound is not None:
            load = self._by_index[entry.bound.index].load
            load.waiting += more
            load.waiting_tokens += more * entry.features.new_tokens

    def _grant_to(self, entry: QueueEntry, among: Sequence[TrackedEngine[E]]) -> None:
        """Give the entry a slot on its bound engine, if that is among these, or on any of these."""
        now_s = self._clock()
        choice = entry.bound
        if choice is None or all(at.index != choice.index for at in among):
            choice = self._choose(entry.features, _not_excluded(among, entry.excluded))
        if entry.bound is None:
            self._memory.note(entry.features, choice.index, now_s)
        waited_s = 0.0
        if entry.waits:
            waited_s = now_s - entry.arrived_s
            self.waits.add(waited_s)
        self._count_held_back(entry, -1)
        entry.slot = slot = self._take(choice, entry.features, now_s, waited_s, entry.program)
        self.queue.take(entry, slot.features.new_tokens)

    def _take(
        self,
        choice: Choice,
        features: RoutingFeatures,
        now_s: float,
        waited_s: float = 0.0,
        program: Program | None = None,
    ) -> EngineSlot[E]:
        at = self._by_index[choice.index]
        features = self.prompts.note_sent(features, choice.index)
        if at.breaker.failures:
            at.breaker.note_attempt(now_s)
        at.load.chosen = self._memory.made
        self.choices[choice.why] += 1
        return EngineSlot(self, at, features, choice.why, waited_s, program)


_NONE: frozenset[int] = frozenset()


def _not_excluded(
    among: Sequence[TrackedEngine[E]], excluded: frozenset[int]
) -> Sequence[TrackedEngine[E]]:
    """Return the engines on which the request has not failed, if there are any."""
    if excluded:
        return [at for at in among if at.index not in excluded] or among
    return among
