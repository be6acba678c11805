"""Sessions over HTTP: which servers of a model get the requests that name one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import isfinite
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from benchmarks.scripted.server import ScriptedSettings
from shell_router.api import ApiSettings
from shell_router.core.engine import ChatServing
from shell_router.engines.sglang import SglangPair
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.queue import QueueSettings
from shell_router.topology import parse_topology
from tests.fakes.api_server import Api, ScriptedRelay, api, chat
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_pair import ScriptedPool, scripted_pool, until

TRIO = parse_topology(
    "name: trio\ntree: {shape: [2, 1], models: [small, small]}\ndefaults: {sampling: {max_new_tokens: 4}}",
    source="trio.yaml",
)
CHAT = "/v1/chat/completions"
AGENTS = "/v1/agent/requests"
KEYS = ApiSettings(keys={"alice": "sk-a", "bob": "sk-b"})
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: chat(model="small"),
    "/v1/responses": {"model": "small", "input": "Hi"},
    "/v1/messages": {
        "model": "small",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "Hi"}],
    },
    "/v1/completions": {"model": "large", "prompt": "Hi"},
    AGENTS: {"program": "p", "model": "small", "prompt": "Hi"},
    "/generate": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}},
    "/prefill_only": {"input_ids": [1, 2, 3]},
}


@dataclass
class Deployment:
    """A router before two prefill and two decode servers, which serve all of its models."""

    api: Api
    pool: ScriptedPool
    sent: int = 0

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, ...]:
        """Send the request; return the numbers of the servers that got it."""
        servers = (*self.pool.prefills, *self.pool.decodes)
        before = [server.requests for server in servers]
        self.sent += 1
        if path == AGENTS:
            body = {**body, "agent": f"agent-{self.sent}"}
        url = self.api.url + path
        async with self.api.client.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.read()
        return tuple(
            at for at, server in enumerate(servers) for _ in range(server.requests - before[at])
        )


@asynccontextmanager
async def deployed(
    settings: ScriptedSettings | None = None, api_settings: ApiSettings | None = None
) -> AsyncIterator[Deployment]:
    moa = ScriptedMoa()
    settings = settings or ScriptedSettings(vocabulary=10)
    async with scripted_pool(2, 2, settings) as pool:
        for name, model in moa.models.items():
            moa.models[name] = replace(model, engine=pool.pool)
        relays: Any = {"small": pool.pool}
        async with api(moa, api_settings, relays=relays, topologies=(TRIO,)) as served:
            yield Deployment(served, pool)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_requests_of_one_session_go_to_one_pair(path: str, stream: bool) -> None:
    body = ROUTES[path]
    if path != "/prefill_only":
        body = {**body, "stream": stream}
    async with deployed() as at:
        placed: dict[str, set[tuple[int, ...]]] = {"a": set(), "b": set()}
        for session in "abbaab":  # in turns they would go to alternate servers
            placed[session].add(await at.ask(path, body, **{"x-session-id": session}))
    assert [len(pairs) for pairs in placed.values()] == [1, 1] and placed["a"] != placed["b"]


async def test_a_session_keeps_its_pair_on_all_routes_of_a_model() -> None:
    async with deployed() as at:
        servers: Counter[int] = Counter()
        for path, body in ROUTES.items():
            servers.update(await at.ask(path, body, **{"x-claude-code-session-id": "s"}))
            await at.ask(CHAT, ROUTES[CHAT])
    assert servers == {0: len(ROUTES), 2: len(ROUTES) - 1}, "prefill_only has no decode"


async def test_the_agents_of_a_sessions_graph_are_spread() -> None:
    async with deployed() as at:
        placed = [await at.ask(CHAT, chat(model="trio"), **{"x-session-id": "a"}) for _ in range(3)]
    assert {0, 1} <= set(placed[0]), "its agents"
    assert placed[0] == placed[1] == placed[2]


@pytest.mark.parametrize("path", ROUTES)
async def test_children_go_to_their_parents_prefill_server(path: str) -> None:
    body = ROUTES[path]
    async with deployed() as at:
        homes = {
            parent: (await at.ask(path, body, **{"x-session-affinity": parent}))[0]
            for parent in "ab"
        }
        assert homes["a"] != homes["b"]
        for number, parent in enumerate("bbaaab"):
            child = {"x-session-affinity": f"child-{number}", "x-parent-session-id": parent}
            assert (await at.ask(path, body, **child))[0] == homes[parent]


async def test_children_that_arrive_together_follow_their_parent_behind_one_prefill() -> None:
    info = {"disable_overlap_schedule": False}
    settings = ScriptedSettings(vocabulary=10, server_info=info, prefill_s=0.01)
    prompt = " ".join(f"word{at}" for at in range(600))
    async with deployed(settings) as at:
        await at.pool.pool.fleet.probe()
        for parent in "ab":
            headers = {"x-claude-code-session-id": parent}
            home = (await at.ask(CHAT, chat(model="small"), **headers))[0]
            before = [server.requests for server in (*at.pool.prefills, *at.pool.decodes)]
            question = chat(f"{parent} {prompt}", model="small")
            answers = [
                at.api.post(
                    CHAT, question, **headers, **{"x-claude-code-agent-id": f"{parent}{child}"}
                )
                for child in range(4)
            ]
            uncached = []
            for _, answer in await asyncio.gather(*answers):
                usage = answer["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                uncached.append(usage["prompt_tokens"] - cached)
            after = [server.requests for server in (*at.pool.prefills, *at.pool.decodes)]
            more = [now - then for now, then in zip(after, before, strict=True)]
            assert more[home] == 4 and more[1 - home] == 0
            assert more[2:] == [2, 2], "children share no decode server"
            assert max(uncached) > 600 and sorted(uncached)[-2] < 64, "prefilled once"


async def test_one_tenants_session_is_not_anothers() -> None:
    async with deployed(api_settings=KEYS) as at:
        placed = [
            await at.ask(
                CHAT,
                chat(model="small"),
                **{"Authorization": f"Bearer {key}", "x-session-id": "s"},
            )
            for key in ("sk-a", "sk-b", "sk-b", "sk-a", "sk-a", "sk-b")
        ]
    alice, bob = placed[0], placed[1]
    assert alice != bob and placed[2:] == [bob, alice, alice, bob]


@pytest.mark.parametrize("path", [path for path in ROUTES if path.startswith("/v1")])
async def test_the_trace_shows_session_and_parent(path: str) -> None:
    odd = "é" * 100
    async with deployed() as at:
        headers = {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": odd}
        await at.ask(path, ROUTES[path], **headers)
        _, listed = await at.api.get("/v1/traces")
        (trace,) = listed["data"]
        _, whole = await at.api.get(f"/v1/traces/{trace['id']}")
        async with at.api.client.get(at.api.url + "/metrics") as response:
            metrics = await response.text()
    for shown in (trace, whole):
        assert shown["session"] == "child" and len(shown["parent_session"]) == 32
    assert "child" not in metrics and odd not in metrics


@pytest.mark.parametrize(
    "length", [b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n"]
)
@pytest.mark.parametrize("name", [b"\xff\xfe", b"<b>" * 1000, "é".encode()])
async def test_odd_bytes_name_a_session_by_their_digest(name: bytes, length: bytes) -> None:
    body = orjson.dumps(ROUTES[CHAT])
    end = b"\r\n0\r\n\r\n" if b"chunked" in length else b""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nx-session-id: " + name
    async with deployed() as at:
        address = urlsplit(at.api.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head + b"\r\n" + length % len(body) + body + end)
        assert b"200" in await reader.readline()
        writer.close()
        _, listed = await at.api.get("/v1/traces")
    expected = blake2b(name, digest_size=16).hexdigest()
    assert [trace["session"] for trace in listed["data"]] == [expected]


async def test_a_chat_is_next_whatever_a_loop_of_its_tenant_has_waiting() -> None:
    moa, ended = ScriptedMoa(), list[str]()
    scheduling = SchedulingSettings(queue=QueueSettings("least_attained", max_running=1))
    async with scripted_pool(settings=ScriptedSettings(vocabulary=10, token_s=0.005)) as at:
        pair = SglangPair(*at.pool.fleet.addresses, scheduling=scheduling)
        moa.models["small"] = replace(moa.models["small"], engine=pair)
        async with api(moa) as served:
            url = served.url + CHAT

            async def ask(session: str) -> None:
                body = chat(model="small", max_tokens=2)
                await served.post(CHAT, body, **{"x-session-id": session})
                ended.append(session)

            held = chat(model="small", stream=True, max_tokens=1000, ignore_eos=True)
            async with served.client.post(url, json=held, headers={"x-session-id": "loop"}) as one:
                await one.content.readline()
                asked = [asyncio.create_task(ask(name)) for name in ["loop"] * 20 + ["chat"]]
                await until(lambda: pair.fleet.dispatchers["decode"].waiting == len(asked))
                one.close()
            await asyncio.gather(*asked)
        await pair.aclose()
    assert ended[0] == "chat"


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"n": 2, "temperature": 0}])
async def test_an_engines_own_chats_are_of_the_session(fields: dict[str, Any]) -> None:
    relay = ScriptedRelay(chat=ChatServing())
    async with api(relays={"small": relay}) as served:
        await served.post(CHAT, chat(model="small", **fields), **{"x-session-id": "s"})
    assert relay.forwarded and {session.id for session in relay.sessions if session} == {"s"}


async def test_all_choices_are_of_the_session_and_the_class() -> None:
    async with api() as served:
        body = chat(n=2, service_tier="priority")
        assert (await served.post(CHAT, body, **{"x-session-id": "s"}))[0] == 200
        requests = [one for engine in served.moa.engines.values() for one in engine.generated]
    assert len(requests) == 6
    for one in requests:
        assert one.hints.session is not None and one.hints.session.id == "s"
        assert one.hints.tier == "priority"
    by_run = Counter((one.hints.program, one.hints.began_s) for one in requests)
    assert sorted(by_run.values()) == [3, 3], "agents share the beginning of their run"
    assert all(isfinite(one.hints.began_s) for one in requests)
