"""What is known when an engine is chosen: of the request, of the engines, and of the choices before."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from shell_router.core.hints import NO_HINTS, Hints

KEPT = 65_536
"""Users and places that are remembered; those heard of longest ago are forgotten first."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What an engine says of itself: the share of its KV in use, tokens running and waiting, its cache's hit rate."""

    kv_usage: float
    tokens: int
    running: int
    waiting: int
    hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine that may be chosen, `index` by its place among all of its kind.

    What the router counts itself is exact: requests it has sent there (`running`) and holds back for it (`waiting`),
    prompt tokens there that are not yet prefilled, output tokens that are expected and not yet written, and new
    prompt tokens of what is held back. `reported` is what the engine itself said `age_s` ago, and None where it never
    did or where that is too long ago to be true. `chosen` tells when it was last chosen: the lower, the longer ago.
    `has_adapter` says that the request's adapter is loaded there, or on its way.
    """

    index: int
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    waiting_tokens: int = 0
    chosen: int = 0
    reported: Reported | None = None
    age_s: float | None = None
    has_adapter: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a choice sees it.

    `new_tokens` of its `prompt_tokens` are not yet prefilled as far as is known, `output_tokens` are expected of it.
    `overlaps` are leading prompt tokens that an engine, by its index, has had before; engines that had none are absent.
    `affinity` and `adapter` are as in `Generation`. `update` marks a prefill-only request; without
    `prefills` the engine gets the prompt's KV from another.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    output_tokens: int = 0
    hints: Hints = NO_HINTS
    affinity: str | None = None
    overlaps: Mapping[int, int] = field(default_factory=dict)
    update: bool = False
    prefills: bool = True
    adapter: str | None = None

    @property
    def user(self) -> Hashable | None:
        """Whose request it is, where that is known."""
        return self.hints.user

    @property
    def place(self) -> Hashable | None:
        """User, topology and place in it: finer than the user, so that a tree's agents do not collapse onto one engine.

        None where nothing of it is known.
        """
        hints = self.hints
        return (hints.user, hints.topology, hints.agent) if hints.user or hints.topology else None


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, by its index, and why: a few words that are the same for all choices of the same kind."""

    index: int
    why: str


class Memory:
    """What choices before left behind: how many they were, and where users and places went last.

    Policies read it; `note` is for those who act on their choices.
    """

    def __init__(self, affinity_s: float) -> None:
        self.made = 0
        self._affinity_s = affinity_s
        self._homes: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def home(self, key: Hashable | None, now_s: float) -> int | None:
        """The engine of the last request of `key` (an `Asked.user` or `Asked.place`), unless that is too long ago."""
        found = None if key is None else self._homes.get(key)
        return found[0] if found is not None and now_s - found[1] < self._affinity_s else None

    def note(self, asked: Asked, index: int, now_s: float) -> None:
        """The request goes to this engine now."""
        self.made += 1
        for key in (asked.user, asked.place):
            if key is not None:
                self._homes[key] = (index, now_s)
                self._homes.move_to_end(key)
        while len(self._homes) > KEPT:
            self._homes.popitem(last=False)
