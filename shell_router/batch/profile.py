"""What a pool's models cost: measured by `profiling`, written as a file that one can read and edit
(MOSAIC, 4.1.2).

The paper fits a regression T_m(N_m, mean, max) and does not give its form. Ours is what continuous
batching does: the session starts, the engine writes all tokens at a rate that saturates, and the
longest output ends alone:

    T(N, mean, max) = start + max * step + N * mean * token

Throughput grows with N up to 1 / (mean * token) prompts a second, so a small session costs more per
prompt. What does not grow with N is `fixed_s` of a `planner.ModelWork`, what does is its
`per_prompt_s`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from shell_router.batch.planner import ModelWork
from shell_router.core.statistics import Timing, fitted_costs, held_out_error
from shell_router.errors import ConfigError, require
from shell_router.topology.forms import Number

Load = Literal["engine started", "weights swapped", "model kept"]
"""How a session got its model: its engine was started with it, took its weights from disk, or had
it already.
"""

Figure = Annotated[float, Number("Measured.", at_least=0)]


@dataclass(frozen=True, slots=True)
class SessionRun:
    """A session that was timed without its load: its prompts, and the tokens of their outputs."""

    prompts: int
    mean_tokens: float
    max_tokens: float
    seconds: float

    @property
    def timing(self) -> Timing:
        """What it says of the costs. Raises ConfigError for seconds that cannot be."""
        return Timing(
            self.prompts, (1.0, self.max_tokens, self.prompts * self.mean_tokens), self.seconds
        )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model: seconds to load and unload it, its outputs' tokens, and the curve of a session's
    seconds.

    `held_out_error` is the curve's mean relative error on numbers of prompts that it was not fitted
    to.
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
        return ModelWork(
            name,
            prompts,
            self.load_s,
            per_prompt_s=self.mean_tokens * self.token_s,
            fixed_s=fixed_s,
        )


@dataclass(frozen=True, slots=True)
class PoolProfile:
    """A pool's proposers, and its aggregator.

    If the proposers have one shape, `load_s` is their swap of weights, and a worker's first load
    takes longer by `first_s`, the start of its engine, and by `together_s` for each other worker
    that starts one. Else both are 0.
    """

    models: Mapping[str, ModelProfile] = field(default_factory=dict)
    aggregator: ModelProfile | None = None
    first_s: Figure = 0.0
    together_s: Figure = 0.0

    def cost(self, name: str, prompts: int) -> ModelWork:
        """A proposer's cost. Raises ConfigError where it was not profiled."""
        if name not in self.models:
            raise ConfigError(
                f"The profile has no model {name!r}.",
                remedy="Run shell-router batch profile again.",
            )
        return self.models[name].cost(name, prompts)


def profile_of(runs: Sequence[SessionRun], load_s: float) -> ModelProfile:
    """The profile that timed sessions give. Raises ConfigError for fewer than two numbers of
    prompts.
    """
    numbers = {run.prompts for run in runs}
    require(
        len(numbers) > 1,
        "A session's time cannot be fitted to one number of prompts.",
        "Run it with two or more.",
    )
    timings = [run.timing for run in runs]
    prompts = sum(run.prompts for run in runs)
    start_s, step_s, token_s = fitted_costs(timings)
    return ModelProfile(
        load_s,
        sum(run.prompts * run.mean_tokens for run in runs) / prompts,
        max(run.max_tokens for run in runs),
        start_s,
        step_s,
        token_s,
        held_out_error=held_out_error(timings),
        runs=tuple(runs),
    )


def at_their_dearest(timed: Sequence[tuple[ModelProfile, Load]]) -> list[ModelProfile]:
    """Profiles of models of several shapes, loaded in this order: in a plan's order any of them may
    start an engine.

    One that was swapped in has the shape of the last that was started, and costs as much.
    """
    found = []
    start_s = 0.0
    for profile, load in timed:
        if load == "engine started":
            start_s = profile.load_s
        found.append(replace(profile, load_s=start_s))
    return found


def with_starts(
    profile: PoolProfile, alone_s: float, together_s: float, workers: int
) -> PoolProfile:
    """The profile of a pool of one shape.

    A load that starts an engine takes `alone_s`, or `together_s` on all `workers` at once; `load_s`
    are swaps.
    """
    swap_s = sum(model.load_s for model in profile.models.values()) / len(profile.models)
    more_s = max(0.0, together_s - alone_s) / max(1, workers - 1)
    return replace(profile, first_s=max(0.0, alone_s - swap_s), together_s=more_s)
