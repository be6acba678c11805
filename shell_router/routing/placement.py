"""What is known where a request is placed: of the request, of the engines, and of what was placed
before.

Engines that have had the beginning of a prompt are found by affinity and by blocks of its tokens.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS, NO_HINTS, Generation, Hints, value

KEPT = 65_536
"""Clients and places that are remembered; those that asked longest ago are forgotten first."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine reports: the share of its KV in use, tokens running and waiting, its cache's
    hit rate.
    """

    kv_usage: float
    tokens: int
    running: int
    waiting: int
    hit_rate: float | None = None


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine that may be chosen, `index` by its place among all of its kind, and this router's
    load on it, which is
    exact: the activity monitor (Chimera, section 3.5).

    Of the `running` requests `updates` are prefill-only. `prefill_tokens` of their prompts are not
    yet prefilled, `output_tokens` are expected and not yet written (together the paper's volume
    I[m]), and `held_tokens` of prompts and outputs are there already, as KV. `waiting` requests
    with `waiting_tokens` new ones of prompts are held back for it. `reported` is the engine's own
    report, None without a fresh one. `chosen` numbers the last choice of it: the lower, the longer
    ago.
    """

    index: int
    running: int = 0
    updates: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    held_tokens: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    chosen: int = 0
    reported: EngineReport | None = None

    @property
    def tokens(self) -> int:
        """The KV that all of it takes in the end, as far as is expected."""
        return self.prefill_tokens + self.output_tokens + self.held_tokens


@value
class PlacementRequest:
    """A request that needs an engine of each role.

    `ids` are its prompt's, where they are known. An `update` is prefill-only. `affinity`, `adapter`
    and `cache_key` are as in `Generation`. A batch of `requests` has `prompt_tokens` in all, and
    `max_output_tokens` each.
    """

    prompt_tokens: int
    ids: Sequence[int] | None = None
    max_output_tokens: int = DEFAULT_MAX_NEW_TOKENS
    hints: Hints = NO_HINTS
    affinity: str | None = None
    update: bool = False
    adapter: str | None = None
    cache_key: str | None = None
    requests: int = 1

    @classmethod
    def of(cls, request: Generation, *, update: bool = False) -> "PlacementRequest":
        """What a dispatcher needs to know of `request`."""
        ids = request.input_ids
        limit = request.sampling.get("max_new_tokens")
        if update:
            most = 0
        elif limit is None:
            most = DEFAULT_MAX_NEW_TOKENS
        else:
            most = limit
        return cls(
            len(ids),
            ids,
            most,
            request.hints,
            request.affinity,
            update,
            request.adapter,
            request.cache_key,
        )


@value
class RoutingFeatures:
    """A request as policies and orders see it.

    `new_tokens` of its `prompt_tokens` are not yet prefilled as far as is known, `output_tokens`
    are expected of it. `overlaps` are leading prompt tokens that an engine, by its index, has had
    before; engines that had none are absent. `grows` identifies the growing prompt that it is of.
    `update` marks a prefill-only request; without `prefills` the
    engine gets the prompt's KV from another. `blocks` are the prompt's in the prefix index. A batch
    is several `requests`.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    output_tokens: int = 0
    hints: Hints = NO_HINTS
    grows: int | None = None
    overlaps: Mapping[int, int] = field(default_factory=dict)
    update: bool = False
    prefills: bool = True
    blocks: tuple[int, ...] = ()
    requests: int = 1

    @property
    def user(self) -> str | None:
        """The tenant who asks, where that is known."""
        return self.hints.user

    @property
    def client(self) -> Hashable | None:
        """Whose requests share prefixes: the tenant's own user where the request names one, else
        the tenant.

        None where neither is known. Equal users of two tenants are two clients.
        """
        hints = self.hints
        if hints.user or hints.end_user:
            return (hints.user, hints.end_user)
        return None

    @property
    def place(self) -> Hashable | None:
        """Client, topology and agent: finer than the client, so that a tree's agents do not
        collapse onto one engine.

        None where none of them is known.
        """
        hints = self.hints
        client = self.client
        if client or hints.topology:
            return (client, hints.topology, hints.agent)
        return None


@value
class Choice:
    """An engine, by its index, and why: a few words that are the same for all choices of the same
    kind.
    """

    index: int
    why: str


class ChoiceMemory:
    """Earlier choices: how many they were, and where clients and places went last.

    Policies read it. Without `remembers`, clients and places are not kept.
    """

    def __init__(self, affinity_s: float) -> None:
        self.made = 0
        self.remembers = True
        self._affinity_s = affinity_s
        self._homes: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def home(self, key: Hashable | None, now_s: float) -> int | None:
        """The engine of the last request of `key`, a client or a place, unless that is too long
        ago.
        """
        if key is None:
            found = None
        else:
            found = self._homes.get(key)
        if found is not None and now_s - found[1] < self._affinity_s:
            return found[0]
        return None

    def note(self, features: RoutingFeatures, index: int, now_s: float) -> None:
        """The request goes to this engine now."""
        self.made += 1
        if not self.remembers or features.hints is NO_HINTS:
            return
        for key in (features.client, features.place):
            if key is not None:
                self._homes[key] = (index, now_s)
                self._homes.move_to_end(key)
        while len(self._homes) > KEPT:
            self._homes.popitem(last=False)


# --- the beginnings of prompts

BLOCK_TOKENS = 64
MAX_BLOCKS = 256
"""Of a prompt; tokens behind them decide no choice, and hashing them would cost milliseconds."""

_WEIGHT = 0.1  # of the newest output's length in the mean


class PrefixIndex:
    """Remembers prompts in blocks of 64 tokens, each by a hash of all tokens up to its end.

    `max_blocks` are kept, in order of their last use. Engines evict what they like: an overlap is
    an expectation. Two prompts are taken for equal where 64 bits of hash are.
    """

    def __init__(self, max_blocks: int = 1 << 17) -> None:
        self._max_blocks = max_blocks
        self._engines: OrderedDict[int, int] = OrderedDict()  # by block, a bit per engine

    def overlaps(self, blocks: Sequence[int]) -> Mapping[int, int]:
        """Leading tokens of a prompt that an engine, by its index, has had; engines that had none
        are absent.
        """
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


def blocks_of(
    ids: Sequence[int], adapter: str | None = None, cache_key: str | None = None
) -> tuple[int, ...]:
    """The prompt's whole blocks, each by a hash of all tokens up to its end, of their adapter and
    of their cache.
    """
    known = hash((adapter, cache_key))
    blocks = []
    for begin in range(
        0, min(len(ids), MAX_BLOCKS * BLOCK_TOKENS) - BLOCK_TOKENS + 1, BLOCK_TOKENS
    ):
        known = hash((known, tuple(ids[begin : begin + BLOCK_TOKENS])))
        blocks.append(known)
    return tuple(blocks)


class PromptIndex:
    """Prompts that grow, by affinity, with the engine that holds their beginning and how many
    tokens of it.

    With `prefixes` also the prompts that engines have had, by their tokens.
    """

    def __init__(self) -> None:
        self.prefixes: PrefixIndex | None = None
        self._homes: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._mean_output = float(DEFAULT_MAX_NEW_TOKENS)

    def features(
        self, request: PlacementRequest, *, prefills: bool, decodes: bool
    ) -> RoutingFeatures:
        """The request as engines see it that prefill it, decode it, or do both."""
        hints = request.hints
        grows = None
        resident = 0
        if prefills and request.affinity is not None:
            # clients' own keys may be long and equal to another tenant's; KV of one adapter is of
            # no use to another
            grows = hash((hints.user, request.affinity, request.adapter))
            if (
                request.ids is not None
            ):  # else the key is a client's, whose next prompt need not continue the last
                resident = self._homes.get(grows, (0, 0))[1]
        blocks: tuple[int, ...] = ()
        if self.prefixes is not None and prefills and request.ids is not None:
            blocks = blocks_of(request.ids, request.adapter, request.cache_key)
        output_tokens = 0
        if decodes:
            expected = hints.output_tokens
            each = min(
                request.max_output_tokens,
                round(self._mean_output if expected is None else expected),
            )
            output_tokens = each * request.requests
        return RoutingFeatures(
            request.prompt_tokens,
            max(1, request.prompt_tokens - resident),
            output_tokens,
            hints,
            grows,
            self.prefixes.overlaps(blocks)
            if blocks and self.prefixes is not None
            else _NO_OVERLAPS,
            request.update,
            prefills,
            blocks,
            request.requests,
        )

    def home(self, features: RoutingFeatures) -> int | None:
        """The engine that holds the beginning of a prompt that grows."""
        if features.grows is None:
            return None
        return self._homes.get(features.grows, (None, 0))[0]

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
        if new_tokens == features.new_tokens:
            return features
        return replace(features, new_tokens=new_tokens)

    def wrote(self, tokens: float) -> None:
        """A request ended after `tokens` output tokens; of a batch, their mean."""
        self._mean_output += _WEIGHT * (tokens - self._mean_output)


_NO_OVERLAPS: Mapping[int, int] = {}
