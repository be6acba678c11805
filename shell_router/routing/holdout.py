"""Whether an optimization pays, shown by the programs that run without it. Pure: times and draws
come from the caller.

A model of costs can be wrong; the programs held out cannot. Latencies are compared as logarithms,
since programs differ by factors, and the newest count most, since load changes.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from shell_router.errors import ConfigError

State = Literal["on", "trial", "off"]
log = logging.getLogger(__name__)

Optimization = Literal["incremental_prefill", "drafts"]

_WEIGHT = 0.03  # of the newest program: about the last sixty count
_RECENT_WEIGHT = 0.15  # where a change is to be noticed soon: about the last twelve
# how many count, which is fewer than have run, as those before them fade:
_FEWEST = 2.9  # 3 programs of each kind, before anything is doubted
_SHORTEST_TRIAL = 7.0  # 8 of each kind
_LONGEST_TRIAL = 23.0  # 40 of each kind
# standard errors
_DOUBT = 1.0
_HARM = 2.0
_CLEARED = 1.0


@dataclass(frozen=True, slots=True)
class HoldoutSettings:
    """Which programs run without an optimization, to show what it is worth."""

    share: Annotated[
        float,
        (
            "Share of programs that run without incremental prefill or drafts, for comparison; 0 "
            "compares nothing."
        ),
    ] = 0.05
    retry_s: Annotated[float, "Seconds from switching it off to the next trial."] = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 0.5:
            raise ConfigError(
                f"holdout.share is {self.share:g}.", remedy="Make it at least 0 and at most 0.5."
            )
        if not 0 < self.retry_s < math.inf:
            raise ConfigError(
                f"holdout.retry_s is {self.retry_s:g}.",
                remedy="Make it a number of seconds above 0.",
            )


class Compared(NamedTuple):
    """What is switched off together.

    Incremental prefill is compared by the latency of whole programs, per topology and its models,
    `role` being empty; drafts by the seconds per token of one role's agents on one model.
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
    """How much shorter it takes with it, in shares of the time, with a 95 % interval; below 0 it
    takes longer.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What programs showed so far; no benefit before both kinds have run."""

    compared: Compared
    state: State
    benefit: Benefit | None


class _Programs:
    """Mean and variance of log latencies that fade."""

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
    using: _Programs = field(default_factory=_Programs)
    recent: _Programs = field(
        default_factory=lambda: _Programs(_RECENT_WEIGHT)
    )  # of those using it
    held_out: _Programs = field(default_factory=_Programs)

    def add(self, value: float, *, held_out: bool) -> None:
        for programs in (self.held_out,) if held_out else (self.using, self.recent):
            programs.add(value)

    def fewest(self) -> float:
        return min(self.using.count, self.held_out.count)

    def difference(self, *, recent: bool = False) -> tuple[float, float]:
        """Log latency without less that with it, and its standard error, by the variance of both
        together.
        """
        one = self.using
        other = self.held_out
        variance = (one.deviations + other.deviations) / max(1.0, one.count + other.count - 2)
        if recent:
            one = self.recent
        return other.mean - one.mean, math.sqrt(variance * (1 / one.count + 1 / other.count))


class Holdouts:
    """Per optimization and what it is compared for a comparison that goes on for as long as
    programs come.

    A share of programs is held out. If those with the optimization are slower by more than the
    standard error, a trial
    begins: fresh figures, and every second program is held out. It ends with the optimization off
    if harm is shown or, after 40 programs of each kind, no gain; else with it on. Off, it is tried
    again after `retry_s`.
    """

    def __init__(self, settings: HoldoutSettings | None = None) -> None:
        self.settings = settings or HoldoutSettings()
        self._found: dict[Compared, _Evidence] = {}

    def __contains__(self, key: Compared) -> bool:
        return key in self._found

    def holds_out(self, key: Compared, draw: float, now_s: float) -> bool:
        """Whether this program runs without; `draw` in [0, 1) is its own, so that equal seeds
        choose equally.
        """
        found = self._found.get(key)
        if found is None:
            return draw < self.settings.share
        if found.state == "off" and now_s - found.since_s >= self.settings.retry_s:
            self._found[key] = found = _Evidence("trial", now_s)
        return found.state == "off" or draw < (
            0.5 if found.state == "trial" else self.settings.share
        )

    def observe(
        self, key: Compared, *, held_out: bool, seconds: float, now_s: float
    ) -> Comparison | None:
        """A program, or a token of its agents, took so long; what is known now, if that changed the
        state.
        """
        if not self.settings.share or seconds <= 0:
            return None
        found = self._found.setdefault(key, _Evidence())
        found.add(math.log(seconds), held_out=held_out)
        before = found.state
        if found.state == "on" and found.fewest() >= _FEWEST:
            gain, error = found.difference(recent=True)
            if gain < -_DOUBT * error:
                self._found[key] = found = _Evidence("trial", now_s)
        elif found.state == "trial" and found.fewest() >= _SHORTEST_TRIAL:
            gain, error = found.difference()
            is_over = found.fewest() >= _LONGEST_TRIAL or gain > _CLEARED * error
            if gain < -_HARM * error or (is_over and gain <= 0):
                found.state = "off"
                found.since_s = now_s
            elif is_over:
                found.state = "on"
        if found.state == before:
            return None
        seen = self._comparison(key, found)
        log.warning("%s is %s; time saved: %s", key, seen.state, seen.benefit or "not measured yet")
        return seen

    def comparisons(self) -> Iterator[Comparison]:
        """All of them."""
        return (self._comparison(key, found) for key, found in self._found.items())

    def _comparison(self, key: Compared, found: _Evidence) -> Comparison:
        if found.fewest() < _FEWEST:
            return Comparison(key, found.state, None)
        gain, error = found.difference()
        mean, low, high = (
            1 - math.exp(-one) for one in (gain, gain - 1.96 * error, gain + 1.96 * error)
        )
        return Comparison(key, found.state, Benefit(mean, low, high))
