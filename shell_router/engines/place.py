"""A request that wants an engine, the engines it may get, and its place on one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shell_router.core.generation import DEFAULT_MAX_NEW_TOKENS, Generation
from shell_router.core.hints import NO_HINTS, Hints
from shell_router.core.placement import Placed
from shell_router.engines.breaker import Breaker
from shell_router.scheduling.activity import Entry, InFlight
from shell_router.scheduling.engine_state import EngineState, Reported

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that wants an engine.

    `ids` are its prompt's, where they are known; it writes at most `most_output` tokens. `prefills` is false for an
    engine that gets its KV from another. An `update` is prefill-only. `adapter` is as in `Generation`.
    """

    prompt_tokens: int
    ids: Sequence[int] | None = None
    most_output: int = DEFAULT_MAX_NEW_TOKENS
    hints: Hints = NO_HINTS
    affinity: str | None = None
    update: bool = False
    prefills: bool = True
    adapter: str | None = None

    @classmethod
    def of(cls, request: Generation, *, update: bool = False) -> "Wanted":
        """What a dispatcher needs to know of `request`."""
        limit = request.sampling.get("max_new_tokens")
        most = 0 if update else DEFAULT_MAX_NEW_TOKENS if limit is None else limit
        return cls(
            len(request.input_ids),
            request.input_ids,
            most,
            request.hints,
            request.affinity,
            update,
            adapter=request.adapter,
        )


@dataclass(slots=True)
class Candidate(Generic[E]):
    """An engine, and what is known of it.

    `waiting` requests, of `waiting_tokens`, are held back for it; `chosen` numbers the last choice of it; `heard_s` is
    when it last told its state, `unheard` how often it did not.
    """

    index: int
    engine: E
    name: str
    breaker: Breaker
    in_flight: InFlight = field(default_factory=InFlight)
    waiting: int = 0
    waiting_tokens: int = 0
    chosen: int = 0
    reported: Reported | None = None
    heard_s: float = 0.0
    unheard: int = 0

    def age_s(self, now_s: float) -> float | None:
        """How long ago it told its state; None where it never did."""
        return None if self.reported is None else now_s - self.heard_s

    def state(self, now_s: float, stale_s: float) -> EngineState:
        """As policies see it: what it told `stale_s` ago, or before that, is left out."""
        load, age_s = self.in_flight, self.age_s(now_s)
        return EngineState(
            self.index,
            load.requests,
            self.waiting,
            load.prefill_tokens,
            load.output_tokens,
            self.waiting_tokens,
            self.chosen,
            None if age_s is None or age_s >= stale_s else self.reported,
            age_s,
        )


def _unheard(*_: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class PlaceNews:
    """Who is told what becomes of a request: another may be prefilled, tokens, the whole output, the end."""

    freed: Callable[[], None] = _unheard
    wrote: Callable[[int], None] = _unheard
    completed: Callable[[int], None] = _unheard
    left: Callable[[], None] = _unheard


class Place(Generic[E]):
    """A request's place on `engine`, from the moment it may be sent there until `close`, which must be called.

    `prefilled` and `wrote` keep what is known of the engine's load true. `priority` is for the engine's own queue (the
    lower, the sooner), None where that is not to be told.
    """

    def __init__(self, engine: E, placed: Placed, priority: int | None, entry: Entry, news: PlaceNews) -> None:
        self.engine = engine
        self.placed = placed
        self.priority = priority
        self._entry = entry
        self._news = news
        self._written = 0

    def prefilled(self) -> None:
        """Its prompt is prefilled."""
        self._entry.prefilled()
        self._news.freed()

    def wrote(self, tokens: int) -> None:
        """It wrote so many more tokens; with the first its prompt is prefilled."""
        if not self._written:
            self.prefilled()
        self._written += tokens
        self._entry.wrote(tokens)
        self._news.wrote(tokens)

    def completed(self) -> None:
        """All that it had to write is written."""
        self._news.completed(self._written)

    def close(self) -> None:
        """The engine has done with it, however it ended. Calling it again changes nothing."""
        if not self._entry.ended:
            self._entry.end()
            self._news.left()
