"""The measured costs of a pool's models, as `batch profile` writes them (MOSAIC, 4.1.2).

The paper fits a regression T_m(N_m, mean, max) of unknown form. Ours follows continuous batching:
the session starts, the engine writes all tokens at a rate that saturates, and the longest output
ends alone:

    T(N, mean, max) = start + max * step + N * mean * token

Throughput grows with N up to 1 / (mean * token) prompts a second, so a small session costs more per
prompt. In a `ModelWork`, `fixed_s` is start + max * step, and `per_prompt_s` is mean * token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from shell_router.batch.planner import ModelWork
from shell_router.core.statistics import Timing, fit_costs, measure_held_out_error
from shell_router.errors import ConfigError
from shell_router.files.types import Amount

Load = Literal["engine started", "weights swapped", "model kept"]
"""The kinds of load, the slowest first."""

Figure = Annotated[Amount, "Measured."]


@dataclass(frozen=True, slots=True)
class SessionRun:
    """A timed session, the load left out: its prompts, its outputs' tokens, and its seconds."""

    prompts: int
    mean_tokens: float
    max_tokens: float
    seconds: float

    @property
    def timing(self) -> Timing:
        """The coefficients of `start`, `step` and `token`, and the seconds. Raises ConfigError."""
        coefficients = (1.0, self.max_tokens, self.prompts * self.mean_tokens)
        return Timing(self.prompts, coefficients, self.seconds)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The costs of one model: its load, its outputs' tokens, and the curve of a session's seconds.

    `load_s` includes the unload. `held_out_error` is the curve's mean relative error on numbers of
    prompts that the fit did not see.
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
        """Return the model with `prompts` prompts, for a workload."""
        per_prompt_s = self.mean_tokens * self.token_s
        fixed_s = self.start_s + self.max_tokens * self.step_s
        return ModelWork(name, prompts, self.load_s, per_prompt_s, fixed_s)


@dataclass(frozen=True, slots=True)
class PoolProfile:
    """The costs of a pool's proposers and aggregator.

    If all proposers have one shape, their `load_s` is the time of a swap of weights. A worker's
    first load also starts its engine. It takes `first_s` longer than a swap, and `together_s` more
    for each other worker that starts one at the same time. With several shapes both are 0.
    """

    models: Mapping[str, ModelProfile] = field(default_factory=dict)
    aggregator: ModelProfile | None = None
    first_s: Figure = 0.0
    together_s: Figure = 0.0

    def cost(self, name: str, prompts: int) -> ModelWork:
        """Return a proposer with `prompts` prompts. Raises ConfigError if it was not profiled."""
        if name not in self.models:
            raise ConfigError(
                f"The profile has no model {name!r}.",
                remedy="Run shell-router batch profile again.",
            )
        return self.models[name].cost(name, prompts)


def fit_profile(runs: Sequence[SessionRun], load_s: float) -> ModelProfile:
    """Fit a profile to timed sessions of at least two sizes. Raises ConfigError for bad times."""
    timings = [run.timing for run in runs]
    prompts = sum(run.prompts for run in runs)
    start_s, step_s, token_s = fit_costs(timings)
    return ModelProfile(
        load_s,
        sum(run.prompts * run.mean_tokens for run in runs) / prompts,
        max(run.max_tokens for run in runs),
        start_s,
        step_s,
        token_s,
        held_out_error=measure_held_out_error(timings),
        runs=tuple(runs),
    )


def charge_starts(timed: Sequence[tuple[ModelProfile, Load]]) -> list[ModelProfile]:
    """Return profiles of models of several shapes, each load as long as an engine's start.

    A plan may load any of them first in its shape, which starts an engine. A model in `timed` that
    was swapped in gets the seconds of the last engine start before it, which was of its shape.
    """
    profiles = []
    start_s = 0.0
    for profile, load in timed:
        if load == "engine started":
            start_s = profile.load_s
        profiles.append(replace(profile, load_s=start_s))
    return profiles


def add_starts(
    profile: PoolProfile, alone_s: float, together_s: float, workers: int
) -> PoolProfile:
    """Return the profile of a pool of one shape with the costs of first loads.

    An engine's start takes `alone_s`, or `together_s` on all `workers` at once. The profile's
    `load_s` are swaps.
    """
    swap_s = sum(model.load_s for model in profile.models.values()) / len(profile.models)
    more_s = max(0.0, together_s - alone_s) / max(1, workers - 1)
    return replace(profile, first_s=max(0.0, alone_s - swap_s), together_s=more_s)
