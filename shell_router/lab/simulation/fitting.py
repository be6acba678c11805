"""Costs from timings: the formulas of `engines.simulated.costs`, fitted with the least squared relative errors.

No cost is negative. An error is the mean relative error on timings that the costs were not fitted to: each kind of
timing, of equal lengths or of one batch, is left out once.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Generic, TypeVar

import numpy as np

from shell_router.core.statistics import Floats, non_negative
from shell_router.errors import ConfigError
from shell_router.standins.simulated import DecodeCosts, PrefillCosts, TransferCosts
from shell_router.standins.simulated.costs import attended_pairs

Costs = TypeVar("Costs")


def _require_time(seconds: float) -> None:
    if not 0 < seconds < inf:
        raise ConfigError(f"A timing must be positive and finite, not {seconds} s.")


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """`new` tokens were prefilled behind `cached` ones, alone on the engine."""

    cached: int
    new: int
    seconds: float

    def __post_init__(self) -> None:
        _require_time(self.seconds)


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """A prompt of `tokens` had its first token after `seconds`, of which its prefill takes `prefill_s`."""

    tokens: int
    prefill_s: float
    seconds: float

    def __post_init__(self) -> None:
        _require_time(self.seconds)


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """`steps` steps of a batch of `sequences`, whose lengths summed up to `context` at their beginning."""

    sequences: int
    context: int
    steps: int
    seconds: float

    def __post_init__(self) -> None:
        _require_time(self.seconds)

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps


@dataclass(frozen=True, slots=True)
class Fit(Generic[Costs]):
    """Costs, and their error; None where leaving timings out leaves too few to fit."""

    costs: Costs
    held_out_error: float | None


def fit_prefill(timings: Sequence[PrefillTiming], limits: PrefillCosts) -> Fit[PrefillCosts]:
    """`forward_s`, `token_s` and `attention_s`; the limits are kept. Raises ConfigError below three timings."""
    _require_kinds("Prefill", {(one.cached, one.new) for one in timings}, 3, "--lengths")
    samples = [
        _Sample(
            (one.cached, one.new),
            (ceil(one.new / limits.chunk_tokens), one.new, attended_pairs(one.new, one.cached)),
            one.seconds,
        )
        for one in timings
    ]
    forward_s, token_s, attention_s = _factors(samples)
    costs = replace(limits, forward_s=forward_s, token_s=token_s, attention_s=attention_s)
    return Fit(costs, _held_out_error(samples, 3))


def fit_transfer(timings: Sequence[TransferTiming]) -> Fit[TransferCosts]:
    """What the first token takes beyond the prefill. Raises ConfigError below two different lengths."""
    _require_kinds("The transfer", {one.tokens for one in timings}, 2, "--lengths")
    samples = [_Sample(one.tokens, (1, one.tokens), one.seconds, one.prefill_s) for one in timings]
    return Fit(TransferCosts(*_factors(samples)), _held_out_error(samples, 2))


def fit_decode(timings: Sequence[DecodeTiming], limits: DecodeCosts) -> Fit[DecodeCosts]:
    """`step_s`, `sequence_s` and `context_s`; the limits are kept. Raises ConfigError below three different timings.

    What is left out for the error is all of one batch size.
    """
    _require_kinds("Decoding", {(one.sequences, one.context) for one in timings}, 3, "--batches and --lengths")
    samples = []
    for one in timings:
        grown = one.sequences * one.steps * (one.steps - 1) / 2
        terms = (one.steps, one.steps * one.sequences, one.steps * one.context + grown)
        samples.append(_Sample(one.sequences, terms, one.seconds))
    step_s, sequence_s, context_s = _factors(samples)
    costs = replace(limits, step_s=step_s, sequence_s=sequence_s, context_s=context_s)
    return Fit(costs, _held_out_error(samples, 2))


@dataclass(frozen=True, slots=True)
class _Sample:
    """`seconds` that are `known_s` and the sum of `terms`, each times its factor. A kind is left out as a whole."""

    kind: Hashable
    terms: tuple[float, ...]
    seconds: float
    known_s: float = 0.0


def _factors(samples: Sequence[_Sample]) -> list[float]:
    """Of the terms; errors count relative to `seconds`."""
    seconds = np.array([one.seconds for one in samples])
    rows: Floats = np.array([one.terms for one in samples], dtype=float) / seconds[:, None]
    # terms differ by many powers of ten: attended pairs are millions where passes are few
    scale = np.abs(rows).max(axis=0)
    wanted = 1 - np.array([one.known_s for one in samples]) / seconds
    return [float(one) for one in non_negative(rows / scale, wanted) / scale]


def _held_out_error(samples: Sequence[_Sample], least: int) -> float | None:
    kinds = {one.kind for one in samples}
    if len(kinds) <= least:
        return None
    errors = []
    for left_out in kinds:
        factors = _factors([one for one in samples if one.kind != left_out])
        held_out = (one for one in samples if one.kind == left_out)
        errors += [abs((one.known_s + np.dot(one.terms, factors)) / one.seconds - 1) for one in held_out]
    return float(np.mean(errors))


def _require_kinds(what: str, kinds: set[Hashable], least: int, option: str) -> None:
    if len(kinds) < least:
        raise ConfigError(
            f"{what} cannot be fitted to {len(kinds)} different timings; it takes {least}.",
            remedy=f"Name more with {option}.",
        )
