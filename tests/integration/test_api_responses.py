"""/v1/responses with the official client: of topologies, and of plain models on servers with chats
of their own.
"""

from typing import Any

import openai
import orjson
import pytest
from pydantic import BaseModel

from shell_router.api.response_translation import ResponseTranslation
from shell_router.engines.wire import EventSplitter
from shell_router.errors import EngineStalled
from tests.fakes.api_server import Api, api
from tests.fakes.chat_engines import ChatScript, chat_pair
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

ROOT_SAYS = "root thinks and root speaks and then root is done"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object"},
    "strict": False,
}


def client(served: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def test_a_topology_answers_whole_and_streamed() -> None:
    async with api() as served, client(served) as ai:
        answer = await ai.responses.create(
            model="duo", instructions="Be brief.", input="What is it?"
        )
        assert (answer.output_text, answer.status, answer.model) == (ROOT_SAYS, "completed", "duo")
        assert answer.usage is not None and answer.usage.output_tokens == 30
        events = [
            one
            async for one in await ai.responses.create(
                model="duo", input="What is it?", stream=True
            )
        ]
        assert [one.type for one in events[:4]] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert (
            "".join(one.delta for one in events if one.type == "response.output_text.delta")
            == ROOT_SAYS
        )
        last = events[-1]
        assert last.type == "response.completed" and last.response.output_text == ROOT_SAYS
        assert last.response.usage is not None and last.response.usage.output_tokens == 30
        assert [one.sequence_number for one in events] == list(range(len(events)))  # type: ignore[union-attr]


async def test_an_answer_cut_at_its_limit_is_incomplete_and_a_failed_one_failed() -> None:
    scripts = {
        "small": Script("a b c d", reason="length"),
        "root": Script("a b", error=EngineStalled("nothing came.")),
    }
    async with api(ScriptedMoa(scripts)) as served, client(served) as ai:
        answer = await ai.responses.create(model="small", input="x", max_output_tokens=4)
        assert answer.status == "incomplete"
        assert (
            answer.incomplete_details is not None
            and answer.incomplete_details.reason == "max_output_tokens"
        )
        events = [
            one async for one in await ai.responses.create(model="duo", input="x", stream=True)
        ]
        assert events[-1].type == "response.failed"
        assert (
            events[-1].response.error is not None
            and "nothing came" in events[-1].response.error.message
        )


async def test_tools_are_called_and_answered_by_a_model_with_chats_of_its_own() -> None:
    async with chat_pair() as at, api(relays={"small": at.pair}) as served, client(served) as ai:
        question: Any = {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}
        answer = await ai.responses.create(model="small", input=[question], tools=[WEATHER])
        call = answer.output[0]
        assert call.type == "function_call" and (call.name, call.arguments) == (
            "weather",
            '{"city":"Paris"}',
        )
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
        history: Any = [question, call.model_dump(exclude_none=True), result]
        answer = await ai.responses.create(model="small", input=history, tools=[WEATHER])
        assert answer.output_text == "It says: dry"
        sent = at.decode.sent[1][1]["messages"]
        assert [one["role"] for one in sent] == ["user", "assistant", "tool"]
        async with ai.responses.stream(model="small", input=[question], tools=[WEATHER]) as stream:
            kinds = {event.type async for event in stream}
            done = await stream.get_final_response()
        assert {
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
        } <= kinds
        call = done.output[0]
        assert call.type == "function_call" and call.arguments == '{"city":"Paris"}'


async def test_reasoning_is_an_item_of_its_own_and_formats_are_passed_on() -> None:
    class Answer(BaseModel):
        wet: bool

    def thinks(_: object) -> dict[str, Any]:
        return {"role": "assistant", "content": '{"wet": true}', "reasoning_content": "Hm."}

    async with (
        chat_pair(ChatScript(say=thinks)) as at,
        api(relays={"small": at.pair}) as served,
        client(served) as ai,
    ):
        answer = await ai.responses.parse(
            model="small", input="Rain?", text_format=Answer, reasoning={"effort": "low"}, top_p=0.5
        )
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output_parsed == Answer(wet=True)
        body = at.decode.sent[0][1]
        assert (body["reasoning_effort"], body["response_format"]["type"], body["top_p"]) == (
            "low",
            "json_schema",
            0.5,
        )


@pytest.mark.parametrize("field", ["truncation", "background"])
async def test_a_wrong_field_is_a_400_that_names_it(field: str) -> None:
    async with api() as served:
        wrong = {"model": "small", "input": "x", field: True}
        status, body = await served.post("/v1/responses", wrong)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert body["error"]["param"] == field


async def test_what_is_ignored_is_named() -> None:
    async with api() as served:
        sent = {"model": "small", "input": "x", "store": True, "colour": 1}
        hints = {
            "truncation": "auto",
            "text": {"verbosity": "low"},
            "reasoning": {"effort": "low"},
        }
        status, body = await served.post("/v1/responses", {**sent, **hints})
        assert status == 200
        names = ("store", "colour", "truncation", "text.verbosity", "reasoning.effort")
        assert {*body["warnings"]} == {
            f"{name} was ignored: it has no effect here." for name in names
        }
        _, body = await served.post(
            "/v1/responses", {"model": "duo", "input": "Hi", "prefill": {}, "colour": "red"}
        )
        assert [one.split()[0] for one in body["warnings"]] == [
            "colour",
            "prefill",
        ]  # the chat's own, too


def test_a_call_without_arguments_has_the_same_in_its_last_events() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "now", "arguments": ""}}
    choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
    frames = ResponseTranslation("1", 0, {}, {}).feed(
        b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({"choices": [choice]})
    )
    events = {one["type"]: one for one in map(orjson.loads, EventSplitter().feed(frames))}
    done = events["response.function_call_arguments.done"]["arguments"]
    assert done == events["response.output_item.done"]["item"]["arguments"] == "{}"


def test_an_aborted_answer_failed() -> None:
    chunk = orjson.dumps(
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "abort"}]}
    )
    frames = ResponseTranslation("1", 0, {}, {}).feed(b"data: %b\n\ndata: [DONE]\n\n" % chunk)
    last = orjson.loads(EventSplitter().feed(frames)[-1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


def test_a_stream_that_an_engine_ends_by_an_error_fails_once() -> None:
    translation = ResponseTranslation("1", 0, {}, {})
    frames = translation.feed(b'data: {"error": {"message": "no room"}}\n\ndata: [DONE]\n\n')
    assert [line for line in frames.splitlines() if line.startswith(b"event")] == [
        b"event: response.created",
        b"event: response.in_progress",
        b"event: response.failed",
    ]
    assert b"no room" in frames
