"""Measure whether an optimization pays, by programs that run without it.

Times and random draws come from the caller. A model of costs can be wrong; measured programs that
run without the optimization cannot. Latencies are compared as
logarithms, because programs differ by factors. The newest count most, because load changes.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from annotated_types import Interval

from shell_router.files.types import Seconds

State = Literal["on", "trial", "off"]
log = logging.getLogger(__name__)

Optimization = Literal["incremental_prefill", "drafts"]

_WEIGHT = 0.03  # of the newest program: about the last sixty count
_RECENT_WEIGHT = 0.15  # to notice a change soon: about the last twelve count
# weighted counts of programs, which are below the number that ran, because older ones fade:
_FEWEST = 2.9  # 3 programs of each kind, before a trial can begin
_SHORTEST_TRIAL = 7.0  # 8 of each kind
_LONGEST_TRIAL = 23.0  # 40 of each kind
MOST_COMPARISONS = 1000  # topologies come and go while the router runs
# standard errors of the gain
_DOUBT = 1.0  # a loss above it begins a trial
_HARM = 2.0  # a loss above it ends a trial, and the optimization is off
_CLEARED = 1.0  # a gain above it ends a trial, and the optimization stays on


@dataclass(frozen=True, slots=True)
class HoldoutSettings:
    """The share of programs that run without an optimization, to show its worth."""

    share: Annotated[
        float,
        Interval(ge=0, le=0.5),
        "Share of programs that run without incremental prefill, drafts or calibrated exits; 0 "
        "compares nothing, and exits learn from their first runs alone.",
    ] = 0.05
    retry_s: Annotated[Seconds, "Seconds from switching it off to the next trial."] = 600.0


class Compared(NamedTuple):
    """The key of a comparison: an optimization, and the programs that it is switched for at once.

    Incremental prefill is compared by the latency of whole programs, per topology and its models;
    `role` is empty then. Drafts are compared by the seconds per token of one role's agents on one
    model.
    """

    optimization: Optimization
    topology: str
    models: str
    role: str = ""

    def __str__(self) -> str:
        name = self.optimization.replace("_", " ")
        return f"{name} of {self.topology}" + (
            f" ({self.role}, {self.models})" if self.role else ""
        )


@dataclass(frozen=True, slots=True)
class Benefit:
    """The share of time that an optimization saves, with a 95 % interval; negative for a loss."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The state of a comparison; `benefit` is None until both kinds of programs have run."""

    compared: Compared
    state: State
    benefit: Benefit | None


class _Latencies:
    """Mean and variance of log latencies, with exponential weights."""

    def __init__(self, weight: float = _WEIGHT) -> None:
        self._keep = 1 - weight
        self.count = self._sum = self._squares = 0.0

    def add(self, value: float) -> None:
        keep = self._keep
        self.count = keep * self.count + 1
        self._sum = keep * self._sum + value
        self._squares = keep * self._squares + value**2

    @property
    def mean(self) -> float:
        return self._sum / self.count

    @property
    def deviations(self) -> float:
        """The sum of squared deviations."""
        return max(0.0, self._squares - self._sum**2 / self.count)


@dataclass(slots=True)
class _Evidence:
    state: State = "on"
    since_s: float = 0.0
    using: _Latencies = field(default_factory=_Latencies)
    recent: _Latencies = field(
        default_factory=lambda: _Latencies(_RECENT_WEIGHT)
    )  # of the newest programs that use it
    held_out: _Latencies = field(default_factory=_Latencies)

    def add(self, value: float, *, held_out: bool) -> None:
        for programs in (self.held_out,) if held_out else (self.using, self.recent):
            programs.add(value)

    def fewest(self) -> float:
        return min(self.using.count, self.held_out.count)

    def difference(self, *, recent: bool = False) -> tuple[float, float]:
        """Return log latency without the optimization less that with it, and the standard error.

        The error is computed from the pooled variance.
        """
        using = self.using
        held_out = self.held_out
        degrees = max(1.0, using.count + held_out.count - 2)
        variance = (using.deviations + held_out.deviations) / degrees
        if recent:
            using = self.recent
        error = math.sqrt(variance * (1 / using.count + 1 / held_out.count))
        return held_out.mean - using.mean, error


class Holdouts:
    """An A/B comparison per optimization and topology, updated by every run.

    A share of programs is held out. If the programs with the optimization are slower by more than
    the standard error, a trial begins: fresh figures, and every second program is held out. The
    trial switches the optimization off if it shows harm, or no gain after 40 programs of each kind;
    else it stays on. An optimization that is off is tried again after `retry_s`.
    """

    def __init__(self, settings: HoldoutSettings | None = None) -> None:
        self.settings = settings or HoldoutSettings()
        self._evidence: dict[Compared, _Evidence] = {}

    def __contains__(self, key: Compared) -> bool:
        return key in self._evidence

    def holds_out(self, key: Compared, draw: float, now_s: float) -> bool:
        """Decide whether a program runs without the optimization.

        Args:
            key: The comparison.
            draw: The program's own number in [0, 1), so that equal seeds decide equally.
            now_s: Monotonic seconds.
        """
        evidence = self._evidence.get(key)
        if evidence is None:
            return draw < self.settings.share
        if evidence.state == "off" and now_s - evidence.since_s >= self.settings.retry_s:
            self._evidence[key] = evidence = _Evidence("trial", now_s)
        return evidence.state == "off" or draw < (
            0.5 if evidence.state == "trial" else self.settings.share
        )

    def observe(
        self, key: Compared, *, held_out: bool, seconds: float, now_s: float
    ) -> Comparison | None:
        """Count a program's seconds, or an agent's seconds per token.

        Returns:
            The comparison, if its state changed.
        """
        if not self.settings.share or seconds <= 0:
            return None
        self._evidence[key] = evidence = self._evidence.pop(key, None) or _Evidence()
        if len(self._evidence) > MOST_COMPARISONS:
            del self._evidence[next(iter(self._evidence))]  # was not observed for longest
        evidence.add(math.log(seconds), held_out=held_out)
        before = evidence.state
        if evidence.state == "on" and evidence.fewest() >= _FEWEST:
            gain, error = evidence.difference(recent=True)
            if gain < -_DOUBT * error:
                self._evidence[key] = evidence = _Evidence("trial", now_s)
        elif evidence.state == "trial" and evidence.fewest() >= _SHORTEST_TRIAL:
            gain, error = evidence.difference()
            is_over = evidence.fewest() >= _LONGEST_TRIAL or gain > _CLEARED * error
            if gain < -_HARM * error or (is_over and gain <= 0):
                evidence.state = "off"
                evidence.since_s = now_s
            elif is_over:
                evidence.state = "on"
        if evidence.state == before:
            return None
        seen = self._comparison(key, evidence)
        log.warning("%s is %s; time saved: %s", key, seen.state, seen.benefit or "not measured yet")
        return seen

    def comparisons(self) -> Iterator[Comparison]:
        """Return all comparisons, by name."""
        return (self._comparison(key, self._evidence[key]) for key in sorted(self._evidence))

    def _comparison(self, key: Compared, evidence: _Evidence) -> Comparison:
        if evidence.fewest() < _FEWEST:
            return Comparison(key, evidence.state, None)
        gain, error = evidence.difference()
        mean, low, high = (
            1 - math.exp(-end) for end in (gain, gain - 1.96 * error, gain + 1.96 * error)
        )
        return Comparison(key, evidence.state, Benefit(mean, low, high))
