"""What the online path is asked and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shell_router.core.engine import FinishReason, value
from shell_router.moa.calls import ToolCall, ToolOffer
from shell_router.moa.journal import Journal
from shell_router.topology import Prefill


@value
class MoaRequest:
    """One question for a topology.

    `messages` are chat messages (role, content, and what belongs to tools), one of them at least
    the user's, behind whose last there are at most calls of tools and their results. `sampling`
    overrides the root's sampling parameters; a `sampling_seed` in it seeds the other agents too,
    each in its own way. `seed` fixes the early-exit gate's draws. `id` is unique; it names the run
    in the cache and in traces. `labels` are the client's own, which rules between steps may read.
    With `confidence` the root's is measured. `prediction` is a text that the answer is expected to
    repeat. `chat_template_kwargs`, `max_thinking_tokens`, its thinking's limit, and the tools of
    `offer` are the root's alone. With a `journal` the run goes on where an earlier one broke off.
    `end_user` is as in `Hints`.
    """

    id: str
    tenant: str
    messages: tuple[Mapping[str, Any], ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    labels: Mapping[str, str] = field(default_factory=dict)
    confidence: bool = False
    prediction: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_thinking_tokens: int | None = None
    offer: ToolOffer | None = None
    journal: Journal | None = None
    end_user: str | None = None

    @property
    def question(self) -> str:
        """The text of the last user message."""
        text: str = self.messages[find_question(self.messages)]["content"]
        return text


def find_question(chat: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the last user message."""
    return max(at for at, message in enumerate(chat) if message["role"] == "user")


@dataclass(frozen=True, slots=True)
class OutputOf:
    """A place in a prompt where another agent's output goes."""

    agent: str


Segment = str | OutputOf


@value
class AgentRequest:
    """One agent of an external framework's program.

    Exactly one of `prompt` (raw segments) and `messages` (role and segments, put through the
    model's chat template) is given. A precursor may be running, finished, or not yet sent; the
    first sign of it is waited for `wait_s`. Where `model` is AUTO, it is chosen among `candidates`,
    or among those of the deployment where there are none. A `chat` completion has an unguessable
    agent id, by which its output can be found, and the prompt that a client gets who waits for the
    outputs and sends their texts. Unless it `is_read` by others, it may end inside its thinking.
    With a `journal` it goes on where an earlier attempt broke off. `end_user` is as in `Hints`.
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
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_thinking_tokens: int | None = None
    is_read: bool = True
    journal: Journal | None = field(default=None, compare=False)
    end_user: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The agents whose outputs stand in its prompt, each once."""
        segments = [
            *self.prompt,
            *(segment for _, segments in self.messages for segment in segments),
        ]
        return tuple(
            dict.fromkeys(segment.agent for segment in segments if isinstance(segment, OutputOf))
        )


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
    reasoning_tokens: int = 0


@value
class Answer:
    """The root's output, and what every agent cost, in topological order.

    `confidence` is the geometric mean of the output's token probabilities, None where it was not
    measured. `reasoning` is the thinking before it, where the model's is separated; `calls` are
    those of tools that it ends with.
    """

    text: str
    reason: FinishReason
    agents: Mapping[str, AgentUsage]
    confidence: float | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


ProgramAgentState = Literal["waiting", "running", "finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ProgramState:
    """What is known of an agent program: each agent's state and output so far."""

    program: str
    agents: Mapping[str, ProgramAgentState]
    outputs: Mapping[str, str]
