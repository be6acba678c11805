"""Times a model's requests on an engine that has nothing else to do, through the contract that the router asks by.

Every round times all kinds of requests once, so that a machine whose speed drifts slows all of them; the first round
warms up. Of each kind the median counts.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import ceil

from shell_router.core.engine import Engine, Generation, Tokens
from shell_router.core.statistics import Timing, fitted_costs, held_out_error
from shell_router.errors import ConfigError
from shell_router.standins.simulated import PairCosts, PrefillCosts, TransferCosts
from shell_router.standins.simulated.costs import attended_pairs

DRAWN = {"temperature": 0.7, "top_p": 0.95}
"""As most agents sample: on a small model drawing a token takes a good part of a step."""
Clock = Callable[[], float]
Arrivals = Sequence[tuple[float, int]]
"""When tokens of one output came, and how many had come by then."""


@dataclass(frozen=True, slots=True)
class Amount:
    """What is timed: prompts of `lengths` tokens, `batches` that decode `new_tokens` each, `rounds` of all that."""

    lengths: Sequence[int] = (32, 128, 512, 1024, 2048)
    batches: Sequence[int] = (1, 2, 4, 8, 16)
    new_tokens: int = 64
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, least in (("lengths", 3), ("batches", 1)):
            values = getattr(self, name)
            if len(set(values)) < least or min(values) < 1:
                raise ConfigError(
                    f"{name} must be {least} different numbers or more, all of them above 0, not {values}.",
                    remedy=f"Name them as in --{name} 32,128,512.",
                )
        if self.new_tokens < 8 or self.rounds < 1:
            raise ConfigError("A profile takes 8 new tokens or more and a round or more.", remedy="Raise them.")

    def within(self, context_length: int, limits: PairCosts) -> "Amount":
        """What of it fits the model and its engines. Raises ConfigError where too little does."""
        capacity = min(context_length, limits.prefill.cache_tokens, limits.decode.cache_tokens)
        batches = tuple(sorted({one for one in self.batches if one <= limits.decode.max_batch_size}))
        written = self.new_tokens + max(batches, default=0)
        lengths = tuple(sorted({one for one in self.lengths if one + written < capacity}))
        if len(lengths) < 3 or not batches:
            raise ConfigError(
                f"{capacity} tokens of context and batches of {limits.decode.max_batch_size} leave too little to time.",
                remedy="Name shorter --lengths or smaller --batches.",
            )
        return Amount(lengths, batches, self.new_tokens, self.rounds)


def prefill_timing(cached: int, new: int, seconds: float, limits: PrefillCosts) -> Timing:
    """`new` tokens were prefilled behind `cached` ones, alone on the engine."""
    terms = (ceil(new / limits.chunk_tokens), new, attended_pairs(new, cached))
    return Timing((cached, new), terms, seconds)


def first_token_timing(tokens: int, prefill_s: float, seconds: float) -> Timing:
    """A prompt of `tokens` had its first token after `seconds`, of which its prefill takes `prefill_s`."""
    return Timing(tokens, (1, tokens), seconds, prefill_s)


def decode_timing(sequences: int, context: int, steps: int, seconds: float) -> Timing:
    """`steps` steps of a batch of `sequences`, whose lengths summed up to `context` at their beginning."""
    grown = sequences * steps * (steps - 1) / 2
    return Timing(sequences, (steps, steps * sequences, steps * context + grown), seconds)


def fitted(what: str, timings: Sequence[Timing], least: int, option: str) -> list[float]:
    """The costs of the timings' terms. Raises ConfigError for fewer than `least` different timings."""
    if (found := len({one.terms for one in timings})) < least:
        raise ConfigError(
            f"{what} cannot be fitted to {found} different timings; it takes {least}.",
            remedy=f"Name more with {option}.",
        )
    return fitted_costs(timings)


@dataclass(frozen=True, slots=True)
class ProfiledCosts:
    """What a pair costs, and by work the mean relative error on timings that the costs were not fitted to, if known."""

    costs: PairCosts
    errors: Mapping[str, float]

    @property
    def error_words(self) -> str:
        """The errors for people."""
        known = ", ".join(f"{what} {error:.1%}" for what, error in self.errors.items())
        return f"mean relative error on what the costs were not fitted to: {known or 'not known, too little was timed'}"


def fitted_pair(
    prefills: Sequence[Timing], firsts: Sequence[Timing], decodes: Sequence[Timing], limits: PairCosts
) -> ProfiledCosts:
    """The costs; `limits` are kept but for their times. Raises ConfigError where the timings are too few."""
    forward_s, token_s, attention_s = fitted("Prefill", prefills, 3, "--lengths")
    transfer = TransferCosts(*fitted("The transfer", firsts, 2, "--lengths"))
    step_s, sequence_s, context_s = fitted("Decoding", decodes, 3, "--batches and --lengths")
    found = {
        "prefill": held_out_error(prefills, least=3),
        "first token": held_out_error(firsts),
        "decode": held_out_error(decodes),
    }
    return ProfiledCosts(
        PairCosts(
            replace(limits.prefill, forward_s=forward_s, token_s=token_s, attention_s=attention_s),
            replace(limits.decode, step_s=step_s, sequence_s=sequence_s, context_s=context_s),
            transfer,
        ),
        {what: error for what, error in found.items() if error is not None},
    )


async def profiled(
    engine: Engine, amount: Amount, limits: PairCosts, *, vocabulary: int, draws: random.Random, clock: Clock
) -> ProfiledCosts:
    """The costs of an engine that is left alone meanwhile; `limits` are kept but for their times.

    Prompts are drawn from ids below `vocabulary`. Raises ConfigError where the timings are too few, and EngineError.
    """
    timings = Timings(engine, amount, limits, vocabulary, draws, clock)
    for _ in range(1 + amount.rounds):
        await timings.round()
    return timings.fitted()


@dataclass(slots=True)
class Timings:
    """Rounds of timed requests to one engine, by kind: tokens before and new ones, or sequences and their length."""

    engine: Engine
    amount: Amount
    limits: PairCosts
    vocabulary: int
    draws: random.Random
    clock: Clock
    _requests: int = 0
    _warm: bool = False
    _prefills: dict[tuple[int, int], list[Timing]] = field(default_factory=lambda: defaultdict(list))
    _firsts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _decodes: dict[tuple[int, int], list[Timing]] = field(default_factory=lambda: defaultdict(list))
    _kept: dict[Hashable, list[list[int]]] = field(default_factory=dict)

    def fitted(self) -> ProfiledCosts:
        """The costs as far as they are known. Raises ConfigError where the timings are too few."""
        prefills = {place: _middle(timed) for place, timed in self._prefills.items()}
        firsts = [
            first_token_timing(length, prefills[0, length].seconds, sorted(timed)[(len(timed) - 1) // 2])
            for length, timed in self._firsts.items()
        ]
        return fitted_pair([*prefills.values()], firsts, [*map(_middle, self._decodes.values())], self.limits)

    async def round(self) -> None:
        """Time all kinds once; the first round warms up and is forgotten."""
        await self._time_all()
        if not self._warm:
            self._warm = True
            for timed in (self._prefills, self._firsts, self._decodes):
                timed.clear()

    async def _time_all(self) -> None:
        shortest, *longer = self.amount.lengths
        for length in self.amount.lengths:
            await self._prefill([], length)
            await self._first_token(length)
        for before in longer:
            prefix = self._prompt(before - shortest)
            await self.engine.prefill(self._request(prefix))
            await self._prefill(prefix, shortest)
        for sequences in self.amount.batches:
            for length in self._decoded_lengths(sequences):
                await self._decode(sequences, length)

    async def _prefill(self, prefix: Sequence[int], new: int) -> None:
        request = self._request([*prefix, *self._prompt(new)])
        begun_s = self.clock()
        done = await self.engine.prefill(request)
        seconds = self.clock() - begun_s
        # what the engine found, which need not be what was there: a cache has pages, or does not keep what is prefilled
        new_tokens = done.prompt_tokens - done.cached_tokens
        timing = prefill_timing(done.cached_tokens, new_tokens, seconds, self.limits.prefill)
        self._prefills[len(prefix), new].append(timing)

    async def _first_token(self, length: int) -> None:
        begun_s = self.clock()
        await self._arrivals(self._request(self._prompt(length), new_tokens=1))
        self._firsts[length].append(self.clock() - begun_s)

    async def _decode(self, sequences: int, length: int) -> None:
        """The prompts of a batch are prefilled beforehand, so that its sequences begin at nearly the same time."""
        prompts = self._kept.setdefault((sequences, length), [self._prompt(length) for _ in range(sequences)])
        for prompt in prompts:
            await self.engine.prefill(self._request(prompt))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._arrivals(self._request(prompt, new_tokens=self.amount.new_tokens + sequences)))
                for prompt in prompts
            ]
        timing = together([task.result() for task in tasks], length)
        if timing is not None:
            self._decodes[sequences, length].append(timing)

    def _decoded_lengths(self, sequences: int) -> Sequence[int]:
        """The shortest, the middle and the longest of the prompts that fit into the KV cache together."""
        each = self.limits.decode.cache_tokens // sequences - self.amount.new_tokens - sequences
        fitting = [length for length in self.amount.lengths if length <= each]
        return sorted({fitting[0], fitting[len(fitting) // 2], fitting[-1]}) if fitting else ()

    async def _arrivals(self, request: Generation) -> Arrivals:
        arrivals, come = [], 0
        async with aclosing(self.engine.generate(request)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    come += len(event.ids)
                    arrivals.append((self.clock(), come))
        return arrivals

    def _request(self, ids: Sequence[int], new_tokens: int = 1) -> Generation:
        self._requests += 1
        rid = f"profile-{self.draws.getrandbits(64):016x}-{self._requests:08d}"
        return Generation(rid, ids, {"max_new_tokens": new_tokens, "ignore_eos": True, **DRAWN})

    def _prompt(self, tokens: int) -> list[int]:
        """Fresh ids from the middle of the vocabulary: special tokens stand at either end."""
        return self.draws.choices(
            range(self.vocabulary // 4, max(1 + self.vocabulary // 4, 3 * self.vocabulary // 4)), k=tokens
        )


def together(outputs: Sequence[Arrivals], prompt_tokens: int) -> Timing | None:
    """The steps that a batch made while all its sequences decoded; None where it made none.

    They are counted on the sequence that ended first, from its first tokens after all others had begun.
    """
    if not all(outputs):
        return None
    all_begun_s = max(arrivals[0][0] for arrivals in outputs)
    leader = min(outputs, key=lambda arrivals: arrivals[-1][0])
    counted = [(at_s, come) for at_s, come in leader if at_s > all_begun_s]
    if len(counted) < 2:
        return None
    (begun_s, begun), (ended_s, ended) = counted[0], counted[-1]
    context = sum(prompt_tokens + _come_by(arrivals, begun_s) for arrivals in outputs)
    return decode_timing(len(outputs), context, ended - begun, ended_s - begun_s)


def _come_by(arrivals: Arrivals, at_s: float) -> int:
    return max(come for came_s, come in arrivals if came_s <= at_s)


def _middle(timings: Sequence[Timing]) -> Timing:
    """That of the median seconds per first term, which are passes or steps; of two in the middle the lower."""
    return sorted(timings, key=lambda one: one.seconds / one.terms[0])[(len(timings) - 1) // 2]
