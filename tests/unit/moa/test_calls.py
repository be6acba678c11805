"""Tools of a graph's root: what prompts hold, and which part of an output is a call."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import llguidance
import pytest

from shell_router.core.events import AgentTokens
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import InvalidField
from shell_router.moa.calls import CallReader, ToolOffer, constrain_calls
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
    text: str,
    step: int,
    *,
    must_call: bool = False,
    parallel: bool = True,
    has_schema: bool = False,
) -> tuple[str, list[tuple[str, str]]]:
    model = ScriptedMoa(call_mark="<tool_call>").models["small"]
    offer = ToolOffer(TOOLS, must_call, parallel)
    reader = CallReader(offer, model, is_constrained=must_call or has_schema)
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
    assert read(listed[:-5], step, must_call=True) == ("", [weather])
    nested = '[{"name": "weather", "parameters": {"then": [{"name": "time"}, {"name": "ti'
    assert read(nested, step, must_call=True) == ("", []), "a part of a cut call is no call"
    assert read("No.", step, must_call=True) == ("No.", []), "an engine without grammars wrote it"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("null", "{}"),
        ('{"at": "a\nb"}', '{"at":"a\\nb"}'),
        ('{"at": "a </tool_call> b"}', '{"at":"a </tool_call> b"}'),
        ('{"at": 12345678901234567890123}', '{"at":12345678901234567890123}'),
    ],
    ids=["null", "line feed", "mark", "long integer"],
)
def test_arguments_are_read_as_the_model_meant_them(written: str, arguments: str) -> None:
    call = f'<tool_call>\n{{"name": "time", "arguments": {written}}}\n</tool_call>'
    assert read(f"{call}{CALL}", 7)[1] == [("time", arguments), ("weather", '{"city":"Bonn"}')]


ANSWER = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/who"}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
    "$defs": {"who": {"enum": ["Bob", "time"]}},
}
LOOK = '{"name": "time", "parameters": {"at": 1}}'


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize(
    ("written", "text", "calls"),
    [
        (LOOK, "", ["time"]),
        (f" [ {LOOK}, {LOOK}]", "", ["time", "time"]),
        (f"[{LOOK}, {LOOK[:20]}", "", ["time"]),
        (LOOK[:20], "", []),
        ('{"name": "Bob", "sure": true}', '{"name": "Bob", "sure": true}', []),
        ('{"name": "time", "sure": true}', '{"name": "time", "sure": true}', []),
        ("[1, 2", "[1, 2", []),
        ('{"na', '{"na', []),
    ],
)
def test_an_output_with_a_schema_holds_calls_or_an_answer(
    step: int, written: str, text: str, calls: list[str]
) -> None:
    shown, read_calls = read(written, step, has_schema=True)
    assert (shown, [name for name, _ in read_calls]) == (text, calls)


def test_an_answer_with_a_schema_is_shown_while_it_is_written() -> None:
    model = ScriptedMoa(call_mark="<tool_call>").models["small"]
    reader = CallReader(ToolOffer(TOOLS), model, is_constrained=True)
    assert [reader.feed(text) for text in ('{"na', 'me": "B', 'ob"')] == ["", '{"name": "B', 'ob"']


@pytest.mark.parametrize(
    ("must_call", "parallel", "accepted"),
    [
        (False, True, ["answer", "call", "array of a call", "calls"]),
        (False, False, ["answer", "call", "array of a call"]),
        (True, True, ["array of a call", "calls"]),
        (True, False, ["array of a call"]),
    ],
)
def test_a_grammar_lets_calls_of_the_tools_and_the_answer_through(
    must_call: bool, parallel: bool, accepted: list[str]
) -> None:
    parameters = {"type": "object", "properties": {"at": {"$ref": "#/definitions/A"}}}
    parameters |= {"required": ["at"]}
    tools = [
        {
            "function": {
                "name": name,
                "parameters": {**parameters, "definitions": {"A": {"enum": of}}},
            }
        }
        for name, of in (("time", [1]), ("weather", ["Bonn"]))
    ]
    offer = ToolOffer(tuple(tools), must_call, parallel)
    schema = constrain_calls({"json_schema": json.dumps(ANSWER)}, offer)["json_schema"]
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    outputs = {
        "answer": '{"name": "Bob", "sure": true}',
        "call": LOOK,
        "array of a call": f"[{LOOK}]",
        "calls": f'[{LOOK}, {{"name": "weather", "parameters": {{"at": "Bonn"}}}}]',
        "arguments of another tool": LOOK.replace("1", '"Bonn"'),
        "arguments of no tool": LOOK.replace("1", '1, "why": 2'),
        "another answer": '{"name": "Ann", "sure": true}',
        "nothing": "[]",
    }
    let_through = []
    for name, output in outputs.items():
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        tokens = list(output.encode())
        read = matcher.validate_tokens(tokens)
        matcher.consume_tokens(tokens[:read])
        if read == len(tokens) and matcher.is_accepting():
            let_through.append(name)
    assert let_through == accepted


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


async def test_in_every_request_the_others_read_the_results_as_text() -> None:
    """The root gets them as they are; the templates of others may know no tools."""
    moa = ScriptedMoa({"left": "L", "right": "R"}, call_mark="<tool_call>")
    await ask(moa, replace(TREE, fan_out="request"), messages=TALK)
    called = '<assistant>I call weather with {"city": "Bonn"}'
    returned = "<user>weather returned: rain\nweather returned: wind<assistant>"
    assert moa.prompt_of("left") == f"<user>How is it?{called}{returned}"
    assert moa.prompt_of("root").endswith(
        "<user>How is it?LR Sum up.<assistant><tool>rain<tool>wind<assistant>"
    )


async def test_in_one_turn_the_roots_prompt_grows_at_its_end() -> None:
    moa = ScriptedMoa(call_mark="<tool_call>")
    for messages in (TALK[:1], TALK[:3], TALK):
        await ask(moa, messages=messages)
    first, second, third = [prompt.removesuffix("<assistant>") for prompt in moa.prompts("large")]
    assert second == f"{first}<assistant><tool>rain" and third == f"{second}<tool>wind"
    assert set(moa.prompts("small")) == {"<user>How is it?<assistant>"}


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
    result = await ask(moa, topology, offer=None, messages=TALK)
    assert result.agents["root"].state == "finished", "the leaves have not read the result"


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
    answer = await ask(ScriptedMoa(call_parser=Pythonic(None)))
    assert "--tool-call-parser" in answer.warning


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


async def test_a_root_whose_format_of_calls_is_unknown_answers_in_text_with_a_warning() -> None:
    events = Recorder()
    moa = ScriptedMoa({"root": Script(f"It is {CALL}", piece_words=1)})
    answer = await ask(moa, events=events)
    assert (answer.text, answer.calls) == (f"It is {CALL}", ())
    assert "models.large.tool_call_parser" in answer.warning
    pieces = [event.text for event in events.of(AgentTokens) if event.agent == "root"]
    assert len(pieces) > 2, "nothing is held back"
    moa = ScriptedMoa({"root": '[{"name": "time", "parameters": {}}]'})
    answer = await ask(moa, offer=ToolOffer(TOOLS, must_call=True))
    assert [call.name for call in answer.calls] == ["time"], "a constrained output needs no parser"
    assert not answer.warning


@pytest.mark.parametrize("constrained", ["request", "topology"])
async def test_a_root_with_a_schema_calls_or_answers(constrained: str) -> None:
    moa = ScriptedMoa({"root": LOOK})
    sampling = {"json_schema": json.dumps(ANSWER)}
    topology = TREE
    request = {"sampling": sampling}
    if constrained == "topology":
        root = replace(TREE.root, sampling=sampling)
        topology = replace(TREE, agents={**TREE.agents, "root": root})
        request = {}
    answer = await ask(moa, topology, **request)
    assert (answer.text, [call.name for call in answer.calls], answer.warning) == ("", ["time"], "")
    sent = json.loads(moa.engines["large"].generated[-1].sampling["json_schema"])
    assert sent["$defs"]["answer."]["properties"]["sure"] == {"type": "boolean"}


async def test_calls_that_must_come_take_the_place_of_any_constraint() -> None:
    moa = ScriptedMoa({"root": f"[{LOOK}]"})
    root = replace(TREE.root, sampling={"regex": "yes"})
    topology = replace(TREE, agents={**TREE.agents, "root": root})
    answer = await ask(moa, topology, offer=ToolOffer(TOOLS, must_call=True))
    assert [call.name for call in answer.calls] == ["time"]
    assert "regex" not in moa.engines["large"].generated[-1].sampling
    with pytest.raises(InvalidField, match="tools cannot go with regex"):
        await ask(moa, topology)
    await ask(moa, topology, sampling={"json_schema": "{}"})
    assert "regex" not in moa.engines["large"].generated[-1].sampling, "the client's form holds"


@pytest.mark.parametrize("constrained", ["tools cannot", "json_schema is no JSON"])
async def test_a_constraint_that_calls_cannot_join_is_refused(constrained: str) -> None:
    sampling = {"ebnf": "root ::= x"} if "tools" in constrained else {"json_schema": "$$ANY$$"}
    with pytest.raises(InvalidField, match=constrained):
        await ask(ScriptedMoa(), sampling=sampling)


async def test_a_root_that_votes_is_offered_no_tools() -> None:
    vote = replace(TREE.root, votes="majority", model="vote")
    topology = replace(TREE, agents={**TREE.agents, "root": vote})
    with pytest.raises(InvalidField, match="votes"):
        await ask(ScriptedMoa(call_mark="<tool_call>"), topology)
