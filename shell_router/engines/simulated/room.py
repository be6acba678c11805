"""KV memory of the decode engine: who has room in it, and who waits for room."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from shell_router.engines.simulated.costs import DecodeCosts

Heard = Callable[[int], None]
"""Told how many tokens a writing has written so far."""


def _unheard() -> None:
    """Nobody wants to know."""


@dataclass(slots=True, eq=False)
class Writing:
    """A prompt that writes `wanted` tokens, and is heard of at the first and then every `interval`.

    `taken_back` is called when its room is taken for others: it then waits in the queue again, before all others, and
    has to `admit` itself and `join` anew. `written` counts the tokens it had when it last joined or stopped, `joined`
    is the step at which it would have begun to write, had it never stopped.
    """

    prompt_tokens: int
    wanted: int
    interval: int
    heard: Heard
    taken_back: Callable[[], None] = _unheard
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    written: int = 0
    joined: int = 0
    due: int = -1
    """The step at which it is next heard of; below 0 while it does not run."""
    has_room: bool = False
    running: bool = False
    left: bool = False

    @property
    def tokens(self) -> int:
        """Of its prompt, and those that it had written when it last joined or stopped."""
        return self.prompt_tokens + self.written

    def next_heard(self, written: int) -> int:
        """The number of written tokens at which it is next heard of: 1, 1 + interval, ..., wanted."""
        return min(written + self.interval - (written - 1) % self.interval, self.wanted)


class Room:
    """Gives places and tokens in the order of asking; one that would never fit goes alone.

    Where sequences claim all that they will write, what they hold is theirs until they leave. Where they are let in
    with `reserved_tokens`, they hold what they have, and `grow`.
    """

    def __init__(self, costs: DecodeCosts) -> None:
        self._costs = costs
        self._waiting: OrderedDict[Writing, None] = OrderedDict()
        self.free_tokens = costs.cache_tokens
        self.waiting_tokens = 0  # of those who wait
        self.holders = 0

    @property
    def grows(self) -> bool:
        """Whether sequences take room as they write."""
        return self._costs.reserved_tokens is not None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def ask(self, writing: Writing) -> None:
        """Queue up; nothing where it stands in the queue already."""
        if writing not in self._waiting and not writing.has_room:
            self._queue(writing)

    def let_in(self, next_step: int = 0) -> None:
        """All who fit beside the tokens of the next step, in their order."""
        while self._waiting and self._fits(writing := next(iter(self._waiting)), next_step):
            self._unqueue(writing)
            writing.has_room = True
            self.holders += 1
            self.free_tokens -= self._held(writing)
            if not writing.turn.done():
                writing.turn.set_result(None)

    def grow(self, tokens: int) -> None:
        """Sequences have written so many tokens."""
        if self.grows:
            self.free_tokens -= tokens

    def give_back(self, writing: Writing) -> None:
        """It needs room no more, or waits for it no more."""
        if writing in self._waiting:
            self._unqueue(writing)
        if writing.has_room:
            writing.has_room = False
            self.holders -= 1
            self.free_tokens += self._held(writing)

    def take_back(self, writing: Writing) -> None:
        """Take its room; it is the first to get some again."""
        self.give_back(writing)
        writing.turn = asyncio.get_running_loop().create_future()
        self._queue(writing)
        self._waiting.move_to_end(writing, last=False)

    def _queue(self, writing: Writing) -> None:
        self._waiting[writing] = None
        self.waiting_tokens += writing.tokens

    def _unqueue(self, writing: Writing) -> None:
        del self._waiting[writing]
        self.waiting_tokens -= writing.tokens

    def _held(self, writing: Writing) -> int:
        return writing.tokens if self.grows else writing.prompt_tokens + writing.wanted

    def _fits(self, writing: Writing, next_step: int) -> bool:
        if self.holders >= self._costs.at_once:
            return False
        ahead = (self._costs.reserved_tokens or 0) * (self.holders + 1)
        return not self.holders or self._held(writing) + max(ahead, next_step) <= self.free_tokens
