"""Dispatch requests to engines: filter, score, pick, and queue; for servers and simulated pairs."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Generic, TypeVar

from shell_router.core.durations import Durations
from shell_router.core.engine import Placement
from shell_router.errors import EngineUnavailable, Overloaded, require
from shell_router.files.types import CODE_ONLY, Seconds, Share
from shell_router.routing.engine_selection import (
    POLICIES,
    EngineScene,
    SelectionSettings,
)
from shell_router.routing.failures import Breaker
from shell_router.routing.pace import Mark, Pace
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

LONG_PROMPT_TOKENS = 2048
"""Prompt tokens of batches that an idle server prefills at a time; a prompt with more to prefill is
preempted for an online one, which would wait for it.
"""

QUIET_S = 1.0
"""Seconds without an online request after which an engine is idle, so that batches do not come and
go with each.
"""


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """Settings of the choice of engines and of the queue for them.

    Engines are polled every `poll_s`; reports older than `stale_s` are ignored.
    """

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    batch_slowdown: Annotated[
        Share, "By what share batches may lengthen the time of online requests' tokens."
    ] = 0.05
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
        load: The router's online load on it.
        batch_load: The load of batches.
        batches: Requests of batches that run there and may be preempted, the latest last.
        pace: Measured while there are batches.
        left_s: When the last online request left it.
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
    pace: Pace = field(default_factory=Pace)
    left_s: float = -inf
    batches: dict["EngineSlot[E]", None] = field(default_factory=dict)
    batch_load: EngineState = field(init=False)

    def __post_init__(self) -> None:
        self.batch_load = EngineState(self.load.index)

    @property
    def running(self) -> int:
        """Requests on it, prefill-only updates and those of batches included."""
        return self.load.running + self.batch_load.running

    def count_online(self, now_s: float) -> int:
        """Return its online requests, at least one before it has been idle for QUIET_S."""
        load = self.load
        return max(load.running - load.updates, int(now_s - self.left_s < QUIET_S))

    def get_report(self, now_s: float, stale_s: float) -> EngineReport | None:
        """Return its last report, None if that is as old as `stale_s` seconds."""
        return self.reported if now_s - self.reported_s < stale_s else None

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
        self._at = at
        self.load = load = at.batch_load if features.is_batch else at.load
        self._read: Mark | None = None
        self._prefill = features.new_tokens if features.prefills else 0
        self._output = features.output_tokens
        self._held = self._written = 0
        self._closed = False
        load.running += features.requests
        load.updates += features.requests * features.update
        load.prefill_tokens += self._prefill
        load.output_tokens += self._output
        if dispatcher.preempts and features.hints.on_preempt is not None and not features.update:
            at.batches[self] = None

    @property
    def tokens(self) -> int:
        """The KV tokens that it is expected to take in the end."""
        return self._prefill + self._output + self._held

    @property
    def delays_prompts(self) -> bool:
        """Whether an online prompt would wait long for its prompt."""
        return self._prefill > LONG_PROMPT_TOKENS

    def preempt(self) -> None:
        """Tell a batch's request to leave; its slot is closed now or soon. Idempotent."""
        on_preempt = self.features.hints.on_preempt
        if self in self._at.batches and on_preempt is not None:
            del self._at.batches[self]
            on_preempt()

    def placement(self) -> Placement:
        """Return the engine that the request went to, and why."""
        return Placement(self.name, self._dispatcher.policy, self.why, self.waited_s)

    def note_prefill(self) -> None:
        """Count its prompt as prefilled; idempotent."""
        if self._closed or self._held:
            return
        load = self.load
        load.prefill_tokens -= self._prefill
        self._prefill = 0
        self._held = self.features.prompt_tokens
        load.held_tokens += self._held
        self._at.pace.count(1, self._dispatcher.clock())
        self._dispatcher.grant()

    def note_tokens(self, tokens: int) -> None:
        """Count `tokens` more output tokens, which may exceed the expected ones.

        The first tokens show that the prompt is prefilled.
        """
        if self._closed:
            return
        if not self._held:
            self.note_prefill()
        load = self.load
        output = self._output
        expected = tokens if tokens < output else output
        self._output = output - expected
        load.output_tokens -= expected
        self._written += tokens
        self._held += tokens
        load.held_tokens += tokens
        dispatcher = self._dispatcher
        if self._program is not None:
            dispatcher.queue_of(self.features).count_tokens(self._program, 0, tokens)
        if dispatcher.has_batches:
            now = self._at.pace.mark(dispatcher.clock())
            if self._read is not None:
                self._at.pace.measure(self._read, tokens, now)
            self._read = now

    def note_completion(self) -> None:
        """Count its output as complete."""
        if self.features.is_batch:  # the rest of an output says nothing of others
            return
        self._dispatcher.prompts.note_tokens(self._written / self.features.requests)

    def close(self) -> None:
        """Free the slot, however the request ended; idempotent."""
        if self._closed:
            return
        self._closed = True
        load = self.load
        load.running -= self.features.requests
        load.updates -= self.features.requests * self.features.update
        load.prefill_tokens -= self._prefill
        load.output_tokens -= self._output
        load.held_tokens -= self._held
        self._at.batches.pop(self, None)
        now_s = self._dispatcher.clock()
        if not self.features.is_batch:
            self._at.left_s = now_s
        if self._held:
            self._at.pace.count(-1, now_s)
        # its program still counts as running, so that those that were served as much go first
        self._dispatcher.grant()
        if self._program is not None:
            self._dispatcher.queue_of(self.features).end(self._program)


class Dispatcher(Generic[E]):
    """The engines of one role, each of which can serve every request.

    An engine whose breaker is open gets none. Requests of one affinity keep the engine that holds
    their KV; requests of one session keep their engine while it has room. All others go where the
    policy says, and wait while engines are full, if settings limit them (`holds`). Requests of
    batches have a queue of their own: online requests neither wait for them nor see their load.
    It never waits and does no I/O: `engines.server_client.take_slot` awaits what `submit` returns.

    Attributes:
        choices: Choices by reason.
        waits: Waits of the requests that had to wait.
        prompts: The index of prompts.
        ever: The number of engines that there ever were.
        batches: Waiting requests of batches.
        has_batches: Whether any came.
        is_rechecked: Whether the caller grants slots every second, as engines become idle.

    Args:
        engines: Each engine with its name and its breaker.
        settings: The policy, the order and the limits.
        clock: Gives monotonic seconds.
        prefills: Whether the engines prefill, or get KV from others.
        decodes: Whether the engines write outputs.
        preempts: Whether requests of batches leave for online ones. Those of a remote server do
            not, as they would be paid twice.
    """

    def __init__(
        self,
        engines: Sequence[tuple[E, str, Breaker]],
        settings: SchedulingSettings,
        clock: Callable[[], float],
        *,
        prefills: bool = True,
        decodes: bool = True,
        preempts: bool = True,
    ) -> None:
        self.settings = settings
        self.policy = settings.selection.policy
        self.holds = settings.queue.holds
        self.choices: Counter[str] = Counter()
        self.waits = Durations()
        self._prefills = prefills
        self._decodes = decodes
        self.preempts = preempts
        self.clock = clock
        self._memory = ChoiceMemory(settings.selection.affinity_s)
        self.prompts = PromptIndex()
        self.queue = RequestQueue(settings.queue)
        self.batches = RequestQueue(settings.queue)
        self.has_batches = False
        self.is_rechecked = False
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
        for slot in list(at.batches):
            slot.preempt()
        self.grant()
        return at

    @property
    def waiting(self) -> int:
        """The number of online requests that wait for a slot."""
        return len(self.queue.entries)

    def queue_of(self, features: RoutingFeatures) -> RequestQueue:
        """Return the queue in which the request waits, and which counts what it was served."""
        return self.batches if features.is_batch else self.queue

    def report(self, index: int, reported: EngineReport) -> None:
        """Take in an engine's report."""
        if at := self._by_index.get(index):
            at.reported = reported
            at.reported_s = self.clock()
            self._make_way(at)

    def serving(self) -> list[TrackedEngine[E]]:
        """Return the engines whose breakers are closed, or that may be probed now.

        Raises:
            EngineUnavailable: There are none.
        """
        now_s = self.clock()
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
        now_s = self.clock()
        excluded = _NONE
        if avoid:
            excluded = frozenset(at.index for at in self.tracked if at.engine in avoid)
        features = self.prompts.features(request, prefills=self._prefills, decodes=self._decodes)
        is_batch = features.is_batch
        if not (self.holds or is_batch):
            choice = self._choose(features, _not_excluded(serving, excluded))
            self._memory.note(features, choice.index, now_s)
            slot = self._take(choice, features, now_s)
            self._make_way(self._by_index[choice.index])
            return slot
        most = self.settings.queue.max_waiting
        # no client waits for an update, and batches wait apart
        if self.waiting >= most and not (features.update or is_batch):
            raise Overloaded(
                f"{self.waiting} requests wait for an engine.",
                remedy=f"Try again; {most} may wait.",
            )
        entry = QueueEntry(features, now_s, excluded=excluded)
        self.has_batches |= is_batch
        if not is_batch:
            self._bind(entry, _not_excluded(serving, excluded))
        self.queue_of(features).join(entry)
        self.grant()
        if entry.slot is not None:
            granted: EngineSlot[E] = entry.slot
            return granted
        entry.waits = True
        return entry

    def withdraw(self, entry: QueueEntry) -> None:
        """Remove a request from the queue; a slot that it has got in this moment is closed."""
        queue = self.queue_of(entry.features)
        if entry in queue.entries:
            queue.entries.remove(entry)
        if entry.slot is not None:
            entry.slot.close()
        else:
            self._count_held_back(entry, -1)
            queue.leave(entry.program)

    def grant(self) -> None:
        """Give free slots to waiting requests, in their order; to batches if no other waits."""
        if not (self.queue.entries or self.batches.entries):
            return
        try:
            serving = self.serving()
        except EngineUnavailable as error:
            entries = self.queue.entries + self.batches.entries
            self.queue.entries = []
            self.batches.entries = []
            for entry in entries:
                entry.error = error
                entry.decided()
            return
        self._grant_online(serving)
        while self.batches.entries and not self.queue.entries:
            free = [at for at in serving if self._has_room(at)]
            if not free:
                return
            first = self.batches.next(lambda entry: True, self.clock())
            assert first is not None, "one waits"
            self._grant_to(first, free)
            first.decided()

    def _grant_online(self, serving: Sequence[TrackedEngine[E]]) -> None:
        up = {at.index for at in serving}
        while self.queue.entries:
            free = [at for at in serving if self._has_capacity(at, update=False)]
            free_for_updates = [at for at in serving if self._has_capacity(at, update=True)]
            if not free_for_updates:
                return

            def able(entry: QueueEntry) -> list[TrackedEngine[E]]:
                engines = free_for_updates if entry.features.update else free  # noqa: B023
                if entry.bound is None or entry.bound.index not in up:
                    return engines
                return [at for at in engines if at.index == entry.bound.index]

            first = self.queue.next(lambda entry: bool(able(entry)), self.clock())
            if first is None:
                return
            self._grant_to(first, able(first))
            first.decided()

    def _has_capacity(self, at: TrackedEngine[E], *, update: bool) -> bool:
        """Tell whether the engine takes a request now.

        Updates are limited only by tokens to prefill, because their KV need not stay. An engine
        that is being probed gets no second request until its breaker allows one.
        """
        if at.breaker.blocked_until_s > self.clock():
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

    def _has_room(self, at: TrackedEngine[E]) -> bool:
        """Tell whether the engine takes a request of a batch now."""
        if at.breaker.blocked_until_s > self.clock():
            return False
        if self._prefills and self.preempts:
            most_tokens = 1 if at.count_online(self.clock()) else LONG_PROMPT_TOKENS
            if at.load.prefill_tokens or at.batch_load.prefill_tokens >= most_tokens:
                return False
        most = self.settings.queue.max_tokens
        if most is not None and at.load.tokens + at.batch_load.tokens >= most:
            return False
        return at.batch_load.running < self._count_room(at)

    def _count_room(self, at: TrackedEngine[E]) -> float:
        """Return how many requests of batches may run there next to the online ones."""
        online = at.count_online(self.clock())
        room = inf
        if self.settings.queue.max_running is not None:
            room = self.settings.queue.max_running - at.load.running + at.load.updates
        if not (online and self._decodes and self.preempts):
            return room
        report = at.get_report(self.clock(), self.settings.stale_s)
        if report is not None and report.kv_usage >= self.settings.selection.gimbal.theta_kv:
            return 0
        return min(room, at.pace.count_room(online, self.settings.batch_slowdown))

    def _make_way(self, at: TrackedEngine[E]) -> None:
        """Preempt the batches' requests beyond the engine's room, the latest first."""
        if not at.batches:
            return
        room = self._count_room(at)
        most = self.settings.queue.max_tokens or inf
        tokens = at.load.tokens + sum(slot.tokens for slot in at.batches)
        for slot in reversed(list(at.batches)):
            if len(at.batches) > room or tokens > most or slot.delays_prompts:
                tokens -= slot.tokens
                slot.preempt()

    def _choose(self, features: RoutingFeatures, among: Sequence[TrackedEngine[E]]) -> Choice:
        if self._only is not None:
            return self._only
        home = self.prompts.home(features)
        if home is not None and any(at.index == home for at in among):
            return Choice(home, "growing_prompt")
        now_s = self.clock()
        home = self._memory.home(features.session, now_s)
        if home is not None and any(at.index == home for at in among):
            return Choice(home, "session")
        if len(among) == 1:
            return Choice(among[0].index, "only_one_free")
        for at in among:
            report = at.get_report(now_s, self.settings.stale_s)
            at.load.reported = at.batch_load.reported = report
        loads = [at.batch_load if features.is_batch else at.load for at in among]
        scene = EngineScene(features, loads, self._memory, self.settings.selection, now_s)
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
        now_s = self.clock()
        choice = entry.bound
        if choice is None or all(at.index != choice.index for at in among):
            choice = self._choose(entry.features, _not_excluded(among, entry.excluded))
        is_batch = entry.features.is_batch
        if is_batch:
            self._memory.made += 1  # it makes no engine the home of online requests
        elif entry.bound is None:
            self._memory.note(entry.features, choice.index, now_s)
        waited_s = 0.0
        if entry.waits:
            waited_s = now_s - entry.arrived_s
            if not is_batch:
                self.waits.add(waited_s)
        self._count_held_back(entry, -1)
        entry.slot = slot = self._take(choice, entry.features, now_s, waited_s, entry.program)
        self.queue_of(entry.features).take(entry, slot.features.new_tokens)
        if not is_batch:
            # last, because a slot that closes as it is preempted grants others
            self._make_way(self._by_index[choice.index])

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
        self.choices[choice.why] += 1
        slot = EngineSlot(self, at, features, choice.why, waited_s, program)
        slot.load.chosen = self._memory.made
        return slot


_NONE: frozenset[int] = frozenset()


def _not_excluded(
    among: Sequence[TrackedEngine[E]], excluded: frozenset[int]
) -> Sequence[TrackedEngine[E]]:
    """Return the engines on which the request has not failed, if there are any."""
    if excluded:
        return [at for at in among if at.index not in excluded] or among
    return among
