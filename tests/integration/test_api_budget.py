"""What requests cost, and what they may spend, on each route."""

from dataclasses import replace
from typing import Any

import pytest

from shell_router.core.budget import Price
from tests.fakes.api_server import api, chat
from tests.fakes.moa import ScriptedMoa

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
