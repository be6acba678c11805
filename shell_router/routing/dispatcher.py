"""Which engine takes a request, and when: filter, score, pick; for servers and simulated pairs
alike.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

from shell_router.core.durations import Durations
from shell_router.core.engine import Placement
from shell_router.errors import EngineUnavailable, Overloaded, require
from shell_router.files.types import CODE_ONLY
from shell_router.routing.engine_selection import (
    POLICIES,
    Scene,
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
from shell_router.routing.queue import QueueEntry, QueueSettings, RequestQueue

E = TypeVar("E")

METRICS_POLL_S = 5.0
"""How often engines are asked for a state that only metrics show."""


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """How engines are chosen and requests wait for them.

    Engines are asked for their state every `poll_s`; reports older than `stale_s` are ignored.
    """

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    poll_s: Annotated[
        float, "Seconds between polls of the engines, below 5; longer costs less and knows less."
    ] = 1.0
    stale_s: Annotated[float, CODE_ONLY] = 5.0

    def __post_init__(self) -> None:
        require(self.poll_s > 0, f"poll_s must be above 0, not {self.poll_s:g}")
        require(
            self.stale_s > self.poll_s,
            (
                f"poll_s must be below {self.stale_s:g}, not {self.poll_s:g}: older reports are "
                "ignored"
            ),
        )


@dataclass(slots=True, eq=False)
class TrackedEngine(Generic[E]):
    """An engine, and what is known of it.

    `reported_s` is when it last reported its state, `failed_polls` how often it did not answer.
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
        """Its place among all that there ever were."""
        return self.load.index

    def age_s(self, now_s: float) -> float | None:
        """How long ago it reported its state; None where it never did."""
        if self.reported is None:
            return None
        return now_s - self.reported_s


class EngineSlot(Generic[E]):
    """A request's slot on `engine`, from the moment it may be sent there until `close`, which must
    be called.

    `prefilled` and `wrote` keep what is known of the engine's load true; after `close` they change
    nothing.
    """

    def __init__(
        self,
        dispatcher: "Dispatcher[E]",
        at: TrackedEngine[E],
        features: RoutingFeatures,
        why: str,
        waited_s: float = 0.0,
    ) -> None:
        self.engine = at.engine
        self.name = at.name
        self.why = why
        self.waited_s = waited_s
        self._dispatcher = dispatcher
        self.features = features
        self._load = load = at.load
        if features.prefills:
            self._prefill = features.new_tokens
        else:
            self._prefill = 0
        self._output = features.output_tokens
        self._held = self._written = 0
        self._closed = False
        load.running += features.requests
        load.updates += features.requests * features.update
        load.prefill_tokens += self._prefill
        load.output_tokens += self._output

    def placement(self) -> Placement:
        """Where the request went and why."""
        return Placement(self.name, self._dispatcher.policy, self.why, self.waited_s)

    def prefilled(self) -> None:
        """Its prompt is prefilled. Calling it again changes nothing."""
        if self._closed or self._held:
            return
        load = self._load
        load.prefill_tokens -= self._prefill
        self._prefill = 0
        self._held = self.features.prompt_tokens
        load.held_tokens += self._held
        if self._dispatcher.holds:
            self._dispatcher.grant()

    def wrote(self, tokens: int) -> None:
        """It wrote `tokens` more, perhaps more than were expected; with the first its prompt is
        prefilled.
        """
        if self._closed:
            return
        if not self._held:
            self.prefilled()
        load = self._load
        output = self._output
        expected = tokens if tokens < output else output
        self._output = output - expected
        load.output_tokens -= expected
        self._written += tokens
        self._held += tokens
        load.held_tokens += tokens
        if self._dispatcher.holds:
            self._dispatcher.queue.count_tokens(self.features.user, 0, tokens)

    def completed(self) -> None:
        """All that it had to write is written."""
        self._dispatcher.prompts.wrote(self._written / self.features.requests)

    def close(self) -> None:
        """The engine has done with it, however it ended. Calling it again changes nothing."""
        if self._closed:
            return
        self._closed = True
        load = self._load
        load.running -= self.features.requests
        load.updates -= self.features.requests * self.features.update
        load.prefill_tokens -= self._prefill
        load.output_tokens -= self._output
        load.held_tokens -= self._held
        if self._dispatcher.holds:
            self._dispatcher.left(self.features)


class Dispatcher(Generic[E]):
    """The engines of one kind, each of which serves every request, but not equally fast.

    An engine whose breaker is open gets none. Requests of one affinity keep the engine that holds
    their KV; all others go where the policy says, and wait where the settings limit what an engine
    takes at a time (`holds`). `choices` counts them by reason, `waits` those that had to wait.
    Engines that do not prefill get KV from others; those that do not decode write nothing. Never
    waits and does no I/O: `engines.fleet.take_slot` awaits what `submit` returns.
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
        self._track([TrackedEngine(*one, EngineState(index)) for index, one in enumerate(engines)])

    def _track(self, tracked: list[TrackedEngine[E]]) -> None:
        """Requests go to these engines from now on."""
        self.tracked = tracked
        self.engines = tuple(at.engine for at in tracked)
        self._by_index = {at.index: at for at in tracked}
        self._only = (Choice(tracked[0].index, "only_engine")) if (len(tracked) == 1) else (None)
        policy = POLICIES[self.policy]
        self.reads_reports = len(tracked) > 1 and policy.reads_reports
        """Whether choices depend on what engines report."""
        often_s = self.settings.poll_s
        if self.reads_reports:
            self.poll_s = often_s
        else:
            self.poll_s = max(METRICS_POLL_S, often_s)
        """Seconds between polls of the engines."""
        self._memory.remembers = self.reads_reports
        if len(tracked) > 1 and policy.reads_prefixes:
            self.prompts.prefixes = self.prompts.prefixes or PrefixIndex()
        else:
            self.prompts.prefixes = None

    def add(self, engine: E, name: str, breaker: Breaker) -> None:
        """Requests go to this engine, too."""
        self._track([*self.tracked, TrackedEngine(engine, name, breaker, EngineState(self.ever))])
        self.ever += 1
        self.grant()

    def drain(self, engine: E) -> TrackedEngine[E]:
        """Send no more requests to this engine, which is not the only one; what runs there stays in
        flight there.
        """
        (at,) = (one for one in self.tracked if one.engine is engine)
        for entry in self.queue.entries:
            if entry.bound is not None and entry.bound.index == at.index:
                self._held_back(entry, -1)
                entry.bound = None
        self._track([one for one in self.tracked if one is not at])
        self.grant()
        return at

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self.queue.entries)

    def report(self, index: int, reported: EngineReport) -> None:
        """The engine has reported its state."""
        if at := self._by_index.get(index):
            at.reported, at.reported_s = reported, self._clock()

    def serving(self) -> list[TrackedEngine[E]]:
        """The engines whose breakers are closed, or that may be probed now. EngineUnavailable where
        there are none.
        """
        now_s = self._clock()
        serving = [at for at in self.tracked if at.breaker.blocked_until_s <= now_s]
        if serving:
            return serving
        wait_s = min(at.breaker.wait_s(now_s) for at in self.tracked)
        named = " and ".join(at.name for at in self.tracked)
        raise EngineUnavailable(
            (
                f"The circuit breaker of {named} is open: no request is sent there for another "
                f"{wait_s:.1f} s."
            ),
            remedy="Look at the engine's log, and ask again later.",
        )

    def submit(
        self, request: PlacementRequest, avoid: Collection[E] = ()
    ) -> EngineSlot[E] | QueueEntry:
        """A slot, where the request is sent at once, or its queue entry; not on one of `avoid` if
        another serves.

        Raises EngineUnavailable while the breakers of all are open, and Overloaded where too many
        wait.
        """
        serving = self.serving()
        now_s = self._clock()
        if avoid:
            excluded = frozenset(at.index for at in self.tracked if at.engine in avoid)
        else:
            excluded = _NONE
        features = self.prompts.features(request, prefills=self._prefills, decodes=self._decodes)
        if not self.holds:
            choice = self._choice(
                features, _not_excluded(serving, excluded) if excluded else serving
            )
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
        """The request waits no longer. A slot that it had got in this moment is closed."""
        if entry in self.queue.entries:
            self.queue.entries.remove(entry)
        if entry.slot is not None:
            entry.slot.close()
        else:
            self._held_back(entry, -1)
            self.queue.leave(entry.features)

    def grant(self) -> None:
        """Give slots that are free to requests that wait, in their order."""
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
                if entry.bound and entry.bound.index in up:
                    bound = entry.bound.index
                else:
                    bound = None
                if bound is None:
                    return engines
                return [at for at in engines if at.index == bound]

            first = self.queue.next(lambda entry: bool(able(entry)), self._clock())
            if first is None:
                return
            self._grant_to(first, able(first))
            first.decided()

    def left(self, features: RoutingFeatures) -> None:
        """A request is over."""
        self.queue.leave(features)
        self.grant()

    # --- choosing

    def _has_capacity(self, at: TrackedEngine[E], *, update: bool) -> bool:
        """Updates, whose KV need not stay, are limited only by what is to be prefilled.

        An engine that is being probed gets no second request until its breaker allows one.
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

    def _choice(self, features: RoutingFeatures, among: Sequence[TrackedEngine[E]]) -> Choice:
        if self._only is not None:
            return self._only
        home = self.prompts.home(features)
        if home is not None and any(at.index == home for at in among):
            return Choice(home, "growing_prompt")
        if len(among) == 1:
            return Choice(among[0].index, "only_one_free")
        now_s = self._clock()
        stale_s = self.settings.stale_s
        for at in among:
            if now_s - at.reported_s < stale_s:
                at.load.reported = at.reported
            else:
                at.load.reported = None
        scene = Scene(
            features, [at.load for at in among], self._memory, self.settings.selection, now_s
        )
        return POLICIES[self.policy].choose(scene)

    def _bind(self, entry: QueueEntry, among: Sequence[TrackedEngine[E]]) -> None:
        """Choose the engine now if the settings say so, or if one of `among` holds the prompt's
        beginning.
        """
        home = self.prompts.home(entry.features)
        if self.settings.queue.bind == "arrival" or any(at.index == home for at in among):
            entry.bound = self._choice(entry.features, among)
            self._memory.note(entry.features, entry.bound.index, entry.arrived_s)
            self._held_back(entry, 1)

    def _held_back(self, entry: QueueEntry, more: int) -> None:
        """The entry is held back for the engine that it is bound to, if to any; no longer where
        `more` is -1.
        """
        if entry.bound is not None:
            load = self._by_index[entry.bound.index].load
            load.waiting += more
            load.waiting_tokens += more * entry.features.new_tokens

    def _grant_to(self, entry: QueueEntry, among: Sequence[TrackedEngine[E]]) -> None:
        """A slot on the engine that the entry is bound to, if that is among these, or else on one
        of these.
        """
        now_s = self._clock()
        if entry.bound and any(at.index == entry.bound.index for at in among):
            choice = entry.bound
        else:
            choice = None
        if choice is None:
            choice = self._choice(entry.features, _not_excluded(among, entry.excluded))
        if entry.bound is None:
            self._memory.note(entry.features, choice.index, now_s)
        if entry.waits:
            waited_s = now_s - entry.arrived_s
        else:
            waited_s = 0.0
        if entry.waits:
            self.waits.add(waited_s)
        self._held_back(entry, -1)
        entry.slot = slot = self._take(choice, entry.features, now_s, waited_s)
        self.queue.take(entry, slot.features.new_tokens)

    def _take(
        self, choice: Choice, features: RoutingFeatures, now_s: float, waited_s: float = 0.0
    ) -> EngineSlot[E]:
        at = self._by_index[choice.index]
        features = self.prompts.sent(features, choice.index)
        if at.breaker.failures:
            at.breaker.tried(now_s)
        at.load.chosen = self._memory.made
        self.choices[choice.why] += 1
        return EngineSlot(self, at, features, choice.why, waited_s)


_NONE: frozenset[int] = frozenset()


def _not_excluded(
    among: Sequence[TrackedEngine[E]], excluded: frozenset[int]
) -> Sequence[TrackedEngine[E]]:
    """Those on which the request has not failed, if there are any."""
    if excluded:
        return [at for at in among if at.index not in excluded] or among
    return among
