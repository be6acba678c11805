"""Costs from timings: the formulas of `engines.simulated.costs`, fitted with the least squared relative errors.

No cost is negative. An error is the mean relative error on timings that the costs were not fitted to: each kind of
timing, of equal lengths or of one batch, is left out once.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Generic, TypeVar

import numpy as np

from shell_router.core.least_squares import Floats, non_negative
from shell_router.engines.simulated import DecodeCosts, PrefillCosts, TransferCosts
from shell_router.engines.simulated.costs import attended_pairs
from shell_router.errors import ConfigError

Costs = TypeVar("Costs")
Timing = TypeVar("Timing", "PrefillTiming", "TransferTiming", "DecodeTiming")


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
    """`steps` steps of a batch of so many sequences, whose lengths summed up to `context` at their beginning."""

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

    def terms(one: PrefillTiming) -> tuple[float, ...]:
        return (ceil(one.new / limits.chunk_tokens), one.new, attended_pairs(one.new, one.cached))

    def fitted(some: Sequence[PrefillTiming]) -> PrefillCosts:
        forward_s, token_s, attention_s = _factors([terms(one) for one in some], [one.seconds for one in some])
        return replace(limits, forward_s=forward_s, token_s=token_s, attention_s=attention_s)

    def predicted(costs: PrefillCosts, one: PrefillTiming) -> float:
        passes, new, attended = terms(one)
        return passes * costs.forward_s + new * costs.token_s + attended * costs.attention_s

    _require_kinds("Prefill", {(one.cached, one.new) for one in timings}, 3, "--lengths")
    return Fit(fitted(timings), _held_out(timings, lambda one: (one.cached, one.new), 3, fitted, predicted))


def fit_transfer(timings: Sequence[TransferTiming]) -> Fit[TransferCosts]:
    """What the first token takes beyond the prefill. Raises ConfigError below two different lengths."""

    def fitted(some: Sequence[TransferTiming]) -> TransferCosts:
        beyond = [one.seconds - one.prefill_s for one in some]
        return TransferCosts(*_factors([(1, one.tokens) for one in some], [one.seconds for one in some], beyond))

    def predicted(costs: TransferCosts, one: TransferTiming) -> float:
        return one.prefill_s + costs.seconds(one.tokens)

    _require_kinds("The transfer", {one.tokens for one in timings}, 2, "--lengths")
    return Fit(fitted(timings), _held_out(timings, lambda one: one.tokens, 2, fitted, predicted))


def fit_decode(timings: Sequence[DecodeTiming], limits: DecodeCosts) -> Fit[DecodeCosts]:
    """`step_s`, `sequence_s` and `context_s`; the limits are kept. Raises ConfigError below three different timings.

    What is left out for the error is all of one batch size.
    """

    def terms(one: DecodeTiming) -> tuple[float, ...]:
        grown = one.sequences * one.steps * (one.steps - 1) / 2
        return (one.steps, one.steps * one.sequences, one.steps * one.context + grown)

    def fitted(some: Sequence[DecodeTiming]) -> DecodeCosts:
        step_s, sequence_s, context_s = _factors([terms(one) for one in some], [one.seconds for one in some])
        return replace(limits, step_s=step_s, sequence_s=sequence_s, context_s=context_s)

    def predicted(costs: DecodeCosts, one: DecodeTiming) -> float:
        return costs.steps_s(one.steps, one.sequences, one.context)

    _require_kinds("Decoding", {(one.sequences, one.context) for one in timings}, 3, "--batches and --lengths")
    return Fit(fitted(timings), _held_out(timings, lambda one: one.sequences, 2, fitted, predicted))


def _factors(
    terms: Sequence[Sequence[float]], seconds: Sequence[float], wanted: Sequence[float] | None = None
) -> list[float]:
    """Factors of the terms whose sums are `wanted`, by default `seconds`; errors count relative to `seconds`."""
    whole = np.array(seconds)
    rows: Floats = np.array(terms, dtype=float) / whole[:, None]
    # terms differ by many powers of ten: attended pairs are millions where passes are few
    scale = np.abs(rows).max(axis=0)
    return [float(one) for one in non_negative(rows / scale, np.array(wanted or seconds) / whole) / scale]


def _held_out(
    timings: Sequence[Timing],
    kind: Callable[[Timing], Hashable],
    least: int,
    fitted: Callable[[Sequence[Timing]], Costs],
    predicted: Callable[[Costs, Timing], float],
) -> float | None:
    kinds = {kind(one) for one in timings}
    if len(kinds) <= least:
        return None
    errors = []
    for left_out in kinds:
        costs = fitted([one for one in timings if kind(one) != left_out])
        errors += [abs(predicted(costs, one) / one.seconds - 1) for one in timings if kind(one) == left_out]
    return sum(errors) / len(errors)


def _require_kinds(what: str, kinds: set[Hashable], least: int, option: str) -> None:
    if len(kinds) < least:
        raise ConfigError(
            f"{what} cannot be fitted to {len(kinds)} different timings; it takes {least}.",
            remedy=f"Name more with {option}.",
        )
