"""Completions of prompts by what has no engine's own: topologies and the router's own models."""

import openai
import pytest

from shell_router.errors import EngineStalled
from tests.fakes.api_server import Api, api, chat, client
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

PATH = "/v1/completions"
PROMPT = "What is it?"


async def read_chat(served: Api, model: str) -> str:
    _, answer = await served.post("/v1/chat/completions", chat(PROMPT, model=model))
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("model", ["duo", "small"])
async def test_a_prompt_is_answered_as_a_users_message(model: str) -> None:
    async with api() as served, client(served, "none") as ai:
        whole = await ai.completions.create(model=model, prompt=PROMPT, max_tokens=64)
        assert whole.object == "text_completion"
        assert whole.choices[0].text == await read_chat(served, model)
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None and whole.usage.completion_tokens > 0
        listed = await ai.completions.create(model=model, prompt=[PROMPT])
        assert listed.choices[0].text == whole.choices[0].text


@pytest.mark.parametrize("model", ["duo", "small"])
async def test_a_streamed_completion_has_the_text_of_the_whole_one(model: str) -> None:
    async with api() as served, client(served, "none") as ai:
        stream = await ai.completions.create(
            model=model, prompt=PROMPT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        texts = [choice.text for chunk in chunks for choice in chunk.choices]
        assert "".join(texts) == await read_chat(served, model)
        assert len(texts) > 2
        assert chunks[-1].usage is not None
        assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "stop"


async def test_the_limit_and_the_stops_hold_as_in_a_chat() -> None:
    async with api() as served:
        await served.post(PATH, {"model": "small", "prompt": "x", "max_tokens": 3, "stop": "end"})
        (request,) = served.moa.engines["small"].generated
        assert request.sampling["max_new_tokens"] == 3
        assert request.sampling["stop"] == "end"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ["one", "two"]),
        ("prompt", [1, 2, 3]),
        ("prompt", ""),
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 2),
        ("logprobs", 0),
    ],
)
async def test_what_only_an_engine_completes_is_refused_by_its_name(
    field: str, value: object
) -> None:
    async with api() as served:
        status, answer = await served.post(PATH, {"model": "duo", "prompt": PROMPT, field: value})
        assert status == 400
        assert answer["error"]["param"] == field


async def test_a_failure_in_a_streamed_completion_is_an_error_of_its_client() -> None:
    broken = Script("it is one and two and three", error=EngineStalled("silent"), error_after=1)
    async with api(ScriptedMoa({"small": broken})) as served, client(served, "none") as ai:
        stream = await ai.completions.create(model="small", prompt=PROMPT, stream=True)
        with pytest.raises(openai.APIError, match="silent"):
            async for _ in stream:
                pass
