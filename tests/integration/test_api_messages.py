"""/v1/messages: Anthropic's shape, of topologies and of plain models on servers with chats of their
own.
"""

from typing import Any

import orjson
import pytest

from shell_router.api import ApiSettings
from shell_router.api.messages import MESSAGES, MessageTranslation, as_chat
from shell_router.api.replies import ErrorBody, anthropic_error, list_shared_fields, problem_body
from shell_router.engines.wire import EventSplitter
from shell_router.errors import (
    EngineAborted,
    EngineStalled,
    PromptTooLong,
    RouterStopping,
    ShellRouterError,
)
from tests.fakes.api_server import Api, api
from tests.fakes.chat_engines import ChatScript, call, chat_pair
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

ROOT_SAYS = "root thinks and root speaks and then root is done"
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}
RAIN = {"role": "user", "content": "Rain?"}


def asked(**fields: object) -> dict[str, Any]:
    return {"model": "small", "max_tokens": 64, "messages": [RAIN], **fields}


async def events_of(served: Api, **fields: object) -> list[dict[str, Any]]:
    async with served.stream(asked(stream=True, **fields), "/v1/messages") as response:
        assert response.status == 200
        return [orjson.loads(one) for one in EventSplitter().feed(await response.read())]


async def test_a_topology_answers_whole_and_streamed_in_the_published_order_of_events() -> None:
    async with api() as served:
        status, whole = await served.post("/v1/messages", asked(model="duo", system="Be brief."))
        assert (status, whole["type"], whole["role"], whole["model"]) == (
            200,
            "message",
            "assistant",
            "duo",
        )
        assert whole["content"] == [{"type": "text", "text": ROOT_SAYS}]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
        assert whole["usage"]["output_tokens"] == 30 and whole["usage"]["input_tokens"] > 0
        events = await events_of(served, model="duo")
        kinds = [one["type"] for one in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert {*kinds[2:-3]} == {"content_block_delta"}
        assert "".join(one["delta"]["text"] for one in events[2:-3]) == ROOT_SAYS
        assert events[-2]["usage"]["output_tokens"] == 30


def test_the_tenants_user_is_in_the_metadata() -> None:
    assert as_chat(MESSAGES.read(asked(metadata={"user_id": "ann"})))[0]["user"] == "ann"
    assert as_chat(MESSAGES.read(asked(metadata={})))[0]["user"] is None


async def test_an_answer_cut_at_its_limit_says_so_and_a_failed_stream_ends_with_an_error() -> None:
    scripts = {"small": Script("a b c d", reason="length")}
    async with api(ScriptedMoa(scripts)) as served:
        _, whole = await served.post("/v1/messages", asked(max_tokens=4))
        assert whole["stop_reason"] == "max_tokens"
    translation = MessageTranslation("1", {"model": "m"}, {})
    frames = translation.feed(b'data: {"error": {"message": "no room"}}\n\ndata: [DONE]\n\n')
    assert [line for line in frames.splitlines() if line.startswith(b"event")] == [
        b"event: message_start",
        b"event: error",
    ]
    assert b"no room" in frames


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RouterStopping("x"), "overloaded_error"),
        (EngineStalled("x"), "api_error"),
        (PromptTooLong("x"), None),
    ],
)
async def test_a_failed_stream_names_the_kind_of_error(
    error: ShellRouterError, kind: str | None
) -> None:
    frames = MessageTranslation("1", {"model": "m"}, {}).error(problem_body(error, "1"))
    last = orjson.loads(EventSplitter().feed(frames)[-1])
    assert last["type"] == "error"
    shown = {"type": kind or "invalid_request_error", "message": "x"}
    assert last["error"].items() >= shown.items()


def test_an_aborted_answer_is_an_error_whole_and_streamed() -> None:
    aborted = {"index": 0, "finish_reason": "abort"}
    with pytest.raises(EngineAborted):
        MessageTranslation("1", {"model": "m"}, {}).whole(
            {"choices": [{**aborted, "message": {"content": "a"}}]}
        )
    chunk = orjson.dumps({"choices": [{**aborted, "delta": {"content": "a"}}]})
    frames = MessageTranslation("1", {"model": "m"}, {}).feed(
        b"data: %b\n\ndata: [DONE]\n\n" % chunk
    )
    assert orjson.loads(EventSplitter().feed(frames)[-1])["error"]["type"] == "api_error"


async def test_errors_have_anthropics_shape() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"})) as served:
        for fields, key, status, kind in (
            ({}, "sk-2", 401, "authentication_error"),
            ({"model": "none"}, "sk-1", 404, "not_found_error"),
            ({"temperature": -1}, "sk-1", 400, "invalid_request_error"),
        ):
            answered, body = await served.post(
                "/v1/messages", asked(**fields), **{"x-api-key": key}
            )
            assert (answered, body["type"]) == (status, "error")
            assert body["error"].keys() == {"type", *list_shared_fields(ErrorBody.__annotations__)}
            assert body["error"]["type"] == kind and body["request_id"]


@pytest.mark.parametrize(
    ("status", "kind"), [(413, "request_too_large"), (429, "rate_limit_error")]
)
def test_an_error_is_named_by_its_status(status: int, kind: str) -> None:
    assert anthropic_error({"message": "x"}, status) == {"type": kind, "message": "x"}


async def test_thoughts_tools_and_results_reach_a_model_with_chats_of_its_own() -> None:
    def says(body: Any) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": "Dry.", "reasoning_content": "Hm."}
        return call("weather", {"city": "Paris"})

    async with chat_pair(ChatScript(say=says)) as at, api(relays={"small": at.pair}) as served:
        _, first = await served.post(
            "/v1/messages", asked(tools=[WEATHER], tool_choice={"type": "auto"})
        )
        (block,) = first["content"]
        assert (first["stop_reason"], block["type"], block["input"]) == (
            "tool_use",
            "tool_use",
            {"city": "Paris"},
        )
        sent = at.decode.sent[0][1]
        assert (
            sent["tool_choice"],
            sent["parallel_tool_calls"],
            sent["max_completion_tokens"],
        ) == (
            "auto",
            True,
            64,
        )
        assert sent["tools"][0]["function"]["parameters"] == {"type": "object"}
        dry = {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": [{"type": "text", "text": "dry"}],
        }
        thought = {"type": "thinking", "thinking": "Ask.", "signature": ""}
        history = [
            RAIN,
            {"role": "assistant", "content": [thought, *first["content"]]},
            {"role": "user", "content": [dry]},
        ]
        events = await events_of(
            served, messages=history, tools=[WEATHER], output_config={"effort": "low"}
        )
        started = [
            one["content_block"]["type"] for one in events if one["type"] == "content_block_start"
        ]
        deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
        assert (deltas, started) == ([{"type": "text_delta", "text": "Dry."}], ["text"])
        sent = at.decode.sent[1][1]
        assert [one["role"] for one in sent["messages"]] == ["user", "assistant", "tool"]
        assert (
            sent["messages"][1]["reasoning_content"] == "Ask."
            and sent["messages"][2]["content"] == "dry"
        )
        assert sent["reasoning_effort"] == "low"
        _, whole = await served.post("/v1/messages", asked(messages=history, tools=[WEATHER]))
        assert [one["type"] for one in whole["content"]] == ["thinking", "text"]
        events = await events_of(served, tools=[WEATHER])
        parts = [
            one["delta"]["partial_json"] for one in events if one["type"] == "content_block_delta"
        ]
        assert len(parts) > 1 and orjson.loads("".join(parts)) == {"city": "Paris"}


async def test_arguments_that_were_cut_off_are_wrapped() -> None:
    translation = MessageTranslation("1", {"model": "m"}, {})
    cut = {"id": "c", "function": {"name": "weather", "arguments": '{"city": "Pa'}}
    found = translation.whole(
        {"choices": [{"message": {"tool_calls": [cut]}, "finish_reason": "length"}]}
    )
    assert found["content"][0]["input"] == {"INVALID_JSON": '{"city": "Pa'}


async def test_images_documents_stops_and_thinking_are_translated() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    document = {"type": "document", "title": "Tides", "source": {"type": "text", "data": "High."}}
    question = {"type": "text", "text": "What is it?"}
    content = [{"type": "image", "source": source}, document, question]
    async with chat_pair() as at, api(relays={"small": at.pair}) as served:
        body = asked(
            messages=[{"role": "user", "content": content}], stop_sequences=["END"], top_k=5
        )
        status, answer = await served.post(
            "/v1/messages", body | {"thinking": {"type": "disabled"}}
        )
        assert status == 200, answer
        sent = at.decode.sent[0][1]
        image, text, _ = sent["messages"][0]["content"]
        assert image["image_url"]["url"] == "data:image/png;base64,AAAA"
        assert text == {"type": "text", "text": "Tides\nHigh."}
        assert (sent["stop"], sent["top_k"]) == (["END"], 5)
        assert sent["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_wrong_field_is_a_400_that_names_its_path() -> None:
    async with api() as served:
        status, body = await served.post("/v1/messages", asked(thinking={"type": "much"}))
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert body["error"]["message"].startswith("thinking.type must be ")


async def test_what_is_ignored_is_named_and_keys_come_in_either_header() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"})) as served:
        headers = {"x-api-key": "sk-1", "anthropic-version": "2023-06-01"}
        status, body = await served.post(
            "/v1/messages", asked(container="c", cache_control={}), **headers
        )
        assert status == 200
        assert body["warnings"] == ["container was ignored: it has no effect here."]
        assert (await served.post("/v1/messages", asked(), **{"x-api-key": "sk-2"}))[0] == 401
        assert (await served.post("/v1/messages", asked(), Authorization="Bearer sk-1"))[0] == 200


@pytest.mark.parametrize("model", ["small", "duo"])
async def test_a_limit_beyond_the_context_counts_as_what_the_prompt_leaves(model: str) -> None:
    moa = ScriptedMoa(context_length=200)
    async with api(moa) as served:
        status, body = await served.post("/v1/messages", asked(model=model, max_tokens=16384))
        assert status == 200, body
        chat = {"model": model, "messages": [RAIN], "max_tokens": 16384}
        status, body = await served.post("/v1/chat/completions", chat)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "ask for fewer tokens" in body["error"]["message"]
    (request,) = moa.engines["small" if model == "small" else "large"].generated
    assert request.sampling["max_new_tokens"] == 200 - len(request.input_ids)


async def test_servers_with_chats_of_their_own_get_no_limit_beyond_the_context() -> None:
    async with (
        chat_pair(ChatScript(say=lambda _: {"role": "assistant", "content": "x"})) as at,
        api(ScriptedMoa(context_length=200), relays={"small": at.pair}) as served,
    ):
        for limit, forwarded in ((16384, None), (100, 100)):
            effort = {"effort": "low"}
            sent = asked(max_tokens=limit, output_config=effort)
            status, _ = await served.post("/v1/messages", sent)
            assert status == 200
            assert at.decode.sent[-1][1].get("max_completion_tokens") == forwarded


THINKING = {"type": "enabled", "budget_tokens": 32}


@pytest.mark.parametrize("model", ["small", "duo"])
async def test_a_budget_of_thinking_is_no_fault_where_the_models_thinking_is_unknown(
    model: str,
) -> None:
    async with api() as served:
        status, body = await served.post("/v1/messages", asked(model=model, thinking=THINKING))
        assert (status, body["stop_reason"]) == (200, "end_turn"), body
        (warning,) = body["warnings"]
        assert "limit of thinking was ignored" in warning and "reasoning_parser" in warning
        *_, end, _ = await events_of(served, model=model, thinking=THINKING)
        assert end["warnings"] == [warning]
        chat = {"model": model, "messages": [RAIN], "max_thinking_tokens": 32}
        assert (await served.post("/v1/chat/completions", chat))[0] == 400


async def test_a_budget_of_thinking_is_left_out_for_servers_with_chats_of_their_own() -> None:
    script = ChatScript(say=lambda _: call("weather", {"city": "Paris"}))
    sent = asked(thinking=THINKING, tools=[WEATHER])
    async with chat_pair(script) as at, api(relays={"small": at.pair}) as served:
        async with served.stream(sent, "/v1/messages") as response:
            body = await response.json()
            assert response.status == 200, body
            assert response.headers["x-ignored-fields"] == "thinking.budget_tokens"
        assert body["warnings"] == ["thinking.budget_tokens was ignored: it has no effect here."]
        assert at.decode.sent[0][1]["chat_template_kwargs"] == {"enable_thinking": True}
        assert "max_thinking_tokens" not in at.decode.sent[0][1]


async def test_an_ignored_field_is_named_as_the_client_wrote_it() -> None:
    async with api() as served:
        _, body = await served.post("/v1/messages", asked(output_config={"effort": "low"}))
    assert body["warnings"] == ["output_config.effort was ignored: it has no effect here."]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
@pytest.mark.parametrize(("model", "agent"), [("small", "small"), ("duo", "left")])
async def test_a_system_message_among_the_others_stays_in_its_place(
    model: str, agent: str, content: object, place: int
) -> None:
    moa = ScriptedMoa()
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    system = [billing, {"type": "text", "text": "You code."}]
    talk = [RAIN, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Now?"}]
    talk.insert(place, {"role": "system", "content": content})
    async with api(moa) as served:
        sent = asked(model=model, messages=talk, system=system)
        async with served.stream(sent, "/v1/messages") as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
    turns = ["<user>Rain?", "<assistant>No.", "<user>Now?"]
    turns.insert(place, "<system>Be brief.")
    prompt = "".join(["<system>You code.", *turns, "<assistant>"])
    assert moa.prompt_of(agent) == prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": [RAIN]}),
        ("/v1/responses/input_tokens", {"input": "Rain?"}),
    ],
)
async def test_a_prompt_is_counted_as_the_model_or_the_root_gets_it(
    path: str, body: dict[str, Any]
) -> None:
    async with api() as served:
        _, counted = await served.post(path, {**body, "model": "small"})
        _, answer = await served.post("/v1/chat/completions", asked())
        assert counted["input_tokens"] == answer["usage"]["prompt_tokens"] > 0
        _, of_root = await served.post(path, {**body, "model": "duo"})
        assert of_root["input_tokens"] > 0
        assert (await served.post(path, {**body, "model": "none"}))[0] == 404
        too_long = {"messages": [{**RAIN, "content": "x" * 100_000}], "input": "x" * 100_000}
        sent = {"model": "small", **{name: too_long[name] for name in body}}
        assert (await served.post(path, sent))[0] == 400


@pytest.mark.parametrize("model", ["small", "duo"])
async def test_the_stop_sequence_that_ended_an_answer_is_named_if_the_client_asked_for_it(
    model: str,
) -> None:
    moa = ScriptedMoa(
        {agent: Script("thinks", matched="Answer") for agent in ("root", "only", "small", "a", "b")}
    )
    async with api(moa) as served:
        for asked_for, found in (
            (["x", "Answer"], ("stop_sequence", "Answer")),
            (["x"], ("end_turn", None)),
        ):
            fields = {"model": model, "stop_sequences": asked_for}
            _, whole = await served.post("/v1/messages", asked(**fields))
            assert (whole["stop_reason"], whole["stop_sequence"]) == found
            delta = (await events_of(served, **fields))[-2]["delta"]
            assert (delta["stop_reason"], delta["stop_sequence"]) == found


async def test_paths_below_messages_have_errors_of_anthropics_shape() -> None:
    async with api() as served:
        for path in ("/v1/messages/count_tokens", "/v1/messages/batches"):
            _, answer = await served.post(path, {"model": "small"})
            assert (answer["type"], "message" in answer["error"]) == ("error", True)
