"""The scripted server: deterministic, honest about its cache, and faithful to its script."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from benchmarks.scripted.server import Fault, ScriptedServer, ScriptedSettings


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


def body(**more: Any) -> dict[str, Any]:
    return {
        "input_ids": [1, 2, 3],
        "bootstrap_room": 7,
        "sampling_params": {"max_new_tokens": 4},
        **more,
    }


async def test_the_same_prompt_gives_the_same_answer(session: aiohttp.ClientSession) -> None:
    answers = []
    async with ScriptedServer() as server, ScriptedServer() as other:
        for url in (server.url, server.url, other.url):
            async with session.post(f"{url}/generate", json=body(rid="r")) as answer:
                answers.append(await answer.read())
    assert answers[0] == answers[1] == answers[2]


async def test_a_script_can_be_posted_while_it_runs(session: aiohttp.ClientSession) -> None:
    async with ScriptedServer() as server:
        script = {"fault": {"kind": "status", "status": 503, "times": 1}, "vocabulary": 5}
        async with session.post(f"{server.url}/script", json=script) as answer:
            assert (await answer.json())["vocabulary"] == 5
        statuses = []
        for _ in range(2):
            async with session.post(f"{server.url}/generate", json=body()) as answer:
                statuses.append(answer.status)
        assert statuses == [503, 200]


@pytest.mark.parametrize(
    "script", [{"fault": {"kind": "gremlins"}}, {"vocabulary": 0}, {"colour": "red"}, [1]]
)
async def test_a_bad_script_is_refused(session: aiohttp.ClientSession, script: object) -> None:
    async with (
        ScriptedServer() as server,
        session.post(f"{server.url}/script", json=script) as answer,
    ):
        assert answer.status == 400


async def test_requests_sent_at_once_are_answered_in_order(session: aiohttp.ClientSession) -> None:
    async with ScriptedServer() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for rid in ("a", "b", "c"):
            sent = orjson.dumps(body(rid=rid))
            writer.write(
                b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(sent), sent)
            )
        seen = b""
        while seen.count(b'"id"') < 3:
            seen += await reader.read(65536)
        assert [seen.index(b'"id":"%s"' % rid) for rid in (b"a", b"b", b"c")] == sorted(
            seen.index(b'"id":"%s"' % rid) for rid in (b"a", b"b", b"c")
        )
        writer.close()
        await writer.wait_closed()


def test_bad_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="token_s"):
        ScriptedSettings(token_s=-1)
    with pytest.raises(ValueError, match="kind"):
        Fault("gremlins")  # type: ignore[arg-type]
