"""Requests that begin with the same tokens, of which a prefill server computes them once.

The agents of a layer have one question and come at once. An SGLang server that schedules a pass
while the last one runs finds no prefix of that one in its cache yet: without this every agent that
came meanwhile would be prefilled whole.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shell_router.core.engine import Generation
from shell_router.routing.placement import BLOCK_TOKENS, PrefixIndex, blocks_of

_KEPT_BLOCKS = 1 << 14  # a million tokens, as many as a large KV cache holds


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTurn:
    """A prompt that is being prefilled, in blocks of tokens, until `end`.

    Attributes:
        waited: Whether it waited for another prompt.
    """

    prefixes: "SharedPrefixes"
    blocks: Sequence[int]
    waited: bool
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, *, prefilled: bool) -> None:
        """Let the requests go on that wait for this prompt; idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self.prefixes.forget(self, prefilled=prefilled)


class SharedPrefixes:
    """The prompts that one prefill server has prefilled, and those that it is prefilling.

    Blocks that the server has evicted count as prefilled; a request for them waits for nothing.
    """

    def __init__(self) -> None:
        self._kept = PrefixIndex(_KEPT_BLOCKS)
        self._under_way: dict[int, PrefixTurn] = {}

    async def begin(self, request: Generation, fewest: float) -> PrefixTurn:
        """Wait while prompts under way compute over `fewest` tokens of this one's beginning."""
        blocks = blocks_of(request.input_ids, request.adapter, request.cache_key)
        waited = False
        while (leader := self._find_leader(blocks, fewest)) is not None:
            waited = True
            await leader.ended.wait()
        turn = PrefixTurn(self, blocks, waited)
        for block in blocks:
            self._under_way.setdefault(block, turn)
        return turn

    def _find_leader(self, blocks: Sequence[int], fewest: float) -> PrefixTurn | None:
        """Return the prompt that computes the last of the blocks that are under way."""
        kept = self._kept.overlaps(blocks).get(0, 0) // BLOCK_TOKENS
        leader = None
        shared = 0
        for block in blocks[kept:]:
            turn = self._under_way.get(block)
            if turn is None:
                break
            leader = turn
            shared += BLOCK_TOKENS
        return leader if shared > fewest else None

    def forget(self, turn: PrefixTurn, *, prefilled: bool) -> None:
        """Take the prompt from those under way."""
        for block in turn.blocks:
            if self._under_way.get(block) is turn:
                del self._under_way[block]
        if prefilled:
            self._kept.add(turn.blocks, 0)
