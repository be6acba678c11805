"""Responses in the background, asked for with OpenAI's client at routers that share a Redis."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from agent_cache import Journals
from agent_cache.redis import RedisAgentPromptCache
from shell_router.api import ApiSettings
from shell_router.errors import EngineError
from shell_router.topology import Agent, Topology
from tests.fakes.api_server import Api, api, chat, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.redis_server import RedisServer, own_redis
from tests.fakes.scripted_engine import Gates, Script
from tests.integration.test_api_kept_runs import asked, router

ASK: dict[str, Any] = {"model": "duo", "input": "What is it?", "background": True}
RESPONSES = "/v1/responses"

redis = pytest.fixture(own_redis)


@asynccontextmanager
async def clients(*routers: Api, key: str = "none") -> AsyncIterator[list[openai.AsyncOpenAI]]:
    async with AsyncExitStack() as stack:
        made = [
            openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=key, max_retries=0)
            for one in routers
        ]
        yield [await stack.enter_async_context(one) for one in made]


async def ended(client: openai.AsyncOpenAI, id: str) -> Response:
    async with asyncio.timeout(30):
        while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            pass
    return found


async def events(client: openai.AsyncOpenAI, id: str, after: int | None = None) -> list[Any]:
    given = {} if after is None else {"starting_after": after}
    return [one async for one in await client.responses.retrieve(id, stream=True, **given)]


def text_of(found: list[Any]) -> str:
    return "".join(one.delta for one in found if one.type == "response.output_text.delta")


async def test_a_response_is_made_without_its_client_and_given_by_every_router(
    redis: RedisServer,
) -> None:
    gates = Gates("root")
    async with (
        router(redis, ScriptedMoa(pace=gates.pace)) as here,
        router(redis) as there,
        clients(here, there) as (one, two),
    ):
        tool = {"type": "function", "name": "f", "parameters": {"maximum": 2**70 + 1}}
        tools: Any = [tool]
        begun = await one.responses.create(**ASK, metadata={"for": "us"}, tools=tools)
        assert begun.status == "queued" and begun.background
        await gates.until_waiting(1)
        for client in (one, two):
            assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        gates.open("root")
        found = [await ended(client, begun.id) for client in (one, two)]
        assert found[0] == found[1] and found[0].status == "completed"
        assert found[0].to_dict()["tools"] == tools
        assert "root is done" in found[0].output_text and found[0].metadata == {"for": "us"}
        assert found[0].created_at == begun.created_at and found[0].usage is not None
        assert asked(here, there) == ["left", "right", "root"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_router_that_is_asked_goes_on_with_what_a_dead_one_left(
    redis: RedisServer, stream: bool
) -> None:
    gates = Gates("root")
    async with router(redis) as there, clients(there) as (two,):
        async with (
            router(redis, ScriptedMoa(pace=gates.pace), drain_s=0.01) as here,
            clients(here) as (one,),
        ):
            begun = await one.responses.create(**ASK)
            await gates.until_waiting(1)
        found = (await events(two, begun.id))[-1].response if stream else await ended(two, begun.id)
        assert found.status == "completed" and found.created_at == begun.created_at
        assert asked(there) == ["root"]


async def test_a_stream_can_be_left_and_followed_from_any_event_on_at_any_router(
    redis: RedisServer,
) -> None:
    gates = Gates("root")
    moa = ScriptedMoa(pace=lambda rid, piece: gates.pace(rid, piece - 2))
    async with (
        router(redis, moa) as here,
        router(redis) as there,
        clients(here, there) as (one, two),
    ):
        first = []
        async for event in await one.responses.create(**ASK, stream=True):
            first.append(event)
            if event.type == "response.output_text.delta":
                break
        id, last = first[0].response.id, first[-1].sequence_number
        gates.open("root")
        whole = (await ended(two, id)).output_text
        for client in (one, two):
            rest = await events(client, id, last)
            assert text_of(first) + text_of(rest) == whole and rest[-1].type == "response.completed"
            assert rest[0].sequence_number > last and rest[-1].response.output_text == whole
            replayed = await events(client, id)
            assert text_of(replayed) == whole
            for at in range(replayed[-1].sequence_number):
                assert text_of(await events(client, id, at)) == whole[max(0, at - 3) :]
        assert asked(here, there) == ["left", "right", "root"]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stream_at_another_router_waits_for_the_end(
    redis: RedisServer, cancelled: bool
) -> None:
    gates = Gates("root")
    async with (
        router(redis, ScriptedMoa(pace=gates.pace)) as here,
        router(redis) as there,
        clients(here, there) as (one, two),
    ):
        begun = await one.responses.create(**ASK)
        await gates.until_waiting(1)
        following = asyncio.create_task(events(two, begun.id))
        await until(
            lambda: [task.get_name() for task in asyncio.all_tasks()].count("kept-run") == 2
        )
        if cancelled:
            await two.responses.cancel(begun.id)
            with pytest.raises(openai.ConflictError, match="was cancelled"):
                await following
        else:
            gates.open("root")
            assert (await following)[-1].type == "response.completed"
        assert asked(there) == []
        assert (await two.responses.retrieve(begun.id)).status == (
            "cancelled" if cancelled else "completed"
        )


async def test_a_cancelled_response_ends_at_the_router_that_runs_it(redis: RedisServer) -> None:
    gates = Gates("root")
    moa = ScriptedMoa(pace=gates.pace)
    async with (
        router(redis, moa) as here,
        router(redis) as there,
        clients(here, there) as (one, two),
    ):
        for canceller in (one, two):
            begun = await one.responses.create(**ASK)
            await gates.until_waiting(1)
            follower = asyncio.create_task(events(one, begun.id))
            cancelled = await canceller.responses.cancel(begun.id)
            assert cancelled.status == "cancelled"
            await until(lambda: not moa.running)
            assert (await follower)[-1].type == "response.failed"
            for client in (one, two):
                assert (await client.responses.retrieve(begun.id)).status == "cancelled"
                assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert asked(there) == []


class Late:
    """Journals whose calls of one kind arrive after `first`."""

    def __init__(self, journals: Journals, call: str, first: Callable[[], Awaitable[None]]) -> None:
        self._journals, self._call, self._first = journals, call, first

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._journals, name)

        async def late(*given: Any) -> Any:
            await self._first()
            return await call(*given)

        return late if name == self._call else call


async def test_a_response_that_ends_while_it_is_cancelled_keeps_its_output(
    redis: RedisServer,
) -> None:
    gates = Gates("root")

    async def end() -> None:
        gates.open("root")
        assert (await ended(client, begun.id)).status == "completed"

    async with RedisAgentPromptCache(redis.url, clock=time.monotonic, lease_s=0.4) as cache:
        journals: Any = Late(cache.journals, "seal", end)
        async with (
            api(ScriptedMoa(pace=gates.pace), journals=journals) as served,
            clients(served) as (client,),
        ):
            begun = await client.responses.create(**ASK)
            await gates.until_waiting(1)
            for found in (
                await client.responses.cancel(begun.id),
                await client.responses.retrieve(begun.id),
            ):
                assert found.status == "completed" and "root is done" in found.output_text


async def test_a_response_that_is_just_being_created_has_its_time(redis: RedisServer) -> None:
    key, found = "one-response", list[Response]()
    id = "resp_" + blake2b(key.encode(), digest_size=16).hexdigest()

    async def look_and_cancel() -> None:
        if not found:
            found.append(await client.responses.retrieve(id))
            found.append(await client.responses.cancel(id))

    async with RedisAgentPromptCache(redis.url, clock=time.monotonic, lease_s=0.4) as cache:
        journals: Any = Late(cache.journals, "append", look_and_cancel)
        async with (
            api(journals=journals, wall=lambda: 1234.5) as served,
            clients(served) as (client,),
        ):
            found.append(
                await client.responses.create(**ASK, extra_headers={"Idempotency-Key": key})
            )
            found.append(await client.responses.retrieve(id))
    assert [one.status for one in found] == ["queued", "cancelled", "queued", "cancelled"]
    assert [one.created_at for one in found] == [1234] * 4


async def test_two_retries_with_a_key_race_for_one_response(redis: RedisServer) -> None:
    async with router(redis) as here, router(redis) as there, clients(here, there) as (one, two):
        headers = {"Idempotency-Key": "one-response"}
        sent = [
            client.responses.create(**ASK, extra_headers=headers) for client in (one, two, one, two)
        ]
        begun = await asyncio.gather(*sent)
        assert len({response.id for response in begun}) == 1
        assert (await ended(two, begun[0].id)).status == "completed"
        again = await one.responses.create(**ASK, extra_headers=headers)
        assert (again.id, again.status) == (begun[0].id, "completed")
        with pytest.raises(openai.UnprocessableEntityError):
            await two.responses.create(**{**ASK, "input": "Something else?"}, extra_headers=headers)
        assert asked(here, there) == ["left", "right", "root"]


async def test_a_response_is_unknown_to_other_tenants(redis: RedisServer) -> None:
    settings = ApiSettings(keys={"alice": "a", "bob": "b"})
    async with router(redis, settings=settings) as served, clients(served, key="a") as (alice,):
        begun = await alice.responses.create(**ASK)
        async with clients(served, key="b") as (bob,):
            for ask in (bob.responses.retrieve, bob.responses.cancel):
                with pytest.raises(openai.NotFoundError, match="No background response"):
                    await ask(begun.id)
        assert (await ended(alice, begun.id)).status == "completed"


def tree(agents: int) -> Topology:
    """A root that reads all other agents."""
    leaves = {name: Agent(name, "small") for name in map("leaf{}".format, range(agents - 1))}
    return Topology(f"tree-{agents}", {**leaves, "root": Agent("root", "large", tuple(leaves))})


@pytest.mark.parametrize("limits", [{"max_agents_per_tenant": 26}, {"max_running": 2}])
async def test_a_streamed_response_counts_once_until_it_ends_whether_its_client_stays_or_leaves(
    redis: RedisServer, limits: dict[str, int]
) -> None:
    gates = Gates("root")
    moa = ScriptedMoa(pace=lambda rid, piece: gates.pace(rid, piece - 2))
    settings, trees = ApiSettings(keys={"alice": "a", "bob": "b"}, **limits), (tree(13), tree(26))
    async with (
        router(redis, moa, settings=settings, topologies=trees) as served,
        clients(served, key="a") as (alice,),
    ):
        metrics, ask = served.services.metrics.registry, {**ASK, "model": "tree-13"}

        def running() -> float | None:
            return metrics.get_sample_value("shell_router_running_requests")

        streams = [await alice.responses.create(**ask, stream=True) for _ in range(2)]
        await gates.until_waiting(2)
        with pytest.raises(openai.RateLimitError):
            await alice.responses.create(**ask)
        begun = await anext(aiter(streams[0]))
        async with await alice.responses.retrieve(begun.response.id, stream=True) as followed:
            assert (await anext(aiter(followed))).type == begun.type
        for stream in streams:
            await stream.close()
        left = {"route": RESPONSES, "status": "499"}
        await until(lambda: metrics.get_sample_value("shell_router_http_requests_total", left) == 2)
        with pytest.raises(openai.RateLimitError):
            await alice.responses.create(**ask)
        assert running() == 2
        gates.open("root")
        await until(lambda: running() == 0)
        assert (
            await alice.chat.completions.create(
                model="tree-26", messages=[{"role": "user", "content": "x"}]
            )
        ).choices


async def test_a_response_that_two_requests_take_up_at_once_counts_once(redis: RedisServer) -> None:
    gates, both, claims = Gates("root"), asyncio.Event(), list[None]()
    settings, trees = (
        ApiSettings(keys={"alice": "a", "bob": "b"}, max_agents_per_tenant=30),
        (tree(13), tree(14)),
    )

    async def claim_together() -> None:
        claims.append(None)
        both.set() if len(claims) == 2 else None
        await both.wait()

    fields: dict[str, Any] = {"settings": settings, "topologies": trees}
    orphaning = router(redis, ScriptedMoa(pace=gates.pace), drain_s=0.01, **fields)
    async with orphaning as here, clients(here, key="a") as (alice,):
        begun = await alice.responses.create(**{**ASK, "model": "tree-13"})
        await gates.until_waiting(1)
    async with RedisAgentPromptCache(redis.url, clock=time.monotonic, lease_s=0.4) as cache:
        fields["journals"] = Late(cache.journals, "claim", claim_together)
        moa = ScriptedMoa(pace=gates.pace)
        async with api(moa, **fields) as there, clients(there, key="a") as (alice,):
            found = await asyncio.gather(*[alice.responses.retrieve(begun.id) for _ in range(2)])
            assert [one.status for one in found] == ["queued", "queued"]
            other = await alice.responses.create(**{**ASK, "model": "tree-14"})
            gates.open("root")
            for id in (begun.id, other.id):
                assert (await ended(alice, id)).status == "completed"


async def test_an_id_that_names_nothing_or_another_run_is_unknown(redis: RedisServer) -> None:
    async with router(redis) as served, clients(served) as (client,):
        key = "resp_" + "0" * 32
        await served.post("/v1/chat/completions", chat(), **{"Idempotency-Key": key})
        for id in (key, "resp_" + "1" * 32, "resp_x", "{response_id}"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(id)
        status, body = await served.get(
            f"{RESPONSES}/{(await client.responses.create(**ASK)).id}?starting_after=x"
        )
        assert (status, body["error"]["param"]) == (400, "starting_after")


async def test_a_failed_response_says_why_at_every_router(redis: RedisServer) -> None:
    async with (
        router(redis, ScriptedMoa({"left": Script("", error=EngineError("left broke"))})) as here,
        router(redis) as there,
        clients(here, there) as (one, two),
    ):
        begun = await one.responses.create(**ASK)
        for client in (one, two):
            found = await ended(client, begun.id)
            assert (
                found.status == "failed"
                and found.error is not None
                and "left" in found.error.message
            )
            assert (await events(client, begun.id))[-1].type == "response.failed"
        assert asked(there) == []


async def test_without_redis_background_is_refused_with_the_remedy() -> None:
    async with api() as served:
        status, body = await served.post(RESPONSES, ASK)
        assert (status, body["error"]["param"]) == (400, "background")
        assert "Set cache.backend to redis" in body["error"]["message"]
        assert (await served.get(f"{RESPONSES}/resp_{'0' * 32}"))[0] == 404


async def test_a_response_goes_on_while_redis_is_away(redis: RedisServer) -> None:
    gates = Gates("root")
    moa = ScriptedMoa(pace=gates.pace)
    async with router(redis, moa) as served, clients(served) as (client,):
        begun = await client.responses.create(**ASK)
        await gates.until_waiting(1)
        redis.stall()
        with pytest.raises(openai.InternalServerError, match="Redis is away"):
            await client.responses.retrieve(begun.id)
        with pytest.raises(openai.InternalServerError, match="Redis is away"):
            await client.responses.create(**ASK)
        gates.open("root")
        redis.resume()
        assert (await ended(client, begun.id)).status == "completed"
        assert asked(served) == ["left", "right", "root"]
