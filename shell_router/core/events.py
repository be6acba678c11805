"""What happens during a run, in order. Traces, metrics and streamed events are all read from these.

`at_s` is the run's clock (monotonic seconds); every event names the agent or cluster it speaks of.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from shell_router.core.engine import FinishReason, Placement, value


@value
class ModelChosen:
    """One of several models was chosen for `agents`, which share it. `why` is a reason of
    routing.model_choice.

    `scores` are chances of a right answer, empty without a predictor. `waits` are the models' load:
    seconds, or tokens where `unmeasured` names models whose tokens' cost is not known.
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
    """A rule of a topology with steps chose what is next: `step`, or "end", after the step that has
    ended, or "start".

    `root` is the agent whose output is the step's; at the end the one that has answered. `rule`
    counts from 1 among the rules of `after`, and `why` says what made it hold. `text` is, at the
    end, the answer where it was held back, since another step could have followed, and `reasoning`
    the thinking before it.
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
    """The agent's task began: a leaf goes to its engine, another starts on its prefix."""

    at_s: float
    agent: str
    model: str


@value
class PrefillIncrement:
    """One prefill-only update ended. `slot` is the precursor last read from, None for the fixed
    prefix.
    """

    at_s: float
    agent: str
    started_s: float
    slot: str | None
    prompt_tokens: int
    cached_tokens: int
    resident_tokens: int
    """Tokens of this prompt that earlier increments had prefilled: what `cached_tokens` should
    reach.
    """


@value
class PromptReady:
    """All slots are filled; the agent's real request goes out now."""

    at_s: float
    agent: str
    prompt_tokens: int


@value
class AgentPlaced:
    """The agent's real request was sent: an engine of each role that takes part, and why. Emitted
    again for a retry.
    """

    at_s: float
    agent: str
    placed: tuple[Placement, ...]


@value
class AgentTokens:
    """The agent decoded these tokens."""

    at_s: float
    agent: str
    ids: tuple[int, ...]
    text: str


@value
class AgentThought:
    """The agent decoded these tokens of its thinking, which those that read its answer do not
    get."""

    at_s: float
    agent: str
    ids: tuple[int, ...]
    text: str


@value
class AgentFinished:
    """The agent's output is complete. `confidence` is the geometric mean token probability, where
    measured.
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
    """The agent wrote nothing: those it reads agree, and its output is `text`, that of `source`,
    and as sure.
    """

    at_s: float
    agent: str
    source: str
    text: str
    confidence: float | None


@value
class AgentStopped:
    """The agent was cut off and its output discarded: by its cluster's exit, or because no agent
    needs it.
    """

    at_s: float
    agent: str
    why: Literal["early_exit", "unneeded"]


@value
class AgentErred:
    """The agent failed. With `dropped` the run goes on without it."""

    at_s: float
    agent: str
    error: str
    dropped: bool


@value
class Degraded:
    """Something that only makes a run faster, or its choices better, failed; the run goes on
    without it.

    `agent` may be a cluster's id, or empty where it concerns the whole run.
    """

    at_s: float
    agent: str
    what: Literal["increment", "early_exit", "scores", "lengths", "classifier"]
    error: str


Event = (
    ModelChosen
    | StepChosen
    | AgentStarted
    | PrefillIncrement
    | PromptReady
    | AgentPlaced
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
    """The part of the answer that comes with the event; the tokens of `answering` agents are the
    answer.

    What was held back, since another step could have followed, comes in one piece when it is
    chosen.
    """
    if isinstance(event, AgentTokens | AggregationSkipped):
        if event.agent in answering:
            return event.text
        return ""
    if isinstance(event, StepChosen):
        return event.text
    return ""
