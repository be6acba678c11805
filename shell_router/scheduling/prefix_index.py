"""Which leading tokens each engine has had before, as far as one router knows."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

BLOCK_TOKENS = 64
MOST_BLOCKS = 256
"""Of a prompt; what lies further behind decides no choice, and hashing it would cost milliseconds."""


class PrefixIndex:
    """Remembers prompts in blocks of 64 tokens, each by a hash of all tokens up to its end.

    `room` blocks are kept, those met longest ago leave first. Engines evict what they like: an overlap is an
    expectation. Two prompts are taken for equal where 64 bits of hash are.
    """

    def __init__(self, room: int = 1 << 17) -> None:
        self._room = room
        self._engines: OrderedDict[int, int] = OrderedDict()  # by block, a bit per engine

    def overlaps(self, ids: Sequence[int], adapter: str | None = None) -> Mapping[int, int]:
        """Leading tokens of a prompt that an engine, by its index, has had; those that had none are absent.

        Prompts for different adapters of a model share nothing.
        """
        found: dict[int, int] = {}
        for number, block in enumerate(_blocks(ids, adapter), 1):
            engines = self._engines.get(block, 0)
            if not engines:
                break
            for index in _bits(engines):
                if number == 1 or found.get(index) == (number - 1) * BLOCK_TOKENS:
                    found[index] = number * BLOCK_TOKENS
        return found

    def add(self, ids: Sequence[int], index: int, adapter: str | None = None) -> None:
        """The engine is sent this prompt."""
        for block in _blocks(ids, adapter):
            self._engines[block] = self._engines.get(block, 0) | 1 << index
            self._engines.move_to_end(block)
        while len(self._engines) > self._room:
            self._engines.popitem(last=False)


def _blocks(ids: Sequence[int], adapter: str | None) -> Iterator[int]:
    known = hash(adapter)
    for begin in range(0, min(len(ids), MOST_BLOCKS * BLOCK_TOKENS) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        known = hash((known, tuple(ids[begin : begin + BLOCK_TOKENS])))
        yield known


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
