"""Native requests on their way through."""

import asyncio

import pytest

from shell_router.api import ApiSettings
from shell_router.api.replies import ErrorBody
from shell_router.core.engine import ChatServing, Placement, Session
from shell_router.errors import EngineRejected, EngineUnreachable
from tests.fakes.api_server import ScriptedRelay, api, chat

ODD_BODY = b'{ "text":"hi",  "unknown_field": {"deep": [1, 2.50]}, "sampling_params":{}}'


@pytest.mark.parametrize("route", ["generate", "prefill_only"])
async def test_bodies_and_answers_pass_byte_for_byte(route: str) -> None:
    relay = ScriptedRelay((b'{"a":', b" 1}"), "application/json", 201)
    async with api(relays={"small": relay}) as served:
        async with served.client.post(f"{served.url}/{route}", data=ODD_BODY) as response:
            assert (response.status, await response.read()) == (201, b'{"a": 1}')
            assert response.content_type == "application/json"
        assert relay.forwarded == [(route, ODD_BODY)]


async def test_a_stream_passes_chunk_by_chunk() -> None:
    relay = ScriptedRelay(
        (b"data: 1\n\n", b"data: 2\n\n"), "text/event-stream", gate=asyncio.Event()
    )
    body = {"text": "x", "stream": True}
    async with api(relays={"small": relay}) as served, served.stream(body, "/generate") as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        assert relay.gate is not None
        relay.gate.set()
        assert await response.read() == b"data: 2\n\n"


async def test_the_model_is_named_by_header_or_field_and_must_be_known() -> None:
    one, two = ScriptedRelay((b'"one"',)), ScriptedRelay((b'"two"',))
    async with api(relays={"one": one, "two": two}) as served:
        assert await served.post("/generate", {"text": "x"}, **{"x-model": "two"}) == (200, "two")
        assert await served.post("/generate", {"text": "x", "model": "one"}) == (200, "one")
        status, body = await served.post("/generate", {"text": "x"})
        assert status == 400 and "one, two" in body["error"]["message"]
        status, body = await served.post("/generate", {"text": "x", "model": "three"})
        assert status == 404 and "one, two" in body["error"]["message"]
        status, _ = await served.post("/generate", {"text": "x", "model": 3})
        assert status == 400


async def test_the_routing_key_names_the_session() -> None:
    relay = ScriptedRelay((b"1",))
    async with api(relays={"small": relay}) as served:
        await served.post("/prefill_only", {"text": "x"}, **{"x-routing-key": "chat-7"})
        await served.post("/generate", {"text": "x"})
    assert relay.sessions == [Session("chat-7", "", "chat-7"), None]


async def test_a_tenants_user_goes_with_what_an_engine_answers_itself() -> None:
    relay = ScriptedRelay(chat=ChatServing())
    chat = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    async with api(relays={"small": relay}) as served:
        for path, body in (
            ("chat/completions", chat),
            ("completions", {"model": "small", "prompt": "Hi"}),
        ):
            for fields in (
                {"user": "ann"},
                {"user": "ben", "prompt_cache_key": "ann"},
                {"user": "ben"},
                {},
            ):
                status, _ = await served.post(f"/v1/{path}", {**body, **fields})
                assert status == 200
    ann, also_ann, ben, none = relay.end_users[:4]
    assert ann == also_ann != ben and none is None
    assert relay.end_users[4:] == [ann, ann, ben, None]


async def test_errors_before_and_after_the_head_reach_the_client() -> None:
    broken = EngineUnreachable("closed early.")
    whole = ScriptedRelay((b"{",), error=broken)
    stream = ScriptedRelay((b"data: 1\n\n",), "text/event-stream", error=broken)
    async with api(relays={"whole": whole, "stream": stream}) as served:
        status, body = await served.post("/generate", {"text": "x"}, **{"x-model": "whole"})
        assert (status, body["error"]["code"]) == (502, "engine_error")
        async with served.stream({"model": "stream"}, "/generate") as response:
            assert response.status == 200
            assert b'"engine_error"' in (await response.read()).removeprefix(b"data: 1\n\n")
        status, body = await served.post("/generate", [], **{"x-model": "whole"})
        assert status == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"text": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", chat(logprobs=True)),
        ("/v1/chat/completions", chat(n=2, temperature=0)),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "low"}}),
    ],
)
async def test_the_first_event_of_an_engines_stream_is_timed_once(
    path: str, fields: dict[str, object]
) -> None:
    relay = ScriptedRelay(
        (b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"),
        "text/event-stream",
        chat=ChatServing(),
    )
    async with api(relays={"small": relay}) as served:
        async with served.stream({**fields, "model": "small", "stream": True}, path) as response:
            assert response.status == 200, await response.text()
            await response.read()
        assert relay.forwarded
        registry = served.services.metrics.registry
        counted = registry.get_sample_value(
            "shell_router_first_token_seconds_count", {"target": "small"}
        )
        assert counted == 1


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_an_engine_that_does_not_end_is_given_up_at_the_limit(content_type: str) -> None:
    relay = ScriptedRelay((b"data: 1\n\n", b"data: 2\n\n"), content_type, gate=asyncio.Event())
    async with api(settings=ApiSettings(request_timeout_s=0.05), relays={"small": relay}) as served:
        async with served.stream({"text": "x"}, "/generate") as response:
            assert b"deadline_exceeded" in await response.read()
        assert relay.left_early == 1


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, b'{"error": {"message": "no room", "code": 400}}', "rejected_by_engine"),
        (422, b'{"error": "no room"}', "rejected_by_engine"),
        (500, b"no room", "engine_error"),
        (503, b'{"object": "error", "message": "no room"}', "engine_unavailable"),
    ],
)
async def test_an_engines_error_keeps_status_and_message_in_the_shape_of_all_errors(
    status: int, body: bytes, code: str
) -> None:
    async with api(relays={"small": ScriptedRelay((body,), status=status)}) as served:
        reported, envelope = await served.post("/generate", {"text": "x"})
    assert (reported, envelope["error"]["code"]) == (status, code)
    assert envelope["error"]["message"] == f"The engine answered {status}: no room"
    assert envelope["error"].keys() == ErrorBody.__annotations__.keys()


@pytest.mark.parametrize(
    "relay",
    [
        ScriptedRelay((b"busy",), status=429),
        ScriptedRelay((b"busy",), status=503),
        ScriptedRelay((), error=EngineRejected("busy", status=429)),
    ],
)
async def test_an_engine_that_has_too_much_to_do_is_asked_again_later(relay: ScriptedRelay) -> None:
    settings, body = ApiSettings(retry_after_s=7), {"text": "x"}
    async with (
        api(settings=settings, relays={"small": relay}) as served,
        served.stream(body, "/generate") as response,
    ):
        assert response.status == (429 if relay.error else relay.status)
        assert response.headers["Retry-After"] == "7"


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_the_servers_that_answer_are_named_with_the_reason(content_type: str) -> None:
    placed = (Placement("prefill-0", "scored", "wait"), Placement("decode-1", "scored", "tie"))
    relay = ScriptedRelay((b"1",), content_type, placed=placed)
    async with (
        api(relays={"small": relay}) as served,
        served.stream({"text": "x"}, "/generate") as response,
    ):
        assert (
            response.headers["x-shell-router-engine"]
            == "prefill-0 (scored: wait); decode-1 (scored: tie)"
        )
