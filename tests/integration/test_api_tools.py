"""Calls of tools on the routes for chats, of a model alone and of a graph."""

import json
from typing import Any

import pytest

from tests.fakes.api_server import Api, api
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

CALL = '{"name": "look", "arguments": {"at": 1}}'
QUESTION = "How is it?"
FORM = {"type": "object", "properties": {"sure": {"type": "boolean"}}}
Outcome = tuple[str, list[str], str]
"""The text, the calls' names, and the reason of the answer's end."""


class ChatRoute:
    path = "/v1/chat/completions"
    cut = "length"

    def ask(self, choice: str) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "look"}}
        messages = [{"role": "user", "content": QUESTION}]
        return {"messages": messages, "tools": [tool], "tool_choice": choice}

    def form(self) -> dict[str, Any]:
        named = {"name": "x", "schema": FORM}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def read(self, body: dict[str, Any]) -> Outcome:
        (choice,) = body["choices"]
        calls = choice["message"].get("tool_calls") or []
        names = [call["function"]["name"] for call in calls]
        return choice["message"]["content"] or "", names, choice["finish_reason"]


class ResponsesRoute:
    path = "/v1/responses"
    cut = "incomplete"

    def ask(self, choice: str) -> dict[str, Any]:
        tools = [{"type": "function", "name": "look"}]
        return {"input": QUESTION, "tools": tools, "tool_choice": choice}

    def form(self) -> dict[str, Any]:
        return {"text": {"format": {"type": "json_schema", "name": "x", "schema": FORM}}}

    def read(self, body: dict[str, Any]) -> Outcome:
        items = body["output"]
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        names = [item["name"] for item in items if item["type"] == "function_call"]
        return "".join(texts), names, body["status"]


class MessagesRoute:
    path = "/v1/messages"
    cut = "max_tokens"

    def ask(self, choice: str) -> dict[str, Any]:
        kind = {"required": "any"}.get(choice, choice)
        messages = [{"role": "user", "content": QUESTION}]
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        return {
            "messages": messages,
            "max_tokens": 100,
            "tools": tools,
            "tool_choice": {"type": kind},
        }

    def form(self) -> dict[str, Any]:
        return {"output_config": {"format": {"type": "json_schema", "schema": FORM}}}

    def read(self, body: dict[str, Any]) -> Outcome:
        blocks = body["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        names = [block["name"] for block in blocks if block["type"] == "tool_use"]
        return "".join(texts), names, body["stop_reason"]


ROUTES = [ChatRoute(), ResponsesRoute(), MessagesRoute()]
Route = ChatRoute | ResponsesRoute | MessagesRoute


def scripted(text: str, reason: Any = "stop") -> ScriptedMoa:
    moa = ScriptedMoa(call_mark="<tool_call>")
    for engine in moa.engines.values():
        engine.answer = lambda _: Script(text, reason=reason, piece_words=1)
    return moa


async def ask(served: Api, route: Route, model: str, choice: str) -> Outcome:
    status, body = await served.post(route.path, {"model": model, **route.ask(choice)})
    assert status == 200, body
    return route.read(body)


@pytest.mark.parametrize("model", ["small", "duo"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize(
    ("choice", "written", "calls"),
    [
        ("auto", f'<tool_call>{CALL}</tool_call> <tool_call>{{"name": "lo', ["look"]),
        ("required", f'[{CALL}, {CALL}, {{"name": "look", "arguments": {{', ["look", "look"]),
        ("required", '[{"name": "look", "argum', []),
    ],
    ids=["behind a call", "in an array", "in the first call"],
)
async def test_an_output_that_the_limit_cut_has_its_whole_calls_and_says_so(
    route: Route, model: str, choice: str, written: str, calls: list[str]
) -> None:
    async with api(scripted(written, "length")) as served:
        assert await ask(served, route, model, choice) == ("", calls, route.cut)


@pytest.mark.parametrize("model", ["small", "duo"])
async def test_a_stream_shows_nothing_of_an_array_of_calls(model: str) -> None:
    written = f'[{CALL}, {{"name": "look", "arg'
    async with api(scripted(written, "length")) as served:
        body = {"model": model, "stream": True, **ChatRoute().ask("required")}
        async with served.stream(body) as answer:
            lines = (await answer.text()).splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert not any(choice["delta"].get("content") for choice in choices)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"at": 1}]
        assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("model", ["small", "duo"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize(
    ("written", "text", "calls"),
    [
        (CALL, "", ["look"]),
        (f"[{CALL}, {CALL}]", "", ["look", "look"]),
        ('{"sure": true}', '{"sure": true}', []),
    ],
    ids=["call", "calls", "answer"],
)
async def test_tools_with_a_schema_give_calls_or_an_answer_that_obeys_it(
    route: Route, model: str, written: str, text: str, calls: list[str]
) -> None:
    moa = scripted(written)
    async with api(moa) as served:
        sent = {"model": model, **route.ask("auto"), **route.form()}
        status, body = await served.post(route.path, sent)
        assert status == 200, body
        assert route.read(body)[:2] == (text, calls)
    (engine,) = [moa.engines[name] for name in ("small", "large") if moa.engines[name].generated][
        -1:
    ]
    schema = json.loads(engine.generated[-1].sampling["json_schema"])
    assert schema["$defs"]["answer."] == {**FORM, "additionalProperties": False}


@pytest.mark.parametrize("model", ["small", "duo"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_tools_that_the_router_cannot_run_are_left_out_and_named(
    route: Route, model: str
) -> None:
    other = {"type": "web_search_1", "name": "search"}
    async with api(scripted(f"<tool_call>{CALL}</tool_call>")) as served:
        sent = {"model": model, **route.ask("auto")}
        sent["tools"] = [other, *sent["tools"]]
        async with served.stream(sent, path=route.path) as answer:
            assert answer.status == 200
            assert answer.headers["x-ignored-fields"] == "tools.web_search_1"
            body = await answer.json()
        assert route.read(body)[1] == ["look"]
        assert body["warnings"] == ["tools.web_search_1 was ignored: it has no effect here."]
        named = {"type": "tool", "name": "search"} if route.cut == "max_tokens" else other
        status, body = await served.post(route.path, {**sent, "tool_choice": named})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


LONG = 12345678901234567890123
LIMITED: dict[str, Any] = {"type": "object", "properties": {"at": {"maximum": LONG}}}


@pytest.mark.parametrize("model", ["small", "duo"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_integers_of_tools_keep_all_digits(route: Route, model: str) -> None:
    moa = scripted(f'[{{"name": "look", "parameters": {{"at": {LONG}}}}}]')
    async with api(moa) as served:
        sent = {"model": model, **route.ask("required")}
        (tool,) = sent["tools"]
        function = tool.get("function", tool)
        schema = "input_schema" if "input_schema" in function else "parameters"
        function[schema] = LIMITED
        async with served.stream(sent, path=route.path) as answer:
            assert answer.status == 200
            assert str(LONG) in (await answer.text())
        function[schema] = {"type": "object", "properties": {"at": {"enum": [LONG]}}}
        status, body = await served.post(route.path, sent)
        assert status == 400 and "64 bits" in body["error"]["message"]
    engine = moa.engines["small" if model == "small" else "large"]
    assert str(LONG) in engine.generated[-1].sampling["json_schema"]


async def test_integers_of_earlier_calls_keep_all_digits() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": LONG}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "dry"}
    talk = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "Dry."},
        {"role": "user", "content": QUESTION},
    ]
    moa = scripted("It is dry.")
    async with api(moa) as served:
        sent = {"model": "duo", "messages": talk, "max_tokens": 9}
        status, _ = await served.post("/v1/messages", sent)
    assert status == 200
    assert str(LONG) in moa.prompt_of("left")


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": LONG},
        {"max_tokens": LONG},
        {"temperature": LONG},
        {"stop_token_ids": [LONG]},
        {"logit_bias": {"1": LONG}},
        {"metadata": {"at": LONG}},
        {"chat_template_kwargs": {"at": LONG}},
        {"response_format": {"type": "json_object", "at": LONG}},
        {"messages": LONG},
        {"model": LONG},
        {"unknown": LONG},
        {"topology": {"agents": {"a": {"model": "small", "sampling": {"seed": LONG}}}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_integers_beyond_64_bits_are_taken_or_refused(fields: dict[str, Any]) -> None:
    async with api(scripted("Dry.")) as served:
        for stream in (False, True):
            talk = [{"role": "user", "content": QUESTION}]
            sent = {"model": "small", "messages": talk, "stream": stream, **fields}
            async with served.stream(sent) as answer:
                assert answer.status in (200, 400), await answer.text()
