"""Servers that prefill and decode themselves: what pairs have holds for them, too."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from benchmarks.scripted.server import Fault, ScriptedServer, ScriptedSettings
from launch.sglang_cpu.pair import free_ports
from shell_router.app import serve_deployment
from shell_router.config import ApiKey, Config, EmbedderSettings, Limits, Listen, ModelSettings
from shell_router.core.engine import Generation
from shell_router.engines.address import PairAddress, ServerAddress
from shell_router.engines.sglang import SglangPair
from shell_router.errors import (
    EngineError,
    EngineRejected,
    EngineStalled,
    EngineUnreachable,
    PromptTooLong,
)
from tests.fakes.api_server import LIMIT, chat, until
from tests.fakes.command import running_command
from tests.fakes.scripted_pair import BREAKER, LIMITS, ONCE, SOON, collect, generation

MODEL = Path(__file__).parents[2] / "models" / "small"
SETTINGS = ScriptedSettings("null", vocabulary=30)
OPERATOR = {"Authorization": "Bearer sk-o"}
FAULTS = [
    (Fault("refuse"), EngineUnreachable),
    (Fault("status", status=500), EngineRejected),
    (Fault("stall"), EngineStalled),
    (Fault("close", after_tokens=2), EngineUnreachable),
    (Fault("stall", after_tokens=2), EngineStalled),
    (Fault("garbage", after_tokens=2), EngineRejected),
    (Fault("error_event", after_tokens=2), EngineRejected),
]


@asynccontextmanager
async def scripted(
    count: int = 1, settings: ScriptedSettings = SETTINGS
) -> AsyncIterator[Sequence[ScriptedServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedServer(settings)) for _ in range(count)]


@asynccontextmanager
async def client_of(*servers: ScriptedServer, **options: Any) -> AsyncIterator[SglangPair]:
    addresses = [ServerAddress(server.url) for server in servers]
    async with aclosing(SglangPair(*addresses, **{"limits": LIMITS, **options})) as client:
        yield client


def grown(affinity: str, tokens: int) -> Generation:
    request = generation(f"{affinity}-{tokens}", tokens)
    ids = [ord(affinity), *request.input_ids[1:]]
    return replace(request, input_ids=ids, affinity=affinity)


@dataclass(frozen=True)
class Deployment:
    """A router whose model `small` has the servers, and its operator's client."""

    url: str
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: object = None, **query: str) -> Any:
        at = self.url + path
        async with self.http.request(
            method, at, json=body, params=query, headers=OPERATOR
        ) as answer:
            text = await answer.text()
            return answer.status, orjson.loads(text) if text.startswith("{") else text


@asynccontextmanager
async def deployed(*urls: str, **model: Any) -> AsyncIterator[Deployment]:
    config = Config(
        {"small": ModelSettings(MODEL, servers=urls, **model)},
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
        limits=Limits(engine_start_s=5, engine_attempts=1),
        api_keys={"ops": ApiKey("sk-o", operator=True)},
    )
    async with (
        serve_deployment(config) as url,
        aiohttp.ClientSession(timeout=LIMIT) as http,
    ):
        yield Deployment(url, http)


async def test_a_model_on_one_server_is_ready_answers_and_is_in_the_metrics() -> None:
    async with scripted() as (server,), deployed(server.url) as at:
        status, ready = await at.ask("GET", "/ready")
        assert (status, ready["checks"]["engine small"]) == (200, True)
        status, body = await at.ask(
            "POST", "/v1/chat/completions", chat(model="small", max_tokens=5)
        )
        assert (status, body["usage"]["completion_tokens"]) == (200, 5)
        _, text = await at.ask("GET", "/metrics")
        labels = f'model="small",role="server",url="{server.url}"'
        assert f"shell_router_engine_requests{{{labels}}} 0.0" in text
        await server.stop()
        assert (await at.ask("GET", "/ready"))[0] == 503
        await server.start()


@pytest.mark.parametrize(("warms", "way"), [(("route",), "route"), ((), "generate")])
async def test_updates_go_by_the_plugins_route_or_as_requests_for_one_token(
    warms: tuple[Any, ...], way: str
) -> None:
    async with (
        scripted(settings=replace(SETTINGS, warms=warms)) as (server,),
        client_of(server) as client,
    ):
        assert await client.fleet.probe() == (way,)
        assert [(await client.prefill(grown("a", end))).cached_tokens for end in (50, 100)] == [
            0,
            50,
        ]
        _, finish = await collect(client, grown("a", 120))
        assert finish.cached_tokens == 100
        async with client.forward("prefill_only", b'{"input_ids": [1, 2, 3]}') as answer:
            relayed = orjson.loads(b"".join([chunk async for chunk in answer.chunks]))
        assert relayed["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize("way", ["route", "generate"])
async def test_an_update_that_is_cancelled_is_aborted(way: Any) -> None:
    settings = replace(SETTINGS, prefill_s=60)
    async with scripted(settings=settings) as (server,), client_of(server) as client:
        client.fleet.prefill_only[client.fleet.servers[0]].way = way
        update = asyncio.create_task(client.prefill(generation("under-way")))
        await until(lambda: server.running)
        update.cancel()
        await asyncio.wait({update})
        await client.aclose()
        assert server.aborted == ["under-way"]
        assert not server.running


@pytest.mark.parametrize(("fault", "error"), FAULTS, ids=lambda fault: getattr(fault, "kind", ""))
async def test_a_failure_names_the_engine_and_the_next_request_is_served(
    fault: Fault, error: type[EngineError]
) -> None:
    limits = replace(LIMITS, stall_s=0.3) if fault.kind == "stall" else LIMITS
    async with scripted() as (server,), client_of(server, limits=limits, retries=ONCE) as client:
        server.settings = replace(server.settings, fault=fault)
        with pytest.raises(error, match=r"^The engine "):
            await collect(client, generation("failed"))
        await client.aclose()
        assert server.aborted == ["failed"]
        server.settings = replace(server.settings, fault=None)
        await collect(client, generation("next"))
        assert not server.running
        with pytest.raises(PromptTooLong):
            await collect(client, generation("long", SETTINGS.context_length + 1))


async def test_requests_are_spread_and_a_growing_prompt_stays_where_its_kv_is() -> None:
    settings = replace(SETTINGS, token_s=0.005)
    async with scripted(3, settings) as servers, client_of(*servers) as client:
        await asyncio.gather(*(collect(client, generation(f"r{index}")) for index in range(9)))
        assert [server.requests for server in servers] == [3, 3, 3]
        for affinity in "abc":
            for end in (50, 100):
                await client.prefill(grown(affinity, end))
            _, finish = await collect(client, grown(affinity, 110))
            assert finish.cached_tokens == 100


async def test_a_retry_goes_elsewhere_and_the_breaker_opens() -> None:
    async with (
        scripted(2) as (first, second),
        client_of(first, second, retries=SOON, breaker=BREAKER) as client,
    ):
        await first.stop()
        for index in range(6):
            await collect(client, generation(f"r{index}"))
        assert second.requests == 6
        assert client.fleet.retried == BREAKER.failures
        assert [server.breaker.open for server in client.fleet.servers] == [True, False]
        assert await client.fleet.serves() and client.fleet.seems_up
        await first.start()


async def test_the_load_of_a_request_is_counted_once_and_ends_with_it() -> None:
    settings = replace(SETTINGS, token_s=0.005)
    async with scripted(settings=settings) as (server,), client_of(server) as client:
        (tracked,) = client.fleet.decodes.tracked
        async with aclosing(client.generate(generation(prompt_tokens=40, new_tokens=50))) as stream:
            await anext(stream)
            load = tracked.load
            assert (load.running, load.prefill_tokens, load.tokens) == (1, 0, 90)
        assert (load.running, load.tokens) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_native_requests_keep_the_servers_own_bytes_with_log_probabilities_of_the_prompt(
    stream: bool,
) -> None:
    async with scripted() as (server,), deployed(server.url) as at:
        body = {
            "input_ids": [3, 4, 5],
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": stream,
            "sampling_params": {"max_new_tokens": 4},
        }
        _, answer = await at.ask("POST", "/generate", body)
        text = answer if isinstance(answer, str) else orjson.dumps(answer).decode()
        assert '"input_token_logprobs":[[null,3,null]' in text
        status, answer = await at.ask("POST", "/prefill_only", {"input_ids": [3, 4, 5]})
        assert (status, answer["meta_info"]["cached_tokens"]) == (200, 2)


async def test_adapters_are_models_of_their_own() -> None:
    settings = replace(SETTINGS, adapters=("algebra",))
    async with (
        scripted(settings=settings) as (server,),
        deployed(server.url, adapters={"algebra": Path("algebra")}) as at,
    ):
        texts = [
            (await at.ask("POST", "/v1/chat/completions", chat(model=model, max_tokens=8)))[1][
                "choices"
            ][0]["message"]["content"]
            for model in ("small", "small:algebra")
        ]
        assert texts[0] != texts[1]


async def test_a_server_is_added_and_the_other_drained_while_requests_run() -> None:
    settings = replace(SETTINGS, token_s=0.002)
    async with scripted(2, settings) as (old, new), deployed(old.url) as at:
        asked = chat(model="small", max_tokens=200)
        running = asyncio.create_task(at.ask("POST", "/v1/chat/completions", asked))
        await until(lambda: old.running == 1)
        added = {"model": "small", "server": new.url}
        assert await at.ask("POST", "/v1/engines", added) == (201, added)
        assert (await at.ask("POST", "/v1/engines", added))[0] == 409
        gone = {"model": "small", "server": old.url}
        assert await at.ask("DELETE", "/v1/engines", **gone) == (200, {**gone, "running": 0})
        assert (await running)[1]["usage"]["completion_tokens"] == 200
        _, listed = await at.ask("GET", "/v1/engines")
        assert listed["data"] == [{"model": "small", "server": new.url}]
        count = old.requests
        assert (await at.ask("POST", "/v1/chat/completions", asked))[0] == 200
        assert old.requests == count


async def test_a_server_of_a_pair_is_refused_and_so_is_an_undivided_one_in_a_pair() -> None:
    async with (
        scripted() as (server,),
        scripted(settings=replace(SETTINGS, role="prefill")) as (prefill,),
    ):
        async with client_of(prefill) as client:
            with pytest.raises(EngineRejected, match="disaggregation mode is prefill") as refused:
                await client.fleet.probe()
            assert "--disaggregation-mode null" in refused.value.remedy
        pair = SglangPair(PairAddress(server.url, server.url, "127.0.0.1", 1))
        async with aclosing(pair):
            with pytest.raises(EngineRejected, match="disaggregation mode is null"):
                await pair.fleet.probe()


async def test_a_server_that_is_missing_at_the_start_is_named_and_taken_in_when_it_comes() -> None:
    (port,) = free_ports(1)
    late = ScriptedServer(SETTINGS)
    async with scripted() as (server,):
        models = {
            "small": ModelSettings(MODEL, servers=(server.url,)),
            "large": ModelSettings(MODEL, servers=(f"http://127.0.0.1:{port}",)),
        }
        config = Config(
            models,
            embedder=EmbedderSettings("none"),
            listen=Listen(port=0),
            limits=Limits(engine_start_s=0.5, engine_attempts=1),
        )
        async with serve_deployment(config) as url, aiohttp.ClientSession(timeout=LIMIT) as http:
            at = Deployment(url, http)
            status, ready = await at.ask("GET", "/ready")
            assert (status, ready["degraded"]) == (200, ["engine large"])
            await late.start(port)
            asked = chat(model="large", max_tokens=3)
            async with asyncio.timeout(30):
                while (await at.ask("POST", "/v1/chat/completions", asked))[0] != 200:
                    pass
        await late.stop()


async def test_one_command_serves_the_shipped_topologies_over_one_server() -> None:
    folder = {"tokenizer_path": str(MODEL.with_name("large"))}
    async with scripted(settings=replace(SETTINGS, server_info=folder)) as (server,):
        async with running_command("serve", "--engine", server.url, "--port", "0") as command:
            url = (await command.line_with("Serving on", limit_s=60)).split()[-1]
            async with aiohttp.ClientSession(timeout=LIMIT) as http:
                asked = chat(model="tree-9-3-1", max_tokens=4)
                assert (await Deployment(url, http).ask("POST", "/v1/chat/completions", asked))[
                    0
                ] == 200
        assert server.requests > 13
