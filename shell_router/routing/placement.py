"""The facts for placing a request: the request, the engines, and earlier placements.

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
    """An engine's report of its state.

    Attributes:
        kv_usage: The share of its KV in use.
        tokens: Tokens that run and wait.
        running: Requests that run.
        waiting: Requests that wait.
        hit_rate: The hit rate of its prefix cache.
    """

    kv_usage: float
    tokens: int
    running: int
    waiting: int
    hit_rate: float | None = None


@dataclass(slots=True, eq=False)
class EngineState:
    """This router's exact load on an engine: the activity monitor (Chimera, section 3.5).

    Attributes:
        index: Its number among all engines of its kind that there ever were.
        updates: How many of the running requests are prefill-only.
        prefill_tokens: Prompt tokens that are not prefilled yet. Together with `output_tokens` this
            is the paper's volume I[m].
        output_tokens: Output tokens that are expected and not written yet.
        held_tokens: Tokens of prompts and outputs whose KV is there.
        waiting: Requests that the router holds back for it.
        waiting_tokens: Prompt tokens that these would prefill.
        chosen: The number of the last choice of it; a lower number is longer ago.
        reported: The engine's report; None without a fresh one.
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
        """The KV tokens that all of its requests are expected to take in the end."""
        return self.prefill_tokens + self.output_tokens + self.held_tokens


@value
class PlacementRequest:
    """A request that needs an engine of each role.

    Attributes:
        prompt_tokens: Tokens of all prompts of a batch.
        ids: The prompt's ids, if they are known.
        max_output_tokens: The limit of each output.
        update: Whether it is prefill-only.
        affinity: See `Generation`, as for `adapter` and `cache_key`.
        requests: The size of a batch.
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
        """Return the facts of `request` that a dispatcher needs."""
        ids = request.input_ids
        most = request.sampling.get("max_new_tokens")
        if most is None:
            most = DEFAULT_MAX_NEW_TOKENS
        if update:
            most = 0
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

    Attributes:
        new_tokens: Prompt tokens that are not prefilled, as far as is known.
        output_tokens: Output tokens that are expected.
        grows: The identity of the growing prompt that it is part of.
        overlaps: Leading prompt tokens that an engine, by its index, has had; only of engines with
            some.
        update: Whether it is prefill-only.
        prefills: Whether the engine prefills; if not, it gets the prompt's KV from another.
        decodes: Whether the engine writes the output.
        blocks: The prompt's blocks in the prefix index.
        requests: The size of a batch.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    output_tokens: int = 0
    hints: Hints = NO_HINTS
    grows: int | None = None
    overlaps: Mapping[int, int] = field(default_factory=dict)
    update: bool = False
    prefills: bool = True
    decodes: bool = True
    blocks: tuple[int, ...] = ()
    requests: int = 1

    @property
    def is_batch(self) -> bool:
        """Whether it is a batch's, the lowest class."""
        return self.hints.tier == "batch"

    @property
    def user(self) -> str | None:
        """The tenant, if it is known."""
        return self.hints.user

    @property
    def client(self) -> Hashable | None:
        """The sender whose requests share prefixes: the tenant's own user, or else the tenant.

        It is None if neither is known. Equal users of two tenants are two clients.
        """
        hints = self.hints
        if hints.user or hints.end_user:
            return (hints.user, hints.end_user)
        return None

    @property
    def session(self) -> Hashable | None:
        """The requests that stay on one engine of each role; None without a session.

        A topology's agents do not collapse onto one engine. A session's relatives, which share its
        prefixes, share only its prefill server.
        """
        hints = self.hints
        session = hints.session
        if session is None:
            return None
        name = (session.prefix or session.id) if self.prefills else session.id
        if hints.topology in (None, hints.agent):  # a plain model
            return (hints.user, name, None, None)
        return (hints.user, name, hints.topology, hints.agent)

    @property
    def program(self) -> Hashable | None:
        """The tenant's session with its relatives, or else its run; None without either."""
        hints = self.hints
        if hints.session is not None:
            return (hints.user, hints.session.prefix or hints.session.id, None)
        if hints.program is not None:
            return (hints.user, None, hints.program)
        return None

    @property
    def place(self) -> Hashable | None:
        """Client, topology and agent; None if all are unknown.

        It is finer than the client, so that a tree's agents do not collapse onto one engine.
        """
        hints = self.hints
        client = self.client
        if client or hints.topology:
            return (client, hints.topology, hints.agent)
        return None


@value
class Choice:
    """An engine, by its index, and the reason in words that are equal for all choices of a kind."""

    index: int
    why: str


class ChoiceMemory:
    """Earlier choices: their number, and the last engine of each session, client and place.

    Without `remembers`, clients and places are not kept.
    """

    def __init__(self, affinity_s: float) -> None:
        self.made = 0
        self.remembers = True
        self._affinity_s = affinity_s
        self._homes: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def home(self, key: Hashable | None, now_s: float) -> int | None:
        """Return the engine of the key's last request, unless it is too long ago."""
        if key is not None and key in self._homes:
            index, at_s = self._homes[key]
            if now_s - at_s < self._affinity_s:
                return index
        return None

    def note(self, features: RoutingFeatures, index: int, now_s: float) -> None:
        """Note that the request goes to this engine now."""
        self.made += 1
        hints = features.hints
        if hints is NO_HINTS or not (self.remembers or hints.session):
            return
        keys = [features.session]
        if self.remembers:
            keys += [features.client, features.place]
        for key in keys:
            if key is not None:
                self._homes[key] = (index, now_s)
                self._homes.move_to_end(key)
        while len(self._homes) > KEPT:
            self._homes.popitem(last=False)


BLOCK_TOKENS = 64
MAX_BLOCKS = 256
"""Blocks of a prompt that are hashed. Later tokens decide no choice, and hashing them would cost
milliseconds.
"""

_WEIGHT = 0.1  # of the newest output's length in the mean


class PrefixIndex:
    """Remembers prompts in blocks of 64 tokens, each by a hash of all tokens up to its end.

    The `max_blocks` last used blocks are kept. Engines evict what they like, so an overlap is an
    expectation. Prompts count as equal if 64 bits of hash are.
    """

    def __init__(self, max_blocks: int = 1 << 17) -> None:
        self._max_blocks = max_blocks
        self._engines: OrderedDict[int, int] = OrderedDict()  # by block, a bit per engine

    def overlaps(self, blocks: Sequence[int]) -> Mapping[int, int]:
        """Return the leading tokens of a prompt that each engine has had, by its index.

        Engines that have had none are absent.
        """
        overlaps: dict[int, int] = {}
        for number, block in enumerate(blocks):
            engines = self._engines.get(block, 0)
            if not engines:
                break
            while engines:
                index = (engines & -engines).bit_length() - 1
                engines &= engines - 1
                if overlaps.get(index, 0) == number * BLOCK_TOKENS:
                    overlaps[index] = (number + 1) * BLOCK_TOKENS
        return overlaps

    def add(self, blocks: Sequence[int], index: int) -> None:
        """Note that the engine is sent this prompt."""
        for block in blocks:
            self._engines[block] = self._engines.get(block, 0) | 1 << index
            self._engines.move_to_end(block)
        while len(self._engines) > self._max_blocks:
            self._engines.popitem(last=False)


def blocks_of(
    ids: Sequence[int], adapter: str | None = None, cache_key: str | None = None
) -> tuple[int, ...]:
    """Hash the prompt's whole blocks, each with all tokens before it, its adapter and its cache."""
    block = hash((adapter, cache_key))
    blocks = []
    for number in range(min(len(ids) // BLOCK_TOKENS, MAX_BLOCKS)):
        begin = number * BLOCK_TOKENS
        block = hash((block, tuple(ids[begin : begin + BLOCK_TOKENS])))
        blocks.append(block)
    return tuple(blocks)


class PromptIndex:
    """Growing prompts, by affinity, with the engine that holds their beginning and its tokens.

    With `prefixes` also the prompts that engines have had, by their tokens.
    """

    def __init__(self) -> None:
        self.prefixes: PrefixIndex | None = None
        self._homes: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._mean_output = float(DEFAULT_MAX_NEW_TOKENS)

    def features(
        self, request: PlacementRequest, *, prefills: bool, decodes: bool
    ) -> RoutingFeatures:
        """Describe the request to engines that prefill it, decode it, or do both."""
        hints = request.hints
        grows = None
        resident = 0
        if prefills and request.affinity is not None:
            # KV of one adapter is of no use to another
            grows = hash((hints.user, request.affinity, request.adapter))
            resident = self._homes.get(grows, (0, 0))[1]
        blocks: tuple[int, ...] = ()
        if self.prefixes is not None and prefills and request.ids is not None:
            blocks = blocks_of(request.ids, request.adapter, request.cache_key)
        overlaps = _NO_OVERLAPS
        if blocks and self.prefixes is not None:
            overlaps = self.prefixes.overlaps(blocks)
        output_tokens = 0
        if decodes:
            expected = hints.output_tokens
            if expected is None:
                expected = self._mean_output
            output_tokens = min(request.max_output_tokens, round(expected)) * request.requests
        return RoutingFeatures(
            request.prompt_tokens,
            max(1, request.prompt_tokens - resident),
            output_tokens,
            hints,
            grows,
            overlaps,
            request.update,
            prefills,
            decodes,
            blocks,
            request.requests,
        )

    def home(self, features: RoutingFeatures) -> int | None:
        """Return the engine that holds the beginning of a growing prompt."""
        if features.grows is None:
            return None
        return self._homes.get(features.grows, (None, 0))[0]

    def note_sent(self, features: RoutingFeatures, index: int) -> RoutingFeatures:
        """Note that the prompt goes to this engine.

        Returns:
            The features with the tokens that are new there.
        """
        if features.grows is None and self.prefixes is None:
            return features
        cached = features.overlaps.get(index, 0)
        if features.grows is not None:
            if self.home(features) == index:
                cached = max(cached, features.prompt_tokens - features.new_tokens)
            self._homes[features.grows] = (index, features.prompt_tokens)
            self._homes.move_to_end(features.grows)
            if len(self._homes) > KEPT:
                self._homes.popitem(last=False)
        if self.prefixes is not None:
            self.prefixes.add(features.blocks, index)
        new_tokens = max(1, features.prompt_tokens - cached)
        if new_tokens == features.new_tokens:
            return features
        return replace(features, new_tokens=new_tokens)

    def note_tokens(self, tokens: float) -> None:
        """Note the output tokens of a request that ended; for a batch, their mean."""
        self._mean_output += _WEIGHT * (tokens - self._mean_output)


_NO_OVERLAPS: Mapping[int, int] = {}
