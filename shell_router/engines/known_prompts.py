"""What is known of prompts before they are sent: where their beginning lies, and how much will be written."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from shell_router.core.generation import DEFAULT_MAX_NEW_TOKENS
from shell_router.engines.place import Wanted
from shell_router.scheduling.engine_state import KEPT, Asked
from shell_router.scheduling.prefix_index import PrefixIndex

_WEIGHT = 0.1  # of the newest output's length in the mean


class KnownPrompts:
    """Prompts that grow, with the engine that holds their beginning; with `prefixes` also what all engines have had."""

    def __init__(self, *, prefixes: bool) -> None:
        self._prefixes = PrefixIndex() if prefixes else None
        self._homes: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by affinity: where, and how many tokens
        self._mean_output = float(DEFAULT_MAX_NEW_TOKENS)

    def asked(self, wanted: Wanted) -> Asked:
        """The request as a choice sees it."""
        known = self._homes.get(_key(wanted.affinity, wanted.adapter)) if wanted.affinity is not None else None
        resident = 0 if known is None else known[1]
        expected = wanted.hints.output_tokens
        return Asked(
            wanted.prompt_tokens,
            max(1, wanted.prompt_tokens - resident),
            min(wanted.most_output, round(self._mean_output if expected is None else expected)),
            wanted.hints,
            wanted.affinity,
            self._overlaps(wanted),
            wanted.update,
            wanted.prefills,
            wanted.adapter,
        )

    def _overlaps(self, wanted: Wanted) -> Mapping[int, int]:
        if self._prefixes is None or wanted.ids is None:
            return {}
        return self._prefixes.overlaps(wanted.ids, wanted.adapter)

    def home(self, asked: Asked) -> int | None:
        """The engine that holds the beginning of a prompt that grows."""
        if asked.affinity is None:
            return None
        return self._homes.get(_key(asked.affinity, asked.adapter), (None, 0))[0]

    def sent(self, wanted: Wanted, asked: Asked, index: int) -> Asked:
        """The prompt goes to this engine: the request with what of it is new there."""
        known = asked.overlaps.get(index, 0)
        if asked.affinity is not None:
            if self.home(asked) == index:
                known = max(known, asked.prompt_tokens - asked.new_tokens)
            self._remember(_key(asked.affinity, asked.adapter), index, asked.prompt_tokens)
        if self._prefixes is not None and wanted.ids is not None:
            self._prefixes.add(wanted.ids, index, wanted.adapter)
        new = max(1, asked.prompt_tokens - known)
        return asked if new == asked.new_tokens else replace(asked, new_tokens=new)

    def wrote(self, tokens: int) -> None:
        """A request wrote so many tokens, to its end."""
        self._mean_output += _WEIGHT * (tokens - self._mean_output)

    def _remember(self, key: int, index: int, tokens: int) -> None:
        self._homes[key] = (index, tokens)
        self._homes.move_to_end(key)
        if len(self._homes) > KEPT:
            self._homes.popitem(last=False)


def _key(affinity: str, adapter: str | None) -> int:
    """A client's own key may be long, and KV of one adapter is of no use to another."""
    return hash((affinity, adapter))
