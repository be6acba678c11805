"""Which of several engines takes a request, and when: for servers and for simulated pairs alike."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from shell_router.core.placement import Placed
from shell_router.engines.breaker import Breaker
from shell_router.engines.known_prompts import KnownPrompts
from shell_router.engines.place import Candidate, Place, PlaceNews, Wanted
from shell_router.engines.waiting_line import Turn, WaitingLine
from shell_router.errors import EngineUnavailable
from shell_router.scheduling.engine_selection import choose
from shell_router.scheduling.engine_state import Asked, Choice, Memory, Reported
from shell_router.scheduling.queue_memory import QueueMemory
from shell_router.scheduling.queue_order import priority
from shell_router.scheduling.settings import SchedulingSettings

E = TypeVar("E")


class Dispatcher(Generic[E]):
    """The engines of one kind, each of which serves every request, but not equally fast.

    An engine whose breaker is open gets none. Requests of one affinity keep the engine that holds their KV; all others
    go where the policy says, and wait for their turn where engines take only so many at once. `choices` counts them by
    reason, `waited` those that had to wait, and `waited_s` for how long in all. `has_adapter` tells whether an engine
    has an adapter.
    """

    def __init__(
        self,
        engines: Sequence[tuple[E, str, Breaker]],
        settings: SchedulingSettings,
        clock: Callable[[], float],
        has_adapter: Callable[[E, str], bool] = lambda engine, adapter: False,
    ) -> None:
        self.candidates = [Candidate(index, *one) for index, one in enumerate(engines)]
        self.settings = settings
        self.choices: Counter[str] = Counter()
        self.waited, self.waited_s = 0, 0.0
        self._clock = clock
        self._has_adapter = has_adapter
        self._queue = QueueMemory()
        self._line: WaitingLine[E] = WaitingLine(settings.queue, self._queue)
        self._memory = Memory(settings.selection.affinity_s)
        self._prompts = KnownPrompts(prefixes=settings.selection.reads_prefixes and len(engines) > 1)

    @property
    def engines(self) -> tuple[E, ...]:
        """All of them, in their order."""
        return tuple(at.engine for at in self.candidates)

    @property
    def policy(self) -> str:
        """The name of the policy that chooses."""
        return self.settings.selection.policy

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._line.turns)

    def heard(self, index: int, reported: Reported) -> None:
        """The engine has just told its state."""
        self.candidates[index].reported, self.candidates[index].heard_s = reported, self._clock()

    def require_serving(self) -> None:
        """Raise EngineUnavailable while the breakers of all are open."""
        self._serving()

    async def place(self, wanted: Wanted, avoid: Collection[E] = ()) -> Place[E]:
        """A place on an engine, where the request is sent at once; not on one of `avoid` if another serves.

        Raises EngineUnavailable while the breakers of all are open, or where no place comes free in time.
        """
        serving, now_s = self._serving(), self._clock()
        shunned = frozenset(at.index for at in self.candidates if at.engine in avoid) if avoid else frozenset()
        turn: Turn[E] = Turn(wanted, self._prompts.asked(wanted), now_s, shunned)
        if not self.settings.queue.holds:
            return self._take(turn, self._choice(turn.asked, _wished(serving, shunned)))
        self._queue.arrived(turn.asked, now_s)
        self._bind(turn, _wished(serving, shunned))
        self._line.join(turn)
        self.grant()
        if turn.has_place:
            return turn.place.result()
        turn.waited = True
        try:
            return await self._line.granted(turn)
        finally:
            if not turn.has_place:
                self._unbind(turn)
                self._queue.left(turn.asked)

    def grant(self) -> None:
        """Give places that are free to those who wait, in their order."""
        if not self._line.turns:
            return
        try:
            serving = self._serving()
        except EngineUnavailable as error:
            self._line.refuse_all(error)
            return
        while True:
            room = {at.index for at in serving if self._has_room(at, update=False)}
            update_room = {at.index for at in serving if self._has_room(at, update=True)}
            can_go = partial(_can_go, {at.index for at in serving}, room, update_room)
            turn = self._line.first(can_go, self._clock()) if update_room else None
            if turn is None:
                return
            able = update_room if turn.wanted.update else room
            wished = _wished([at for at in serving if at.index in able], turn.shunned)
            bound = turn.bound if turn.bound is not None and turn.bound.index in able else None
            turn.place.set_result(self._take(turn, bound or self._choice(turn.asked, wished)))

    # --- choosing

    def _serving(self) -> list[Candidate[E]]:
        now_s = self._clock()
        serving = [at for at in self.candidates if not at.breaker.wait_s(now_s)]
        if serving:
            return serving
        wait_s = min(at.breaker.wait_s(now_s) for at in self.candidates)
        named = " and the ".join(str(at.engine) for at in self.candidates)
        raise EngineUnavailable(
            f"The {named} failed again and again; no request is sent there for another {wait_s:.1f} s.",
            remedy="Look at the engine's log, and ask again later.",
        )

    def _has_room(self, at: Candidate[E], *, update: bool) -> bool:
        """For updates, whose KV nobody has to keep, only what is to be prefilled counts."""
        limits, load = self.settings.queue, at.in_flight
        if limits.max_prefill_tokens is not None and load.prefill_tokens >= limits.max_prefill_tokens:
            return False
        if update:
            return True
        if limits.max_tokens is not None and load.tokens >= limits.max_tokens:
            return False
        return limits.max_running is None or load.requests - load.updates < limits.max_running

    def _choice(self, asked: Asked, among: Sequence[Candidate[E]]) -> Choice:
        if len(self.candidates) == 1:
            return Choice(0, "only_engine")
        home = self._prompts.home(asked)
        if home is not None and any(at.index == home for at in among):
            return Choice(home, "growing_prompt")
        if len(among) == 1:
            return Choice(among[0].index, "only_one_free")
        now_s, stale_s, selection = self._clock(), self.settings.stale_s, self.settings.selection
        states = [at.state(now_s, stale_s) for at in among]
        if (adapter := asked.adapter) is not None:
            has = [self._has_adapter(at.engine, adapter) for at in among]
            states = [replace(state, has_adapter=one) for state, one in zip(states, has, strict=True)]
        return choose(asked, states, self._memory, selection, now_s)

    def _bind(self, turn: Turn[E], among: Sequence[Candidate[E]]) -> None:
        """Choose the engine now where it is not to be chosen when one has a place."""
        home = self._prompts.home(turn.asked)
        if self.settings.queue.bind == "arrival" or any(at.index == home for at in among):
            turn.bound = self._choice(turn.asked, among)
            self._memory.note(turn.asked, turn.bound.index, turn.arrived_s)
            self.candidates[turn.bound.index].waiting += 1
            self.candidates[turn.bound.index].waiting_tokens += turn.asked.new_tokens

    def _unbind(self, turn: Turn[E]) -> None:
        if turn.bound is not None:
            self.candidates[turn.bound.index].waiting -= 1
            self.candidates[turn.bound.index].waiting_tokens -= turn.asked.new_tokens

    # --- taking

    def _take(self, turn: Turn[E], choice: Choice) -> Place[E]:
        at, now_s = self.candidates[choice.index], self._clock()
        queue, waiting = self.settings.queue, self._line.as_waiting(turn)
        rank = priority(waiting, self._queue, queue) if queue.engine_priority else None
        if turn.bound is None:
            self._memory.note(turn.asked, choice.index, now_s)
        asked = self._prompts.sent(turn.wanted, turn.asked, choice.index)
        at.breaker.tried(now_s)
        at.chosen = self._memory.made
        self.choices[choice.why] += 1
        if queue.holds:
            self._line.leave(turn)
            self._unbind(turn)
            self._queue.chosen(asked, waiting.missed // queue.starvation_misses, queue.quantum)
        waited_s = now_s - turn.arrived_s if turn.waited else 0.0
        self.waited, self.waited_s = self.waited + turn.waited, self.waited_s + waited_s
        placed = Placed(at.name, self.policy, choice.why, waited_s)
        news = self._news(asked) if queue.holds else PlaceNews(completed=self._prompts.wrote)
        return Place(at.engine, placed, rank, at.in_flight.begin(asked), news)

    def _news(self, asked: Asked) -> PlaceNews:
        return PlaceNews(
            self.grant,
            lambda tokens: self._queue.served(asked.user, 0, tokens),
            self._prompts.wrote,
            partial(self._left, asked),
        )

    def _left(self, asked: Asked) -> None:
        self._queue.left(asked)
        self.grant()


def _wished(among: Sequence[Candidate[E]], shunned: frozenset[int]) -> Sequence[Candidate[E]]:
    """Those that a request has not failed on, where there are any."""
    return [at for at in among if at.index not in shunned] or among if shunned else among


def _can_go(serving: set[int], room: set[int], update_room: set[int], turn: Turn[E]) -> bool:
    if turn.place.done():
        return False
    able = update_room if turn.wanted.update else room
    return turn.bound.index in able if turn.bound is not None and turn.bound.index in serving else bool(able)
