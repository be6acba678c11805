"""A request's trace, made from its events; the latest traces, and the tokens of tenants."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from shell_router.core import events
from shell_router.core.budget import Price
from shell_router.core.engine import Placement
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.spans import SpanContext, make_run_span
from shell_router.errors import UnknownTrace


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """The prefill times of an agent that reads others.

    Attributes:
        hidden_s: Seconds of prefill-only updates while inputs were still being written.
        exposed_s: Seconds from the last input's end to the first decoded token, which nothing
            hides: the rest of the prefill, the queue, and the KV transfer.
    """

    hidden_s: float
    exposed_s: float

    def as_json(self) -> NewValues:
        """Return both times, and the hidden share; None if nothing was prefilled."""
        total = self.hidden_s + self.exposed_s
        return {
            "hidden_prefill_s": round(self.hidden_s, 6),
            "exposed_prefill_s": round(self.exposed_s, 6),
            "overlap_share": self.hidden_s / total if total > 0 else None,
        }


def add_up(times: Iterable[PrefillTimes | None]) -> PrefillTimes:
    """Add up both times over agents; agents without times are None and are skipped."""
    counted = [agent for agent in times if agent is not None]
    hidden_s = sum(agent.hidden_s for agent in counted)
    exposed_s = sum(agent.exposed_s for agent in counted)
    return PrefillTimes(hidden_s, exposed_s)


def critical_path(
    root: str, precursors: Mapping[str, Sequence[str]], ended_s: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the chain of agents that set the latency, from a leaf to `root`.

    Before each agent in it comes the precursor that ended last.
    """
    path = [root]
    while last := [agent for agent in precursors.get(path[-1], ()) if agent in ended_s]:
        path.append(max(last, key=ended_s.__getitem__))
    return tuple(reversed(path))


OUTCOMES = ("running", "finished", "failed", "cancelled")
"""The outcomes of runs."""

End = events.AgentFinished | events.AggregationSkipped | events.AgentStopped | events.AgentErred


@dataclass(slots=True)
class AgentTrace:
    """One agent's events, with its tokens only counted; times are the run's clock in seconds.

    Only a FullTrace has `messages`, its prompt, and `texts`, the pieces of its output.
    """

    model: str
    started_s: float
    increments: list[events.PrefillIncrement] = field(default_factory=list)
    ready: events.PromptReady | None = None
    placed: events.AgentPlaced | None = None
    first_token_s: float | None = None
    first_tokens: int = 0
    tokens: int = 0
    end: End | None = None
    forwards: str = ""
    messages: list[NewValues] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The agent's state in the words of AgentUsage, such as running, finished or early_exit."""
        match self.end:
            case None:
                return "running"
            case events.AgentFinished():
                return "finished"
            case events.AggregationSkipped():
                return "skipped"
            case events.AgentStopped(why=why):
                return why
            case events.AgentErred():
                return "failed"

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens of its prompt and of its output, as far as they are known."""
        if isinstance(self.end, events.AgentFinished):
            return self.end.prompt_tokens, self.end.completion_tokens
        return self.ready.prompt_tokens if self.ready else 0, self.tokens

    def cost(self, price: Price) -> float:
        """Return the dollars of its tokens, as far as they are known."""
        prompt_tokens, completion_tokens = self.usage
        cached_tokens = 0
        if isinstance(self.end, events.AgentFinished):
            cached_tokens = self.end.cached_tokens
        return price.cost(prompt_tokens, cached_tokens, completion_tokens)

    @property
    def confidence(self) -> float | None:
        """The geometric mean token probability of the output, if measured."""
        if isinstance(self.end, events.AgentFinished | events.AggregationSkipped):
            return self.end.confidence
        return None

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first ones; None before the end or without such tokens."""
        if self.end is None or self.first_token_s is None or self.tokens <= self.first_tokens:
            return None
        return (self.end.at_s - self.first_token_s) / (self.tokens - self.first_tokens)

    def prefill_times(self, inputs_done_s: float) -> PrefillTimes | None:
        """Return the prefill times, given when all inputs were complete; None before a token."""
        if self.first_token_s is None:
            return None
        hidden = sum(
            max(0.0, min(update.at_s, inputs_done_s) - update.started_s)
            for update in self.increments
        )
        return PrefillTimes(hidden, max(0.0, self.first_token_s - inputs_done_s))

    def as_json(self, origin_s: float) -> NewValues:
        """Return facts and spans; times are seconds since `origin_s`."""
        facts: NewValues = {
            "model": self.model,
            "state": self.state,
            "started_s": since(self.started_s, origin_s),
            "decoded_tokens": self.tokens,
        }
        if self.placed is not None:
            facts["engines"] = [asdict(placement) for placement in self.placed.placed]
        if self.messages or self.texts:
            facts |= {"messages": self.messages, "output": "".join(self.texts)}
        if self.end is not None:
            facts["ended_s"] = since(self.end.at_s, origin_s)
            facts |= {name: getattr(self.end, name) for name in END_FACTS[type(self.end)]}
        return facts | {"spans": self._spans(origin_s)}

    def _spans(self, origin_s: float) -> list[NewValues]:
        spans = [_span("queue", self.started_s, self._left_queue_s, origin_s)]
        for update in self.increments:
            facts = {
                name: getattr(update, name)
                for name in ("slot", "prompt_tokens", "cached_tokens", "resident_tokens")
            }
            span = _span("prefill_increment", update.started_s, update.at_s, origin_s)
            spans.append(span | facts)
        if self.ready is not None:  # of the decoding request, to its first token
            cached = None
            if isinstance(self.end, events.AgentFinished):
                cached = self.end.cached_tokens
            tokens = {"prompt_tokens": self.ready.prompt_tokens, "cached_tokens": cached}
            spans.append(_span("prefill", self.ready.at_s, self.first_token_s, origin_s) | tokens)
        if self.first_token_s is not None:
            ended_s = self.end.at_s if self.end else None
            spans.append(
                _span("decode", self.first_token_s, ended_s, origin_s) | {"tokens": self.tokens}
            )
        return spans

    @property
    def _left_queue_s(self) -> float | None:
        """The time of the agent's first request, or of its end if it sent none."""
        if self.increments:
            return min(update.started_s for update in self.increments)
        last = self.ready or self.end
        return last.at_s if last else None


END_FACTS: Mapping[type, tuple[str, ...]] = {
    events.AgentFinished: (
        *("reason", "prompt_tokens", "completion_tokens", "cached_tokens", "confidence"),
        *("drafted_tokens", "accepted_tokens"),
    ),
    events.AggregationSkipped: ("source", "confidence"),
    events.AgentErred: ("error", "dropped"),
    events.AgentStopped: (),
}
"""The fields of each kind of end that a trace shows."""


def _span(name: str, start_s: float, end_s: float | None, origin_s: float) -> NewValues:
    """Make a span; an unknown end is None."""
    ended = None if end_s is None else since(end_s, origin_s)
    return {"name": name, "start_s": since(start_s, origin_s), "end_s": ended}


def since(at_s: float, origin_s: float) -> float:
    """Return the seconds from `origin_s` to `at_s`, to the microsecond."""
    return round(at_s - origin_s, 6)


@dataclass(slots=True, eq=False)
class Trace:
    """Spans and figures of one run, readable while it runs.

    Attributes:
        root: The answering agent, unless steps choose another.
        started_s: The run's clock at the start, in seconds.
        wall_s: The same moment in Unix time.
        precursors: The agents that each agent reads. An agent that is missing counts as having all
            inputs when its prompt is ready, as in agent requests, whose graph is unknown.
        parent: The client's span.
        outcome: running, finished, failed or cancelled.
        ended_s: None while the run is running.
        program: The program of an agent request.
        agent: The name that an agent request gave its agent.
        user: A digest of the tenant's own user or conversation, if the request names one.
        session: The session that the request's headers name, and its `parent_session`.
        question: The last user message, of a FullTrace.
        answer: The answer's text, of a FullTrace.
    """

    id: str
    tenant: str
    target: str
    root: str
    started_s: float
    wall_s: float
    precursors: Mapping[str, Sequence[str]]
    parent: SpanContext | None = None
    agents: dict[str, AgentTrace] = field(default_factory=dict)
    choices: list[events.ModelChosen] = field(default_factory=list)
    steps: list[events.StepChosen] = field(default_factory=list)
    exits: list[events.ExitScored] = field(default_factory=list)
    degraded: list[events.Degraded] = field(default_factory=list)
    outcome: str = "running"
    ended_s: float | None = None
    error: str = ""
    program: str = ""
    agent: str = ""
    user: str = ""
    session: str = ""
    parent_session: str = ""
    question: str | None = None
    answer: str | None = None

    @property
    def span(self) -> SpanContext:
        """The run's span."""
        return make_run_span(self.id, self.parent)

    @property
    def writer(self) -> str:
        """The agent that wrote the answer: the root, or the agent whose output it forwards."""
        writer = self.root
        while (agent := self.agents.get(writer)) and agent.forwards:
            writer = agent.forwards
        return writer

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the start of the run to the start of its answer."""
        root = self.agents.get(self.root)
        if root is None or root.first_token_s is None:
            return None
        return since(root.first_token_s, self.started_s)

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens of all agents' prompts and outputs, as far as they are known."""
        prompts = outputs = 0
        for agent in self.agents.values():
            prompt, output = agent.usage
            prompts += prompt
            outputs += output
        return prompts, outputs

    def add(self, event: events.Event) -> None:
        """Take in the next event."""
        # first, because most events are of these kinds
        if isinstance(event, (events.AgentTokens, events.AgentThought)):
            agent = self._agent(event.agent, event.at_s)
            if agent.first_token_s is None:
                agent.first_token_s = event.at_s
                agent.first_tokens = len(event.ids)
            agent.tokens += len(event.ids)
            return
        match event:
            case events.AgentStarted():
                self.agents[event.agent] = AgentTrace(event.model, event.at_s)
            case events.PrefillIncrement():
                self._agent(event.agent, event.started_s).increments.append(event)
            case events.PromptReady():
                self._agent(event.agent, event.at_s).ready = event
            case events.AgentPlaced():
                self._agent(event.agent, event.at_s).placed = event
            case events.AgentStopped(why="kept"):
                self.agents[event.agent] = AgentTrace(event.model, event.at_s, end=event)
            case (
                events.AgentFinished()
                | events.AggregationSkipped()
                | events.AgentStopped()
                | events.AgentErred()
            ):
                agent = self._agent(event.agent, event.at_s)
                agent.end = event
                if isinstance(event, events.AggregationSkipped):
                    agent.forwards = event.source
            case events.ModelChosen():
                self.choices.append(event)
            case events.StepChosen():
                self.steps.append(event)
                self.root = event.root
            case events.ExitScored():
                self.exits.append(event)
            case events.Degraded():
                self.degraded.append(event)

    def _agent(self, agent: str, at_s: float) -> AgentTrace:
        """Return the agent's record; make one if it failed or was cut off before it started."""
        if agent not in self.agents:
            self.agents[agent] = AgentTrace("unknown", at_s)
        return self.agents[agent]

    def list_placements(self) -> tuple[Placement, ...]:
        """Return the engines of the root's last request; empty before it."""
        root = self.agents.get(self.root)
        if root is not None and root.placed is not None:
            return root.placed.placed
        return ()

    def close(self, at_s: float, outcome: str, error: str = "") -> None:
        """Close the trace; `outcome` is finished, failed or cancelled."""
        self.ended_s = at_s
        self.outcome = outcome
        self.error = error

    def summary(self) -> NewValues:
        """Return the trace's entry in a list; `agents` counts the agents that have begun."""
        return {
            "id": self.id,
            "model": self.target,
            **self._list_names(),
            "created": int(self.wall_s),
            "status": self.outcome,
            "duration_ms": None
            if self.ended_s is None
            else round(1e3 * (self.ended_s - self.started_s), 3),
            "agents": len(self.agents),
        }

    def _list_names(self) -> NewValues:
        fields = ("program", "agent", "user", "session", "parent_session")
        return {field: name for field in fields if (name := getattr(self, field))}

    def as_json(self) -> NewValues:
        """Return the whole trace; times are seconds since the request began."""
        ended = {
            agent: trace.end.at_s for agent, trace in self.agents.items() if trace.end is not None
        }
        return {
            "id": self.id,
            "object": "trace",
            **self._list_names(),
            "target": self.target,
            "state": self.outcome,
            "started_at": self.wall_s,
            "duration_s": None if self.ended_s is None else since(self.ended_s, self.started_s),
            **({"error": self.error} if self.error else {}),
            "choices": [self._timed_json(choice) for choice in self.choices],
            "steps": [self._timed_json(step) for step in self.steps],
            "agents": {agent: self._agent_json(agent, ended) for agent in self.agents},
            "exits": [self._timed_json(scored) for scored in self.exits],
            "degraded": [
                asdict(event) | {"at_s": since(event.at_s, self.started_s)}
                for event in self.degraded
            ],
            "overlap": self._overlap_json(ended),
        }

    def _agent_json(self, agent: str, ended: Mapping[str, float]) -> NewValues:
        facts = self.agents[agent].as_json(self.started_s)
        times = self._times(agent, ended)
        return (
            facts
            | {"precursors": list(self.precursors.get(agent, ()))}
            | (times.as_json() if times else {})
        )

    def _timed_json(
        self, event: events.ModelChosen | events.StepChosen | events.ExitScored
    ) -> NewValues:
        facts = asdict(event)
        for text in ("text", "reasoning"):  # traces hold no texts
            facts.pop(text, None)
        times = {"start_s": facts.pop("started_s"), "end_s": facts.pop("at_s")}
        return {name: since(at, self.started_s) for name, at in times.items()} | facts

    def _times(self, agent: str, ended: Mapping[str, float]) -> PrefillTimes | None:
        """Return prefill times from the moment when the agent's last input was complete.

        The inputs of a leaf are complete when it starts.
        """
        trace = self.agents[agent]
        if agent not in self.precursors:
            if trace.ready:
                return trace.prefill_times(trace.ready.at_s)
            return None
        return trace.prefill_times(
            max((ended[p] for p in self.precursors[agent] if p in ended), default=trace.started_s)
        )

    def _overlap_json(self, ended: Mapping[str, float]) -> NewValues:
        """Add up prefill times over agents that read others, and along the slowest chain.

        Leaves are left out of the first sum: prefill can hide only while inputs are written.
        """
        readers = [
            agent
            for agent in self.agents
            if self.precursors.get(agent) or self.agents[agent].increments
        ]
        # one that was cut off ended with the gate's decision, which others' outputs had led to
        wrote = {
            agent: ended_s
            for agent, ended_s in ended.items()
            if not isinstance(self.agents[agent].end, events.AgentStopped)
        }
        path = critical_path(self.root, self.precursors, wrote)
        times = {agent: self._times(agent, ended) for agent in self.agents}
        return {
            **add_up([times.get(agent) for agent in readers]).as_json(),
            "critical_path": list(path),
            "critical_exposed_prefill_s": add_up([times.get(agent) for agent in path]).exposed_s,
        }


class FullTrace(Trace):
    """A trace that also holds the agents' prompts and outputs."""

    def add(self, event: events.Event) -> None:
        """Take in the next event."""
        super().add(event)
        if isinstance(event, events.AgentTokens | events.AggregationSkipped):
            self.agents[event.agent].texts.append(event.text)
        elif isinstance(event, events.AgentStarted) and event.list_messages is not None:
            self.agents[event.agent].messages = event.list_messages()

    def list_messages(self, agent: str) -> list[NewValues]:
        """Return the agent's prompt as `split_messages` does."""
        outputs = {
            name: "".join(trace.texts) if trace.state in ("finished", "skipped") else ""
            for name, trace in self.agents.items()
        }
        return split_messages(self.agents[agent].messages, outputs)


def split_messages(messages: Sequence[Values], outputs: Mapping[str, str]) -> list[NewValues]:
    """Return a trace's messages with each output as a message of its own, as replayers need it.

    An empty output is left out, with the texts around it, and one that is unknown is named.
    """
    split: list[NewValues] = []
    for message in messages:
        if not isinstance(message["content"], list):
            split.append({**message})
            continue
        text = ""
        for piece in message["content"]:
            if not isinstance(piece, str):
                writer = piece["output_of"]
                output = outputs.get(writer, f"[the output of {writer}]")
                before = piece["before"]
                after = piece["after"]
            elif piece in outputs.values():
                output = piece
                before = after = ""
            else:
                text += piece
                continue
            if output:
                text += before
                if text:
                    split.append({"role": message["role"], "content": text})
                split.append({"role": "assistant", "content": output})
                text = after
        if text:
            split.append({"role": message["role"], "content": text})
    return split


class TraceStore:
    """The last `capacity` traces; a tenant sees only its own.

    With `contents` they should be FullTraces.
    """

    def __init__(self, capacity: int = 1_000, *, contents: bool = False) -> None:
        self.contents = contents
        self._capacity = capacity
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, trace: Trace) -> None:
        """Keep `trace`, and forget the oldest beyond capacity."""
        self._traces[trace.id] = trace
        while len(self._traces) > self._capacity:
            self._traces.popitem(last=False)

    def latest(self, tenant: str, matches: Callable[[Trace], bool], limit: int) -> list[Trace]:
        """Return at most `limit` of the tenant's traces that `matches` accepts, latest first."""
        latest_first = (
            trace
            for trace in reversed(self._traces.values())
            if trace.tenant == tenant and matches(trace)
        )
        return list(islice(latest_first, limit))

    def get(self, tenant: str, trace_id: str) -> Trace:
        """Return a trace of the tenant.

        Raises:
            UnknownTrace: It is not held, or is another tenant's.
        """
        trace = self._traces.get(trace_id)
        if trace is None or trace.tenant != tenant:
            raise UnknownTrace(
                f"No trace {trace_id!r} is held.",
                remedy=f"A router keeps the last {self._capacity} of its own: behind a load "
                "balancer, ask one router.",
            )
        return trace


class TokenRates:
    """The tokens that tenants used in the last minute, approximately.

    The previous minute counts by the share of it that lies within the last 60 s.
    """

    def __init__(self) -> None:
        # by tenant: the minute, its tokens, the tokens of the minute before
        self._used: dict[str, tuple[float, float, float]] = {}

    def add(self, tenant: str, tokens: float, now_s: float) -> None:
        """Count tokens of prompts and outputs that the tenant has used."""
        minute, used, before = self._at(tenant, now_s)
        self._used[tenant] = minute, used + tokens, before

    def wait_s(self, tenant: str, limit: float, now_s: float) -> float:
        """Return the seconds until the tenant, if it uses no more, is below `limit`; 0 if it is."""
        minute, used, before = self._at(tenant, now_s)
        passed = now_s / 60 - minute
        if used >= limit:
            return 60 * (2 - passed - limit / used)
        if before:
            return max(0.0, 60 * (1 - passed - (limit - used) / before))
        return 0.0

    def _at(self, tenant: str, now_s: float) -> tuple[float, float, float]:
        minute = now_s // 60
        last, used, before = self._used.get(tenant, (minute, 0.0, 0.0))
        if last == minute:
            return minute, used, before
        return minute, 0.0, used if last == minute - 1 else 0.0
