"""What a pool's models cost: measured by `profiling`, written as a file that one can read and edit (MOSAIC, 4.1.2).

The paper fits a regression T_m(N_m, mean, max) and does not give its form. Ours is what continuous batching does: the
session starts, the engine writes all tokens at a rate that saturates, and the longest output ends alone:

    T(N, mean, max) = start + max * step + N * mean * token

Throughput grows with N up to 1 / (mean * token) prompts a second, so a small session costs more per prompt. What does
not grow with N is `fixed_s` of a `planner.ModelWork`, what does is its `per_prompt_s`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Annotated, Any

import numpy as np

from shell_router.batch.planner import ModelWork
from shell_router.core.statistics import non_negative
from shell_router.errors import ConfigError
from shell_router.topology.forms import Number

DIGITS = 9
Figure = Annotated[float, Number("Measured.", at_least=0)]


@dataclass(frozen=True, slots=True)
class SessionRun:
    """A session that was timed without its load: its prompts, and the tokens of their outputs."""

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

    def seconds(self, prompts: int, mean_tokens: float, max_tokens: float) -> float:
        """T(N, mean, max)."""
        return self.start_s + max_tokens * self.step_s + prompts * (mean_tokens * self.token_s)


def fit(runs: Sequence[SessionRun]) -> SessionCurve:
    """The curve with the least squared relative errors.

    Where two terms explain the runs equally well, as with equal longest outputs in all of them, the simpler curve is
    taken. Raises ConfigError for fewer than two different numbers of prompts.
    """
    if len({run.prompts for run in runs}) < 2:
        raise ConfigError(
            "A session's time cannot be fitted to one number of prompts.", remedy="Run it with two or more."
        )
    rows = [(1.0, run.max_tokens, run.prompts * run.mean_tokens) for run in runs]
    terms = np.array([[figure / run.seconds for figure in row] for row, run in zip(rows, runs, strict=True)])
    return SessionCurve(*(float(one) for one in non_negative(terms, np.ones(len(runs)))))


def held_out_error(runs: Sequence[SessionRun]) -> float | None:
    """Mean relative error on each number of prompts, of a curve fitted to the others; None below three numbers."""
    sizes = sorted({run.prompts for run in runs})
    if len(sizes) < 3:
        return None
    errors = []
    for prompts in sizes:
        curve = fit([run for run in runs if run.prompts != prompts])
        errors += [
            abs(curve.seconds(run.prompts, run.mean_tokens, run.max_tokens) / run.seconds - 1)
            for run in runs
            if run.prompts == prompts
        ]
    return sum(errors) / len(errors)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model: seconds to load and unload it, its outputs' tokens, and the curve of a session's seconds.

    `held_out_error` is the curve's mean relative error on numbers of prompts that it was not fitted to.
    """

    load_s: Figure
    mean_tokens: Figure
    max_tokens: Figure
    start_s: Figure
    step_s: Figure
    token_s: Figure
    held_out_error: float | None = None
    runs: tuple[SessionRun, ...] = ()

    def cost(self, name: str, prompts: int) -> ModelWork:
        """The model in a workload, with `prompts` prompts."""
        fixed_s = self.start_s + self.max_tokens * self.step_s
        return ModelWork(name, prompts, self.load_s, per_prompt_s=self.mean_tokens * self.token_s, fixed_s=fixed_s)


@dataclass(frozen=True, slots=True)
class PoolProfile:
    """A pool's proposers, and its aggregator."""

    models: Mapping[str, ModelProfile] = field(default_factory=dict)
    aggregator: ModelProfile | None = None

    def cost(self, name: str, prompts: int) -> ModelWork:
        """A proposer's cost. Raises ConfigError where it was not profiled."""
        if name not in self.models:
            raise ConfigError(f"The profile has no model {name!r}.", remedy="Run shell-router batch profile again.")
        return self.models[name].cost(name, prompts)

    def as_plain(self) -> dict[str, Any]:
        """Values for a YAML file, where figures have nanoseconds: a token may take a few microseconds."""

        def rounded(section: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in section}

        return asdict(self, dict_factory=rounded)


def profile_of(runs: Sequence[SessionRun], load_s: float) -> ModelProfile:
    """The profile that timed sessions give. Raises ConfigError for fewer than two numbers of prompts."""
    curve = fit(runs)
    prompts = sum(run.prompts for run in runs)
    return ModelProfile(
        load_s,
        sum(run.prompts * run.mean_tokens for run in runs) / prompts,
        max(run.max_tokens for run in runs),
        **asdict(curve),
        held_out_error=held_out_error(runs),
        runs=tuple(runs),
    )
