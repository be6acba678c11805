"""Several choices of what the router itself answers: as many runs, joined."""

import asyncio
from collections import Counter
from pathlib import Path

import openai
import pytest

from shell_router.api import ApiSettings
from shell_router.errors import EngineStalled
from tests.fakes.api_server import api, batch_api, chat, client, line, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Hold, Script

PATH = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "What is it?"}]}


@pytest.mark.parametrize("model", ["duo", "small", "medium"])
async def test_each_choice_is_a_run_and_usage_sums_all(model: str) -> None:
    async with api() as served, client(served, "none") as ai:
        one = await ai.chat.completions.create(model=model, **ASKED)  # type: ignore[call-overload]
        three = await ai.chat.completions.create(model=model, n=3, **ASKED)  # type: ignore[call-overload]
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        assert {choice.message.content for choice in three.choices} == {
            one.choices[0].message.content
        }
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(three.usage, name) == 3 * getattr(one.usage, name)
        hidden = [found.usage.completion_tokens_details.reasoning_tokens for found in (one, three)]
        assert hidden[1] == 3 * hidden[0]


@pytest.mark.parametrize("model", ["duo", "small"])
async def test_streamed_choices_have_the_texts_of_whole_ones(model: str) -> None:
    async with api() as served, client(served, "none") as ai:
        one = await ai.chat.completions.create(model=model, **ASKED)  # type: ignore[call-overload]
        stream = await ai.chat.completions.create(
            model=model, n=2, stream=True, stream_options={"include_usage": True}, **ASKED
        )  # type: ignore[call-overload]
        texts: Counter[int] = Counter()
        chunks = [chunk async for chunk in stream]
        said = {0: "", 1: ""}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            said[choice.index] += choice.delta.content or ""
            texts[choice.index] += choice.finish_reason == "stop"
        assert said == dict.fromkeys((0, 1), one.choices[0].message.content)
        assert texts == {0: 1, 1: 1}
        assert chunks[-1].usage.completion_tokens == 2 * one.usage.completion_tokens
        name = "shell_router_first_token_seconds_count"
        timed = served.services.metrics.registry.get_sample_value(name, {"target": model})
        assert timed == 3, "one for each run"


async def test_choices_of_a_seeded_request_have_seeds_that_follow_each_other() -> None:
    async with api() as served:
        status, _ = await served.post(PATH, chat(model="small", n=3, seed=5))
        assert status == 200
        seeds = [asked.sampling["sampling_seed"] for asked in served.moa.engines["small"].generated]
        assert sorted(seeds) == [5, 6, 7]


async def test_a_completion_has_several_choices_too() -> None:
    async with api() as served, client(served, "none") as ai:
        answer = await ai.completions.create(model="duo", prompt="What is it?", n=2)
        assert len({choice.text for choice in answer.choices}) == 1 == len(answer.choices) - 1


async def test_a_choice_that_fails_fails_the_request_and_ends_the_others() -> None:
    broken = Script("it is", error=EngineStalled("silent"))
    async with api(ScriptedMoa({"root": broken})) as served:
        status, answer = await served.post(PATH, chat(n=2))
        assert status in {502, 504}
        assert "silent" in answer["error"]["message"]
        assert not served.moa.running


async def test_a_client_that_leaves_ends_all_choices() -> None:
    hold = Hold()
    async with api(ScriptedMoa(pace=hold.pace)) as served:
        asked = asyncio.ensure_future(served.post(PATH, chat(model="small", n=2)))
        await until(lambda: len(served.moa.running) == 2)
        asked.cancel()
        await until(lambda: not served.moa.running)
        hold.release()


async def test_all_choices_count_as_a_tenants_agents() -> None:
    settings = ApiSettings(keys={"me": "sk-1", "you": "sk-2"}, max_agents_per_tenant=8)
    async with api(settings=settings) as served:
        key = {"Authorization": "Bearer sk-1"}
        assert (await served.post(PATH, chat(n=2), **key))[0] == 200
        status, answer = await served.post(PATH, chat(n=3), **key)
        assert status == 400
        assert "agents" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "headers"),
    [({"lazy": True, "program": "p"}, {}), ({}, {"Idempotency-Key": "k"})],
)
async def test_choices_are_neither_lazy_nor_kept(
    fields: dict[str, object], headers: dict[str, str]
) -> None:
    async with api() as served:
        status, answer = await served.post(PATH, chat(model="small", n=2, **fields), **headers)
        assert status == 400
        assert answer["error"]["message"]


@pytest.mark.parametrize("model", ["duo", "small"])
async def test_fields_that_are_ignored_are_named_with_several_choices_as_with_one(
    model: str,
) -> None:
    ignored = {"verbosity": "low", "guided_choice": ["x"], "tools": [{"type": "web_search"}]}
    async with api() as served:
        for fields in (ignored, {"verbosity": "low"}):
            bodies = [await served.post(PATH, chat(model=model, n=n, **fields)) for n in (1, 2)]
            (_, one), (_, two) = bodies
            assert two["warnings"] == one["warnings"] and len(one["warnings"]) == len(fields)
        body = {"model": model, "prompt": "q", "n": 2, "guided_choice": ["x"]}
        _, completed = await served.post("/v1/completions", body)
        assert "guided_choice" in completed["warnings"][0]


async def test_warnings_of_all_choices_come_with_the_answer() -> None:
    broken = Script("it is", error=EngineStalled("silent"))
    async with api(ScriptedMoa({"right": broken})) as served:
        status, answer = await served.post(PATH, chat(n=2))
        assert status == 200
        assert "'right'" in answer["warnings"][0]


async def test_more_choices_than_the_limit_are_refused() -> None:
    async with api() as served, client(served, "none") as ai:
        with pytest.raises(openai.BadRequestError, match="n must be"):
            await ai.chat.completions.create(model="duo", n=17, **ASKED)  # type: ignore[call-overload]


async def test_a_line_of_a_batch_has_one_choice_and_says_so(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        ended = await router.ended(await router.begin(line("one"), line("two", n=2)))
        assert set(await router.results(ended.output_file_id)) == {"one"}
        failed = await router.results(ended.error_file_id)
        assert failed["two"]["response"]["body"]["error"]["param"] == "n"
