"""How long a session of one expert takes, as a function of how much it is asked (MOSAIC, section 4.1.2).

The paper fits a regression T_m(N_m, mean, max) and does not give its form. Ours is what continuous batching does: the
session starts, the engine writes all tokens at a rate that saturates, and the longest output ends alone:

    T(N, mean, max) = start + max * step + N * mean * token

Throughput is then N / (start + max * step + N * mean * token): it grows with N up to 1 / (mean * token) prompts a
second, so that a small session costs more per prompt. What does not grow with N is `fixed_s` of a `plan.Expert`, what
does is its `per_prompt_s`; the integer program takes both as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from shell_router.core.least_squares import Floats, non_negative
from shell_router.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SessionRun:
    """A session that was timed, its load apart: so many prompts, and the tokens of their outputs."""

    prompts: int
    mean_tokens: float
    max_tokens: float
    seconds: float

    def __post_init__(self) -> None:
        if not (self.prompts >= 1 and self.mean_tokens >= 0 and self.max_tokens >= 0 and 0 < self.seconds < inf):
            raise ConfigError(f"A session cannot have been {self}.", remedy="Give positive, finite figures.")


@dataclass(frozen=True, slots=True)
class SessionCurve:
    """Seconds per session, per token of the longest output, and per token of all outputs; none is negative."""

    start_s: float
    step_s: float
    token_s: float

    def fixed_s(self, max_tokens: float) -> float:
        """What a session takes however many prompts it has."""
        return self.start_s + max_tokens * self.step_s

    def per_prompt_s(self, mean_tokens: float) -> float:
        """What each further prompt takes."""
        return mean_tokens * self.token_s

    def seconds(self, prompts: int, mean_tokens: float, max_tokens: float) -> float:
        """T(N, mean, max)."""
        return self.fixed_s(max_tokens) + prompts * self.per_prompt_s(mean_tokens)


def fit(runs: Sequence[SessionRun]) -> SessionCurve:
    """The curve with the least squared relative errors.

    Where two terms explain the runs equally well, as with equal longest outputs in all of them, the simpler curve is
    taken. Raises ConfigError for fewer than two different numbers of prompts.
    """
    if len({run.prompts for run in runs}) < 2:
        raise ConfigError(
            "A session's time cannot be fitted to one number of prompts.", remedy="Run it with two or more."
        )
    return SessionCurve(*(float(one) for one in non_negative(_terms(runs), np.ones(len(runs)))))


def held_out_error(runs: Sequence[SessionRun]) -> float:
    """Mean relative error on each number of prompts, of a curve fitted to the others; ConfigError below three."""
    if len({run.prompts for run in runs}) < 3:
        raise ConfigError("The error needs sessions of three numbers of prompts.", remedy="Run it with more.")
    errors = []
    for prompts in sorted({run.prompts for run in runs}):
        curve = fit([run for run in runs if run.prompts != prompts])
        errors += [
            abs(curve.seconds(run.prompts, run.mean_tokens, run.max_tokens) / run.seconds - 1)
            for run in runs
            if run.prompts == prompts
        ]
    return sum(errors) / len(errors)


def _terms(runs: Sequence[SessionRun]) -> Floats:
    """One row per run: what the three figures are multiplied with, over the run's seconds."""
    rows = [(1.0, run.max_tokens, run.prompts * run.mean_tokens) for run in runs]
    return np.array([[figure / run.seconds for figure in row] for row, run in zip(rows, runs, strict=True)])
