"""Pairs of engines that are added and drained while a router serves: no request is harmed, and all
is checked first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from benchmarks.scripted.server import BootstrapRooms, ScriptedServer, ScriptedSettings
from launch.sglang_cpu.pair import free_ports
from shell_router.app import serve_deployment
from shell_router.config import (
    ApiKey,
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    ModelSettings,
    PairSettings,
)
from tests.fakes.api_server import LIMIT, until

MODEL = Path(__file__).parents[2] / "models" / "small"
STREAMS, TOKENS = 32, 60
SERVERS = ScriptedSettings(vocabulary=30, token_s=0.002)
OPERATOR, TENANT = {"Authorization": "Bearer sk-o"}, {"Authorization": "Bearer sk-t"}


@dataclass(frozen=True)
class Pair:
    """A scripted pair; all pairs of a test share their rooms, as any prefill works with any
    decode."""

    prefill: ScriptedServer
    decode: ScriptedServer

    @property
    def urls(self) -> dict[str, Any]:
        return {"prefill": self.prefill.url, "decode": self.decode.url}

    @property
    def requests(self) -> int:
        return min(self.prefill.requests, self.decode.requests)


@dataclass(frozen=True)
class Fleet:
    """A router whose model `small` has the first of the pairs, and the client of its operator."""

    url: str
    http: aiohttp.ClientSession
    pairs: list[Pair]

    async def ask(
        self, method: str, body: object = None, key: dict[str, str] = OPERATOR, **query: object
    ) -> tuple[int, Any]:
        at, params = f"{self.url}/v1/engines", {name: str(value) for name, value in query.items()}
        async with self.http.request(method, at, json=body, params=params, headers=key) as answer:
            return answer.status, await answer.json()

    async def add(self, pair: Pair) -> tuple[int, Any]:
        return await self.ask("POST", {"model": "small", "pair": pair.urls})

    async def served(self) -> list[str]:
        return [one["prefill"] for one in (await self.ask("GET"))[1]["data"]]


@asynccontextmanager
async def fleet(pairs: int = 2, *, host: str = "127.0.0.1") -> AsyncIterator[Fleet]:
    rooms, keys = BootstrapRooms(), {"ops": ApiKey("sk-o", operator=True), "tenant": ApiKey("sk-t")}
    async with AsyncExitStack() as stack:

        async def started(role: Any) -> ScriptedServer:
            return await stack.enter_async_context(
                ScriptedServer(replace(SERVERS, role=role), rooms=rooms)
            )

        there = [Pair(await started("prefill"), await started("decode")) for _ in range(pairs)]
        config = Config(
            {"small": ModelSettings(MODEL, pairs=(PairSettings(**spelled(there[0], host)),))},
            embedder=EmbedderSettings("none"),
            listen=Listen(port=0),
            limits=Limits(
                engine_start_s=5, engine_attempts=1
            ),  # nothing is sent again: what is harmed shows
            api_keys=keys,
        )
        url = await stack.enter_async_context(serve_deployment(config))
        yield Fleet(
            url, await stack.enter_async_context(aiohttp.ClientSession(timeout=LIMIT)), there
        )


async def test_a_pair_is_added_and_the_other_drained_and_stopped_under_32_streams_and_none_is_harmed() -> (
    None
):
    async with (
        fleet() as at,
        openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="sk-t", max_retries=0) as ai,
    ):
        first, second = at.pairs
        ended, over = 0, asyncio.Event()

        async def stream() -> None:
            nonlocal ended
            while not over.is_set():
                asked: Any = {
                    "model": "small",
                    "messages": [{"role": "user", "content": "What is it?"}],
                }
                options: Any = {
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "max_tokens": TOKENS,
                }
                chunks = [
                    chunk async for chunk in await ai.chat.completions.create(**asked, **options)
                ]
                assert chunks[-1].usage and chunks[-1].usage.completion_tokens == TOKENS
                ended += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(stream())
            await until(lambda: first.decode.running == STREAMS)
            assert (await at.add(second))[0] == 201
            assert sorted(await at.served()) == sorted(pair.prefill.url for pair in at.pairs)
            await until(lambda: min(first.decode.running, second.decode.running) > 0)
            assert first.decode.running > 0
            assert await at.ask("DELETE", model="small", **first.urls) == (
                200,
                {"model": "small", **first.urls, "running": 0},
            )
            assert await at.served() == [second.prefill.url]
            asked, count = first.requests, ended
            await first.prefill.stop()
            await first.decode.stop()
            await until(lambda: ended > count + STREAMS)
            assert first.requests == asked  # nothing came there any more
            over.set()
        assert second.requests >= STREAMS
        await first.prefill.start()  # the fixture stops it
        await first.decode.start()


async def test_a_drain_that_takes_longer_than_is_waited_for_says_what_still_runs_and_lets_it_end() -> (
    None
):
    async with (
        fleet() as at,
        openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="sk-t", max_retries=0) as ai,
    ):
        first, second = at.pairs
        asked: Any = {
            "model": "small",
            "messages": [{"role": "user", "content": "What is it?"}],
            "max_tokens": 400,
        }
        long = asyncio.create_task(ai.chat.completions.create(**asked))
        await until(lambda: first.decode.running == 1)
        assert (await at.add(second))[0] == 201
        for _ in range(2):  # asked again it says the same
            status, body = await at.ask("DELETE", model="small", wait_s=0, **first.urls)
            assert (status, body["running"]) == (202, 1)
        again = asyncio.create_task(at.ask("DELETE", model="small", **first.urls))
        usage = (await long).usage
        assert usage and usage.completion_tokens == 400
        gone = (200, {"model": "small", **first.urls, "running": 0})
        assert await again == gone and await at.ask("DELETE", model="small", **first.urls) == gone
        assert await at.served() == [second.prefill.url]
        assert second.requests <= 3  # those of the probe
        assert (await at.add(first))[0] == 201
        assert (await at.ask("DELETE", model="small", **first.urls)) == gone


def spelled(pair: Pair, host: str, end: str = "") -> dict[str, str]:
    """Spell the URLs of a pair with another host, or a user."""
    return {role: url.replace("127.0.0.1", host) + end for role, url in pair.urls.items()}


async def test_passwords_of_engine_urls_are_in_no_metric_answer_or_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "shell_router")
    host = "user:hidden@127.0.0.1"
    async with fleet(3, host=host) as at:
        first, second, third = at.pairs
        added = await at.ask("POST", {"model": "small", "pair": spelled(second, host)})
        assert added == (201, {"model": "small", **second.urls})
        listed = await at.ask("GET")
        assert listed == (
            200,
            {
                "object": "list",
                "data": [{"model": "small", **pair.urls} for pair in (first, second)],
            },
        )
        gone = spelled(third, host)
        await third.decode.stop()
        lost = await at.ask("POST", {"model": "small", "pair": gone})
        assert lost[0] == 502
        await third.decode.start()
        await at.ask("DELETE", model="small", **spelled(second, host))
        drained = await at.ask("DELETE", model="small", **second.urls)
        assert drained == (200, {"model": "small", **second.urls, "running": 0})
        async with at.http.get(f"{at.url}/metrics", headers=OPERATOR) as answer:
            metrics = await answer.text()
        assert f'url="{first.prefill.url}"' in metrics
        assert "hidden" not in metrics + str(lost) + caplog.text


async def test_servers_that_were_started_with_another_model_are_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(4) as at:
        paths = ("/models/small/", "org/Small", "/c/models--org--Small/snapshots/0a1", "/m/large")
        for pair, path in zip(at.pairs, paths, strict=True):
            pair.decode.memory.model_path = path
            if pair is not at.pairs[0]:
                assert (await at.add(pair))[0] == 201
        lines = [line for line in caplog.messages if "the model's path is" in line]
        assert len(lines) == 1
        assert at.pairs[3].decode.url in lines[0] and "/m/large" in lines[0]


async def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    ports = free_ports(2)
    gone = {"prefill": f"http://127.0.0.1:{ports[0]}", "decode": f"http://127.0.0.1:{ports[1]}"}
    async with fleet() as at:
        first, second = at.pairs
        swapped = {"prefill": second.decode.url, "decode": second.prefill.url}
        bodies: list[tuple[dict[str, Any], int, str | None]] = [
            ({}, 400, "model"),
            ({"model": "small"}, 400, "pair"),
            ({"model": "small", "pair": []}, 400, "pair"),
            ({"model": "small", "pair": {"prefill": "x"}}, 400, "pair.prefill"),
            (
                {"model": "small", "pair": {**second.urls, "prefill": "http://127.0.0.1:99999"}},
                400,
                "pair.prefill",
            ),
            (
                {"model": "small", "pair": {**second.urls, "decode": "http://h:1?token=x"}},
                400,
                "pair",
            ),
            (
                {"model": "small", "pair": {**second.urls, "bootstrap_port": 0}},
                400,
                "pair.bootstrap_port",
            ),
            ({"model": "small", "pair": {**second.urls, "port": 1}}, 400, "pair.port"),
            ({"model": "small", "pair": second.urls, "pairs": []}, 400, "pairs"),
            ({"model": "large", "pair": second.urls}, 409, None),
            ({"model": "small", "pair": {**second.urls, "launch": {}}}, 409, None),
            ({"model": "small", "pair": first.urls}, 409, None),
            ({"model": "small", "pair": spelled(first, "localhost", "/")}, 409, None),
            ({"model": "small", "pair": spelled(first, "user:password@127.0.0.1")}, 409, None),
            (
                {
                    "model": "small",
                    "pair": {**second.urls, "prefill": first.prefill.url, "bootstrap_port": 1},
                },
                409,
                None,
            ),
            ({"model": "small", "pair": gone}, 502, None),
            ({"model": "small", "pair": swapped}, 502, None),
        ]
        for body, expected, param in bodies:
            status, answer = await at.ask("POST", body)
            assert (status, (answer.get("error") or {}).get("param")) == (expected, param), (
                body,
                answer,
            )
        for query, expected in (
            ({}, 400),
            ({"model": "large", **first.urls}, 409),
            ({"model": "small", **second.urls}, 409),
            ({"model": "small", **first.urls}, 409),  # its last one
            ({"model": "small", **first.urls, "wait_s": -1}, 400),
        ):
            assert (await at.ask("DELETE", **query))[0] == expected
        assert await at.served() == [first.prefill.url]
        for method in ("GET", "POST", "DELETE"):
            assert (await at.ask(method, key=TENANT))[0] == 403


async def test_pairs_that_share_a_server_keep_it_until_the_last_of_them_is_drained() -> None:
    async with (
        fleet() as at,
        openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="sk-t", max_retries=0) as ai,
    ):
        first, second = at.pairs
        both = Pair(second.prefill, first.decode)
        assert [(await at.add(pair))[0] for pair in (both, second)] == [201, 201]
        for pair in (both, first):
            assert (await at.ask("DELETE", model="small", **pair.urls))[0] == 200
        before = first.requests
        for _ in range(4):
            await ai.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "Hi"}], max_tokens=2
            )
        assert first.requests == before and second.requests >= 4
