"""Chooses the gate's tau by what it loses against an aggregator that is always asked.

MOSAIC fixes tau at 1 or 2/3 and leaves its choice open. Here every tau is judged on one run in which the aggregator
answered every question: no model is asked again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shell_router.batch.gate import ALWAYS, CONFIDENCES, ROUNDING, Vote
from shell_router.batch.results import Result
from shell_router.core.intervals import Interval, paired_difference, wilson
from shell_router.errors import DataError


@dataclass(frozen=True, slots=True)
class Trial:
    """One tau on one run: the share of questions it skips the aggregator for, how right it is, and points lost."""

    tau: float
    skipped: float
    accuracy: Interval
    loss: Interval


def trials(results: Sequence[Result], confidence: str | None = None) -> list[Trial]:
    """Every tau that makes a difference, the most cautious first; the first asks the aggregator always.

    Agreement is measured by one of CONFIDENCES, or as it was in the run.

    Questions on which the aggregator failed are left out. Raises DataError unless right answers are known, and the
    aggregator was asked wherever experts answered.
    """
    graded = [result for result in results if result.right is not None and result.experts]
    if any(result.by == "experts" and not result.error for result in graded):
        raise DataError("The aggregator was not asked everything.", remedy="Run it with --tau 2, in the same folder.")
    known = [result for result in graded if result.by != "experts"]
    if not known:
        raise DataError("No right answers are known in this run.", remedy="Run questions that have an answer.")
    sure = [_confidence(result, confidence) for result in known]
    taus = sorted({round(one, 4) for one, result in zip(sure, known, strict=True) if result.winner is not None})
    return [_trial(tau, known, sure) for tau in (ALWAYS, *reversed(taus)) if tau > 0]


def choose(tried: Sequence[Trial], bound: float) -> Trial:
    """The lowest tau that, with all above it, loses at most `bound` points."""
    chosen = tried[0]
    for trial in tried:
        if trial.loss.value > bound:
            break
        chosen = trial
    return chosen


def _confidence(result: Result, measure: str | None) -> float:
    if measure is None:
        return result.confidence
    return CONFIDENCES[measure]([Vote(one.answer, one.confidence) for one in result.experts])


def _trial(tau: float, results: Sequence[Result], sure: Sequence[float]) -> Trial:
    skipped = [result.winner is not None and one >= tau - ROUNDING for result, one in zip(results, sure, strict=True)]
    right = [
        bool(result.experts[result.winner].right) if skip and result.winner is not None else bool(result.right)
        for result, skip in zip(results, skipped, strict=True)
    ]
    lost = paired_difference([float(bool(was.right)) - now for was, now in zip(results, right, strict=True)])
    share = sum(right) / len(right)
    return Trial(tau, sum(skipped) / len(skipped), wilson(share, len(right)), _points(lost))


def _points(share: Interval) -> Interval:
    return Interval(*(100 * end for end in (share.value, share.low, share.high)))
