"""What a pool's models cost: measured by `profiling`, written as a file that one can read and edit (MOSAIC, 4.1.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shell_router.batch.cost import SessionCurve, SessionRun, fit, held_out_error
from shell_router.batch.plan import Expert
from shell_router.errors import ConfigError

DIGITS = 9
"""Nanoseconds: a token may take a few microseconds."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model: seconds to load and unload it, its outputs' tokens, and the curve of a session's seconds.

    `held_out_error` is the curve's mean relative error on numbers of prompts that it was not fitted to.
    """

    load_s: float
    mean_tokens: float
    max_tokens: float
    start_s: float
    step_s: float
    token_s: float
    held_out_error: float | None = None
    runs: tuple[SessionRun, ...] = ()

    def cost(self, name: str, prompts: int) -> Expert:
        """The model in a workload, with so many prompts."""
        curve = SessionCurve(self.start_s, self.step_s, self.token_s)
        return Expert(
            name,
            prompts,
            load_s=self.load_s,
            per_prompt_s=curve.per_prompt_s(self.mean_tokens),
            fixed_s=curve.fixed_s(self.max_tokens),
        )


@dataclass(frozen=True, slots=True)
class PoolProfile:
    """A pool's models as experts, and its aggregator."""

    models: Mapping[str, ModelProfile] = field(default_factory=dict)
    aggregator: ModelProfile | None = None

    def cost(self, name: str, prompts: int) -> Expert:
        """An expert's cost. Raises ConfigError where it was not profiled."""
        if name not in self.models:
            raise ConfigError(f"The profile has no model {name!r}.", remedy="Run shell-router batch profile again.")
        return self.models[name].cost(name, prompts)

    def as_plain(self) -> dict[str, Any]:
        """Values for a YAML file."""
        found = {"models": {name: _plain(model) for name, model in self.models.items()}}
        return found | ({"aggregator": _plain(self.aggregator)} if self.aggregator else {})


def profile_of(runs: Sequence[SessionRun], load_s: float) -> ModelProfile:
    """The profile that timed sessions give. Raises ConfigError for fewer than two numbers of prompts."""
    curve = fit(runs)
    prompts = sum(run.prompts for run in runs)
    return ModelProfile(
        load_s,
        sum(run.prompts * run.mean_tokens for run in runs) / prompts,
        max(run.max_tokens for run in runs),
        **asdict(curve),
        held_out_error=held_out_error(runs) if len({run.prompts for run in runs}) > 2 else None,
        runs=tuple(runs),
    )


def _plain(model: ModelProfile) -> dict[str, Any]:
    return {
        name: [{key: _rounded(one) for key, one in run.items()} for run in value] if name == "runs" else _rounded(value)
        for name, value in asdict(model).items()
    }


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value
