"""What orders of waiting requests remember of users and programs."""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any

from shell_router.scheduling.engine_state import KEPT, Asked

OUTPUT_WEIGHT = 2
"""An output token counts as two of a prompt, as in the literature on fair serving (and in most price lists)."""


class QueueMemory:
    """Tokens that users were served, when programs began, and how far their requests have risen."""

    def __init__(self) -> None:
        self._attained: OrderedDict[Hashable, float] = OrderedDict()
        self._active: Counter[Hashable] = Counter()
        self._began_s: OrderedDict[str, float] = OrderedDict()
        self._levels: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def attained(self, user: Hashable) -> float:
        """Tokens that this user was served, outputs twice."""
        return self._attained.get(user, 0.0)

    def began_s(self, program: str | None, otherwise: float) -> float:
        """When the program's first request arrived."""
        return otherwise if program is None else self._began_s.get(program, otherwise)

    def level(self, program: str | None) -> int:
        """The starvation level at which the program's requests start: 0 or below."""
        return 0 if program is None else self._levels.get(program, (0, 0))[0]

    # --- what happens

    def arrived(self, asked: Asked, now_s: float) -> None:
        """A request arrives. A user who was away gets no more credit than the least served of those who were not."""
        user, program = asked.user, asked.hints.program
        if not self._active[user] and self._active.total():
            least = min(self.attained(one) for one, requests in self._active.items() if requests)
            self._set(user, max(self.attained(user), least))
        self._active[user] += 1
        if program is not None:
            self._began_s.setdefault(program, now_s)
            _forget_oldest(self._began_s)

    def chosen(self, asked: Asked, risen: int, quantum: int) -> None:
        """The request is served next, having risen by so many levels while it waited."""
        program = asked.hints.program
        if program is not None:
            level, left = self._levels.pop(program, (0, 0))
            level, left = (-risen, quantum) if risen else (level, left - 1)
            if left > 0:
                self._levels[program] = (level, left)
                _forget_oldest(self._levels)
        self.served(asked.user, asked.new_tokens)

    def served(self, user: Hashable, prompt_tokens: int, output_tokens: int = 0) -> None:
        """So many tokens were prefilled, or written, for the user."""
        self._set(user, self.attained(user) + prompt_tokens + OUTPUT_WEIGHT * output_tokens)

    def left(self, asked: Asked) -> None:
        """A request that had arrived is over."""
        self._active[asked.user] -= 1
        if self._active[asked.user] <= 0:
            del self._active[asked.user]

    def _set(self, user: Hashable, tokens: float) -> None:
        self._attained[user] = tokens
        self._attained.move_to_end(user)
        _forget_oldest(self._attained)


def _forget_oldest(remembered: OrderedDict[Any, Any]) -> None:
    while len(remembered) > KEPT:
        remembered.popitem(last=False)
