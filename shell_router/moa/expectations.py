"""What is expected of agents: measured lengths and latencies, tokens in flight, known prompts."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from shell_router.core.engine import Hints, ServedModel, Tokenizer, value
from shell_router.core.predictors import NO_FORECAST, Forecast
from shell_router.moa.requests import AgentRequest, MoaRequest, OutputOf, Segment, find_question
from shell_router.routing.increments import PrefillLoad
from shell_router.topology import Agent, Topology
from shell_router.topology.prompting import fill_text

PLAIN_REQUEST = "plain request"
"""The workflow of all requests that name a model, whether or not the model was chosen."""

AGENT_REQUEST = "agent request"
"""The workflow of all agents that an external framework sends; its graph is not known."""

# of models, and of topologies' agents; the means measured longest ago are forgotten first
_MOST_MEANS = 100_000
_WEIGHT = 0.2  # of the newest measurement: a change of load shows after about five


class LatencyEstimates:
    """Exponential moving averages per model and agent; None before the first sample."""

    def __init__(self) -> None:
        self._prefill: dict[str, PrefillLoad] = {}
        self._means: OrderedDict[tuple[str | None, ...], float] = OrderedDict()

    def _observe(self, newest: float, *key: str | None) -> None:
        before = self._means.get(key, newest)
        self._means[key] = before + _WEIGHT * (newest - before)
        self._means.move_to_end(key)
        if len(self._means) > _MOST_MEANS:
            self._means.popitem(last=False)

    def get_load(self, model: ServedModel) -> PrefillLoad:
        """Return the load of the model's prefill servers, which it shares with its adapters."""
        name = model.base or model.alias
        load = self._prefill.get(name)
        if load is None:
            load = PrefillLoad(model.prefill_cost)
            self._prefill[name] = load
        load.servers = model.prefill_servers
        return load

    def observe_run(
        self, model: str, hints: Hints, tokens: int, run_s: float, token_s: float | None
    ) -> None:
        """Learn from an agent that wrote its output to the end.

        Args:
            model: The model's alias.
            hints: Those of the agent's request.
            tokens: The tokens it wrote.
            run_s: Seconds from its complete prompt to its end.
            token_s: Seconds per token after the first ones.
        """
        if hints.topology:
            agent: tuple[str | None, ...] = (hints.topology, hints.agent)
        else:
            agent = (None, hints.agent, hints.user)
        self._observe(run_s, "run_s", model)
        self._observe(tokens, "tokens", model)
        self._observe(tokens, "tokens", model, *agent)
        if token_s is not None:
            self._observe(token_s, "token_s", model)

    def get_token_s(self, model: str) -> float | None:
        """Return the mean seconds between a sequence's tokens."""
        return self._means.get(("token_s", model))

    def get_output_tokens(
        self, model: str, topology: str | None, agent: str | None, *user: str | None
    ) -> float | None:
        """Return the agent's mean output tokens with `model`, or the mean of all of its agents.

        An agent without a topology is its user's: tenants may name theirs alike.
        """
        of_model = self._means.get(("tokens", model))
        return self._means.get(("tokens", model, topology, agent, *user), of_model)

    def observe_fate(self, topology: str, agent: str, *, decoded: bool, read: bool) -> None:
        """Learn whether the agent's prompt was decoded, and its output read, in one run."""
        self._observe(float(decoded), "decoded", topology, agent)
        self._observe(float(read), "read", topology, agent)

    def get_chance(self, topology: str, agent: str, kind: Literal["decoded", "read"]) -> float:
        """Return how likely the prompt is decoded, or the output read; 1 before the first run."""
        return self._means.get((kind, topology, agent), 1.0)

    def expect_finish_s(self, topology: Topology) -> Mapping[str, float]:
        """Return seconds from the request's start to each agent's expected end.

        Agents of models without measurements, and their successors, are absent.
        """
        finish: dict[str, float] = {}
        for agent in topology.agents.values():
            run_s = self._means.get(("run_s", agent.model))
            if run_s is not None and all(precursor in finish for precursor in agent.precursors):
                finish[agent.id] = run_s + max((finish[p] for p in agent.precursors), default=0.0)
        return finish


def guess_output_tokens(sampling: Mapping[str, Any]) -> float:
    """Return what is expected of an agent whose model is not measured: half of its limit.

    Without a limit, and beyond 1,024 tokens of it, 512 tokens are expected.
    """
    limit: float = sampling.get("max_new_tokens", inf)
    return min(limit / 2, 512.0)


Leave = Callable[[str], None]
"""Called with an agent that has ended."""


class Activity:
    """The predicted tokens of every agent that was given to a model and has not ended."""

    def __init__(self) -> None:
        self._tokens: dict[str, dict[tuple[int, str], float]] = {}
        self._programs = 0

    def sum_tokens(self, model: str) -> float:
        """Return P_m, the sum over the entries of `model` (Algorithm 1, line 10)."""
        return sum(self._tokens.get(model, {}).values())

    @contextmanager
    def enter_program(self, expected: Mapping[str, tuple[str, float]]) -> Iterator[Leave]:
        """Enter the agents of one run while the context is open.

        An agent leaves when the function that this yields is called, the others with the context.
        All stages enter at once: those of a chain together hold the tokens that the paper's entry
        of the running stage does.

        Args:
            expected: The model and the expected tokens of each agent.
        """
        self._programs += 1
        program = self._programs
        for agent, (model, tokens) in expected.items():
            self._tokens.setdefault(model, {})[program, agent] = tokens

        def leave(agent: str) -> None:
            self._tokens[expected[agent][0]].pop((program, agent), None)

        try:
            yield leave
        finally:
            for agent, (model, _) in expected.items():
                self._tokens[model].pop((program, agent), None)


def expect_outputs(
    topology: Topology,
    estimates: LatencyEstimates,
    request: MoaRequest,
    forecasts: Mapping[str, Forecast],
) -> Mapping[str, Hints]:
    """Return the hints of each agent, with its expected output tokens.

    These are predicted, else the agent's own mean, else its model's mean; None for a new model, 0
    for a vote. An agent has no total if nothing is expected of an agent that follows it.
    """
    hints: dict[str, Hints] = {}
    after: dict[str, set[str]] = {}
    for agent in reversed(tuple(topology.agents.values())):
        forecast = forecasts.get(agent.id, NO_FORECAST)
        tokens = 0.0 if agent.votes else forecast.own_tokens.get(agent.model)
        if tokens is None:
            tokens = estimates.get_output_tokens(agent.model, topology.name, agent.id)
        following = set[str]().union(*(after[reader] for reader in topology.successors[agent.id]))
        after[agent.id] = following | {agent.id}
        later = [hints[name].output_tokens for name in hints if name in following]
        later_tokens = [expected for expected in later if expected is not None]
        total = None
        if tokens is not None and len(later_tokens) == len(later):
            total = forecast.total_tokens.get(agent.model, tokens + sum(later_tokens))
        hints[agent.id] = Hints(
            request.tenant,
            request.id,
            topology.name,
            agent.id,
            tokens,
            total,
            request.end_user,
            request.tier,
            request.session,
            request.ends_s - request.timeout_s,
            bool(agent.precursors),
        )
    return hints


def name_workflow(topology: Topology) -> str:
    """Return the topology's name, or PLAIN_REQUEST if a request for one model made it."""
    is_plain = len(topology.agents) == 1 and topology.root.id == topology.name
    return PLAIN_REQUEST if is_plain else topology.name


def number_stages(topology: Topology) -> Mapping[str, str]:
    """Return each agent's stage in the workflow: the number of its layer, leaves 1."""
    stages: dict[str, str] = {}
    for number, layer in enumerate(topology.layers, start=1):
        stages |= dict.fromkeys(layer, str(number))
    return stages


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The texts of a prompt before other agents have written, without the chat template's marks.

    Attributes:
        system: The system prompt.
        user: The client's question, or all raw segments of a framework's agent.
        rest: All other text.
    """

    system: str
    user: str
    rest: str

    @property
    def characters(self) -> int:
        """The length of all texts together."""
        return len(self.system) + len(self.user) + len(self.rest)

    def count_tokens(self, tokenizer: Tokenizer) -> tuple[int, int, int]:
        """Return the tokens of the system prompt, of the question, and of all texts."""
        texts = (self.system, self.user, self.rest)
        system, user, rest = [len(tokenizer.encode(text)) if text else 0 for text in texts]
        return system, user, system + user + rest


@value
class ForecastQuery:
    """An agent that a predictor is asked about: its place in a workflow, prompt and models."""

    workflow: str
    stage: str
    prompt: KnownPrompt
    models: tuple[str, ...]
    scored: bool


def read_agent_prompt(agent: Agent, chat: Sequence[Mapping[str, str]]) -> KnownPrompt:
    """Return the known prompt of a topology's agent that answers `chat`."""
    at = find_question(chat)
    question = chat[at]["content"]
    others = [*chat[:at], *chat[at + 1 :]]
    prompt = agent.prompt
    system = [fill_text(prompt.system, question)] if prompt.system else []
    system += [turn["content"] for turn in others if turn["role"] == "system"]
    rest = [turn["content"] for turn in others if turn["role"] != "system"]
    rest += [fill_text(prompt.prefix, ""), fill_text(prompt.suffix, "")]
    return KnownPrompt("\n\n".join(system), question, "\n".join(filter(None, rest)))


def read_request_prompt(request: AgentRequest) -> KnownPrompt:
    """Return the known prompt of an external framework's agent."""
    if request.prompt:
        return KnownPrompt("", _join_texts(request.prompt), "")
    texts: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    for role, segments in request.messages:
        texts.setdefault(role, []).append(_join_texts(segments))
    question = texts["user"].pop() if texts["user"] else ""
    return KnownPrompt(
        "\n\n".join(texts["system"]), question, "\n".join(texts["user"] + texts["assistant"])
    )


def _join_texts(segments: Sequence[Segment]) -> str:
    return "".join(segment for segment in segments if not isinstance(segment, OutputOf))
