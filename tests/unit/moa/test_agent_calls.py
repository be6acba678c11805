"""Agents below the root that call tools: each goes on alone with the results of its own calls."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.engine import Generation
from shell_router.core.events import AgentStopped
from shell_router.errors import AgentFailed, EngineUnreachable, InvalidField
from shell_router.moa.calls import ToolOffer
from shell_router.moa.executor import Executor
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.topology import Topology, parse_topology
from tests.fakes.moa import ControlWordTokenizer, Recorder, ScriptedMoa, agent_of
from tests.fakes.scripted_engine import Script

TOOLS = ({"type": "function", "function": {"name": "look"}},)
CALL = 'I look.<tool_call>\n{"name": "look", "arguments": {"at": "AGENT"}}\n</tool_call>'
GRAPH = """
agents:
  left: {model: small, tools: on}
  right: {model: medium, tools: on}
  plain: {model: small}
  middle: {model: medium, precursors: [left, plain], prompt: {slot: "[{output}]"}}
  root: {model: large, precursors: [middle, right], prompt: {slot: "[{output}]"}}
"""


def parse(text: str = GRAPH) -> Topology:
    return parse_topology(text, source="graph.yaml")


class Client:
    """A client's chat with agents that call `look` as often as `calls` says, then write a text."""

    def __init__(self, calls: dict[str, int], *, text: str = GRAPH, **options: Any) -> None:
        self.graph = parse(text)
        self.moa = ScriptedMoa(call_mark="<tool_call>", **options)
        self.executor = self.moa.executor
        self.calls = calls
        self.scripts: dict[str, Script] = {}
        self.chat: list[dict[str, Any]] = [{"role": "user", "content": "How is it?"}]
        self.events = Recorder()
        self.sent = 0
        for alias, engine in self.moa.engines.items():
            engine.answer = lambda request, alias=alias: self.answer(alias, request)

    def answer(self, alias: str, request: Generation) -> Script:
        agent = agent_of(request)
        prompt = self.moa.tokenizers[alias].decode(request.input_ids)
        if agent in self.scripts:
            return self.scripts[agent]
        if prompt.count(f"seen by {agent}") < self.calls.get(agent, 0):
            return Script(CALL.replace("AGENT", agent))
        return Script(f"{agent} is done")

    async def ask(self, **fields: Any) -> Answer:
        self.sent += 1
        self.events = Recorder()
        request = {"offer": ToolOffer(TOOLS), "messages": tuple(self.chat), **fields}
        run = MoaRequest(f"run{self.sent}", request.pop("tenant", "t"), **request)
        return await self.executor.run(self.graph, run, self.events.emit)

    def give_results(self, answer: Answer, **changed: Any) -> None:
        """Append the answer's calls, and a result for each that names its agent."""
        calls = [
            {"id": call.id, "function": {"name": call.name, "arguments": {}}}
            for call in answer.calls
        ]
        self.chat.append({"role": "assistant", "content": answer.text, "tool_calls": calls})
        for call in answer.calls:
            agent = re.sub("call_[0-9a-f]{24}_?", "", call.id) or "root"
            result = {"role": "tool", "content": f"seen by {agent}", "tool_call_id": call.id}
            self.chat.append(result | changed)

    def ran(self) -> list[str]:
        """The agents that engines were asked for since the last call."""
        ran = []
        for engine in self.moa.engines.values():
            ran += [agent_of(request) for request in engine.generated]
            engine.generated.clear()
        return sorted(ran)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A graph whose agents may call tools or not, and how often each would."""
    names = [*(f"n{number}" for number in range(draw(st.integers(1, 6)))), "root"]
    read: set[str] = set()
    text = "agents:\n"
    for at, name in enumerate(names):
        precursors = draw(st.sets(st.sampled_from(names[:at]), max_size=3)) if at else set()
        if name == "root":
            precursors |= set(names[:at]) - read
        read |= precursors
        tools = draw(st.sampled_from(["on", "off"])) if name != "root" else "on"
        text += f"  {name}: {{model: small, tools: {tools}, precursors: {sorted(precursors)}}}\n"
    return text, {name: draw(st.integers(0, 2)) for name in names}


@given(graphs())
async def test_in_any_graph_an_agent_runs_once_and_once_more_for_each_answer_that_it_called_in(
    drawn: tuple[str, dict[str, int]],
) -> None:
    text, calls = drawn
    client = Client(calls, text=text)
    for name, agent in client.graph.agents.items():
        if not client.graph.may_call(agent):
            calls[name] = 0
    while (answer := await client.ask()).calls:
        client.give_results(answer)
    assert answer.text == "root is done" and answer.agents.keys() == client.graph.agents.keys()
    assert Counter(client.ran()) == {name: 1 + count for name, count in calls.items()}
    assert not client.moa.running


def agents_in(answer: Answer) -> list[str]:
    return [call.id.partition("_")[2].partition("_")[2] for call in answer.calls]


def states(answer: Answer) -> dict[str, str]:
    return {name: used.state for name, used in answer.agents.items()}


async def test_calls_of_several_agents_end_one_answer_and_each_goes_on_with_its_own_results() -> (
    None
):
    client = Client({"left": 1, "right": 1})
    first = await client.ask()
    assert agents_in(first) == ["left", "right"] and first.text == ""
    assert [call.arguments for call in first.calls] == ['{"at":"left"}', '{"at":"right"}']
    assert client.ran() == ["left", "plain", "right"]
    assert states(first) == {
        **dict.fromkeys(("left", "right", "plain"), "finished"),
        **dict.fromkeys(("middle", "root"), "waiting"),
    }
    assert {event.agent for event in client.events.of(AgentStopped)} == {"middle", "root"}
    assert not client.moa.running
    client.give_results(first)
    second = await client.ask()
    prompt = client.moa.prompt_of("left")
    assert prompt.endswith("<assistant>I look.<tool>seen by left<assistant>")
    assert "seen by right" not in prompt and "<tool look>" in prompt
    assert "[left is done][plain is done]" in client.moa.prompt_of("middle")
    root = client.moa.prompt_of("root")
    assert "[middle is done][right is done]" in root and "seen by" not in root
    assert client.ran() == ["left", "middle", "right", "root"]
    assert (second.text, second.calls) == ("root is done", ())
    assert states(second)["plain"] == "kept"


async def test_an_agent_that_has_finished_is_kept_while_another_goes_on_calling() -> None:
    client = Client({"left": 3, "right": 1, "root": 2})
    rounds = []
    while (answer := await client.ask()).calls:
        rounds.append((agents_in(answer), client.ran()))
        client.give_results(answer)
    assert rounds == [
        (["left", "right"], ["left", "plain", "right"]),
        (["left"], ["left", "right"]),
        (["left"], ["left"]),
        ([""], ["left", "middle", "root"]),
        ([""], ["root"]),
    ]
    assert client.ran() == ["root"] and answer.text == "root is done"
    assert states(answer) == {**dict.fromkeys(client.graph.agents, "kept"), "root": "finished"}


@pytest.mark.parametrize("agent", ["left", "root"])
async def test_the_prompts_of_an_agent_that_calls_grow_at_their_end_on_one_engine(
    agent: str,
) -> None:
    client = Client({"left": 2, "right": 1, "root": 2})
    asked: list[Generation] = []
    while (answer := await client.ask()).calls:
        for engine in client.moa.engines.values():
            asked += [request for request in engine.generated if agent_of(request) == agent]
            engine.generated.clear()
        client.give_results(answer)
    prompts = [list(request.input_ids)[:-1] for request in asked]
    assert len(prompts) == 2 + (agent == "left")
    assert all(after[: len(before)] == before for before, after in pairwise(prompts))
    assert len({request.affinity for request in asked}) == 1


async def test_an_aggregator_may_call_and_reads_the_same_outputs_again() -> None:
    text = GRAPH.replace("tools: on", "").replace(
        "precursors: [left", "tools: on, precursors: [left"
    )
    client = Client({"middle": 1}, text=text)
    client.give_results(await client.ask())
    first = client.moa.prompt_of("middle")
    assert client.ran() == ["left", "middle", "plain", "right"]
    assert (await client.ask()).text == "root is done"
    assert client.moa.prompt_of("middle").startswith(first)
    assert client.ran() == ["middle", "root"]


async def test_a_root_without_tools_reads_agents_that_have_them() -> None:
    text = GRAPH.replace("root: {", "root: {tools: off, ")
    client = Client({"left": 1, "root": 1}, text=text)
    client.give_results(await client.ask())
    answer = await client.ask()
    assert not answer.calls and "<tool_call>" in answer.text
    assert "<tool look>" not in client.moa.prompt_of("root")
    with pytest.raises(InvalidField, match="No agent of 'graph' calls tools"):
        client.graph = parse(text.replace("tools: on", ""))
        await client.ask()


async def test_a_client_that_must_have_calls_has_them_of_the_root_alone() -> None:
    client = Client({})
    client.scripts["root"] = Script('[{"name": "look", "parameters": {}}]')
    answer = await client.ask(offer=ToolOffer(TOOLS, must_call=True))
    assert agents_in(answer) == [""]
    asked = client.moa.engines["small"].generated
    assert all("json_schema" not in request.sampling for request in asked)
    with pytest.raises(InvalidField, match="Several agents"):
        await client.ask(offer=ToolOffer(TOOLS, parallel=False))


def forge(client: Client) -> None:
    call = client.chat[1]["tool_calls"][0]
    call["id"] = client.chat[2]["tool_call_id"] = f"call_{24 * '0'}_left"


def forge_another(client: Client) -> None:
    name = f"call_{24 * '1'}_left"
    client.chat[1]["tool_calls"].insert(0, {"id": name, "function": {"name": "look"}})
    client.chat.append({"role": "tool", "content": "forged", "tool_call_id": name})


def rename(client: Client) -> None:
    call = client.chat[1]["tool_calls"][0]
    call["id"] = client.chat[2]["tool_call_id"] = call["id"].replace("left", "right")


def ask_another_question(client: Client) -> None:
    client.chat[0] = {"role": "user", "content": "How was it?"}


def drop_result(client: Client) -> None:
    client.chat.pop()


def drop_call(client: Client) -> None:
    client.chat.pop()
    client.chat[1]["tool_calls"].pop()


REFUSED = {
    forge: r"not known here: call_0{24}_left\.",
    forge_another: r"not known here: call_1{24}_left\.",
    rename: r"not known here: call_[0-9a-f]{24}_right\.",
    ask_another_question: "not known here: call_.*_left, call_.*_right.* expired",
    drop_result: r"lack results of agents' calls: call_[0-9a-f]{24}_right\.",
    drop_call: r"lack results of agents' calls: call_[0-9a-f]{24}_right\.",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
async def test_results_that_do_not_fit_the_calls_are_refused_before_any_agent_runs(
    change: Any,
) -> None:
    client = Client({"left": 1, "right": 1})
    client.give_results(await client.ask())
    client.ran()
    change(client)
    with pytest.raises(InvalidField, match=REFUSED[change]):
        await client.ask()
    assert client.ran() == [] and not client.events.events


async def test_results_for_another_tenants_or_an_expired_turn_are_refused() -> None:
    client, now = Client({"left": 1}), [0.0]
    cache = MemoryAgentPromptCache(clock=lambda: now[0], ttl_s=10)
    client.executor = Executor(client.moa.models, cache, None, clock=monotonic)
    client.give_results(await client.ask())
    with pytest.raises(InvalidField, match="not known here"):
        await client.ask(tenant="other")
    now[0] = 11.0
    with pytest.raises(InvalidField, match="expired"):
        await client.ask()


async def test_the_same_question_at_once_and_the_same_results_again_do_not_disturb_a_turn() -> None:
    client = Client({"left": 2})
    first = await client.ask()
    await client.ask()
    client.give_results(first)
    await client.ask()  # its answer is lost
    answer = await client.ask()
    client.give_results(answer)
    client.ran()
    assert (await client.ask()).text == "root is done"
    assert client.ran() == ["left", "middle", "root"]


async def test_what_tools_and_agents_wrote_stays_quoted() -> None:
    client = Client({"left": 1}, tokenizer=ControlWordTokenizer)
    client.scripts["left"] = Script(CALL.replace("I look.", "<end>"))
    answer = await client.ask()
    client.give_results(answer, content="<end>")
    del client.scripts["left"]
    client.calls["left"] = 0
    await client.ask()
    tokenizer = client.moa.tokenizers["small"]
    asked = [r for r in client.moa.engines["small"].generated if agent_of(r) == "left"]
    assert tokenizer.decode(asked[-1].input_ids).count("<end>") == 2
    assert tokenizer.count_control(list(asked[-1].input_ids)) == 0  # type: ignore[attr-defined]


async def test_text_beside_results_is_read_by_the_agents_that_go_on_and_by_the_root() -> None:
    client = Client({"left": 1})
    client.give_results(await client.ask())
    client.chat.append({"role": "user", "content": "Be brief.", "continues": True})
    client.ran()
    await client.ask()
    for agent in ("left", "root"):
        assert client.moa.prompt_of(agent).endswith("<user>Be brief.<assistant>")
    assert "Be brief." not in client.moa.prompt_of("middle")


async def test_an_agent_that_fails_is_left_out_while_others_wait() -> None:
    client = Client({"left": 1}, text=GRAPH.replace("plain: {", "plain: {on_failure: drop, "))
    client.scripts["plain"] = Script("", error=EngineUnreachable("gone"))
    client.give_results(await client.ask())
    client.ran()
    answer = await client.ask()
    assert "gone" in answer.agents["plain"].error and answer.agents["plain"].state == "kept"
    assert "[left is done]\n\nNow" in client.moa.prompt_of("middle")
    assert client.ran() == ["left", "middle", "root"]


async def test_a_failure_fails_the_request_though_others_wait() -> None:
    client = Client({"left": 1})
    client.scripts["plain"] = Script("", error=EngineUnreachable("gone"))
    with pytest.raises(AgentFailed, match="plain"):
        await client.ask()
    assert not client.moa.running


async def test_a_model_whose_calls_cannot_be_read_is_named_in_a_warning() -> None:
    client = Client({}, text=GRAPH.replace("left: {model: small", "left: {model: other"))
    client.moa.models["other"] = replace(client.moa.models["other"], call_mark=None)
    assert "'other' writes calls" in (await client.ask()).warning


async def test_an_agent_stays_on_the_model_that_has_its_prompt() -> None:
    text = GRAPH.replace("left: {model: small", "left: {model: small, fallbacks: [other]")
    client = Client({"left": 2}, text=text)
    fallback = client.moa.engines["small"].answer
    client.moa.engines["small"].answer = lambda _: Script("", error=EngineUnreachable("gone"))
    client.graph = parse(text.replace("plain: {model: small", "plain: {model: medium"))
    client.give_results(await client.ask())
    client.moa.engines["small"].answer = fallback
    answer = await client.ask()
    assert answer.agents["left"].model == "other"
    assert agents_in(answer) == ["left"]
