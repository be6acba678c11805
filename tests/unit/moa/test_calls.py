"""Tools of a graph's root: what prompts hold, and which part of an output is a call."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shell_router.core.events import AgentTokens
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import InvalidField
from shell_router.moa.calls import CallReader, ToolOffer
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.topology import Agent, Cluster, Prompt, Topology
from tests.fakes.moa import Recorder, ScriptedMoa
from tests.fakes.scripted_engine import Script

TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("weather", "time"))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "time", "arguments": {}}'
TREE = Topology(
    "tree",
    {
        "left": Agent("left", "small"),
        "right": Agent("right", "medium"),
        "root": Agent("root", "large", ("left", "right"), Prompt(suffix=" Sum up.")),
    },
)
TALK: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "How is it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "c"},
    {"role": "tool", "content": "wind", "tool_call_id": "c"},
)


def read(
    text: str, step: int, *, must_call: bool = False, parallel: bool = True
) -> tuple[str, list[tuple[str, str]]]:
    model = ScriptedMoa(call_mark="<tool_call>").models["small"]
    reader = CallReader(ToolOffer(TOOLS, must_call, parallel), model)
    shown = "".join(reader.feed(text[at : at + step]) for at in range(0, len(text), step))
    rest, calls = asyncio.run(reader.finish())
    return shown + rest, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_calls_are_read_however_the_output_is_cut(step: int) -> None:
    weather, time = ("weather", '{"city":"Bonn"}'), ("time", "{}")
    assert read(f"Let me <tool look.\n{CALL}\n{OTHER}", step) == (
        "Let me <tool look.\n",
        [weather, time],
    )
    assert read(f"{CALL}{OTHER}", step, parallel=False) == ("", [weather])
    assert read("a <tool_cal", step) == ("a <tool_cal", [])
    for broken in (
        '<tool_call>{"name": "weather", "arg',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ):
        assert read(f"So {broken}", step) == (f"So {broken}", [])
    listed = (
        '[{"name": "weather", "parameters": {"city": "Bonn"}}, {"name": "time", "parameters": {}}]'
    )
    assert read(listed, step, must_call=True) == ("", [weather, time])
    assert read(listed[:-5], step, must_call=True) == (listed[:-5], [])


async def ask(
    moa: ScriptedMoa, topology: Topology = TREE, events: Recorder | None = None, **request: Any
) -> Answer:
    asked = {"messages": TALK[:1], "offer": ToolOffer(TOOLS), **request}
    return await moa.executor.run(
        topology, MoaRequest("r", "t", **asked), (events or Recorder()).emit
    )


def test_a_call_that_could_not_be_written_stays_text() -> None:
    deep = '{"of": ' * 300 + "1" + "}" * 300
    written = f'<tool_call>{{"name": "time", "arguments": {deep}}}</tool_call>'
    assert read(written, 100) == (written, [])


async def test_the_root_alone_is_offered_tools_and_its_call_is_no_text() -> None:
    moa, events = (
        ScriptedMoa({"root": Script(f"I look. {CALL}", piece_words=1)}, call_mark="<tool_call>"),
        Recorder(),
    )
    answer = await ask(moa, events=events)
    assert moa.prompt_of("left") == "<user>How is it?<assistant>"
    assert moa.prompt_of("root").startswith("<tool weather><tool time><user>How is it?")
    assert (answer.text, [call.name for call in answer.calls]) == ("I look. ", ["weather"])
    streamed = "".join(event.text for event in events.of(AgentTokens) if event.agent == "root")
    assert streamed == answer.text


async def test_the_conversation_goes_on_with_the_results() -> None:
    """The root gets them as they are; the others, whose templates may know no tools, as text."""
    moa = ScriptedMoa({"left": "L", "right": "R"}, call_mark="<tool_call>")
    await ask(moa, messages=TALK)
    called = '<assistant>I call weather with {"city": "Bonn"}'
    returned = "<user>weather returned: rain\nweather returned: wind<assistant>"
    assert moa.prompt_of("left") == f"<user>How is it?{called}{returned}"
    assert moa.prompt_of("root").endswith(
        "<user>How is it?LR Sum up.<assistant><tool>rain<tool>wind<assistant>"
    )


async def test_agreement_is_not_forwarded_past_an_agent_with_tools() -> None:
    early = EarlyExit(policy="in_flight", skip_aggregation=True)
    topology = replace(TREE, clusters=(Cluster("leaves", ("left", "right"), early),))
    moa = ScriptedMoa(
        {"left": "The answer is 7.", "right": "The answer is 7.", "root": CALL},
        call_mark="<tool_call>",
    )
    answer = await ask(moa, topology)
    assert answer.calls and answer.agents["root"].state == "finished"
    without = await ask(moa, topology, offer=None)
    assert without.agents["root"].state == "skipped", "the leaves agree"


class Pythonic:
    """A server's parser of calls like `[weather(city)]`; it keeps what it was asked."""

    def __init__(self, name: str | None = "pythonic") -> None:
        self.tool_parser = name
        self.asked: list[str] = []

    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[Any]]:
        self.asked.append(text)
        found = re.findall(r"(\w+)\((\w+)\)", text)
        return text.partition("[")[0], [
            {"name": name, "arguments": {"city": city}} for name, city in found
        ]


async def test_calls_of_other_formats_are_read_by_the_models_servers() -> None:
    parser, events = Pythonic(), Recorder()
    moa = ScriptedMoa(
        {"root": Script("I look. [weather(Bonn), rm(all)]", piece_words=1)}, call_parser=parser
    )
    answer = await ask(moa, events=events)
    assert (answer.text, [(call.name, call.arguments) for call in answer.calls]) == (
        "I look. ",
        [("weather", '{"city":"Bonn"}')],
    )
    assert parser.asked == ["I look. [weather(Bonn), rm(all)]"]
    assert moa.prompt_of("root").startswith("<tool weather defer_loading>"), (
        "as SGLang's own chats write them"
    )
    assert moa.engines["large"].generated[-1].sampling["skip_special_tokens"] is False
    moa = ScriptedMoa({"root": "It is dry."}, call_parser=parser)
    answer = await ask(moa)
    assert (answer.text, answer.calls) == ("It is dry.", ())
    forced = ScriptedMoa({"root": '[{"name": "time", "parameters": {}}]'}, call_parser=parser)
    answer = await ask(forced, offer=ToolOffer(TOOLS, must_call=True))
    assert [call.name for call in answer.calls] == ["time"] and len(parser.asked) == 2
    with pytest.raises(InvalidField, match="--tool-call-parser"):
        await ask(ScriptedMoa(call_parser=Pythonic(None)))


async def test_text_before_a_known_mark_is_streamed_and_not_sent_to_the_parser() -> None:
    parser, events = Pythonic("mistral"), Recorder()
    moa = ScriptedMoa(
        {"root": Script("I look. [TOOL_CALLS] weather(Bonn)", piece_words=1)}, call_parser=parser
    )
    answer = await ask(moa, events=events)
    assert parser.asked == ["[TOOL_CALLS] weather(Bonn)"]
    assert (answer.text, len(answer.calls)) == ("I look. ", 1)
    assert (
        "".join(event.text for event in events.of(AgentTokens) if event.agent == "root")
        == "I look. "
    )


async def test_what_cannot_call_tools_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"models\.large\.tool_call_parser"):
        await ask(ScriptedMoa())
    vote = replace(TREE.root, votes=True, model="vote")
    with pytest.raises(InvalidField, match="votes"):
        await ask(
            ScriptedMoa(call_mark="<tool_call>"),
            replace(TREE, agents={**TREE.agents, "root": vote}),
        )
    moa = ScriptedMoa(call_mark="<tool_call>")
    moa.models["medium"] = replace(moa.models["medium"], call_mark=None)
    with_fallback = replace(
        TREE, agents={**TREE.agents, "root": replace(TREE.root, fallbacks=("medium",))}
    )
    with pytest.raises(InvalidField, match=r"models\.medium\.tool_call_parser"):
        await ask(moa, with_fallback)
    moa = ScriptedMoa({"root": '[{"name": "time", "parameters": {}}]'})
    answer = await ask(moa, offer=ToolOffer(TOOLS, must_call=True))
    assert [call.name for call in answer.calls] == ["time"], "a constrained output needs no parser"
