"""Topologies with steps over HTTP: who answers, what is streamed when, and what is reported of the
choice.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from shell_router.core.marks import REASONING_PARSERS
from shell_router.errors import EngineStalled
from shell_router.topology import parse_topology
from tests.fakes.api_server import WAYS, Api, api, chat, hear, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Gates, Hold, Script
from tests.fakes.topologies import parse_steps

TREE = parse_topology(
    "name: tree\ntree: {shape: [2, 1], models: [small, large]}", source="tree.yaml"
)
TRIAGE = parse_steps(
    """name: triage
description: the small one first
start: [{when: {label: {effort: high}}, go: together}, {go: quick}]
steps:
  quick: {model: small, then: [{when: {matches: unsure}, go: careful}, {go: end}]}
  careful: {model: large, precursors: [quick]}
  together: {topology: tree}
""",
    source="triage.yaml",
    topologies={"tree": TREE},
)
UNSURE = {"quick": "i am unsure of that", "careful": "it is one and two and three and four"}


@asynccontextmanager
async def served(
    scripts: dict[str, Script | str] | None = None, gates: Gates | Hold | None = None
) -> AsyncIterator[Api]:
    moa = ScriptedMoa(scripts, pace=gates.pace) if gates else ScriptedMoa(scripts)
    async with api(moa, topologies=(TRIAGE, TREE)) as running:  # type: ignore[arg-type] # topologies of both kinds
        yield running


@asynccontextmanager
async def client(running: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0
    ) as connected:
        yield connected


def question(**fields: object) -> dict[str, object]:
    return chat("How much?", model="triage", **fields)


async def test_the_openai_client_gets_the_first_steps_answer_where_it_is_sure() -> None:
    async with served({"quick": "it is 2"}) as running, client(running) as ai:
        raw = await ai.chat.completions.with_raw_response.create(**question())
        assert raw.parse().choices[0].message.content == "it is 2"
        assert raw.headers["x-steps"] == "quick: start 2; end: quick 2"
        assert not running.moa.engines["large"].generated


async def test_it_gets_the_next_steps_answer_where_the_first_says_so_and_pays_for_both() -> None:
    async with served(UNSURE) as running, client(running) as ai:
        answer = await ai.chat.completions.create(**question(), extra_body={"include_agents": True})
        agents = answer.model_extra["agents"]
        assert answer.choices[0].message.content == UNSURE["careful"]
        assert list(agents) == ["quick", "careful"]
        assert answer.usage.completion_tokens == sum(
            spent["completion_tokens"] for spent in agents.values()
        )
        assert "i am unsure of that" in running.moa.prompt_of("careful")


async def test_metadata_chooses_the_tree_instead() -> None:
    async with served({"together/root": "all of us"}) as running, client(running) as ai:
        answer = await ai.chat.completions.create(**question(metadata={"effort": "high"}))
        assert answer.choices[0].message.content == "all of us"
        stream = await ai.chat.completions.create(
            stream=True, **question(metadata={"effort": "high"})
        )
        assert (
            "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "all of us"
        )


async def test_a_step_that_is_surely_the_last_streams_as_it_writes() -> None:
    hold = Hold(first=1)  # at the second piece of the large model's answer
    async with served({**UNSURE, "quick": "unsure"}, hold) as running, client(running) as ai:
        stream = await ai.chat.completions.create(stream=True, **question())
        texts = (
            chunk.choices[0].delta.content
            async for chunk in stream
            if chunk.choices[0].delta.content
        )
        first = await anext(texts)
        hold.release()
        assert UNSURE["careful"].startswith(first) and first != UNSURE["careful"]
        assert first + "".join([text async for text in texts]) == UNSURE["careful"]


async def test_an_answer_that_could_have_been_followed_comes_when_it_is_decided() -> None:
    async with served({"quick": "it is one and two and three"}) as running, client(running) as ai:
        stream = await ai.chat.completions.create(
            stream=True, extra_body={"include_agents": True}, **question()
        )
        chunks = [chunk async for chunk in stream]
        reported = [
            chunk.model_extra["agent_event"]["type"]
            if not chunk.choices
            else chunk.choices[0].delta.content
            for chunk in chunks
        ]
        assert [one for one in reported if one and not one.startswith("agent.")] == [
            "it is one and two and three"
        ]
        assert reported.index("agent.finished") < reported.index("it is one and two and three")
        steps = [
            chunk.model_extra["agent_event"]
            for chunk in chunks
            if not chunk.choices and chunk.model_extra["agent_event"]["type"] == "agent.step"
        ]
        assert [(step["after"], step["step"], step["rule"]) for step in steps] == [
            ("start", "quick", 2),
            ("quick", "end", 2),
        ]


async def test_the_thinking_of_an_answer_that_could_have_been_followed_comes_with_it() -> None:
    moa = ScriptedMoa({"quick": "<think>hm</think>it is 2"}, reasoning=REASONING_PARSERS["qwen3"])
    async with api(moa, topologies=(TRIAGE,)) as running, client(running) as ai:  # type: ignore[arg-type]
        whole = await ai.chat.completions.create(**question())
        said = whole.choices[0].message
        assert (said.content, (said.model_extra or {})["reasoning_content"]) == ("it is 2", "hm")
        for agents in (False, True):
            stream = await ai.chat.completions.create(
                stream=True, **question(), extra_body={"include_agents": agents}
            )
            chunks = [chunk async for chunk in stream]
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            thinking = [(one.model_extra or {}).get("reasoning_content") for one in deltas]
            assert (
                [one.content for one in deltas if one.content],
                [one for one in thinking if one],
            ) == (
                ["it is 2"],
                ["hm"],
            )
            last = [
                event for chunk in chunks if (event := (chunk.model_extra or {}).get("agent_event"))
            ][-1:]
            assert all("reasoning" not in event for event in last)
        request_id = chunks[0].id.removeprefix("chatcmpl-")
        assert "hm" not in str((await running.get(f"/v1/traces/{request_id}"))[1])


async def test_the_trace_tells_which_rule_chose_what_and_why() -> None:
    async with served(UNSURE) as running:
        async with running.client.post(
            f"{running.url}/v1/chat/completions", json=question()
        ) as response:
            trace_id = response.headers["x-trace-id"]
        _, trace = await running.get(f"/v1/traces/{trace_id}")
        assert [(one["after"], one["rule"], one["step"], one["why"]) for one in trace["steps"]] == [
            ("start", 2, "quick", "otherwise"),
            ("quick", 1, "careful", "output matches 'unsure'"),
            ("careful", 1, "end", "always"),
        ]
        assert trace["agents"]["careful"]["precursors"] == ["quick"]
        assert trace["overlap"]["critical_path"] == ["quick", "careful"]
        async with running.client.get(f"{running.url}/metrics") as response:
            metrics = await response.text()
        assert (
            'shell_router_steps_chosen_total{after="quick",rule="1",step="careful",target="triage"} 1.0'
            in metrics
        )


async def test_the_critical_path_ends_with_the_agent_that_answered() -> None:
    async with served({"quick": "it is 2"}) as running:
        async with running.client.post(
            f"{running.url}/v1/chat/completions", json=question()
        ) as response:
            trace_id = response.headers["x-trace-id"]
            assert response.headers["x-shell-router-engine"].startswith("engine-0")
        _, trace = await running.get(f"/v1/traces/{trace_id}")
        assert trace["overlap"]["critical_path"] == ["quick"]


async def test_a_choice_of_model_inside_a_step_is_reported_with_the_steps_name() -> None:
    tree = parse_topology(
        "name: tree\ntree: {shape: [2, 1], models: [small], root_model: auto}", source="tree.yaml"
    )
    whole = parse_steps(
        "name: s\nstart: w\nsteps: {w: {topology: tree}}",
        source="s.yaml",
        topologies={"tree": tree},
    )
    async with api(topologies=(whole,)) as running:  # type: ignore[arg-type]
        body = chat("How much?", model="s")
        async with running.client.post(f"{running.url}/v1/chat/completions", json=body) as response:
            assert response.headers["x-model-choice"].startswith("w/root=")


async def test_models_lists_it_as_a_topology_with_its_steps() -> None:
    async with served() as running, client(running) as ai:
        listed = {model.id: model.model_extra async for model in ai.models.list()}
        assert listed["triage"]["kind"] == listed["tree"]["kind"] == "topology"
        assert sorted(listed["triage"]["steps"]) == ["careful", "quick", "together"]
        assert listed["triage"]["agents"] == 5 and "steps" not in listed["tree"]


async def test_metadata_that_is_no_object_of_texts_is_refused_by_field() -> None:
    async with served() as running:
        for metadata, field in (({"effort": 3}, "metadata.effort"), ("high", "metadata")):
            status, body = await running.post("/v1/chat/completions", question(metadata=metadata))
            assert (status, body["error"]["param"]) == (400, field)


async def test_a_prompt_that_is_too_long_for_the_first_step_is_refused_with_its_status_in_a_stream_too() -> (
    None
):
    async with api(ScriptedMoa(context_length=200), topologies=(TRIAGE, TREE)) as running:  # type: ignore[arg-type]
        status, body = await running.post(
            "/v1/chat/completions",
            {**question(stream=True), **chat("a " * 200, model="triage", stream=True)},
        )
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_later_step_that_fails_is_sent_in_the_stream() -> None:
    broken = Script("x y z", error=EngineStalled("nothing came for 60 s."))
    async with served({"quick": "unsure", "careful": broken}) as running, client(running) as ai:
        stream = await ai.chat.completions.create(stream=True, **question())
        try:
            async for _ in stream:
                pass
        except openai.APIError as error:
            assert "nothing came" in str(error)
        else:
            raise AssertionError("the stream ended well")


async def test_a_client_that_leaves_between_steps_leaves_nothing_running() -> None:
    gates = Gates("careful")
    async with served(UNSURE, gates) as running:
        request = asyncio.create_task(running.post("/v1/chat/completions", question()))
        await gates.until_waiting(1)
        request.cancel()
        await asyncio.wait([request])
        await until(lambda: not running.moa.running and len(running.moa.cache) == 0)
        assert running.moa.aborted == {"careful"}


@pytest.mark.parametrize("way", WAYS)
async def test_patterns_that_take_too_long_over_a_text_are_the_clients_fault(
    way: tuple[str, bool],
) -> None:
    slow = [
        {"when": {"matches": f"((a{{0,30}}){{0,30}}){{0,1}}b{number}"}, "go": "a"}
        for number in range(99)
    ]
    topology = {"name": "x", "start": [*slow, {"go": "a"}], "steps": {"a": {"model": "small"}}}
    async with api(ScriptedMoa(context_length=100_000)) as running:
        question = [{"role": "user", "content": "a" * 65_000}]
        heard = await hear(running, way, question, topology=topology)
        assert heard.status == 400, heard
        assert "nested repetitions multiply" in heard.error["message"]
        assert (
            await hear(running, way, [{"role": "user", "content": "Hi"}], topology=topology)
        ).status == 200
