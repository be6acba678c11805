"""One request's trace, built from its events."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentPassedOn,
    AgentPlaced,
    AgentStarted,
    AgentStopped,
    AgentTokens,
    Degraded,
    Event,
    ExitScored,
    ModelChosen,
    PrefillIncrement,
    PromptReady,
    StepChosen,
)
from shell_router.core.placement import Placed
from shell_router.telemetry.agent_trace import AgentTrace, since
from shell_router.telemetry.overlap import PrefillTimes, critical_path, summed


class Trace:
    """Spans and figures of one run; readable while it runs.

    `precursors` is the graph, by agent; where it is not known (agent requests) an agent's inputs count as done
    when its prompt is ready. `root` answers, where steps do not choose another. `started_s` is the run's clock,
    `wall_s` the same moment in Unix time.
    """

    def __init__(
        self,
        trace_id: str,
        *,
        tenant: str,
        target: str,
        root: str,
        started_s: float,
        wall_s: float,
        precursors: Mapping[str, Sequence[str]],
    ) -> None:
        self.id = trace_id
        self.tenant = tenant
        self.agents: dict[str, AgentTrace] = {}
        self._target = target
        self._root = root
        self.started_s = started_s
        self.wall_s = wall_s
        self._precursors = precursors
        self.choices: list[ModelChosen] = []
        self.steps: list[StepChosen] = []
        self._exits: list[ExitScored] = []
        self._degraded: list[Degraded] = []
        self._outcome = "running"
        self._ended_s: float | None = None
        self._error = ""

    def add(self, event: Event) -> None:
        """Take in the next event."""
        match event:
            case AgentTokens():
                self._of(event.agent, event.at_s).add_tokens(event)
            case AgentStarted():
                self.agents[event.agent] = AgentTrace(event.model, event.at_s)
            case PrefillIncrement():
                self._of(event.agent, event.started_s).increments.append(event)
            case PromptReady():
                self._of(event.agent, event.at_s).ready = event
            case AgentPlaced():
                self._of(event.agent, event.at_s).placed = event
            case AgentFinished() | AgentPassedOn() | AgentStopped() | AgentErred():
                self._of(event.agent, event.at_s).end = event
            case ModelChosen():
                self.choices.append(event)
            case StepChosen():
                self.steps.append(event)
                self._root = event.root
            case ExitScored():
                self._exits.append(event)
            case Degraded():
                self._degraded.append(event)

    def placed(self) -> tuple[Placed, ...]:
        """Where the root's request went last, and why; empty before that."""
        root = self.agents.get(self._root)
        return root.placed.placed if root is not None and root.placed is not None else ()

    def ended(self, at_s: float, outcome: str, error: str = "") -> None:
        """Close the trace; `outcome` is finished, failed or cancelled."""
        self._ended_s, self._outcome, self._error = at_s, outcome, error

    def as_json(self) -> dict[str, Any]:
        """The whole trace; all times are seconds since the request began."""
        return {
            "id": self.id,
            "object": "trace",
            "target": self._target,
            "state": self._outcome,
            "started_at": self.wall_s,
            "duration_s": None if self._ended_s is None else since(self._ended_s, self.started_s),
            **({"error": self._error} if self._error else {}),
            "choices": [self._timed_json(choice) for choice in self.choices],
            "steps": [self._step_json(step) for step in self.steps],
            "agents": {agent: self._agent_json(agent) for agent in self.agents},
            "exits": [self._timed_json(scored) for scored in self._exits],
            "degraded": [self._degraded_json(event) for event in self._degraded],
            "overlap": self._overlap_json(),
        }

    def _of(self, agent: str, at_s: float) -> AgentTrace:
        """The agent's trace; one that failed before it started gets its record here."""
        return self.agents.setdefault(agent, AgentTrace("unknown", at_s))

    def _agent_json(self, agent: str) -> dict[str, Any]:
        facts = self.agents[agent].as_json(self.started_s)
        return facts | {"precursors": list(self._precursors.get(agent, ())), **times_json(self._times(agent))}

    def _step_json(self, step: StepChosen) -> dict[str, Any]:
        facts = self._timed_json(step)
        del facts["text"]  # traces hold no texts
        return facts

    def _timed_json(self, event: ModelChosen | StepChosen | ExitScored) -> dict[str, Any]:
        facts = asdict(event)
        times = {"start_s": facts.pop("started_s"), "end_s": facts.pop("at_s")}
        return {name: since(at, self.started_s) for name, at in times.items()} | facts

    def _degraded_json(self, event: Degraded) -> dict[str, Any]:
        at_s = since(event.at_s, self.started_s)
        return {"at_s": at_s, "agent": event.agent, "what": event.what, "error": event.error}

    def _times(self, agent: str) -> PrefillTimes | None:
        done_s = self._inputs_done_s(agent)
        return None if done_s is None else self.agents[agent].prefill_times(done_s)

    def _inputs_done_s(self, agent: str) -> float | None:
        """When the agent's last input was complete; a leaf's inputs are there when it starts."""
        trace = self.agents[agent]
        if agent not in self._precursors:
            return trace.ready.at_s if trace.ready else None
        ended = self._ended_agents()
        return max((ended[p] for p in self._precursors[agent] if p in ended), default=trace.started_s)

    def _ended_agents(self) -> dict[str, float]:
        return {agent: trace.end.at_s for agent, trace in self.agents.items() if trace.end is not None}

    def _overlap_json(self) -> dict[str, Any]:
        """Over agents that read others (a leaf has nothing to hide behind), and along the slowest chain."""
        readers = [agent for agent in self.agents if self._precursors.get(agent) or self.agents[agent].increments]
        path = critical_path(self._root, self._precursors, self._ended_agents())
        known = {agent: times for agent in self.agents if (times := self._times(agent)) is not None}
        return {
            **times_json(summed(known[agent] for agent in readers if agent in known)),
            "critical_path": list(path),
            "critical_exposed_prefill_s": summed(known[agent] for agent in path if agent in known).exposed_s,
        }


def times_json(times: PrefillTimes | None) -> dict[str, Any]:
    """Hidden and exposed prefill in seconds and the hidden share, where known."""
    if times is None:
        return {}
    return {
        "hidden_prefill_s": round(times.hidden_s, 6),
        "exposed_prefill_s": round(times.exposed_s, 6),
        "overlap_share": times.overlap_share,
    }
