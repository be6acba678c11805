"""The requests and answers of the online path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shell_router.core.budget import UNLIMITED, Budget, Purse
from shell_router.core.engine import FinishReason, RequestClass, Session, value
from shell_router.core.events import AgentStopped
from shell_router.core.exact_json import Values
from shell_router.early_exit.settings import EarlyExit
from shell_router.moa.calls import ToolCall, ToolOffer
from shell_router.moa.journal import RunJournal
from shell_router.moa.spending import Account
from shell_router.topology import Prefill

CutOff = Literal["early_exit", "unneeded", "deadline", "budget", "waiting"]
AgentState = Literal["finished", "skipped", "kept", CutOff, "failed"]


@value
class AgentUsage:
    """The cost of one agent in tokens; none if it was skipped, or its output was kept.

    Attributes:
        completion_tokens: If the agent was cut off, those decoded by then.
        token_s: Seconds per token after its first ones, None if there were no more.
        finish_reason: Why its own output ended, None if it was forwarded or cut off.
        error: Why it gave no output, if it failed or was cut off at the deadline.
        cost: Dollars, by its model's price.
        estimated: Whether its engine gave no counts.
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
    finish_reason: FinishReason | None = None
    error: str = ""
    cost: float = 0.0
    estimated: bool = False

    def keep(self) -> "AgentUsage":
        """Return the cost in later requests of its turn, which read the same output."""
        return AgentUsage(self.model, 0, 0, 0, "kept", error=self.error)


@value
class IssuedCall:
    """A call of an agent below the root, with the `text` that the agent wrote before it."""

    agent: str
    model: str
    text: str
    name: str
    arguments: str


@value
class FanOut:
    """The outputs that stand before the calls of a turn.

    Attributes:
        reader: The model of the root that read them; in a topology with steps, the step. It is
            empty while agents below the root wait for results of their calls.
        outputs: The text of each agent or step, and its ids if a reader took them. The outputs that
            the root has read stand in the order of its slots. A text is empty if there was no
            output.
        agents: The cost of each agent in later requests.
        issued: All calls of agents below the root, by id.
    """

    reader: str
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    agents: dict[str, AgentUsage] = field(default_factory=dict)
    issued: dict[str, IssuedCall] = field(default_factory=dict)


NOTHING_KEPT = FanOut("", {})


@dataclass(slots=True, eq=False)
class Turn:
    """All requests up to the next question; a root reads the same outputs in each.

    Attributes:
        continues: Whether the request brings results of calls to a topology that keeps outputs.
        name: Names its topology and its messages; empty if the request calls no tools.
        kept: The outputs that an earlier request has read.
        read: Those that this request has read, to be kept.
        slots: The order of the slots of each agent that goes on or starts after others.
    """

    continues: bool = False
    name: str = ""
    kept: FanOut = NOTHING_KEPT
    read: FanOut | None = None
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def calls_below(self) -> bool:
        """Whether agents below the root have called tools in it."""
        return bool(self.kept.issued or (self.read is not None and self.read.issued))

    def list_stops(self, now_s: float) -> list[AgentStopped]:
        """Return an event for each agent whose output was kept."""
        agents = self.kept.agents.items()
        return [AgentStopped(now_s, name, "kept", used.model) for name, used in agents]


@value
class MoaRequest:
    """A question for a topology.

    Attributes:
        id: Unique; it names the run in the cache and in traces.
        messages: Chat messages (role, content, and what belongs to tools). A user message that
            `continues` stands beside results of calls, in their turn.
        sampling: Overrides the root's parameters. A `sampling_seed` seeds the other agents, too,
            each in its own way.
        seed: Fixes the draws of early-exit gates and hold-outs.
        labels: The client's own, which rules between steps may read.
        confidence: Measure the root's confidence.
        prediction: A text that the answer is expected to repeat.
        chat_template_kwargs: The root's alone.
        max_thinking_tokens: The limit of the root's thinking.
        offer: The tools that the root may call, and agents that the topology lets call them.
        bends_limits: Lower limits of outputs to what prompts leave of the contexts, and leave out
            that of thinking, with a warning, if the root's model has no reasoning parser.
        journal: The run goes on where an earlier one broke off.
        end_user: As in `Hints`.
        tier: As in `Hints`.
        session: As in `Hints`.
        turn: Set by the executor.
        budget: The most that the run may spend, as far as its topology allows.
        purse: Pays for the run; set by the executor where there is a budget.
        accounts: Pay for it, too, and for other requests.
        ends_s: The deadline by the event loop's clock; set by the executor.
    """

    id: str
    tenant: str
    messages: tuple[Values, ...]
    sampling: Values = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    labels: Mapping[str, str] = field(default_factory=dict)
    confidence: bool = False
    prediction: str = ""
    chat_template_kwargs: Values = field(default_factory=dict)
    max_thinking_tokens: int | None = None
    offer: ToolOffer | None = None
    bends_limits: bool = False
    journal: RunJournal | None = None
    end_user: str | None = None
    tier: RequestClass = "default"
    session: Session | None = None
    turn: Turn = Turn()
    budget: Budget = UNLIMITED
    purse: Purse | None = None
    accounts: tuple[Account, ...] = ()
    ends_s: float = 0.0

    @property
    def turn_messages(self) -> tuple[Values, ...]:
        """The messages up to the question, with the system messages that follow it."""
        end = find_question(self.messages) + 1
        while end < len(self.messages) and self.messages[end]["role"] == "system":
            end += 1
        return self.messages[:end]

    @property
    def question(self) -> str:
        """The text of the user message that began the turn."""
        text: str = self.messages[find_question(self.messages)]["content"]
        return text


def find_question(chat: Sequence[Values]) -> int:
    """Return the index of the last user message that begins a turn; the first one does."""
    users = [at for at, turn in enumerate(chat) if turn["role"] == "user"]
    return next((at for at in reversed(users) if not chat[at].get("continues")), users[0])


@dataclass(frozen=True, slots=True)
class OutputOf:
    """A place in a prompt for another agent's output."""

    agent: str


Segment = str | OutputOf


@value
class AgentRequest:
    """One agent of an external framework's program, with either a `prompt` or `messages`.

    Attributes:
        model: AUTO to have it chosen among `candidates`, or among all models of `auto`.
        prompt: Raw segments.
        messages: Roles and segments, put through the model's chat template.
        wait_s: The longest wait for a precursor's first tokens; it need not have been sent yet.
        drops_failed: A precursor that fails is left out, unless none remains; otherwise the agent
            fails, too.
        early_exit: Judges the outputs that it reads, and leaves out those that are unfinished.
        confidence: Measure the output's confidence, which early exits of readers need.
        chat: A chat completion. Its agent id cannot be guessed, and finds its output. Its prompt is
            that of a client that waits for the outputs and sends their texts.
        is_read: Others read it, so that it fails if it ends inside its thinking.
        journal: The agent goes on where an earlier attempt broke off.
        end_user: As in `Hints`.
        tier: As in `Hints`.
        session: As in `Hints`.
    """

    tenant: str
    program: str
    agent: str
    model: str
    prompt: tuple[Segment, ...] = ()
    messages: tuple[tuple[str, tuple[Segment, ...]], ...] = ()
    sampling: Values = field(default_factory=dict)
    prefill: Prefill = Prefill()
    wait_s: float = 60.0
    timeout_s: float = 600.0
    drops_failed: bool = False
    early_exit: EarlyExit | None = None
    confidence: bool = False
    candidates: tuple[str, ...] = ()
    chat: bool = False
    chat_template_kwargs: Values = field(default_factory=dict)
    max_thinking_tokens: int | None = None
    is_read: bool = True
    journal: RunJournal | None = field(default=None, compare=False)
    end_user: str | None = None
    tier: RequestClass = "default"
    session: Session | None = field(default=None, compare=False)
    accounts: tuple[Account, ...] = field(default=(), compare=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """The agents whose outputs stand in its prompt, each once."""
        segments = list(self.prompt)
        for _, more in self.messages:
            segments += more
        agents = [segment.agent for segment in segments if isinstance(segment, OutputOf)]
        return tuple(dict.fromkeys(agents))


@value
class Answer:
    """The root's output, and the cost of every agent, in topological order.

    Attributes:
        confidence: The geometric mean of the output's token probabilities, None if not measured.
        reasoning: The thinking before the output, if the model's is separated.
        calls: The tool calls at its end.
        warning: Why it holds no calls, if tools were offered in vain, or is not the root's complete
            output.
        matched: The stop string that ended it.
    """

    text: str
    reason: FinishReason
    agents: Mapping[str, AgentUsage]
    confidence: float | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    warning: str = ""
    matched: str = ""


ProgramAgentState = Literal["waiting", "running", "finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class ProgramState:
    """The states and outputs so far of a program's agents."""

    program: str
    agents: Mapping[str, ProgramAgentState]
    outputs: Mapping[str, str]
