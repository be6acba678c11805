"""Chat completions with an Idempotency-Key: one run however often, and at whichever router, it is
asked for.
"""

import asyncio
import gc
import json
import logging
import time
import weakref
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agent_cache import CacheUnavailable, Journals
from agent_cache.redis import RedisAgentPromptCache
from shell_router.api import ApiSettings
from shell_router.api.runs import KeptRun, KeptRuns, Run
from shell_router.core.events import Emit
from shell_router.moa.deadline import Deadlines
from shell_router.moa.requests import Answer, MoaRequest
from tests.fakes.api_server import Api, ScriptedRelay, api, chat, until
from tests.fakes.journals import MemoryJournals
from tests.fakes.moa import ScriptedMoa, agent_of, ask
from tests.fakes.redis_server import RedisServer, own_redis
from tests.fakes.scripted_engine import Gates, Hold, Script

KEY = {"Idempotency-Key": "one-run"}
CHATS = "/v1/chat/completions"
HEAD = "2afb9b83f9314e5d029766197f539792"
"""The fingerprint of an empty body."""
AGENT = {"program": "p", "agent": "a", "model": "small", "prompt": "Hello"}


redis = pytest.fixture(own_redis)


@asynccontextmanager
async def router(
    redis: RedisServer, moa: ScriptedMoa | None = None, **fields: Any
) -> AsyncIterator[Api]:
    async with AsyncExitStack() as stack:
        cache = RedisAgentPromptCache(redis.url, clock=time.monotonic, lease_s=0.4)
        journals: Journals = (await stack.enter_async_context(cache)).journals
        yield await stack.enter_async_context(api(moa, journals=journals, **fields))


def asked(*routers: Api) -> list[str]:
    """The agents that engines were asked for, all routers together."""
    engines = [engine for one in routers for engine in one.moa.engines.values()]
    return sorted(agent_of(request) for engine in engines for request in engine.generated)


def text(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


async def streamed(served: Api) -> str:
    """The text of a stream that ended in order."""
    async with served.client.post(
        served.url + CHATS, json=chat(stream=True), headers=KEY
    ) as response:
        assert response.status == 200
        frames = (await response.text()).strip().split("\n\n")
    assert frames.pop() == "data: [DONE]"
    deltas = [json.loads(frame.partition("data: ")[2])["choices"][0]["delta"] for frame in frames]
    return "".join(delta.get("content", "") for delta in deltas)


async def test_the_same_request_is_answered_once_and_repeated_at_every_router(
    redis: RedisServer,
) -> None:
    async with router(redis) as here, router(redis) as there:
        status, first = await here.post(CHATS, chat(), **KEY)
        assert status == 200
        for served in (here, there):
            _, again = await served.post(CHATS, chat(), **KEY)
            assert text(again) == text(first) and again["usage"] == first["usage"]
        assert asked(here, there) == ["left", "right", "root"]


async def test_a_second_request_follows_the_run_from_its_start(redis: RedisServer) -> None:
    gates = Gates("root")
    moa = ScriptedMoa(pace=lambda rid, piece: gates.pace(rid, piece - 2))
    async with router(redis, moa) as served, asyncio.TaskGroup() as group:
        first = group.create_task(streamed(served))
        await gates.until_waiting(1)
        second = group.create_task(streamed(served))
        await until(
            lambda: (
                served.services.metrics.registry.get_sample_value("shell_router_running_requests")
                == 2
            )
        )
        gates.open("root")
        assert await first == await second != ""
        assert asked(served) == ["left", "right", "root"]


async def test_another_router_waits_for_the_run_and_repeats_it(redis: RedisServer) -> None:
    gates = Gates("root")
    async with (
        router(redis, ScriptedMoa(pace=gates.pace)) as here,
        router(redis) as there,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(here.post(CHATS, chat(), **KEY))
        await gates.until_waiting(1)
        second = group.create_task(there.post(CHATS, chat(), **KEY))
        await until(
            lambda: (
                there.services.metrics.registry.get_sample_value("shell_router_running_requests")
                == 1
            )
        )
        gates.open("root")
        assert text((await first)[1]) == text((await second)[1])
        assert asked(there) == []


async def test_a_client_that_left_gets_the_rest_and_its_engines_did_not_go_on_meanwhile(
    redis: RedisServer,
) -> None:
    gates = Gates("root")
    moa = ScriptedMoa(pace=gates.pace)
    async with router(redis, moa) as here, router(redis) as there:
        async with here.client.post(here.url + CHATS, json=chat(stream=True), headers=KEY):
            await gates.until_waiting(1)
        await until(lambda: not moa.running)
        assert "root is done" in await streamed(there)
        assert asked(there) == ["root"]


async def test_a_run_goes_on_while_one_of_its_clients_is_there(redis: RedisServer) -> None:
    gates = Gates("root")
    async with router(redis, ScriptedMoa(pace=gates.pace)) as served, asyncio.TaskGroup() as group:
        leaves = asyncio.create_task(streamed(served))
        await gates.until_waiting(1)
        stays = group.create_task(streamed(served))
        running = served.services.metrics.registry
        await until(lambda: running.get_sample_value("shell_router_running_requests") == 2)
        leaves.cancel()
        await until(lambda: running.get_sample_value("shell_router_running_requests") == 1)
        gates.open("root")
        assert "root is done" in await stays
        assert asked(served) == ["left", "right", "root"]


async def test_another_body_under_the_same_key_is_refused(redis: RedisServer) -> None:
    gates = Gates("root")
    async with (
        router(redis, ScriptedMoa(pace=gates.pace)) as here,
        router(redis) as there,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(here.post(CHATS, chat(), **KEY))
        await gates.until_waiting(1)
        for served in (here, there):
            status, body = await served.post(CHATS, chat("Something else?"), **KEY)
            assert (status, body["error"]["code"]) == (422, "idempotency_key_reused")
        gates.open("root")
        assert (await first)[0] == 200


async def test_each_tenant_has_keys_of_its_own(redis: RedisServer) -> None:
    settings = ApiSettings(keys={"alice": "a", "bob": "b"})
    async with router(redis, settings=settings) as served:
        for key in ("a", "b"):
            status, _ = await served.post(
                CHATS, chat(f"I am {key}"), **KEY, Authorization=f"Bearer {key}"
            )
            assert status == 200


async def test_without_redis_a_key_is_refused_with_the_remedy() -> None:
    async with api() as served:
        status, body = await served.post(CHATS, chat(), **KEY)
        assert (status, body["error"]["param"]) == (400, "Idempotency-Key")
        assert "Set cache.backend to redis" in body["error"]["message"]
        assert asked(served) == []
        assert (await served.get("/v1/traces"))[1]["data"] == [], "what never ran has no trace"


@pytest.mark.parametrize("key", ["", "two words", "x" * 256])
async def test_a_key_must_be_fit_to_name_something(key: str) -> None:
    async with api(journals=MemoryJournals()) as served:
        status, body = await served.post(CHATS, chat(), **{"Idempotency-Key": key})
        assert (status, body["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        (CHATS, chat(model="small", lazy=True, program="p")),
    ],
)
async def test_a_key_is_refused_where_the_run_would_not_be_kept(
    path: str, body: dict[str, Any]
) -> None:
    async with api(journals=MemoryJournals(), relays={"small": ScriptedRelay()}) as served:
        status, said = await served.post(path, body, **KEY)
        assert (status, said["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, chat()),
        ("/v1/agent/requests", AGENT),
        ("/v1/responses", {"model": "duo", "input": "x", "background": True}),
    ],
)
async def test_what_nests_deeper_than_can_be_kept_is_refused(
    path: str, body: dict[str, Any]
) -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    async with api(journals=MemoryJournals()) as served:
        status, said = await served.post(path, {**body, "extra": deep}, **KEY)
        assert (status, said["error"]["code"]) == (400, "invalid_request")
        assert "Flatten it" in said["error"]["message"]


AGENTS = "/v1/agent/requests"


def paced(gates: Gates) -> ScriptedMoa:
    """Agent requests, of which those of `gates` wait."""
    return ScriptedMoa(pace=lambda rid, piece: gates.pace(f".{rid.partition('.')[0]}", piece))


def agents_asked(*routers: Api) -> list[str]:
    """As `asked`, of agent requests."""
    engines = [engine for one in routers for engine in one.moa.engines.values()]
    return sorted(
        request.rid.partition(".")[0] for engine in engines for request in engine.generated
    )


async def test_an_agent_request_is_answered_once_and_repeated_at_every_router(
    redis: RedisServer,
) -> None:
    async with router(redis) as here, router(redis) as there:
        sent = [served.post(AGENTS, AGENT, **KEY) for served in (here, there, here, there)]
        answers = [body["text"] for status, body in await asyncio.gather(*sent) if status == 200]
        assert len(answers) == 4 and len(set(answers)) == 1
        assert agents_asked(here, there) == ["a"]
        status, body = await there.post(AGENTS, {**AGENT, "prompt": "Something else?"}, **KEY)
        assert (status, body["error"]["code"]) == (422, "idempotency_key_reused")


async def test_an_agent_whose_router_ends_goes_on_at_the_next_and_can_be_read_there(
    redis: RedisServer,
) -> None:
    gates = Gates("b")
    one, two = (
        AGENT,
        {**AGENT, "agent": "b", "prompt": ["It said: ", {"output_of": "a"}], "stream": True},
    )
    key = {"Idempotency-Key": "two"}
    async with router(redis) as there, aiohttp.ClientSession() as client:
        async with router(redis, paced(gates), drain_s=0.01) as here:
            assert (await here.post(AGENTS, one, **KEY))[0] == 200
            asking = asyncio.create_task(client.post(here.url + AGENTS, json=two, headers=key))
            await gates.until_waiting(1)
        async with await asking as response:
            assert "router_stopping" in await response.text()
        _, first = await there.post(AGENTS, one, **KEY)
        async with there.client.post(there.url + AGENTS, json=two, headers=key) as response:
            last = (await response.text()).split("\n\n")[-3]
            second = json.loads(last.removeprefix("data: "))["text"]
        await there.post(AGENTS, {**AGENT, "agent": "c", "prompt": [{"output_of": "b"}]})
        assert there.moa.prompts("small") == [f"It said: {first['text']}", second]
        assert agents_asked(there) == ["b", "c"]


async def test_an_agent_that_its_program_cancels_is_asked_again_by_a_retry(
    redis: RedisServer,
) -> None:
    gates = Gates("a")
    async with router(redis, paced(gates)) as served:
        asking = asyncio.create_task(served.post(AGENTS, AGENT, **KEY))
        await gates.until_waiting(1)
        async with served.client.delete(f"{served.url}{AGENTS}/p") as response:
            assert response.status == 200
        assert (await asking)[1]["error"]["code"] == "agent_failed"
        gates.open("a")
        assert (await served.post(AGENTS, AGENT, **KEY))[0] == 200


async def frames_after(served: Api, last: str | None, **fields: Any) -> tuple[list[str], str, str]:
    """The ids of a repeated stream's events, its text, and the code of the error that it ends
    with."""
    headers, ids, text, code = KEY | ({} if last is None else {"Last-Event-ID": last}), [], "", ""
    async with served.client.post(
        served.url + CHATS, json=chat(stream=True, **fields), headers=headers
    ) as response:
        for frame in (await response.text()).strip().split("\n\n"):
            id, _, data = frame.rpartition("data: ")
            if data == "[DONE]" or "event: " in id:
                continue
            body = json.loads(data)
            code = body.get("error", {}).get("code", "")
            ids += [id.strip().removeprefix("id: ")] if id else []
            text += "".join(
                choice["delta"].get("content", "") for choice in body.get("choices", ())
            )
    return ids, text, code


@pytest.mark.parametrize("agents", [False, True])
async def test_what_follows_the_last_event_is_sent_whatever_the_events_were(
    redis: RedisServer, agents: bool
) -> None:
    async with router(redis) as here, router(redis) as there:
        ids, whole, _ = await frames_after(here, None, include_agents=agents)
        assert ids[-1].startswith(f"{len(whole)}-")
        for at in range(len(whole) + 1):
            last = f"{at}-{zlib.crc32(whole[:at].encode()):08x}"
            for served in (here, there):
                assert (await frames_after(served, last, include_agents=agents))[1:] == (
                    whole[at:],
                    "",
                )


@pytest.mark.parametrize("last", ["5-00000000", "100000-00000000"])
async def test_a_client_whose_text_differs_from_the_repeated_one_is_refused(
    redis: RedisServer, last: str
) -> None:
    async with router(redis) as served:
        assert (await frames_after(served, last))[1:] == ("", "stream_changed")


async def test_a_place_that_is_none_is_refused() -> None:
    async with api(journals=MemoryJournals()) as served:
        status, body = await served.post(CHATS, chat(stream=True), **KEY, **{"Last-Event-ID": "5"})
        assert status == 400 and body["error"]["param"] == "Last-Event-ID"


async def test_a_run_goes_on_when_redis_is_killed_and_new_ones_begin_without_it(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    gates = Gates("root")
    async with router(redis, ScriptedMoa(pace=gates.pace)) as served, asyncio.TaskGroup() as group:
        first = group.create_task(served.post(CHATS, chat(), **KEY))
        await gates.until_waiting(1)
        redis.kill()
        gates.open("root")
        assert (await first)[0] == 200
        status, _ = await served.post(CHATS, chat(), **{"Idempotency-Key": "another"})
        assert status == 200
        redis.start()
        assert (await served.post(CHATS, chat(), **{"Idempotency-Key": "third"}))[0] == 200
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["Redis is away" in record.getMessage() for record in warnings].count(True) == 2


@pytest.mark.parametrize(
    "entry", ["not JSON", "[]", '["tokens","x"]', '["begin",".0.left"]', '["finish",".0.left",7]']
)
async def test_a_journal_that_makes_no_sense_costs_nothing_but_itself(
    redis: RedisServer, entry: str
) -> None:
    async with router(redis) as here, router(redis) as there:
        _, first = await here.post(CHATS, chat(), **KEY)
        redis.ask(
            "RPUSH",
            next(name for name, _ in redis.keys().items() if name.endswith(":journal")),
            entry,
        )
        status, again = await there.post(CHATS, chat(), **KEY)
        assert status == 200 and text(again) == text(first)


async def test_a_run_that_a_stopping_router_cuts_goes_on_at_the_next(redis: RedisServer) -> None:
    gates = Gates("root")
    async with router(redis) as there, aiohttp.ClientSession() as client:
        async with router(redis, ScriptedMoa(pace=gates.pace), drain_s=0.01) as here:
            asking = asyncio.create_task(client.post(here.url + CHATS, json=chat(), headers=KEY))
            await gates.until_waiting(1)
        async with await asking as response:
            assert (await response.json())["error"]["code"] == "router_stopping"
        assert (await there.post(CHATS, chat(), **KEY))[0] == 200
        assert asked(there) == ["root"]


class GatedRun(Run):
    """A run that ends when it may."""

    def __init__(self, asked: MoaRequest | None = None) -> None:
        self.asked = asked or ask()
        self.id = self.asked.id
        self.kept: KeptRun | None = None
        self.ran: MoaRequest | None = None
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def run(self, asked: MoaRequest, also: Emit | None) -> Answer:
        self.ran, self._also = asked, also
        self.begun.set()
        await self.gate.wait()
        return Answer("done", "stop", {})


def joined(runs: KeptRuns, whole: GatedRun | None = None) -> GatedRun:
    return runs.join(whole or GatedRun(), "key", {})


async def test_a_retry_that_comes_as_the_last_client_leaves_is_answered() -> None:
    runs = KeptRuns(MemoryJournals(head=HEAD), Deadlines())
    first = joined(runs)
    leaves = asyncio.create_task(first.answer())
    await first.begun.wait()
    leaves.cancel()
    again = joined(runs)
    retry = asyncio.create_task(again.answer())
    async with asyncio.timeout(30):
        await asyncio.wait([leaves])
        again.gate.set()
        assert (await retry).text == "done"


async def test_a_client_that_comes_after_the_last_one_left_has_a_run_of_its_own() -> None:
    runs = KeptRuns(MemoryJournals(head=HEAD), Deadlines())
    first = joined(runs)
    leaves = asyncio.create_task(first.answer())
    await first.begun.wait()
    leaves.cancel()
    await asyncio.sleep(0)
    again = joined(runs)
    assert again is not first
    again.gate.set()
    assert (await again.answer()).text == "done"


@pytest.mark.parametrize("claims", [("away",), ("held", "away"), ("held", "away", "held", "away")])
async def test_a_run_waits_for_its_journal_where_the_store_is_away_for_a_moment(
    claims: Sequence[str],
) -> None:
    left = list(claims)

    class Scripted(MemoryJournals):
        async def claim(self, *args: Any) -> Sequence[bytes] | None:
            if not left:
                return await super().claim(*args)
            if left.pop(0) == "away":
                raise CacheUnavailable("the store is away")
            return None

    store = Scripted(head=HEAD)
    store.lease_s = 0.2
    whole = joined(KeptRuns(store, Deadlines()))
    whole.gate.set()
    assert (await whole.answer()).text == "done"
    assert whole.ran is not None and whole.ran.journal is not None


async def test_a_run_that_ended_is_not_held_by_itself() -> None:
    runs, whole = KeptRuns(MemoryJournals(head=HEAD), Deadlines()), GatedRun()
    joined(runs, whole).gate.set()
    gone = weakref.ref(whole)
    gc.disable()
    try:
        await whole.answer()
        del whole
        assert gone() is None
    finally:
        gc.enable()


async def test_an_agent_that_an_early_exit_cut_runs_again_for_the_same_key(
    redis: RedisServer,
) -> None:
    async def pace(rid: str, piece: int) -> None:
        if rid.startswith("late.") and piece == 1:
            await hold.pace(rid, piece)

    path, hold = "/v1/agent/requests", Hold()
    moa = ScriptedMoa(pace=pace)
    moa.engines["small"].answer = lambda _: Script("It is so.", piece_words=2)
    agent = {"program": "p", "model": "small", "prompt": "Why?"}
    outputs = [{"output_of": "first"}, {"output_of": "late"}]
    exits = {"policy": "quorum", "min_completed": 1}
    reader = {**agent, "agent": "reader", "prompt": outputs, "early_exit": exits}
    async with router(redis, moa) as served:
        late = asyncio.ensure_future(served.post(path, {**agent, "agent": "late"}, **KEY))
        await hold.until_waiting()
        reading = asyncio.ensure_future(served.post(path, reader))
        assert (await served.post(path, {**agent, "agent": "first"}))[0] == 200
        assert (await late)[1]["finish_reason"] == "abort"
        assert (await reading)[0] == 200
        hold.release()
        status, again = await served.post(path, {**agent, "agent": "late"}, **KEY)
        assert (status, again["finish_reason"]) == (200, "stop")
        assert again["text"].endswith("It is so.")  # behind the tokens that it had
