"""The settings of model choice: what is chosen from and how, who predicts, and what is recorded to train them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shell_router.config.refusal import require
from shell_router.scheduling.model_choice import ModelChoiceSettings, ModelPolicy


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """What the model `auto` stands for, and how one is chosen (docs/model-choice.md)."""

    models: tuple[str, ...] = ()
    policy: ModelPolicy = "chimera"
    latency_slack: float = 1.0
    score_margin: float = 0.05
    slack_s: float = 0.0
    answer_worth_s: float = 20.0
    profile: Path | None = None
    max_batch: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(set(self.models)) == len(self.models), "models names one twice", "Name each model once.")
        for model, batch in self.max_batch.items():
            require(batch > 0, f"max_batch of {model!r} must be above 0, not {batch}")
        try:
            self.choice()
        except ValueError as error:
            require(False, str(error))

    def choice(self) -> ModelChoiceSettings:
        """The part that the policies read."""
        return ModelChoiceSettings(
            self.policy, self.latency_slack, self.score_margin, self.slack_s, self.answer_worth_s
        )


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """Trained predictors, each a folder that `shell-router train` wrote, and the most that asking them may take."""

    scores: Path | None = None
    lengths: Path | None = None
    limit_s: float = 0.2
    gather_s: float = 0.002
    max_batch: int = 32
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        require(0 < self.limit_s < math.inf, f"limit_s must be above 0 and finite, not {self.limit_s}")
        require(0 <= self.gather_s < math.inf, f"gather_s must be at least 0 and finite, not {self.gather_s}")
        for name in ("max_batch", "threads"):
            require(getattr(self, name) > 0, f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Files with a line per agent run, in `folder`; nothing is recorded without one."""

    folder: Path | None = None
    prompts: bool = False
    max_file_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        require(self.max_file_bytes > 0, f"max_file_bytes must be above 0, not {self.max_file_bytes}")
