"""Traces of agent programs for public replayers, and the same graphs as topologies of this router.

    python -m benchmarks.neutral.traces FOLDER

writes our own traces. They are written, not recorded: a replayer sends the question and waits for
live outputs, of which each trace says the length and who reads them. Each call reads its
precursors' outputs as assistant messages, by which inference-perf finds its edges.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shell_router.lab.simulation import replay as recorded
from shell_router.lab.simulation.replay import (
    CHARACTERS_PER_TOKEN,
    NotOneGraphError,
    link_calls,
    read_calls,
)
from shell_router.lab.traces import build_call

QUESTION = (
    "A town of forty thousand people wants to halve the cars in its center within ten years. It "
    "has two bus lines, a railway station at its edge, narrow streets from the middle ages, and "
    "little money. Shops fear for their customers, and many of the people who work there live in "
    "villages around. What should it do first, what later, and how would it know that it works?"
)
ANOTHER = "Here is what another assistant would answer."
MERGE = "Now write the one answer that keeps what is right in all of these."
RESULT = (
    "Result of the tool, call {turn}: the line carried {carried} people on a working day, "
    "{percent} percent of them before nine in the morning. What do you do next?"
)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
MARK = "[SESS:0123456789abcdef] "
"""As long as what inference-perf puts before messages that are no outputs, another each session."""

Message = Mapping[str, str]
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a trace; `reads` and `texts` alternate in its prompt, which begins with a text."""

    name: str
    tokens: int
    reads: Sequence[str]
    texts: Sequence[str]


def build_tree(shape: Sequence[int], tokens: Sequence[int]) -> list[Call]:
    """Layers of agents, each of which reads its cluster of the layer before."""
    calls: list[Call] = []
    above: list[str] = []
    for layer, (size, length) in enumerate(zip(shape, tokens, strict=True)):
        names = [f"layer-{layer}-{index}" for index in range(size)]
        width = len(above) // size
        for index, name in enumerate(names):
            reads = above[index * width : (index + 1) * width]
            calls.append(_build_call(name, length, reads))
        above = names
    return calls


def build_debate(agents: int, rounds: int, tokens: int) -> list[Call]:
    """Every agent answers, then reads all answers and answers again; one sums up."""
    calls: list[Call] = []
    above: list[str] = []
    for turn in range(rounds):
        names = [f"round-{turn}-{index}" for index in range(agents)]
        calls += [_build_call(name, tokens, above) for name in names]
        above = names
    return [*calls, _build_call("summary", tokens, above)]


def build_tool_loop(turns: int, tokens: int) -> list[Call]:
    """One agent, which gets a tool's result after each of its turns but the last."""
    calls = []
    for turn in range(turns):
        results = [
            RESULT.format(turn=index + 1, carried=900 + 130 * index, percent=31 + 4 * index)
            for index in range(turn)
        ]
        reads = [f"turn-{index}" for index in range(turn)]
        calls.append(Call(f"turn-{turn}", tokens, reads, [QUESTION, *results]))
    return calls


def _build_call(name: str, tokens: int, reads: Sequence[str]) -> Call:
    between = [ANOTHER] * (len(reads) - 1)
    texts = [QUESTION, *between, MERGE] if reads else [QUESTION]
    return Call(name, tokens, reads, texts)


def build_panel(agents: int, tokens: int, straggler_tokens: int) -> list[Call]:
    """A panel whose first member writes far more than the others, and its judge."""
    panel = build_tree((agents, 1), (tokens, tokens))
    return [Call(panel[0].name, straggler_tokens, (), panel[0].texts), *panel[1:]]


OWN: Mapping[str, Sequence[Call]] = {
    "tree-3-1": build_tree((3, 1), (48, 64)),
    "tool-loop": build_tool_loop(5, 32),
    "tree-9-3-1": build_tree((9, 3, 1), (48, 48, 64)),
    "panel-straggler": build_panel(4, 32, 128),
    "debate-3x2": build_debate(3, 2, 48),
}


def write_own(folder: Path) -> None:
    """Write our traces, a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, calls in OWN.items():
        _write_trace(folder / f"{name}.json", name, calls)


def _write_trace(file: Path, name: str, calls: Sequence[Call]) -> None:
    outputs = {call.name: f"What {call.name} of {name} wrote." for call in calls}
    ends: dict[str, datetime] = {}
    spans = []
    for number, call in enumerate(calls):
        start = max((ends[reads] for reads in call.reads), default=BEGAN)
        # all lengths differ: a replayer lets a call wait for any other that ended before it began
        ends[call.name] = start + timedelta(seconds=1, milliseconds=10 * number)
        messages: list[Message] = [{"role": "user", "content": call.texts[0]}]
        for reads, text in zip(call.reads, call.texts[1:], strict=True):
            messages.append({"role": "assistant", "content": outputs[reads]})
            messages.append({"role": "user", "content": text})
        times = (start, ends[call.name])
        spans.append(_build_span(name, call.name, messages, outputs[call.name], call.tokens, times))
    _write_spans(file, name, spans)


def _build_span(
    trace: str,
    name: str,
    messages: Sequence[Message],
    output: str,
    tokens: int,
    times: tuple[datetime, datetime],
) -> Values:
    prompt = sum(len(message["content"]) for message in messages) // CHARACTERS_PER_TOKEN
    return build_call(trace, name, messages, output, (prompt, tokens), times)


def _write_spans(file: Path, name: str, spans: Sequence[Values]) -> None:
    document = {"trace_id": name, "span_count": len(spans), "spans": spans}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace to replay.

    Attributes:
        file: The trace as its author wrote it.
        agents: The same graph as the agents of a topology; None if it is not one graph.
        whole: A trace of one call, which asks that topology; None without one.
        note: Why there is no topology.
        root: The last call's span id.
    """

    name: str
    file: Path
    root: str
    agents: Values | None = None
    whole: Path | None = None
    note: str = ""


def load_trace(file: Path, folder: Path, model: str) -> Trace:
    """Read a trace, and write the one of a single call to `folder` where it has a topology.

    `model` is the alias of the agents' model. Raises ValueError for a file without calls.
    """
    spans = read_calls(file)
    name = file.stem.replace("_", "-").lower()
    root = spans[-1]
    try:
        question, agents = _build_agents(spans, model)
    except NotOneGraphError as error:
        return Trace(name, file, root["span_id"], note=str(error))
    whole = folder / f"{name}.json"
    begin, end = (datetime.fromisoformat(root[time]) for time in ("start_time", "end_time"))
    messages = [{"role": "user", "content": question}]
    tokens = recorded.count_output(root["attributes"])
    span = _build_span(name, root["span_id"], messages, "An answer.", tokens, (begin, end))
    _write_spans(whole, name, [span])
    return Trace(name, file, root["span_id"], agents, whole)


def _build_agents(spans: Sequence[Values], model: str) -> tuple[str, Values]:
    """Return the question of the topology and its agents; raises NotOneGraphError."""
    calls = link_calls(spans)
    question = _find_question([call.messages for call in calls])
    agents: Values = {}
    for call in calls:
        sampling = {"max_new_tokens": call.output_tokens, "ignore_eos": True}
        prompt = _build_prompt(call, question)
        agents[call.agent] = {"model": model, "prompt": prompt, "sampling": sampling}
        if call.reads:
            agents[call.agent]["precursors"] = list(call.reads)
    return question, agents


def _find_question(prompts: Sequence[Sequence[Message]]) -> str:
    """Return the text that every call's prompt begins with, else a neutral one."""
    asked = [
        [each["content"] for each in messages if each["role"] == "user"] for messages in prompts
    ]
    if not all(asked):
        raise NotOneGraphError("a call has no user message")
    first = {texts[0] for texts in asked}
    return first.pop() if len(first) == 1 else "Answer well."


def _build_prompt(call: recorded.Call, question: str) -> Values:
    """Return the call's prompt as topologies have it."""
    texts = [*call.texts]
    system = call.system
    reads = call.reads
    texts[1:] = [text and MARK + text for text in texts[1:]]  # the first has the question's
    first, *rest = [text.replace("{", "{{").replace("}", "}}") for text in texts]
    asked = question.replace("{", "{{").replace("}", "}}")
    others = first.removeprefix(asked)
    prompt: Values = {"prefix": "{question}" + (f"\n\n{others.lstrip()}" if others else "")}
    if system:
        prompt["system"] = "\n\n".join(system).replace("{", "{{").replace("}", "}}")
    if reads:
        before = ["", *rest[:-1]]
        prompt["slots"] = {
            agent: f"\n\n{text}\n\n{{output}}" if text else "\n\n{output}"
            for agent, text in zip(reads, before, strict=True)
        }
        prompt["suffix"] = f"\n\n{rest[-1]}"
    return prompt


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_own(Path(sys.argv[1]))
