"""Loops of tool calls on the routes for chats: a graph's agents run once a turn."""

import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from agent_cache.redis import RedisAgentPromptCache
from shell_router.api import ApiSettings
from shell_router.moa.executor import Executor
from shell_router.topology import Topology, parse_topology
from tests.fakes.api_server import Api, api
from tests.fakes.moa import ScriptedMoa
from tests.fakes.redis_server import RedisServer, own_redis
from tests.fakes.tool_loops import CALL, CALLERS, calling, calling_below, ran

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
        self.items.append(message)
        for call in message["tool_calls"]:
            self.items.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    @staticmethod
    def write(ids: list[str]) -> dict[str, Any]:
        """The body of an answer with these calls."""
        look = {"name": "look", "arguments": "{}"}
        calls = [{"id": name, "type": "function", "function": look} for name in ids]
        return {"choices": [{"message": {"role": "assistant", "tool_calls": calls}}]}


class ResponsesLoop(ChatLoop):
    path = "/v1/responses"
    tools = ({"type": "function", "name": "look"},)
    text = staticmethod(lambda body: body["output"][-1]["content"][0]["text"])

    def body(self) -> dict[str, Any]:
        return {"model": NAME, "input": self.items, "tools": list(self.tools)}

    def go_on(self, body: dict[str, Any], result: str) -> None:
        self.items += body["output"]
        for call in body["output"]:
            if call["type"] == "function_call":
                answered = {"type": "function_call_output", "call_id": call["call_id"]}
                self.items.append({**answered, "output": result})

    @staticmethod
    def write(ids: list[str]) -> dict[str, Any]:
        call = {"type": "function_call", "name": "look", "arguments": "{}"}
        return {"output": [{**call, "call_id": name} for name in ids]}


class MessagesLoop(ChatLoop):
    path = "/v1/messages"
    tools = ({"name": "look", "input_schema": {"type": "object"}},)
    text = staticmethod(lambda body: body["content"][-1]["text"])

    def body(self) -> dict[str, Any]:
        return {**super().body(), "max_tokens": 100}

    def go_on(self, body: dict[str, Any], result: str) -> None:
        used = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
        block = {"type": "tool_result", "content": result}
        results = [{**block, "tool_use_id": name} for name in used]
        self.items.append({"role": "assistant", "content": body["content"]})
        self.items.append({"role": "user", "content": results})

    @staticmethod
    def write(ids: list[str]) -> dict[str, Any]:
        used = {"type": "tool_use", "name": "look", "input": {}}
        return {"content": [{**used, "id": name} for name in ids]}


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
async def router(
    redis: RedisServer, moa: ScriptedMoa | None = None, topology: Topology = TREE
) -> AsyncIterator[Api]:
    async with AsyncExitStack() as stack:
        cache = RedisAgentPromptCache(redis.url, clock=time.monotonic, lease_s=0.4)
        await stack.enter_async_context(cache)
        moa = moa or calling()
        moa.executor = Executor(moa.models, cache, moa.embedder, clock=time.monotonic)
        served = api(moa, topologies=(topology,), journals=cache.journals)
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


AGENT_CALL = re.compile("call_[0-9a-f]{24}_[a-z0-9-]+")


async def ask(served: Api, loop: ChatLoop, stream: bool, **headers: str) -> tuple[int, str]:
    """The status and the whole text of the answer."""
    body = {**loop.body(), "stream": stream}
    url = served.url + loop.path
    async with served.client.post(url, json=body, headers=headers) as response:
        return response.status, await response.text()


def find_calls(text: str) -> list[str]:
    return [*dict.fromkeys(AGENT_CALL.findall(text))]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.path)
async def test_calls_of_two_agents_come_at_once_and_each_goes_on_with_its_results(
    kind: type[ChatLoop], stream: bool
) -> None:
    loop = kind()
    async with api(calling_below(), topologies=(CALLERS,)) as served:
        status, text = await ask(served, loop, stream)
        ids = find_calls(text)
        agents = [name.rpartition("_")[2] for name in ids]
        assert (status, agents) == (200, ["proposer-1", "proposer-2"])
        assert ran(served.moa) == 2 and "I look" not in text
        loop.go_on(loop.write(ids), "seen")
        status, text = await ask(served, loop, stream)
        assert status == 200 and not find_calls(text)
        (root_call,) = dict.fromkeys(re.findall("call_[0-9a-f]{24}", text))
        assert ran(served.moa) == 2 + 3
        loop.go_on(loop.write([root_call]), "seen")
        status, text = await ask(served, loop, stream)
        assert status == 200 and "It is dry." in text
        assert ran(served.moa) == 2 + 3 + 1
        loop.items.append({"role": "user", "content": "And now?"})
        assert len(find_calls((await ask(served, loop, stream))[1])) == 0, "seen before"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.path)
async def test_results_that_are_missing_or_forged_are_refused_by_their_ids(
    kind: type[ChatLoop], stream: bool
) -> None:
    async with api(calling_below(), topologies=(CALLERS,)) as served:
        first = find_calls((await ask(served, kind(), stream))[1])
        forged = f"call_{24 * '0'}_proposer-2"
        for ids, named in ((first[:1], first[1]), ([first[0], forged], forged)):
            loop = kind()
            loop.go_on(loop.write(ids), "seen")
            status, text = await ask(served, loop, stream)
            assert status == 400 and named in text, text
        assert ran(served.moa) == 2


async def test_results_for_calls_of_another_tenants_agents_are_refused() -> None:
    loop = ChatLoop()
    settings = ApiSettings(keys={"alice": "a", "bob": "b"})
    async with api(calling_below(), settings, topologies=(CALLERS,)) as served:
        ids = find_calls((await ask(served, loop, False, Authorization="Bearer a"))[1])
        loop.go_on(loop.write(ids), "seen")
        status, text = await ask(served, loop, False, Authorization="Bearer b")
        assert status == 400 and ids[0] in text
        assert (await ask(served, loop, False, Authorization="Bearer a"))[0] == 200


async def test_results_of_agents_calls_may_come_to_another_router(redis: RedisServer) -> None:
    loop = ChatLoop()
    async with (
        router(redis, calling_below(), CALLERS) as here,
        router(redis, calling_below(), CALLERS) as there,
    ):
        _, body = await step(here, loop)
        loop.go_on(body, "seen")
        key = {"Idempotency-Key": "one-step"}
        _, body = await step(there, loop, **key)
        _, again = await step(here, loop, **key)
        assert again["usage"] == body["usage"] and ran(here.moa) == 2, "it was not run again"
        loop.go_on(body, "seen")
        header, body = await step(here, loop)
        assert (header, loop.text(body)) == ("kept", "It is dry.")
        assert (ran(here.moa), ran(there.moa)) == (2 + 1, 3)
