"""Health, readiness, metrics, unknown routes, names."""

import asyncio

import pytest

from shell_router.api import ApiSettings
from shell_router.engines.metrics import EngineMetrics
from shell_router.errors import ConfigError
from shell_router.routing.holdout import Compared, Holdouts
from shell_router.topology import Agent, Topology
from tests.fakes.api_server import api, chat


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


async def broken() -> bool:
    raise OSError("connection refused")


async def never() -> bool:
    await asyncio.Event().wait()
    return True


async def test_ready_names_what_is_not() -> None:
    checks = {"cache": yes, "engine small": no, "engine large": broken, "engine other": never}
    async with api(settings=ApiSettings(ready_timeout_s=0.02), checks=checks) as served:
        status, body = await served.get("/ready")
        assert status == 503
        assert body["not_ready"] == ["engine small", "engine large", "engine other"]
        assert (await served.get("/health"))[0] == 200


async def test_ready_is_200_when_all_is_well() -> None:
    async with api(checks={"cache": yes}) as served:
        assert await served.get("/ready") == (
            200,
            {
                "ready": True,
                "not_ready": [],
                "degraded": [],
                "checks": {"cache": True},
            },
        )


async def test_a_shared_cache_that_is_away_does_not_make_the_router_unready() -> None:
    async with api(checks={"cache": no, "engine small": yes}, optional_checks=("cache",)) as served:
        status, body = await served.get("/ready")
        assert (status, body["ready"], body["degraded"]) == (200, True, ["cache"])


async def test_probes_need_no_key_and_metrics_do() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"})) as served:
        assert (await served.get("/health"))[0] == 200
        assert (await served.get("/ready"))[0] == 200
        assert (await served.get("/metrics"))[0] == 401


async def test_metrics_count_requests_by_route_and_runs_by_target() -> None:
    async with api() as served:
        await served.post("/v1/chat/completions", chat())
        await served.get("/some/made/up/path")
        async with served.client.get(served.url + "/metrics") as response:
            text = await response.text()
        assert 'http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'http_requests_total{route="unmatched",status="404"} 1.0' in text
        assert 'run_seconds_count{outcome="finished",target="duo"} 1.0' in text
        assert 'agents_finished_total{model="small",reason="stop"} 1.0' in text
        assert "shell_router_running_requests 0.0" in text


async def test_metrics_have_the_number_of_the_loop_s_tasks() -> None:
    async with api() as served:

        async def tasks() -> float:
            async with served.client.get(served.url + "/metrics") as response:
                return float(
                    (await response.text()).partition("\nshell_router_asyncio_tasks ")[2].split()[0]
                )

        before = await tasks()
        async with asyncio.TaskGroup() as group:
            more = [group.create_task(asyncio.Event().wait()) for _ in range(5)]
            assert await tasks() == before + 5
            for one in more:
                one.cancel()
        assert await tasks() == before


async def test_metrics_can_be_asked_for_by_name_those_of_engines_too() -> None:
    async with api() as served:
        served.services.metrics.registry.register(
            EngineMetrics({}, restarts=[lambda: {"small": 2}])
        )
        names = {"name[]": "shell_router_engine_restarts_total"}
        async with served.client.get(served.url + "/metrics", params=names) as response:
            lines = (await response.text()).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'shell_router_engine_restarts_total{engine="small"} 2.0'
    ]


async def test_unknown_routes_and_methods_answer_in_the_same_shape() -> None:
    async with api() as served:
        status, body = await served.get("/nope")
        assert (status, body["error"]["code"]) == (404, "unknown_route")
        async with served.client.get(served.url + "/generate") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_a_name_that_is_both_topology_and_model_is_refused_at_start() -> None:
    clash = Topology("small", {"a": Agent("a", "large")})
    with pytest.raises(ConfigError, match="small"):
        async with api(topologies=(clash,)):
            pass


async def test_topologies_and_models_say_what_incremental_prefill_and_drafts_save_them() -> None:
    holdouts = Holdouts()
    updates, drafts = (
        Compared("incremental_prefill", "duo", "small"),
        Compared("drafts", "duo", "small", "root"),
    )
    for number in range(16):
        held_out, key = number % 2 == 0, drafts if number < 8 else updates
        holdouts.observe(key, held_out=held_out, seconds=2.0 + held_out + number / 100, now_s=0.0)
    async with api(holdouts=holdouts) as served:
        _, duo = await served.get("/v1/models/duo")
        (seen,) = duo["incremental_prefill"]
        assert (seen["models"], seen["state"]) == ("small", "on")
        assert seen["benefit"]["low"] < seen["benefit"]["mean"] < seen["benefit"]["high"]
        _, small = await served.get("/v1/models/small")
        assert "incremental_prefill" not in small
        (seen,) = small["drafts"]
        assert (seen["topology"], seen["role"], seen["state"]) == ("duo", "root", "on")
        _, large = await served.get("/v1/models/large")
        assert large["drafts"] == []
