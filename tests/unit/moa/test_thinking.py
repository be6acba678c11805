"""Thinking models in a graph: what their readers get, and where it goes instead."""

from dataclasses import replace
from typing import Any

import pytest

from shell_router.core.events import AgentErred, AgentThought
from shell_router.core.marks import REASONING_PARSERS
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import AgentFailed, EngineUnreachable, InvalidRequest
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.topology import VOTE, Agent, Cluster, Prefill, Prompt, Topology
from tests.fakes.moa import Recorder, ScriptedMoa
from tests.fakes.scripted_engine import Script

SAID = "<think>\nmaybe so, maybe not</think>\n\nIt is seven."
SCHEMA = '{"type": "object"}'


def tree(**root: Any) -> Topology:
    agents = {
        "left": Agent("left", "small"),
        "right": Agent("right", "medium", on_failure="drop"),
        "root": Agent("root", "large", ("left", "right"), Prompt(suffix="\nSum up."), **root),
    }
    return Topology("tree", agents, prefill=Prefill(chunk_tokens=1))


def thinking(scripts: dict[str, Script | str]) -> ScriptedMoa:
    return ScriptedMoa(scripts, reasoning=REASONING_PARSERS["qwen3"])


async def ask(
    moa: ScriptedMoa, topology: Topology, events: Recorder | None = None, **request: Any
) -> Answer:
    asked = MoaRequest("r", "t", ({"role": "user", "content": "How many?"},), **request)
    return await moa.executor.run(topology, asked, (events or Recorder()).emit)


async def test_readers_get_answers_alone_also_in_prefill_updates() -> None:
    moa, events = (
        thinking({"left": Script(SAID, piece_words=1), "right": SAID, "root": SAID}),
        Recorder(),
    )
    answer = await ask(moa, tree(), events)
    large = moa.engines["large"]
    prompts = [
        moa.tokenizers["large"].decode(one.input_ids)
        for one in (*large.prefilled, *large.generated)
    ]
    assert large.prefilled, "updates went out"
    assert not any(word in prompt for prompt in prompts for word in ("maybe", "think"))
    assert prompts[-1] == "<user>How many?It is seven.It is seven.\nSum up.<assistant>"
    assert (answer.text, answer.reasoning) == ("It is seven.", "maybe so, maybe not")
    assert {event.agent for event in events.of(AgentThought)} == {"left", "right", "root"}


async def test_thinking_counts_as_tokens_and_as_nothing_else() -> None:
    moa = thinking({"root": Script(SAID, piece_words=100, logprob=-0.5)})
    answer = await ask(moa, tree(), confidence=True)
    usage = answer.agents["root"]
    answered = len(moa.tokenizers["large"].encode("It is seven."))
    assert usage.reasoning_tokens == usage.completion_tokens - answered
    assert answer.confidence == pytest.approx(2.718281828**-0.5)


async def test_an_agent_can_give_its_readers_all_it_wrote() -> None:
    moa, topology = thinking({"left": SAID, "root": SAID}), tree()
    agents = {name: replace(agent, readers_get="all") for name, agent in topology.agents.items()}
    answer = await ask(moa, replace(topology, agents=agents))
    assert SAID in moa.prompt_of("root")
    assert answer.text == "It is seven.", "clients get the root's answer"


@pytest.mark.parametrize("votes", ["majority", None])
async def test_an_output_that_is_forwarded_leaves_its_thinking_behind(votes: Any) -> None:
    said, topology = "<think>hm</think>It is \\boxed{7}.", tree()
    root = replace(topology.root, votes=votes, model=VOTE if votes else "large")
    gate = EarlyExit("in_flight", threshold=0.6, min_completed=2, skip_aggregation=True)
    clusters = () if votes else (Cluster("leaves", ("left", "right"), gate),)
    topology = replace(topology, agents={**topology.agents, "root": root}, clusters=clusters)
    answer = await ask(thinking({"left": said, "right": said}), topology)
    assert answer.agents["root"].state == "skipped"
    assert (answer.text, answer.reasoning) == ("It is \\boxed{7}.", "")
    assert answer.agents["left"].reasoning_tokens > 0


async def test_an_output_that_ends_inside_its_thinking_is_never_read() -> None:
    moa, events = thinking({"right": Script("<think>on and on", reason="length")}), Recorder()
    await ask(moa, tree(), events)
    assert moa.prompt_of("root").count("left") and "right" not in moa.prompt_of("root")
    assert "inside its thinking" in events.of(AgentErred)[0].error
    moa = thinking({"left": Script("<think>on and on", reason="length")})
    with pytest.raises(AgentFailed, match=r"'left' ended inside its thinking.*max_thinking_tokens"):
        await ask(moa, tree())
    assert not moa.running


async def test_a_client_gets_the_thinking_of_a_root_that_came_to_no_answer() -> None:
    answer = await ask(thinking({"root": Script("<think>on and on", reason="length")}), tree())
    assert (answer.text, answer.reasoning, answer.reason) == ("", "on and on", "length")


async def test_thinking_ends_at_its_limit_and_the_answer_follows() -> None:
    """By a second request, behind the thinking so far."""
    moa = thinking({})
    scripts = iter([Script("<think>one two", piece_words=1, reason="length"), Script("Seven.")])
    moa.engines["large"].answer = lambda _request: next(scripts)
    answer = await ask(moa, tree(max_thinking_tokens=5), sampling={"max_new_tokens": 50})
    first, second = moa.engines["large"].generated
    assert (first.sampling["max_new_tokens"], second.sampling["max_new_tokens"]) == (5, 45)
    prompts = [moa.tokenizers["large"].decode(one.input_ids) for one in (first, second)]
    assert prompts[1] == prompts[0] + "<think>one two\n</think>\n\n"
    assert (answer.text, answer.reasoning) == ("Seven.", "one two")
    usage = answer.agents["root"]
    assert (usage.reasoning_tokens, usage.completion_tokens) == (5, 7)
    assert not second.rid.startswith(first.rid), "an abort of the first would end the second"


async def test_an_answer_that_the_limit_of_thinking_cut_goes_on() -> None:
    moa = thinking({})
    scripts = iter(
        [Script("<think>hm</think> It is", piece_words=1, reason="length"), Script(" seven.")]
    )
    moa.engines["large"].answer = lambda _request: next(scripts)
    answer = await ask(moa, tree(max_thinking_tokens=11), sampling={"max_new_tokens": 50})
    first, second = moa.engines["large"].generated
    added = moa.tokenizers["large"].decode(second.input_ids[len(first.input_ids) :])
    assert (added, answer.text, answer.reasoning) == (
        "<think>hm</think> It is",
        "It is seven.",
        "hm",
    )


async def test_a_constraint_holds_for_the_answer_and_not_for_the_thinking() -> None:
    moa = thinking({})
    scripts = iter([Script(SAID, piece_words=1), Script('{"n": 7}')])
    moa.engines["large"].answer = lambda _request: next(scripts)
    answer = await ask(moa, tree(), sampling={"max_new_tokens": 50, "json_schema": SCHEMA})
    first, second = moa.engines["large"].generated
    assert ("json_schema" in first.sampling, second.sampling["json_schema"]) == (False, SCHEMA)
    assert (answer.text, answer.reasoning) == ('{"n": 7}', "maybe so, maybe not")


@pytest.mark.parametrize("of_request", [True, False])
async def test_a_fallback_whose_thinking_is_not_known_has_no_limit_of_it(of_request: bool) -> None:
    moa, limit = thinking({}), {"max_thinking_tokens": 5}
    moa.models["medium"] = replace(moa.models["medium"], reasoning=None)
    moa.engines["large"].answer = lambda _: Script("", error=EngineUnreachable("It is gone."))
    moa.engines["medium"].answer = lambda _: Script("Seven.")
    topology = tree(fallbacks=("medium",), **({} if of_request else limit))
    answer = await ask(moa, topology, **(limit if of_request else {}))
    assert (answer.text, answer.agents["root"].model) == ("Seven.", "medium")


async def test_options_of_the_template_come_from_the_agent_and_for_the_root_from_the_request() -> (
    None
):
    moa = thinking({})
    topology = tree(chat_template_kwargs={"enable_thinking": True, "style": "x"})
    await ask(moa, topology, chat_template_kwargs={"enable_thinking": False})
    assert moa.prompt_of("root").startswith("<enable_thinking=False><style=x><user>")
    assert moa.prompt_of("left").startswith("<user>")


async def test_a_limit_of_thinking_needs_a_model_whose_thinking_is_known() -> None:
    with pytest.raises(InvalidRequest, match=r"models\.large\.reasoning_parser"):
        await ask(ScriptedMoa(), tree(), max_thinking_tokens=10)
