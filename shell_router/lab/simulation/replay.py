"""Recorded calls as graphs: files of OTLP spans, as replayers read them."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from shell_router.core.exact_json import NewValues, Values
from shell_router.errors import ConfigError
from shell_router.standins.simulated.text import SimulatedTokenizer, filler
from shell_router.topology import Agent, Prompt, Topology

CHARACTERS_PER_TOKEN = 4
"""By which inference-perf estimates a length that has no count."""


class NotOneGraphError(ValueError):
    """A trace is no graph with one root and plain texts, so that no topology has its calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a trace.

    Attributes:
        messages: Its prompt.
        reads: The agents whose outputs stand in the prompt, in order.
        texts: The texts around them: one before each, and one behind all.
        system: The system messages.
    """

    agent: str
    span: Values
    messages: Sequence[Values]
    reads: Sequence[str]
    texts: Sequence[str]
    system: Sequence[str]

    @property
    def output_tokens(self) -> int:
        """The length of its output."""
        return count_output(self.span["attributes"])

    @property
    def prompt_tokens(self) -> int:
        """The length of its prompt."""
        texts = [message["content"] for message in self.messages]
        return _count(self.span["attributes"], ("prompt_tokens", "input_tokens"), texts)


def count_output(attributes: Values) -> int:
    """Return the length of a call's output."""
    text = attributes.get("gen_ai.output.text", "")
    return _count(attributes, ("completion_tokens", "output_tokens"), [text])


def _count(attributes: Values, names: Sequence[str], texts: Sequence[str]) -> int:
    for name in names:
        count = attributes.get(f"gen_ai.usage.{name}")
        if count is not None:
            return int(count)
    return max(1, sum(map(len, texts)) // CHARACTERS_PER_TOKEN)


def read_calls(file: Path) -> list[NewValues]:
    """Return the spans of a file that are calls, by their begin.

    Raises ValueError for a file without calls.
    """
    spans = json.loads(file.read_text(encoding="utf-8"))["spans"]
    calls = [span for span in spans if span["attributes"].get("gen_ai.input.messages")]
    if not calls:
        raise ValueError("no span has gen_ai.input.messages")
    return sorted(calls, key=read_start)


def read_start(span: Values) -> datetime:
    """Return when a call began; a time without a zone is UTC."""
    start = datetime.fromisoformat(span["start_time"])
    return start if start.tzinfo else start.replace(tzinfo=UTC)


def link_calls(spans: Sequence[Values]) -> list[Call]:
    """Return the calls of one trace; a call reads an output that is an assistant's message in it.

    Raises NotOneGraphError.
    """
    writers: dict[str, list[str]] = defaultdict(list)
    calls: list[Call] = []
    for number, span in enumerate(spans):
        agent = f"call-{number:02}"
        calls.append(_split_prompt(agent, span, writers, _find_read(calls)))
        output = span["attributes"].get("gen_ai.output.text")
        if not output:
            raise NotOneGraphError(f"call {number} has no output text")
        writers[output].append(agent)
    unread = len(calls) - len(_find_read(calls))
    if unread > 1:
        raise NotOneGraphError(f"no call reads the outputs of {unread - 1} calls")
    return calls


def _find_read(calls: Sequence[Call]) -> set[str]:
    """Return the agents whose outputs one of the calls reads."""
    return {agent for call in calls for agent in call.reads}


def _split_prompt(
    agent: str, span: Values, writers: Mapping[str, Sequence[str]], read_before: Collection[str]
) -> Call:
    """Split a prompt at the outputs in it."""
    messages = json.loads(span["attributes"]["gen_ai.input.messages"])
    system: list[str] = []
    reads: list[str] = []
    texts = [""]
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str):
            raise NotOneGraphError("a message is not one text")
        if message["role"] == "assistant" and content in writers:
            reads.append(_find_writer(agent, writers[content], reads, read_before))
            texts.append("")
        elif message["role"] == "system":
            system.append(content)
        else:
            texts[-1] += ("\n\n" if texts[-1] else "") + content
    return Call(agent, span, messages, reads, texts, system)


def _find_writer(
    agent: str, writers: Sequence[str], reads: Sequence[str], read_before: Collection[str]
) -> str:
    """Return one of those who wrote the same text, if possible one that no call has read yet."""
    unread = [writer for writer in writers if writer not in reads]
    if not unread:
        raise NotOneGraphError(f"a prompt of {agent} holds an output twice")
    return min(unread, key=read_before.__contains__)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A graph to replay: its topology, the lengths of its outputs, and its arrival in seconds."""

    topology: Topology
    output_tokens: Mapping[str, int]
    arrival_s: float


def load_replay(file: Path, models: Collection[str]) -> list[Replayed]:
    """Read the traces of a file as graphs of the simulation's `models`, by their arrival.

    A trace is what has one `trace_id`. A model that the simulation lacks is its only one.

    Raises:
        ConfigError: A trace is not one graph, or its model is not known.
    """
    traces: dict[str, list[Values]] = defaultdict(list)
    try:
        for span in read_calls(file):
            traces[span["trace_id"]].append(span)
        began = {name: read_start(spans[0]) for name, spans in traces.items()}
        first = min(began.values())
        return [
            _build_graph(name, spans, models, (began[name] - first).total_seconds())
            for name, spans in traces.items()
        ]
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file} holds no calls that can be read: {error!r}",
            remedy="Give a file of `shell-router trace --otel`, or one like it.",
        ) from error


def _build_graph(
    name: str, spans: Sequence[Values], models: Collection[str], arrival_s: float
) -> Replayed:
    try:
        calls = link_calls(spans)
    except NotOneGraphError as error:
        raise ConfigError(
            f"Trace {name!r} is no graph with one root: {error}.", remedy="Leave it out."
        ) from error
    tokens = {call.agent: call.output_tokens for call in calls}
    agents = {call.agent: _build_agent(call, tokens, models) for call in calls}
    (root,) = agents.keys() - _find_read(calls)
    agents[root] = agents.pop(root)  # the root is a topology's last agent
    return Replayed(Topology(name, agents), tokens, arrival_s)


def _build_agent(call: Call, tokens: Mapping[str, int], models: Collection[str]) -> Agent:
    """Return an agent with a prompt as long as the call's, of filler with the same beginnings."""
    texts = ["".join([*call.system, call.texts[0]]), *call.texts[1:]]
    own = call.prompt_tokens - TEMPLATE_TOKENS - sum(tokens[agent] for agent in call.reads)
    share = max(0, own) / (sum(map(len, texts)) or 1)
    first, *rest = [filler(round(share * len(text)), text) if text else "" for text in texts]
    if not rest:
        prompt = Prompt(prefix=first)
    else:
        before = ["", *rest[:-1]]
        slots = {agent: text + "{output}" for agent, text in zip(call.reads, before, strict=True)}
        prompt = Prompt(prefix=first, slots=slots, suffix=rest[-1])
    sampling = {"max_new_tokens": tokens[call.agent]}
    model = _find_model(call, models)
    return Agent(call.agent, model, tuple(call.reads), prompt, sampling)


def _find_model(call: Call, models: Collection[str]) -> str:
    model: str = call.span["attributes"].get("gen_ai.request.model", "")
    if model in models:
        return model
    if len(models) > 1:
        raise ConfigError(
            f"A call asks {model!r}, which is none of the simulation's models.",
            remedy="Add it to the simulation's models, or leave it a single one.",
        )
    (only,) = models
    return only


_EMPTY = SimulatedTokenizer().render_chat([{"role": "user", "content": ""}])
TEMPLATE_TOKENS = len(SimulatedTokenizer().encode(_EMPTY))
