"""The access log: a line per request, of every kind of route and ending."""

from pathlib import Path
from typing import Any

import orjson

from shell_router.api import ApiSettings
from shell_router.telemetry.recorder import Recorder
from tests.fakes.api_server import ScriptedRelay, api, chat

CHAT = "/v1/chat/completions"
NATIVE = b'{"text":"ok","meta_info":{"prompt_tokens":30,"completion_tokens":12}}'
SETTINGS = ApiSettings(keys={"alice": "sk-a"})
ALICE = {"Authorization": "Bearer sk-a"}


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [
        orjson.loads(line) for file in folder.iterdir() for line in file.read_bytes().splitlines()
    ]


async def test_each_request_has_a_line_with_tenant_model_status_tokens_and_times(
    tmp_path: Path,
) -> None:
    log = Recorder("access log", tmp_path, 2**20, lambda outcome, lines: None)
    relays = {"small": ScriptedRelay((NATIVE,))}
    async with api(settings=SETTINGS, relays=relays, access_log=log) as served:  # type: ignore[arg-type]
        _, answer = await served.post(CHAT, chat(), **ALICE, **{"x-request-id": "mine"})
        async with served.client.post(
            served.url + CHAT, json=chat(stream=True, model="small"), headers=ALICE
        ) as got:
            await got.read()
        await served.post("/generate", {"text": "x"}, **ALICE)
        await served.post(CHAT, chat(model="none"), **ALICE)
        await served.post(CHAT, chat())
        await served.get("/v1/agent/outputs/secret-name", **ALICE)
    log.close()
    lines = lines_in(tmp_path)
    said = [
        (one["tenant"], one["method"], one["route"], one["model"], one["status"]) for one in lines
    ]
    assert said == [
        ("alice", "POST", CHAT, "duo", 200),
        ("alice", "POST", CHAT, "small", 200),
        ("alice", "POST", "/generate", "small", 200),
        ("alice", "POST", CHAT, None, 404),
        (None, "POST", CHAT, None, 401),
        ("alice", "GET", "/v1/agent/outputs/{marker}", None, 404),
    ]
    whole, stream, native, *others = lines
    assert whole["request_id"] == "mine" and whole["trace_id"] == answer["id"].removeprefix(
        "chatcmpl-"
    )
    assert whole["output_tokens"] >= answer["usage"]["completion_tokens"] > 0
    assert all(0 <= one["first_token_s"] <= one["took_s"] for one in (whole, stream))
    assert (native["prompt_tokens"], native["output_tokens"]) == (30, 12)
    assert all(one["prompt_tokens"] == 0 for one in others)
    assert "secret-name" not in str(lines) and "sk-a" not in str(lines)
