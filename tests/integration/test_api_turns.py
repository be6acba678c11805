"""Loops of tool calls on the routes for chats: a graph's agents run once a turn."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from agent_cache.redis import RedisAgentPromptCache
from shell_router.api import ApiSettings
from shell_router.moa.executor import Executor
from shell_router.topology import parse_topology
from tests.fakes.api_server import Api, api
from tests.fakes.moa import ScriptedMoa
from tests.fakes.redis_server import RedisServer, own_redis
from tests.fakes.tool_loops import CALL, calling, ran

NAME = "tree-9-3-1"
TREE = parse_topology(
    f"name: {NAME}\ntree: {{shape: [9, 3, 1], models: [small, medium, large]}}",
    source="tree.yaml",
)

redis = pytest.fixture(own_redis)


class ChatLoop:
    path = "/v1/chat/completions"
    tools: Any = ({"type": "function", "function": {"name": "look"}},)
    text = staticmethod(lambda body: body["choices"][0]["message"]["content"])

    def __init__(self) -> None:
        self.items: list[Any] = [{"role": "user", "content": "How is it?"}]

    def body(self) -> dict[str, Any]:
        return {"model": NAME, "messages": self.items, "tools": list(self.tools)}

    def go_on(self, body: dict[str, Any], result: str) -> None:
        message = body["choices"][0]["message"]
        (call,) = message["tool_calls"]
        self.items += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]


class ResponsesLoop(ChatLoop):
    path = "/v1/responses"
    tools = ({"type": "function", "name": "look"},)
    text = staticmethod(lambda body: body["output"][-1]["content"][0]["text"])

    def body(self) -> dict[str, Any]:
        return {"model": NAME, "input": self.items, "tools": list(self.tools)}

    def go_on(self, body: dict[str, Any], result: str) -> None:
        call = body["output"][-1]
        answered = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        self.items += [*body["output"], answered]


class MessagesLoop(ChatLoop):
    path = "/v1/messages"
    tools = ({"name": "look", "input_schema": {"type": "object"}},)
    text = staticmethod(lambda body: body["content"][-1]["text"])

    def body(self) -> dict[str, Any]:
        return {**super().body(), "max_tokens": 100}

    def go_on(self, body: dict[str, Any], result: str) -> None:
        used = body["content"][-1]
        block = {"type": "tool_result", "tool_use_id": used["id"], "content": result}
        self.items += [
            {"role": "assistant", "content": body["content"]},
            {"role": "user", "content": [block]},
        ]


LOOPS = [ChatLoop, ResponsesLoop, MessagesLoop]


async def step(served: Api, loop: ChatLoop, **headers: str) -> tuple[str, dict[str, Any]]:
    """The header that says what was kept, and the answer."""
    url = served.url + loop.path
    async with served.client.post(url, json=loop.body(), headers=headers) as response:
        body = await response.json()
        assert response.status == 200, body
        return response.headers.get("x-fan-out", ""), body


@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.path)
async def test_a_loop_of_five_steps_takes_seventeen_agent_runs(kind: type[ChatLoop]) -> None:
    loop = kind()
    async with api(calling(), topologies=(TREE,)) as served:
        kept = []
        for number in range(5):
            header, body = await step(served, loop)
            kept.append(header)
            if number < 4:
                loop.go_on(body, f"seen {number}")
        assert kept == ["", *4 * ["kept"]]
        assert loop.text(body) == "It is dry."
        assert ran(served.moa) == 17
        count = served.services.metrics.registry.get_sample_value
        labels = {"model": "small", "why": "kept"}
        assert count("shell_router_agents_stopped_total", labels) == 4 * 4
        assert count("shell_router_agents_started_total", {"model": "small"}) == 4


async def test_text_beside_results_begins_no_turn_and_stands_where_it_was() -> None:
    loop = MessagesLoop()
    async with api(calling(), topologies=(TREE,)) as served:
        _, body = await step(served, loop)
        loop.go_on(body, "seen")
        reminder = "<system-reminder>Be brief.</system-reminder>"
        for place, text in ((0, "Before."), (2, reminder), (3, "Now.")):
            loop.items[-1]["content"].insert(place, {"type": "text", "text": text})
        assert (await step(served, loop))[0] == "kept"
        asked = served.moa.engines["large"].generated[-1]
        prompt = served.moa.tokenizers["large"].decode(asked.input_ids)
        assert f"<user>Before.<tool>seen<user>{reminder} Now.<assistant>" in prompt
        loop.items.append({"role": "user", "content": "And now?"})
        assert (await step(served, loop))[0] == ""


async def test_a_user_message_of_a_chat_that_continues_begins_no_turn() -> None:
    loop = ChatLoop()
    async with api(calling(), topologies=(TREE,)) as served:
        loop.go_on((await step(served, loop))[1], "seen")
        loop.items.append({"role": "user", "content": "Be brief.", "continues": True})
        assert (await step(served, loop))[0] == "kept"
        loop.items[-1] = {"role": "user", "content": "Be brief."}
        assert (await step(served, loop))[0] == ""
        loop.items = [{**loop.items[0], "continues": True}]
        assert (await step(served, loop))[0] == "", "the first begins one all the same"


async def test_a_stream_says_in_its_head_and_its_events_what_was_kept() -> None:
    loop = ChatLoop()
    async with api(calling(), topologies=(TREE,)) as served:
        loop.go_on((await step(served, loop))[1], "seen 0")
        body = {**loop.body(), "stream": True, "include_agents": True}
        async with served.stream(body) as response:
            assert response.headers["x-fan-out"] == "kept"
            text = await response.text()
        assert text.count("event: agent.stopped") == 12
        assert '"why":"kept","model":"medium"' in text
        trace = (await served.get(f"/v1/traces/{response.headers['x-trace-id']}"))[1]
        states = [agent["state"] for agent in trace["agents"].values()]
        assert sorted(states) == ["finished", *12 * ["kept"]]


async def test_a_panel_is_asked_once_a_turn() -> None:
    loop = ChatLoop()
    moa = ScriptedMoa({"judge": CALL}, call_mark="<tool_call>")
    panel = {"model": "large", "models": ["small", "medium"]}
    async with api(moa) as served:
        for _ in range(2):
            status, body = await served.post(loop.path, {**loop.body(), **panel})
            assert status == 200
            loop.go_on(body, "seen")
        assert ran(moa) == 3 + 1


async def test_results_for_another_tenants_turn_run_all_agents() -> None:
    loop = ChatLoop()
    settings = ApiSettings(keys={"alice": "a", "bob": "b"})
    async with api(calling(), settings, topologies=(TREE,)) as served:
        loop.go_on((await step(served, loop, Authorization="Bearer a"))[1], "seen 0")
        assert (await step(served, loop, Authorization="Bearer b"))[0] == ""
        assert (await step(served, loop, Authorization="Bearer a"))[0] == "kept"
        assert ran(served.moa) == 13 + 13 + 1


@asynccontextmanager
async def router(redis: RedisServer) -> AsyncIterator[Api]:
    async with AsyncExitStack() as stack:
        cache = RedisAgentPromptCache(redis.url, clock=time.monotonic, lease_s=0.4)
        await stack.enter_async_context(cache)
        moa = calling()
        moa.executor = Executor(moa.models, cache, moa.embedder, clock=time.monotonic)
        served = api(moa, topologies=(TREE,), journals=cache.journals)
        yield await stack.enter_async_context(served)


async def test_two_routers_with_one_redis_take_turns_and_one_may_leave(redis: RedisServer) -> None:
    loop = ChatLoop()
    async with router(redis) as here:
        async with router(redis) as there:
            for number, served in enumerate((there, here, there)):
                header, body = await step(served, loop)
                assert header == ("kept" if number else "")
                loop.go_on(body, f"seen {number}")
            assert (ran(there.moa), ran(here.moa)) == (14, 1)
        header, body = await step(here, loop)
        loop.go_on(body, "seen 3")
        assert (header, ChatLoop.text((await step(here, loop))[1])) == ("kept", "It is dry.")
        assert ran(here.moa) == 3


async def test_a_request_under_a_key_is_repeated_elsewhere_as_it_was(redis: RedisServer) -> None:
    loop = ChatLoop()
    key = {"Idempotency-Key": "one-step"}
    async with router(redis) as here, router(redis) as there:
        loop.go_on((await step(here, loop))[1], "seen 0")
        first, again = await step(here, loop, **key), await step(there, loop, **key)
        assert first[0] == again[0] == "kept"
        assert first[1]["usage"] == again[1]["usage"]
        assert ran(there.moa) == 0


async def test_while_redis_is_away_a_router_goes_on_with_its_own_turns(redis: RedisServer) -> None:
    loop = ChatLoop()
    async with router(redis) as served:
        loop.go_on((await step(served, loop))[1], "seen 0")
        redis.kill()
        assert (await step(served, loop))[0] == "kept"
        loop.items[0] = {"role": "user", "content": "And now?"}
        assert (await step(served, loop))[0] == ""
