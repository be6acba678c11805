"""What a pool's file says of how its questions are answered. docs/pools.md explains each."""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from shell_router.batch.gate import ConfidenceName, Gate
from shell_router.errors import ConfigError

AnswerKind = Literal["auto", "exact", "numeric", "choice"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a model decodes, in SGLang's terms."""

    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, f"temperature must be at least 0, not {self.temperature:g}")
        _require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p:g}")
        _require(self.max_new_tokens > 0, f"max_new_tokens must be above 0, not {self.max_new_tokens}")

    def params(self, seed: int) -> dict[str, Any]:
        """The engine's `sampling_params`. Nobody reads along, so that the engine need not send token by token."""
        return {**asdict(self), "sampling_seed": seed, "stream_interval": self.max_new_tokens}


@dataclass(frozen=True, slots=True)
class Recruiting:
    """How many experts answer a question whose line names none, and the run that tells what they are good at."""

    experts: int = 3
    skills: Path | None = None

    def __post_init__(self) -> None:
        _require(self.experts >= 1, f"experts must be at least 1, not {self.experts}")


@dataclass(frozen=True, slots=True)
class Answers:
    """How an answer is found in a text: by its `kind`, or as the last match of `pattern`, or of the group in it."""

    kind: AnswerKind = "auto"
    pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            _require(False, f"pattern is no regular expression: {error}")


@dataclass(frozen=True, slots=True)
class Aggregating:
    """The model that answers where the experts do not agree, and when they do."""

    model: str
    tau: float = 1.0
    confidence: ConfidenceName = "plurality"
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))

    def __post_init__(self) -> None:
        self.gate()

    def gate(self) -> Gate:
        """The gate of equation 11."""
        return Gate(self.tau, self.confidence)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
