"""Chats that a plain model's own servers answer: the official client with tools, choices and
images.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import openai
import pytest

from shell_router.errors import EngineRejected
from tests.fakes.api_server import Api, api, chat
from tests.fakes.chat_engines import ChatPair, ChatScript, chat_pair

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "Rain in Paris?"}


@asynccontextmanager
async def served_chats(
    script: ChatScript | None = None,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ChatPair, Api]]:
    async with (
        chat_pair(script) as at,
        api(relays={"small": at.pair}) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ai,
    ):
        yield ai, at, served


def asked(**fields: object) -> dict[str, Any]:
    return {"model": "small", "messages": [QUESTION], **fields}


async def test_a_tool_is_called_and_its_result_answered() -> None:
    async with served_chats() as (ai, at, _):
        answer = await ai.chat.completions.create(**asked(tools=[WEATHER]))
        message = answer.choices[0].message
        assert (answer.model, answer.choices[0].finish_reason) == ("small", "tool_calls")
        assert message.tool_calls is not None
        called = message.tool_calls[0]
        assert (called.function.name, called.function.arguments) == ("weather", '{"city":"Paris"}')
        result = {"role": "tool", "tool_call_id": called.id, "content": "dry"}
        history = [QUESTION, message.model_dump(exclude_none=True), result]
        answer = await ai.chat.completions.create(**asked(messages=history, tools=[WEATHER]))
        assert answer.choices[0].message.content == "It says: dry"
        assert answer.usage is not None and answer.usage.total_tokens == 12
        for server in (at.prefill, at.decode):
            route, body = server.sent[0]
            assert route == "/v1/chat/completions" and body["tools"] == [WEATHER]
        prefill, decode = at.prefill.sent[0][1], at.decode.sent[0][1]
        assert (
            prefill == decode
            and {"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"} <= prefill.keys()
        )


async def test_a_models_own_sampling_is_sent_where_the_client_sets_none() -> None:
    async with served_chats() as (ai, at, served):
        models = served.moa.models
        models["small"] = replace(models["small"], sampling={"temperature": 0.6, "top_p": 0.9})
        body = asked(tools=[WEATHER], temperature=1)
        await ai.chat.completions.create(**body, extra_body={"top_p": None})
        sent = at.decode.sent[0][1]
        assert (sent["temperature"], sent["top_p"]) == (1, 0.9)


async def test_top_p_0_which_sglang_refuses_is_sent_as_its_least() -> None:
    async with served_chats() as (ai, at, _):
        await ai.chat.completions.create(**asked(tools=[WEATHER], top_p=0))
        assert 0 < at.decode.sent[0][1]["top_p"] < 1e-5


async def test_a_stream_of_calls_passes_and_so_do_fields_of_the_engines_own() -> None:
    async with served_chats() as (ai, at, _):
        extra = {"return_token_ids": True}
        stream = await ai.chat.completions.create(
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
            **asked(tools=[WEATHER]),
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        calls = [one for delta in deltas for one in delta.tool_calls or ()]
        assert calls[0].function is not None and calls[0].function.name == "weather"
        assert (
            "".join(one.function.arguments or "" for one in calls if one.function)
            == '{"city":"Paris"}'
        )
        assert chunks[-1].usage is not None
        assert at.decode.sent[0][1]["return_token_ids"] is True


async def test_fields_that_ask_for_nothing_or_are_the_routers_are_not_refused_and_not_sent() -> (
    None
):
    nothing = {
        **{
            "include_agents": False,
            "best_of": 1,
            "echo": False,
            "top_a": 0,
            "function_call": "auto",
            "modalities": ["text"],
        },
        **{
            "lazy": False,
            "program": "p",
            "prefill": {},
            "prompt_cache_options": {},
            "rid": None,
            "stop": None,
        },
    }
    async with served_chats() as (_, at, served):
        status, body = await served.post("/v1/chat/completions", asked(tools=[WEATHER]) | nothing)
        assert status == 200, body
        assert not nothing.keys() - {"rid"} & at.decode.sent[0][1].keys()


async def test_tools_that_no_engine_gets_are_named() -> None:
    async with served_chats() as (_, at, served):
        for n in (1, 2):
            body = asked(tools=[WEATHER, {"type": "web_search"}], n=n)
            status, answer = await served.post("/v1/chat/completions", body)
            assert status == 200 and "tools.web_search" in answer["warnings"][0]
            assert at.decode.sent[-1][1]["tools"] == [WEATHER]


async def test_an_assistant_message_that_says_nothing_passes() -> None:
    async with served_chats() as (_, at, served):
        messages = [QUESTION, {"role": "assistant", "content": None}, QUESTION]
        assert (
            await served.post("/v1/chat/completions", asked(tools=[WEATHER], messages=messages))
        )[0] == 200
        assert at.decode.sent[0][1]["messages"] == messages


async def test_a_chat_without_such_fields_is_the_routers_own() -> None:
    async with served_chats() as (ai, at, served):
        answer = await ai.chat.completions.create(**asked(tools=[], n=1))
        assert (
            answer.choices[0].message.content
            == "small thinks and small speaks and then small is done"
        )
        assert not at.decode.sent and len(served.moa.engines["small"].generated) == 1


async def test_what_the_engine_answers_itself_is_never_lazy_and_gets_no_marker() -> None:
    async with served_chats() as (ai, at, _):
        lazy = {"program": "p", "lazy": True}
        with pytest.raises(openai.BadRequestError, match="lazy cannot go with tools"):
            await ai.chat.completions.create(**asked(tools=[WEATHER]), extra_body=lazy)
        marker = (
            (await ai.chat.completions.create(**asked(), extra_body=lazy))
            .choices[0]
            .message.content
        )
        with pytest.raises(openai.BadRequestError, match="marker"):
            await ai.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": f"So: {marker}"}],
                tools=[WEATHER],
            )
        with pytest.raises(openai.BadRequestError, match="marker"):
            await ai.completions.create(model="small", prompt=f"So: {marker}")
        assert not at.decode.sent and not at.prefill.sent


async def test_images_and_log_probabilities_are_the_engines() -> None:
    async with served_chats() as (ai, at, _):
        parts = [
            {"type": "text", "text": "What?"},
            {"type": "image_url", "image_url": {"url": "data:,"}},
        ]
        await ai.chat.completions.create(**asked(messages=[{"role": "user", "content": parts}]))
        await ai.chat.completions.create(logprobs=True, top_logprobs=2, **asked())
        assert [body["messages"][0]["content"] for _, body in at.decode.sent] == [
            parts,
            QUESTION["content"],
        ]


async def test_several_choices_are_several_requests_with_seeds_of_their_own() -> None:
    async with served_chats() as (ai, at, _):
        answer = await ai.chat.completions.create(n=3, seed=5, **asked())
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert (
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
            answer.usage.total_tokens,
        ) == (21, 15, 36)
        assert sorted(body["seed"] for _, body in at.decode.sent) == [5, 6, 7]
        assert len({body["bootstrap_room"] for _, body in at.decode.sent}) == 3
        stream = await ai.chat.completions.create(
            n=2, stream=True, stream_options={"include_usage": True}, **asked()
        )
        texts = {0: "", 1: ""}
        chunks = [chunk async for chunk in stream]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.delta.content or ""
        assert texts == {0: "no tools", 1: "no tools"}
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_client_that_leaves_ends_what_runs(choices: int) -> None:
    async with served_chats(ChatScript(gate=asyncio.Event())) as (_, at, served):
        body = asked(tools=[WEATHER], stream=True, n=choices)
        async with served.stream(body) as response:
            await response.content.readuntil(b"\n\n")
            assert len(at.decode.chats) == choices
        await at.idle()


async def test_without_a_parser_the_router_answers_and_says_that_no_tool_can_be_called() -> None:
    async with served_chats(ChatScript(tool_parser=None)) as (ai, at, served):
        status, body = await served.post("/v1/chat/completions", asked(tools=[WEATHER]))
        assert status == 200 and "--tool-call-parser" in body["warnings"][0]
        assert body["choices"][0]["message"]["content"] and not at.decode.sent
        effort = asked(tools=[WEATHER], reasoning_effort="high")
        status, body = await served.post("/v1/chat/completions", effort)
        assert status == 200 and any("reasoning_effort" in text for text in body["warnings"])
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await ai.chat.completions.create(logprobs=True, **asked(tools=[WEATHER]))


async def test_calls_that_a_model_wrote_wrong_are_sent_on_so_that_engines_can_read_them() -> None:
    function = {"name": "weather", "arguments": '{"city": "Par'}
    call = {"id": None, "type": "function", "function": function}
    result = {"role": "tool", "content": "not JSON"}
    history = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    async with served_chats() as (_, at, served):
        status, body = await served.post(
            "/v1/chat/completions", asked(messages=history, tools=[WEATHER])
        )
        assert status == 200, body
        _, sent, answered = at.decode.sent[0][1]["messages"]
        assert sent["tool_calls"][0]["id"] == answered["tool_call_id"]
        arguments = sent["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments) == {"INVALID_JSON": function["arguments"]}


@pytest.mark.parametrize(
    ("had", "has", "fits"),
    [("x", "x", True), ("x", "y", False), ("x", None, False), (None, "x", True)],
)
async def test_a_pair_that_replaces_one_that_is_down_is_compared_with_what_the_model_had(
    had: str | None, has: str | None, fits: bool
) -> None:
    async with (
        chat_pair(ChatScript(tool_parser=had)) as at,
        chat_pair(ChatScript(tool_parser=has)) as new,
    ):
        await at.prefill.stop()
        await at.decode.stop()
        with (
            nullcontext() if fits else pytest.raises(EngineRejected, match="others than the model")
        ):
            await at.pair.fleet.add(new.pair.fleet.addresses[0])
        assert len(at.pair.fleet.addresses) == 1 + fits


async def test_fields_that_the_router_chooses_are_refused() -> None:
    async with served_chats() as (_, _at, served):
        status, body = await served.post(
            "/v1/chat/completions", asked(tools=[WEATHER]) | {"bootstrap_room": 3}
        )
        assert status == 400 and "bootstrap_room" in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["duo", "small"])
async def test_what_has_no_chats_of_its_own_answers_in_text_and_says_what_to_do(
    model: str, stream: bool
) -> None:
    async with (
        api() as served,
        served.stream(chat(model=model, tools=[WEATHER], stream=stream)) as answer,
    ):
        assert answer.status == 200
        assert "tool_call_parser" in await answer.text()


async def test_a_prompt_is_completed_as_it_is() -> None:
    async with served_chats() as (ai, at, served):
        answer = await ai.completions.create(model="small", prompt="Once", max_tokens=4, n=2)
        assert [choice.text for choice in answer.choices] == ["after Once", "after Once"]
        await ai.completions.create(model="small", prompt=[1, 2, 3])
        assert [(route, body["prompt"]) for route, body in at.prefill.sent[1:]] == [
            ("/v1/completions", "Once"),
            ("/v1/completions", [1, 2, 3]),
        ]
        for listed in (["Once"], [[1, 2, 3]]):  # as LangChain and lm-eval send one
            status, _ = await served.post(
                "/v1/completions",
                {"model": "small", "prompt": listed, "best_of": 1, "echo": False, "top_a": 0},
            )
            assert (status, at.decode.sent[-1][1]["prompt"]) == (200, listed[0])
        sent = len(at.decode.sent)
        for fields, param in (
            ({"prompt": ""}, "prompt"),
            ({"prompt": [1, 2], "model": "duo"}, "prompt"),
            ({"prompt": [1, 2], "model": "medium"}, "prompt"),
            ({"prompt": [1, 2000]}, "prompt"),
        ):
            status, body = await served.post("/v1/completions", {"model": "small", **fields})
            assert (status, body["error"]["param"]) == (400, param), fields
        assert (await served.post("/v1/completions", {"model": "none", "prompt": "x"}))[0] == 404
        assert len(at.decode.sent) == sent


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


MALFORMED: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": [WEATHER], "messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"n": 1, "logprobs": True, "logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logprobs": True, "extra": deep(300)}, None),
    ({"n": 2, "extra": deep(300)}, None),
    ({"tool": [WEATHER]}, "tool"),
]


async def test_malformed_bodies_are_refused_by_field_and_reach_no_engine() -> None:
    async with served_chats() as (_, at, served):
        for fields, at_field in MALFORMED:
            status, body = await served.post("/v1/chat/completions", asked(**fields))
            assert (status, body["error"]["param"]) == (400, at_field), (fields, body)
        assert not at.prefill.sent and not at.decode.sent
