"""What requests cost, and what they may spend, on each route."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest

from agent_cache.redis import RedisAgentPromptCache
from shell_router.api import ApiSettings
from shell_router.config import ApiKey
from shell_router.core.budget import Allowance, Price
from shell_router.core.engine import Engine, Finish, Generation, Tokens
from tests.fakes.api_server import Api, ScriptedRelay, api, chat
from tests.fakes.moa import ScriptedMoa
from tests.fakes.redis_server import RedisServer, own_redis

redis = pytest.fixture(own_redis)

PRICE = Price(input=1.0, output=10.0, cached=0.5)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/responses": {"model": "duo", "input": "What is it?"},
    "/v1/messages": chat(max_tokens=64),
}


def priced() -> ScriptedMoa:
    moa = ScriptedMoa()
    for alias, model in moa.models.items():
        moa.models[alias] = replace(model, price=PRICE)
    return moa


@pytest.mark.parametrize("route", BODIES)
async def test_usage_has_the_cost_and_the_same_by_model(route: str) -> None:
    async with api(priced()) as served:
        status, body = await served.post(route, BODIES[route])
        assert status == 200
        _, metrics = await read_costs(served.url, served.client)
    usage = body["usage"]
    models = usage["models"]
    assert set(models) == {"small", "medium", "large"}
    for used in models.values():
        new_tokens = used["prompt_tokens"] - used["cached_tokens"]
        dollars = PRICE.cost(new_tokens, 0, used["completion_tokens"])
        assert used["cost"] == pytest.approx(dollars + used["cached_tokens"] * 0.5e-6)
        assert used["calls"] == 1
    assert usage["cost"] == pytest.approx(sum(used["cost"] for used in models.values()))
    assert metrics == pytest.approx({name: used["cost"] for name, used in models.items()})


async def read_costs(url: str, client: Any) -> tuple[int, dict[str, float]]:
    async with client.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    costs = {}
    for line in lines:
        if line.startswith("shell_router_cost_dollars_total{"):
            name = line.partition('model="')[2].partition('"')[0]
            costs[name] = float(line.rpartition(" ")[2])
    return response.status, costs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_a_spent_budget_ends_with_the_best_output(route: str, stream: bool) -> None:
    async with api(ScriptedMoa()) as served:
        body = {**BODIES[route], "budget": {"calls": 2}, "stream": stream}
        async with served.stream(body, route) as response:
            assert response.status == 200
            text = await response.text()
    assert "left thinks" in text
    assert "max_tokens" in text or "length" in text or "max_output_tokens" in text
    assert "answers in its place" in text


@pytest.mark.parametrize("route", BODIES)
async def test_a_budget_for_nothing_is_402_with_the_figures(route: str) -> None:
    async with api(ScriptedMoa()) as served:
        status, body = await served.post(route, {**BODIES[route], "budget": {"tokens": 2}})
    assert status == 402
    assert "tokens 0 of 2" in body["error"]["message"]


@pytest.mark.parametrize(
    "budget", [{"calls": 0}, {"tokens": 1.5}, {"dollars": 1}, {"cost": -1}, 5, {"seconds": 0}]
)
async def test_a_wrong_budget_is_400_and_names_the_field(budget: object) -> None:
    async with api(ScriptedMoa()) as served:
        status, body = await served.post("/v1/chat/completions", chat(budget=budget))
    assert (status, body["error"]["param"].partition(".")[0]) == (400, "budget")


# --- budgets of keys and programs

SHARED = ApiSettings(
    keys={
        "alice": ApiKey(key="alice-secret", daily_budget=Allowance(calls=7)),
        "bob": ApiKey(key="bob-secret", program_budget=Allowance(calls=4)),
    }
)
ALICE = {"Authorization": "Bearer alice-secret"}
BOB = {"Authorization": "Bearer bob-secret"}


def count_calls(moa: ScriptedMoa) -> int:
    return sum(len(engine.generated) for engine in moa.engines.values())


async def test_fifty_requests_at_once_make_no_more_calls_than_the_day_allows() -> None:
    async with api(settings=SHARED) as served:
        asked = (served.post("/v1/chat/completions", chat(), **ALICE) for _ in range(50))
        answers = await asyncio.gather(*asked)
        assert count_calls(served.moa) == 7
        refused = [body["error"]["code"] for status, body in answers if status != 200]
        assert {status for status, _ in answers} <= {200, 402}
        assert len(refused) >= 43
        assert set(refused) == {"budget_exceeded"}
        status, _ = await served.post("/v1/chat/completions", chat(), **BOB)
        assert status == 200


async def test_two_routers_with_one_redis_share_a_days_budget(redis: RedisServer) -> None:
    async with AsyncExitStack() as stack:
        routers = []
        for _ in range(2):
            cache = RedisAgentPromptCache(redis.url, clock=time.monotonic)
            await stack.enter_async_context(cache)
            router = api(ScriptedMoa(), SHARED, accounts=cache.accounts)
            routers.append(await stack.enter_async_context(router))
        asked = (
            routers[number % 2].post("/v1/chat/completions", chat(), **ALICE)
            for number in range(50)
        )
        await asyncio.gather(*asked)
        assert sum(count_calls(router.moa) for router in routers) == 7


async def test_a_day_begins_anew_at_midnight_in_utc() -> None:
    now_s = 86_400.0 * 20_000 - 1
    async with api(settings=SHARED, wall=lambda: now_s) as served:
        for status in (200, 200, 200, 402):
            assert (await served.post("/v1/chat/completions", chat(), **ALICE))[0] == status
        now_s += 1
        assert (await served.post("/v1/chat/completions", chat(), **ALICE))[0] == 200


async def test_a_programs_requests_share_its_budget_and_no_other_programs() -> None:
    async with api(settings=SHARED) as served:
        first = {**BOB, "x-session-id": "one"}
        status, body = await served.post("/v1/chat/completions", chat(), **first)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
        status, body = await served.post("/v1/chat/completions", chat(), **first)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        status, body = await served.post("/v1/chat/completions", chat(), **first)
        assert (status, body["error"]["code"]) == (402, "budget_exceeded")
        assert "program 'one'" in body["error"]["message"]
        other = {**BOB, "x-session-id": "two"}
        assert (await served.post("/v1/chat/completions", chat(), **other))[0] == 200
        agent = {"program": "three", "model": "small", "prompt": "Why?"}
        for number in range(4):
            sent = {**agent, "agent": f"a{number}"}
            assert (await served.post("/v1/agent/requests", sent, **BOB))[0] == 200
        status, body = await served.post("/v1/agent/requests", {**agent, "agent": "a4"}, **BOB)
        assert (status, body["error"]["code"]) == (402, "budget_exceeded")


async def test_a_request_that_is_sent_again_under_its_key_is_paid_once(redis: RedisServer) -> None:
    async with shared_by(redis) as served:
        key = {**ALICE, "Idempotency-Key": "one"}
        answers = [await served.post("/v1/chat/completions", chat(), **key) for _ in range(3)]
        texts = {body["choices"][0]["message"]["content"] for _, body in answers}
        assert len(texts) == 1
        for reason in ("stop", "length"):  # calls 4 to 7 of 7
            _, body = await served.post("/v1/chat/completions", chat(), **ALICE)
            assert body["choices"][0]["finish_reason"] == reason


async def test_a_key_that_is_used_again_pays_for_what_did_not_run_before(
    redis: RedisServer,
) -> None:
    async with shared_by(redis) as served:
        for _ in range(2):
            await served.post("/v1/chat/completions", chat(), **ALICE)
        key = {**ALICE, "Idempotency-Key": "one"}
        answers = [await served.post("/v1/chat/completions", chat(), **key) for _ in range(3)]
        assert [body["choices"][0]["finish_reason"] for _, body in answers] == 3 * ["length"]
        assert len({body["choices"][0]["message"]["content"] for _, body in answers}) == 1
        assert count_calls(served.moa) == 7


@asynccontextmanager
async def shared_by(redis: RedisServer) -> AsyncIterator[Api]:
    """Serve with accounts and journals in Redis."""
    async with (
        RedisAgentPromptCache(redis.url, clock=time.monotonic) as cache,
        api(settings=SHARED, journals=cache.journals, accounts=cache.accounts) as served,
    ):
        yield served


@pytest.mark.parametrize("stream", [False, True])
async def test_the_choices_of_a_request_share_its_budget(stream: bool) -> None:
    async with api(priced()) as served:
        body = chat(n=4, budget={"calls": 4}, stream=stream)
        async with served.stream(body, "/v1/chat/completions") as response:
            await response.text()
        assert count_calls(served.moa) == 4


async def test_tokens_that_an_engine_does_not_send_are_paid_too() -> None:
    moa = priced()
    engine = moa.engines["small"]
    generate = engine.generate

    async def think(request: Generation) -> AsyncIterator[Tokens | Finish]:
        async for item in generate(request):
            yield replace(item, completion_tokens=5000) if isinstance(item, Finish) else item

    moa.models["small"] = replace(moa.models["small"], engine=cast("Engine", Thinker(think)))
    keys = {"alice": ApiKey(key="alice-secret", daily_budget=Allowance(cost=0.09))}
    async with api(moa, ApiSettings(keys=keys)) as served:
        ask = partial(served.post, "/v1/chat/completions", chat(model="small"), **ALICE)
        costs = [(await ask())[1]["usage"]["cost"] for _ in range(2)]
        assert costs == 2 * [pytest.approx(0.05, rel=0.01)]
        status, _ = await ask()
        assert status == 402


@dataclass(frozen=True)
class Thinker:
    """An engine that is no more than its `generate`."""

    generate: Callable[[Generation], AsyncIterator[Tokens | Finish]]


async def test_what_a_program_is_refused_does_not_count_for_the_day() -> None:
    budgets = {"daily_budget": Allowance(calls=10), "program_budget": Allowance(calls=3)}
    keys = {"alice": ApiKey(key="alice-secret", **budgets)}  # type: ignore[arg-type]
    async with api(settings=ApiSettings(keys=keys)) as served:
        session = {**ALICE, "X-Session-ID": "one"}
        answers = [await served.post("/v1/chat/completions", chat(), **session) for _ in range(4)]
        assert [status for status, _ in answers] == [200, 402, 402, 402]
        _, body = await served.post("/v1/chat/completions", chat(), **ALICE)
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_lazy_answers_take_no_budget() -> None:
    async with api(ScriptedMoa()) as served:
        body = chat(model="small", lazy=True, program="p", budget={"tokens": 1})
        status, answer = await served.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "budget")
        assert count_calls(served.moa) == 0


async def test_unused_and_abandoned_tokens_are_given_back() -> None:
    whole = await price_of_a_chat()
    keys = {"eve": ApiKey(key="eve-secret", daily_budget=Allowance(tokens=3 * whole + 900))}
    async with api(settings=ApiSettings(keys=keys)) as served:
        for _ in range(3):  # each pays more than 256 tokens for each of its agents at first
            status, body = await served.post(
                "/v1/chat/completions", chat(), Authorization="Bearer eve-secret"
            )
            assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")


async def price_of_a_chat() -> int:
    async with api() as served:
        _, body = await served.post("/v1/chat/completions", chat())
    total: int = body["usage"]["total_tokens"]
    return total


async def test_a_key_with_a_budget_cannot_pass_it_by_on_an_engines_own_routes() -> None:
    relay = ScriptedRelay((b"1",))
    async with api(settings=SHARED, relays={"small": relay}) as served:
        status, body = await served.post("/generate", {"text": "x"}, **ALICE)
        assert (status, "has a budget" in body["error"]["message"]) == (403, True)
        assert relay.forwarded == []
