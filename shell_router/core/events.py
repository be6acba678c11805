"""Events of a run, in order; traces, metrics and streams are made from them.

`at_s` is the run's clock in monotonic seconds. Every event names its agent or cluster.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from typing import Literal

from shell_router.core.engine import FinishReason, Placement, value
from shell_router.core.exact_json import NewValues


@value
class ModelChosen:
    """A model was chosen among several for `agents`, which share the choice.

    Attributes:
        why: A reason of routing.model_choice.
        scores: Chances of a right answer by model; empty without a predictor.
        waits: Load by model: seconds, or tokens if `unmeasured` names any model.
        unmeasured: Models whose cost per token is unknown.
    """

    at_s: float
    started_s: float
    agents: tuple[str, ...]
    model: str
    policy: str
    why: str
    scores: Mapping[str, float]
    waits: Mapping[str, float]
    unmeasured: tuple[str, ...]


@value
class StepChosen:
    """A rule of a topology with steps chose the next step.

    Attributes:
        after: The step that has ended, or "start".
        step: The next step, or "end".
        root: The agent whose output is the step's; at the end the agent that has answered.
        rule: The rule's number among those of `after`, from 1.
        why: The condition that made it hold.
        text: At the end, the answer, if it was held back because another step could have followed.
        reasoning: The thinking before that answer.
    """

    at_s: float
    started_s: float
    after: str
    step: str
    root: str
    rule: int
    why: str
    text: str = ""
    reasoning: str = ""


@value
class AgentStarted:
    """The agent's task began: a leaf goes to its engine, another agent starts on its prefix.

    `list_messages` gives its prompt, as traces hold it; None if it has none.
    """

    at_s: float
    agent: str
    model: str
    list_messages: Callable[[], list[NewValues]] | None = field(
        default=None, repr=False, compare=False
    )


@value
class PrefillIncrement:
    """A prefill-only update ended.

    `slot` is the precursor last read from, None for the fixed prefix.
    """

    at_s: float
    agent: str
    started_s: float
    slot: str | None
    prompt_tokens: int
    cached_tokens: int
    resident_tokens: int
    """Tokens of this prompt that earlier updates had prefilled: what `cached_tokens` should reach.
    """


@value
class PromptReady:
    """All slots are filled, and the agent's request goes out now."""

    at_s: float
    agent: str
    prompt_tokens: int


@value
class AgentPlaced:
    """The agent's request was sent to an engine of each role; emitted again for a retry."""

    at_s: float
    agent: str
    placed: tuple[Placement, ...]


@value
class AgentPreempted:
    """Online work took the place of the agent, which is a batch's; it goes on later.

    `lost_tokens` have to be decoded again.
    """

    at_s: float
    agent: str
    lost_tokens: int


@value
class AgentTokens:
    """The agent decoded these tokens."""

    at_s: float
    agent: str
    ids: tuple[int, ...]
    text: str


@value
class AgentThought:
    """The agent decoded these tokens of thinking, which readers of its answer do not get."""

    at_s: float
    agent: str
    ids: tuple[int, ...]
    text: str


@value
class AgentFinished:
    """The agent's output is complete.

    `confidence` is the geometric mean token probability, if measured.
    """

    at_s: float
    agent: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    confidence: float | None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@value
class ExitScored:
    """The early-exit gate scored a cluster after a completion (Faster-MoA, Algorithm 1)."""

    at_s: float
    started_s: float
    cluster: str
    completed: tuple[str, ...]
    confidence: float
    agreement: float
    balance: float
    probability: float
    draw: float
    exited: bool
    aborted: tuple[str, ...]


@value
class AggregationSkipped:
    """The agent forwards the output of `source`: its precursors agree, or it had no time left."""

    at_s: float
    agent: str
    source: str
    text: str
    confidence: float | None


@value
class AgentStopped:
    """The agent was cut off and its output discarded, or it did not run.

    Its cluster exited, no agent needs it any more, the deadline or the end of the budget came, its
    output was kept in an earlier request, or it waits for an agent whose calls lack results. The
    text of a root that the deadline or the budget cuts off stays the answer.
    """

    at_s: float
    agent: str
    why: Literal["early_exit", "unneeded", "deadline", "budget", "kept", "waiting"]
    model: str = "unknown"


@value
class AgentErred:
    """The agent failed; with `dropped` the run goes on without it."""

    at_s: float
    agent: str
    error: str
    dropped: bool


@value
class Degraded:
    """A helper of a run failed, and the run goes on without it.

    Such helpers only make runs faster or choices better. `agent` may be a cluster's id, or empty if
    the failure concerns the whole run.
    """

    at_s: float
    agent: str
    what: Literal[
        "increment",
        "early_exit",
        "evidence",
        "stragglers",
        "scores",
        "lengths",
        "classifier",
        "judge",
    ]
    error: str


Event = (
    ModelChosen
    | StepChosen
    | AgentStarted
    | PrefillIncrement
    | PromptReady
    | AgentPlaced
    | AgentPreempted
    | AgentTokens
    | AgentThought
    | AgentFinished
    | AggregationSkipped
    | ExitScored
    | AgentStopped
    | AgentErred
    | Degraded
)
Emit = Callable[[Event], None]


def answer_in(event: Event, answering: Collection[str]) -> str:
    """Return the part of the answer that comes with the event.

    An answer that was held back, because another step could have followed, comes whole with
    StepChosen.

    Args:
        event: Any event.
        answering: The agents whose tokens are the answer.
    """
    if isinstance(event, AgentTokens | AggregationSkipped):
        if event.agent in answering:
            return event.text
        return ""
    if isinstance(event, StepChosen):
        return event.text
    return ""
