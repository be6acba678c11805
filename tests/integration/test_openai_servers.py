"""Models behind OpenAI-compatible servers, asked through a router."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession

from benchmarks.scripted.server import ScriptedPair, ScriptedSettings
from shell_router.app import load_config, serve_deployment
from shell_router.app.model_files import read_files
from shell_router.app.openai import OpenAISection
from shell_router.config import (
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    ModelSettings,
    PairSettings,
)
from shell_router.config.models import FromEnvironment
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.errors import ConfigError
from tests.fakes.api_server import chat, until
from tests.fakes.openai_server import DONE, USAGE, Answer, OpenAIServer, event, text_of

MODEL = Path(__file__).parents[2] / "models" / "small"
KEY = "sk-abcdef-123456"
LIMITS = Limits(engine_attempts=2, engine_start_s=5)


def remote(server: OpenAIServer, **settings: Any) -> ModelSettings:
    return ModelSettings(engine={"openai": OpenAISection(url=server.url, **settings)})


@asynccontextmanager
async def router(
    models: Mapping[str, ModelSettings], *topologies: Path
) -> AsyncIterator[ClientSession]:
    config = Config(
        models,
        topologies=topologies,
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
        limits=LIMITS,
    )
    async with serve_deployment(config) as url, ClientSession(url) as client:
        yield client


async def ask(client: ClientSession, model: str = "remote", **fields: Any) -> tuple[int, Any]:
    body = {**chat(model=model), **fields}
    async with client.post("/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.json()


def message(body: Any) -> Any:
    return body["choices"][0]["message"]


async def test_a_chat_goes_out_as_messages_and_comes_back_with_the_servers_usage() -> None:
    async with (
        OpenAIServer([Answer(text_of("Hel", "lo ü"))]).running() as server,
        router({"remote": remote(server, model="gpt", body={"reasoning_effort": "low"})}) as client,
    ):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi \ufdd1 东京"},
        ]
        status, body = await ask(
            client, messages=messages, max_tokens=50, temperature=0.5, seed=7, stop=["END"]
        )
    assert (status, message(body)["content"]) == (200, "Hello ü")
    assert body["usage"]["prompt_tokens"] == 11
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert "warnings" not in body
    (sent,) = server.bodies
    assert sent == {
        "model": "gpt",
        "messages": [messages[0], {"role": "user", "content": "Hi  东京"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "max_tokens": 50,
        "temperature": 0.5,
        "seed": 7,
        "stop": ["END"],
    }


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def call(arguments: str, name: str | None = None, index: int | None = 0, **fields: Any) -> bytes:
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    numbered = {} if index is None else {"index": index}
    return event({"tool_calls": [{**numbered, **fields, "function": function}]})


async def test_calls_that_come_in_pieces_are_whole_and_their_results_go_back() -> None:
    first = [
        event({"content": "Let me see."}),
        call("", "add", id="c1"),
        call('{"a": 1', index=0),
        call(', "b": 2}', index=0),
        call('{"a": 12345678901234567890123}', "add", 1, id="c2"),
        event(finish_reason="tool_calls"),
        DONE,
    ]
    async with (
        OpenAIServer([Answer(first), Answer(text_of("3"))]).running() as server,
        router({"remote": remote(server)}) as client,
    ):
        question = {"role": "user", "content": "1 + 2?"}
        status, body = await ask(client, messages=[question], tools=[TOOL], tool_choice="required")
        assert (status, body["choices"][0]["finish_reason"]) == (200, "tool_calls")
        said = message(body)
        assert said["content"] == "Let me see."
        calls = [each["function"] for each in said["tool_calls"]]
        assert calls == [
            {"name": "add", "arguments": '{"a":1,"b":2}'},
            {"name": "add", "arguments": '{"a":12345678901234567890123}'},
        ]
        assert server.bodies[0]["tools"] == [TOOL]
        assert server.bodies[0]["tool_choice"] == "required"
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": "3"}
            for each in said["tool_calls"]
        ]
        _, body = await ask(client, messages=[question, said, *results], tools=[TOOL])
    assert message(body)["content"] == "3"
    _, assistant, *tools = server.bodies[1]["messages"]
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"a":1,"b":2}'
    assert assistant["tool_calls"][0]["id"] == tools[0]["tool_call_id"]
    assert "tool_choice" not in server.bodies[1]


async def test_calls_without_numbers_or_with_one_are_told_apart_by_their_ids() -> None:
    for index in (None, 0):
        pieces = [
            call("{}", "add", index, id="c1"),
            call('{"a": 1}', "add", index, id="c2"),
            event(finish_reason="stop"),
            DONE,
        ]
        async with (
            OpenAIServer([Answer(pieces)]).running() as server,
            router({"remote": remote(server)}) as client,
        ):
            _, body = await ask(client, tools=[TOOL])
        calls = message(body)["tool_calls"]
        assert [each["function"]["arguments"] for each in calls] == ["{}", '{"a":1}']


async def test_thinking_comes_apart_from_the_answer_in_either_name_of_its_field() -> None:
    for name in ("reasoning_content", "reasoning"):
        pieces = [
            event({name: "Two and"}),
            event({name: " two."}),
            event({"content": "4"}),
            event(finish_reason="stop"),
            event(choices=[], usage=USAGE),
            DONE,
        ]
        async with (
            OpenAIServer([Answer(pieces)]).running() as server,
            router({"remote": remote(server)}) as client,
        ):
            _, body = await ask(client)
        assert message(body)["reasoning_content"] == "Two and two."
        assert message(body)["content"] == "4"


async def test_a_schema_and_any_json_go_out_as_formats_and_tools_may_stand_beside() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with (
        OpenAIServer([Answer(text_of('{"a": 1}'))]).running() as server,
        router({"remote": remote(server)}) as client,
    ):
        _, body = await ask(client, response_format=named, tools=[TOOL])
        await ask(client, response_format={"type": "json_object"})
        status, refused = await ask(client, regex="a+")
    assert message(body)["content"] == '{"a": 1}'
    sent = server.bodies[0]["response_format"]["json_schema"]["schema"]
    assert sent["properties"] == schema["properties"]
    assert server.bodies[1]["response_format"] == {"type": "json_object"}
    assert (status, refused["error"]["param"], len(server.bodies)) == (400, "regex", 2)


MIXED = """name: mixed
agents:
  a: {model: remote}
  b: {model: remote}
  root: {model: MODEL, precursors: [a, b]}
prefill: {chunk_tokens: 1}
"""


def topology(folder: Path, text: str) -> Path:
    file = folder / "topology.yaml"
    file.write_text(text, encoding="utf-8")
    return file


async def test_a_topology_cannot_set_other_fields_of_the_body(tmp_path: Path) -> None:
    text = "name: sly\nagents:\n  root: {model: remote, sampling: {custom_params: {model: dear}}}\n"
    async with (
        OpenAIServer([Answer(text_of("4"))]).running() as server,
        router({"remote": remote(server)}, topology(tmp_path, text)) as client,
    ):
        assert (await ask(client, "sly"))[0] == 200
    assert server.bodies[0]["model"] == "remote"


async def test_a_reader_on_sglang_prefills_while_a_remote_agent_writes(tmp_path: Path) -> None:
    async with ScriptedPair(ScriptedSettings(log_bodies=9)) as pair:
        probed = 0

        async def hold_the_end(number: int) -> None:
            if number == 4:  # the reader has its first words, and they are prefilled
                await until(lambda: pair.prefill.requests > probed)

        words = ["Some words of the agent, ", "and some more. ", "The end."]
        said = Answer(text_of(*words), before=hold_the_end)
        local = ModelSettings(MODEL, pairs=(PairSettings(pair.prefill.url, pair.decode.url),))
        async with (
            OpenAIServer([said]).running() as server,
            router(
                {"remote": remote(server), "local": local},
                topology(tmp_path, MIXED.replace("MODEL", "local")),
            ) as client,
        ):
            probed = pair.prefill.requests
            status, body = await ask(client, "mixed", include_agents=True)
    assert status == 200
    assert body["agents"]["a"]["completion_tokens"] == USAGE["completion_tokens"]
    prompt = orjson.loads(pair.decode.bodies[-1])["input_ids"]
    whole = HfTokenizer.from_folder(MODEL)
    written = whole.encode("".join(words))
    assert any(prompt[at : at + len(written)] == written for at in range(len(prompt)))


async def test_a_remote_reader_gets_the_texts_of_others_in_its_message(tmp_path: Path) -> None:
    answers = [Answer(text_of("one \ufdd1")), Answer(text_of("two")), Answer(text_of("both"))]
    async with (
        OpenAIServer(answers).running() as server,
        router(
            {"remote": remote(server)}, topology(tmp_path, MIXED.replace("MODEL", "remote"))
        ) as client,
    ):
        status, body = await ask(client, "mixed")
    assert (status, message(body)["content"]) == (200, "both")
    (question,) = server.bodies[2]["messages"]
    assert question["role"] == "user"
    assert question["content"].index("one ") < question["content"].index("two")
    assert "\ufdd1" not in question["content"]


async def test_an_agent_that_is_cut_off_leaves_its_server(tmp_path: Path) -> None:
    text = "name: fast\nagents:\n  a: {model: remote}\n  b: {model: slow}\n"
    text += "  root: {model: remote, precursors: [a, b]}\n"
    text += "early_exit: {policy: quorum, min_completed: 1}\n"
    async with (
        OpenAIServer([Answer(text_of("4"))]).running() as server,
        OpenAIServer([Answer([event({"content": "well"})], end="never")]).running() as slow,
        router(
            {"remote": remote(server), "slow": remote(slow)}, topology(tmp_path, text)
        ) as client,
    ):
        status, body = await ask(client, "fast")
        assert (status, message(body)["content"]) == (200, "4")
        await asyncio.wait_for(slow.left.wait(), 30)


async def test_a_gate_that_needs_confidence_is_refused_at_load_without_logprobs(
    tmp_path: Path,
) -> None:
    text = MIXED.replace("MODEL", "remote") + "early_exit: {policy: in_flight}\n"
    async with OpenAIServer([Answer(text_of("4"))]).running() as server:
        with pytest.raises(
            ConfigError, match=r"confidence of agent 'a'.*models\.remote\.openai\.logprobs"
        ):
            async with router({"remote": remote(server)}, topology(tmp_path, text)):
                pass


async def test_log_probabilities_of_the_server_are_the_confidence(tmp_path: Path) -> None:
    logprobs = {"content": [{"token": "4", "logprob": -0.5}]}
    pieces = [event({"content": "4"}, logprobs=logprobs), event(finish_reason="stop"), DONE]
    text = MIXED.replace("MODEL", "remote") + "early_exit: {policy: in_flight}\n"
    async with (
        OpenAIServer([Answer(pieces)]).running() as server,
        router({"remote": remote(server, logprobs=True)}, topology(tmp_path, text)) as client,
    ):
        _, body = await ask(client, "mixed", include_agents=True)
    assert server.bodies[0]["logprobs"] is True
    assert body["agents"]["a"]["confidence"] == pytest.approx(0.6065, abs=1e-3)


REFUSED = orjson.dumps({"error": {"message": f"Incorrect API key provided: {KEY[:8]}***."}})
FULL = orjson.dumps({"error": {"message": "maximum context length is 8 tokens"}})


def refusal(
    status: int, body: bytes = b"{}", kind: str = "application/json", **headers: str
) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer([body], status=status, content_type=kind, headers=named)


FAULTS: Mapping[str, tuple[list[Answer], int, str, str]] = {
    "a refused key": ([refusal(401, REFUSED)], 502, "engine_error", "refused the router (401)"),
    "an unknown model": ([refusal(404)], 502, "engine_error", "refused the router (404)"),
    "a long prompt": ([refusal(400, FULL)], 400, "context_length_exceeded", "maximum context"),
    "a refused field": ([refusal(422)], 400, "rejected_by_engine", "answered 422"),
    "a late retry": (
        [refusal(429, Retry_After="60")], 503, "engine_unavailable", "answered 429"
    ),
    "a page": ([refusal(200, b"<html>", "text/html")], 502, "engine_error", "text/html: an HTML page"),
    "a proxy's page": ([refusal(502, b"<html>", "text/html")], 502, "engine_error", "an HTML page"),
    "half a stream": (
        [Answer(text_of("well")[:2], "broken")], 502, "engine_error", "before the answer's end"
    ),
    "an end too early": ([Answer(text_of("well")[:2])], 502, "engine_error", "before its answer"),
    "an error event": (
        [Answer([event({"content": "a"}), event(error={"message": "overheated", "code": 500})])],
        502,
        "engine_error",
        "overheated",
    ),
    "an event of another API": (
        [Answer([b"data: [1]\n\n"])], 502, "engine_error", "no event of a chat completion"
    ),
    "arguments that are none": (
        [Answer([call("{", "add"), event(finish_reason="stop"), DONE])],
        502,
        "engine_error",
        "no JSON object",
    ),
    "a filter": ([Answer(text_of("a", reason="content_filter"))], 502, "engine_error", "content_filter"),
    "silence": ([Answer([event({"content": "a"})], "never")], 504, "engine_stalled", "sent nothing"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_of_the_server_is_one_error_that_says_why_and_shows_no_key(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers, status, code, why = FAULTS[fault]
    async with (
        OpenAIServer(answers).running() as server,
        router({"remote": remote(server, key=KEY, silence_s=0.3)}) as client,
    ):
        answered, body = await ask(client, tools=[TOOL])
        async with client.get("/metrics") as answer:
            shown = await answer.text()
    assert (answered, body["error"]["code"]) == (status, code)
    assert why in body["error"]["message"]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY[:4] not in orjson.dumps(body).decode() + shown + caplog.text


@pytest.mark.parametrize(
    "first",
    [
        refusal(429, Retry_After="0"),
        refusal(503, Retry_After="Thu, 01 Jan 1970 00:00:00 GMT"),
        Answer([], "broken"),
    ],
)
async def test_a_request_that_failed_before_its_first_token_is_sent_again(first: Answer) -> None:
    async with (
        OpenAIServer([first, Answer(text_of("4"))]).running() as server,
        router({"remote": remote(server)}) as client,
    ):
        status, body = await ask(client)
    assert (status, message(body)["content"], len(server.bodies)) == (200, "4", 2)


async def test_a_retry_that_is_due_later_is_left_to_the_client_and_others_wait_too() -> None:
    async with (
        OpenAIServer([refusal(429, Retry_After="60")]).running() as server,
        router({"remote": remote(server)}) as client,
        client.post("/v1/chat/completions", json=chat(model="remote")) as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (503, "60")
        status, refused = await ask(client)
        assert (status, refused["error"]["code"]) == (503, "engine_unavailable")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "pieces",
    [
        text_of("12345678", usage=None),
        text_of("12345678", usage={"prompt_tokens": -1, "completion_tokens": "many"}),
        text_of("12345678", usage={"prompt_tokens": 9, "completion_tokens": 0}),
        text_of("12345678", usage=None)[:-1],
    ],
)
async def test_counts_that_are_missing_or_wrong_are_made_of_the_texts_and_marked(
    pieces: list[bytes],
) -> None:
    async with (
        OpenAIServer([Answer(pieces)]).running() as server,
        router({"remote": remote(server)}) as client,
    ):
        _, body = await ask(client)
    assert (message(body)["content"], body["usage"]["completion_tokens"]) == ("12345678", 2)
    assert body["usage"]["prompt_tokens"] > 0
    assert body["warnings"] == ["Tokens were estimated, as their servers count none: remote."]


async def test_no_more_requests_run_at_a_time_than_the_server_may_have() -> None:
    gate = asyncio.Event()

    async def wait(_: int) -> None:
        await gate.wait()

    async with (
        OpenAIServer([Answer(text_of("4"), before=wait)]).running() as server,
        router({"remote": remote(server, max_running=1)}) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(ask(client)) for _ in range(3)]
        await until(lambda: len(server.bodies) == 1)
        async with client.get("/metrics") as answer:
            waiting = 'queue_requests{model="remote",role="server"} '
            assert waiting in await answer.text()
        assert len(server.bodies) == 1
        gate.set()
        assert [(await task)[0] for task in tasks] == [200] * 3


async def test_a_server_that_is_away_keeps_no_other_model_waiting_and_is_named() -> None:
    async with (
        OpenAIServer([Answer(text_of("4"))], models_status=401).running() as ill,
        OpenAIServer([Answer(text_of("4"))]).running() as server,
        router({"ill": remote(ill, key=KEY), "remote": remote(server)}) as client,
    ):
        assert (await ask(client))[0] == 200
        async with client.get("/ready") as answer:
            checks = (await answer.json())["checks"]
        assert (checks["engine ill"], checks["engine remote"]) == (False, True)
        ill.models_status = 200
        async with client.get("/ready") as answer:
            assert (await answer.json())["checks"]["engine ill"] is True


async def test_keys_and_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_KEY", KEY)
    named = FromEnvironment("REMOTE_KEY")
    async with (
        OpenAIServer([Answer(text_of("4"))]).running() as server,
        router({"remote": remote(server, key=named, headers={"X-Key": KEY[::-1]})}) as client,
    ):
        await ask(client)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert (server.headers[0]["X-Key"], server.headers[0]["User-Agent"]) == (
        KEY[::-1],
        "shell-router",
    )


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


async def test_images_and_other_fields_of_the_api_go_to_the_plain_models_server_as_they_are() -> (
    None
):
    whole = orjson.dumps({"object": "chat.completion", "choices": [], "usage": USAGE})
    answers = [Answer([whole], content_type="application/json"), Answer(text_of("A cat."))]
    question = {"role": "user", "content": [{"type": "text", "text": "What?"}, PICTURE]}
    async with (
        OpenAIServer(answers).running() as server,
        router({"remote": remote(server, model="gpt", key=KEY)}) as client,
    ):
        status, body = await ask(client, messages=[question], tools=[TOOL], max_tokens=9)
        asked = {**chat(model="remote"), "reasoning_effort": "low", "stream": True}
        asked["service_tier"] = "flex"
        async with client.post("/v1/chat/completions", json=asked) as answer:
            streamed = await answer.read()
        async with client.post("/generate", json={"model": "remote", "text": "a"}) as answer:
            native = answer.status
    assert (status, body["object"]) == (200, "chat.completion")
    assert server.bodies[0] == {
        "model": "gpt",
        "messages": [question],
        "tools": [TOOL],
        "max_tokens": 9,
    }
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "service_tier" not in server.bodies[1]
    assert (server.bodies[1]["reasoning_effort"], streamed) == ("low", b"".join(text_of("A cat.")))
    assert native == 400


def test_a_file_names_the_key_by_its_variable_and_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    text = "models:\n  m:\n    openai: {url: 'http://a/v1', key: {env: KEY}, headers: {X-Org: '${ORG}'}}\n"
    file.write_text(text, encoding="utf-8")
    config = load_config(file, {"ORG": "us"})
    section = config.models["m"].engine["openai"]
    assert (section.key, section.headers) == (FromEnvironment("KEY"), {"X-Org": "us"})
    assert "us" not in repr(section)


@pytest.mark.parametrize(
    "settings",
    [
        {"path": MODEL},
        {"tool_call_parser": "hermes"},
        {"quote_control_text": True},
        {"drafts": True},
    ],
)
def test_settings_without_effect_are_refused(settings: Mapping[str, Any]) -> None:
    engine = {"openai": OpenAISection(url="http://a/v1")}
    with pytest.raises(ConfigError, match=f"models.m.{next(iter(settings))} has no effect"):
        read_files({"m": ModelSettings(**settings, engine=engine)})


@pytest.mark.parametrize(
    "section", [{"headers": {"X-A: b\r\nX": "c"}}, {"headers": {"X": "a\r\nb"}}]
)
async def test_headers_that_would_break_the_request_are_refused(section: Mapping[str, Any]) -> None:
    model = ModelSettings(engine={"openai": OpenAISection(url="http://a/v1", **section)})
    with pytest.raises(ConfigError, match="characters that no header may have"):
        async with router({"m": model}):
            pass
