"""What the online path is asked and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shell_router.core.engine import FinishReason, value
from shell_router.topology import Prefill


@value
class MoaRequest:
    """One question for a topology.

    `messages` are chat messages (role, content), the last one the user's. `sampling` overrides the root's sampling
    parameters; a `sampling_seed` in it seeds the other agents too, each in its own way. `seed` fixes the early-exit
    gate's draws. `id` is unique; it names the run in the cache and in traces. `labels` are the client's own, which
    rules between steps may read. With `confidence` the root's is measured. `prediction` is a text that the answer is
    expected to repeat.
    """

    id: str
    tenant: str
    messages: tuple[Mapping[str, str], ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    labels: Mapping[str, str] = field(default_factory=dict)
    confidence: bool = False
    prediction: str = ""

    @property
    def question(self) -> str:
        """The text of the last user message."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class OutputOf:
    """A place in a prompt where another agent's output goes."""

    agent: str


Segment = str | OutputOf


@value
class AgentRequest:
    """One agent of an external framework's program.

    Exactly one of `prompt` (raw segments) and `messages` (role and segments, put through the model's chat template)
    is given. A precursor may be running, finished, or not yet sent; the first sign of it is waited for `wait_s`.
    Where `model` is AUTO, it is chosen among `candidates`, or among those of the deployment where there are none.
    A `chat` completion has an unguessable agent id, by which its output can be found, and the prompt that a client
    gets who waits for the outputs and sends their texts.
    """

    tenant: str
    program: str
    agent: str
    model: str
    prompt: tuple[Segment, ...] = ()
    messages: tuple[tuple[str, tuple[Segment, ...]], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    prefill: Prefill = Prefill()
    wait_s: float = 60.0
    timeout_s: float = 600.0
    candidates: tuple[str, ...] = ()
    chat: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The agents whose outputs stand in its prompt, each once."""
        segments = [*self.prompt, *(segment for _, segments in self.messages for segment in segments)]
        return tuple(dict.fromkeys(segment.agent for segment in segments if isinstance(segment, OutputOf)))


CutOff = Literal["early_exit", "unneeded"]
AgentState = Literal["finished", "skipped", "early_exit", "unneeded", "failed"]


@value
class AgentUsage:
    """Tokens one agent cost: if it was cut off, those decoded by then; if it was skipped, none.

    `token_s` are seconds per token after its first ones, None where there were no more.
    """

    model: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    state: AgentState
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    token_s: float | None = None


@value
class Answer:
    """The root's output, and what every agent cost, in topological order.

    `confidence` is the geometric mean of the output's token probabilities, None where it was not measured.
    """

    text: str
    reason: FinishReason
    agents: Mapping[str, AgentUsage]
    confidence: float | None = None


ProgramAgentState = Literal["waiting", "running", "finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ProgramState:
    """What is known of an agent program: each agent's state and output so far."""

    program: str
    agents: Mapping[str, ProgramAgentState]
    outputs: Mapping[str, str]
