"""What was observed: one record per question, seed and setting."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One agent of one answer. `layer` counts from the leaves (0); `state` is the trace's word.

    It is `started` once its complete prompt was sent to its engine. `completion_tokens` are those that it wrote, also
    when it was cut off; the other counts are 0 unless it finished.
    """

    agent: str
    model: str
    layer: int
    state: str
    started: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """One judgement of a cluster by the early-exit gate, and how long it took."""

    cluster: str
    layer: int
    exited: bool
    duration_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """One question with one seed in one setting.

    `stated` is the answer that the text states, as far as the grader understands it. `latency_s` is what the client
    waited, for the slowest member where several vote. A failed request has an `error` and nothing else to tell.
    """

    question: int
    seed: int
    setting: str
    right: bool
    stated: str | None
    latency_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    agents: Sequence[AgentRecord] = ()
    exits: Sequence[ExitRecord] = ()
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Every field, agents and exits as objects."""
        return asdict(self)
