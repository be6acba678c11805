"""The scripted server: deterministic, honest about its cache, and faithful to its script."""

import asyncio
from collections.abc import AsyncIterator
from os.path import commonprefix
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from shell_router.engines.scripted_server import Fault, ScriptedServer, ScriptedSettings
from shell_router.engines.scripting.prefix_cache import PrefixCache, pack

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=30)


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


def body(**more: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "bootstrap_room": 7, "sampling_params": {"max_new_tokens": 4}, **more}


@given(st.lists(IDS, max_size=8), IDS)
def test_cached_tokens_are_the_longest_prefix_ever_prefilled(prompts: list[list[int]], prompt: list[int]) -> None:
    head = [9] * 8
    cache = PrefixCache()
    for known in prompts:
        cache.insert(pack(head + known))

    longest = max((8 + len(commonprefix([known, prompt])) for known in prompts), default=0)  # noqa: RUF071 - no paths
    assert cache.cached_tokens(pack(head + prompt)) == min(longest, 8 + len(prompt) - 1)


def test_the_cache_holds_no_more_than_its_capacity() -> None:
    cache = PrefixCache(capacity=2)
    for first in (1, 2, 3):
        cache.insert(pack([first] * 10))
    assert [cache.cached_tokens(pack([first] * 10)) for first in (1, 2, 3)] == [0, 9, 9]


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


@pytest.mark.parametrize("script", [{"fault": {"kind": "gremlins"}}, {"vocabulary": 0}, {"colour": "red"}, [1]])
async def test_a_bad_script_is_refused(session: aiohttp.ClientSession, script: object) -> None:
    async with ScriptedServer() as server, session.post(f"{server.url}/script", json=script) as answer:
        assert answer.status == 400


async def test_requests_sent_at_once_are_answered_in_order(session: aiohttp.ClientSession) -> None:
    async with ScriptedServer() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for rid in ("a", "b", "c"):
            sent = orjson.dumps(body(rid=rid))
            writer.write(b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(sent), sent))
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
