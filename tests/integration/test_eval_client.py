"""The evaluation's client where what it meets is not what it expects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from shell_router.errors import EngineStalled, EngineUnreachable, ShellRouterError
from shell_router.lab.evaluation.client import RouterClient
from tests.fakes.api_server import api, chat
from tests.fakes.evaluations import adding_moa


@asynccontextmanager
async def _client_of(
    routes: dict[str, web.Response], limit_s: float = 5.0
) -> AsyncIterator[RouterClient]:
    """A client of a server that answers GET requests to these paths."""

    async def answer(request: web.Request) -> web.Response:
        found = routes.get(request.path)
        return (
            web.Response(status=404)
            if found is None
            else web.Response(status=found.status, body=found.body)
        )

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            yield RouterClient(session, url, limit_s=limit_s)
    finally:
        await runner.cleanup()


async def test_another_server_is_distinguished_from_a_router_at_once() -> None:
    async with _client_of({}) as client:
        with pytest.raises(ShellRouterError, match="is no shell-router: its /ready answered 404"):
            await client.wait_until_ready(limit_s=5)


async def test_models_without_a_kind_are_those_of_another_server() -> None:
    async with _client_of({"/v1/models": web.json_response({"data": [{"id": "gpt"}]})}) as client:
        with pytest.raises(ShellRouterError, match="is no shell-router: its models have no kind"):
            await client.list_settings()


async def test_a_router_that_never_gets_ready_is_given_up() -> None:
    async with _client_of({"/ready": web.Response(status=503)}) as client:
        with pytest.raises(EngineStalled, match=r"not ready within 0\.01 s"):
            await client.wait_until_ready(limit_s=0.01)


async def test_an_answer_that_is_no_json_is_shown() -> None:
    async with _client_of(
        {"/v1/models": web.Response(status=502, body=b"<html>Bad Gateway")}
    ) as client:
        with pytest.raises(ShellRouterError, match=r"answered 502: b'<html>Bad Gateway'"):
            await client.list_settings()


@pytest.mark.parametrize(
    ("port", "cause"), [(1, "Connection refused"), (99999, "http://127.0.0.1:99999/ready")]
)
async def test_a_missing_router_is_reported_with_the_url_and_without_its_password(
    port: int, cause: str
) -> None:
    async with aiohttp.ClientSession() as session:
        client = RouterClient(session, f"http://me:hidden@127.0.0.1:{port}")
        with pytest.raises(EngineUnreachable) as error:
            await client.wait_until_ready(limit_s=5)
    assert error.value.args[0] == (f"No answer from a router at http://127.0.0.1:{port}: {cause}.")


async def test_an_openai_base_url_will_do_and_latency_is_measured_by_the_clock() -> None:
    times = iter([10.0, 12.5])
    async with api(adding_moa({"large": 9})) as served:
        client = RouterClient(served.client, f"{served.url}/v1/", clock=lambda: next(times))
        reply = await client.ask(chat("What is 1 + 2?"))
    assert (reply.text, reply.latency_s) == ("Let me think. Answer: 3", 2.5)
    assert [(agent.agent, agent.layer) for agent in reply.agents] == [
        ("left", 0),
        ("right", 0),
        ("root", 1),
    ]


async def test_a_trace_that_another_router_holds_is_missing_with_a_remedy() -> None:
    async with api(adding_moa({})) as served:
        with pytest.raises(
            ShellRouterError, match=r"answered 404: .*behind a load balancer, ask one router"
        ):
            await RouterClient(served.client, served.url).trace("of-another-router")


async def test_a_request_over_its_limit_is_given_up() -> None:
    moa = adding_moa({})

    async def never(_rid: str, _piece: int) -> None:
        await asyncio.Event().wait()

    moa.engines["large"].pace = never
    async with api(moa) as served:
        with pytest.raises(EngineStalled, match=r"did not answer within 0\.05 s"):
            await RouterClient(served.client, served.url, limit_s=0.05).ask(chat())
