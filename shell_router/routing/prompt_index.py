"""Which engine has had the beginning of a prompt, by affinity and by blocks of its tokens."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS
from shell_router.routing.engine_selection import KEPT, PlacementRequest, RoutingFeatures

BLOCK_TOKENS = 64
MAX_BLOCKS = 256
"""Of a prompt; tokens behind them decide no choice, and hashing them would cost milliseconds."""

_WEIGHT = 0.1  # of the newest output's length in the mean


class PrefixIndex:
    """Remembers prompts in blocks of 64 tokens, each by a hash of all tokens up to its end.

    `max_blocks` are kept, in order of their last use. Engines evict what they like: an overlap is an expectation. Two
    prompts are taken for equal where 64 bits of hash are.
    """

    def __init__(self, max_blocks: int = 1 << 17) -> None:
        self._max_blocks = max_blocks
        self._engines: OrderedDict[int, int] = OrderedDict()  # by block, a bit per engine

    def overlaps(self, blocks: Sequence[int]) -> Mapping[int, int]:
        """Leading tokens of a prompt that an engine, by its index, has had; engines that had none are absent."""
        found: dict[int, int] = {}
        for number, block in enumerate(blocks):
            engines = self._engines.get(block, 0)
            if not engines:
                break
            while engines:
                index = (engines & -engines).bit_length() - 1
                engines &= engines - 1
                if found.get(index, 0) == number * BLOCK_TOKENS:
                    found[index] = (number + 1) * BLOCK_TOKENS
        return found

    def add(self, blocks: Sequence[int], index: int) -> None:
        """The engine is sent this prompt."""
        for block in blocks:
            self._engines[block] = self._engines.get(block, 0) | 1 << index
            self._engines.move_to_end(block)
        while len(self._engines) > self._max_blocks:
            self._engines.popitem(last=False)


def blocks_of(ids: Sequence[int], adapter: str | None = None) -> tuple[int, ...]:
    """The prompt's whole blocks, each by a hash of all tokens up to its end and of the adapter that reads them."""
    known, blocks = hash(adapter), []
    for begin in range(0, min(len(ids), MAX_BLOCKS * BLOCK_TOKENS) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        known = hash((known, tuple(ids[begin : begin + BLOCK_TOKENS])))
        blocks.append(known)
    return tuple(blocks)


class PromptIndex:
    """Prompts that grow, by affinity, with the engine that holds their beginning and how many tokens of it.

    With `prefixes` also the prompts that engines have had, by their tokens.
    """

    def __init__(self) -> None:
        self.prefixes: PrefixIndex | None = None
        self._homes: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._mean_output = float(DEFAULT_MAX_NEW_TOKENS)

    def features(self, request: PlacementRequest, *, prefills: bool, decodes: bool) -> RoutingFeatures:
        """The request as engines see it that prefill it, decode it, or do both."""
        hints, grows, resident = request.hints, None, 0
        if prefills and request.affinity is not None:
            # clients' own keys may be long, and KV of one adapter is of no use to another
            grows = hash((request.affinity, request.adapter))
            resident = self._homes.get(grows, (0, 0))[1]
        blocks: tuple[int, ...] = ()
        if self.prefixes is not None and prefills and request.ids is not None:
            blocks = blocks_of(request.ids, request.adapter)
        output_tokens = 0
        if decodes:
            expected = hints.output_tokens
            output_tokens = min(request.max_output_tokens, round(self._mean_output if expected is None else expected))
        return RoutingFeatures(
            request.prompt_tokens,
            max(1, request.prompt_tokens - resident),
            output_tokens,
            hints,
            grows,
            self.prefixes.overlaps(blocks) if blocks and self.prefixes is not None else _NO_OVERLAPS,
            request.update,
            prefills,
            request.adapter,
            blocks,
        )

    def home(self, features: RoutingFeatures) -> int | None:
        """The engine that holds the beginning of a prompt that grows."""
        return None if features.grows is None else self._homes.get(features.grows, (None, 0))[0]

    def sent(self, features: RoutingFeatures, index: int) -> RoutingFeatures:
        """The prompt goes to this engine: the features with what of it is new there."""
        if features.grows is None and self.prefixes is None:
            return features
        known = features.overlaps.get(index, 0)
        if features.grows is not None:
            if self.home(features) == index:
                known = max(known, features.prompt_tokens - features.new_tokens)
            self._homes[features.grows] = (index, features.prompt_tokens)
            self._homes.move_to_end(features.grows)
            if len(self._homes) > KEPT:
                self._homes.popitem(last=False)
        if self.prefixes is not None:
            self.prefixes.add(features.blocks, index)
        new_tokens = max(1, features.prompt_tokens - known)
        return features if new_tokens == features.new_tokens else replace(features, new_tokens=new_tokens)

    def wrote(self, tokens: int) -> None:
        """A request ended after `tokens` output tokens."""
        self._mean_output += _WEIGHT * (tokens - self._mean_output)


_NO_OVERLAPS: Mapping[int, int] = {}
