"""Models of different shapes behind `shell-router launch`: their servers start in turns, and sleep
in turns.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest
import yaml

from benchmarks.scripted.server import Fault, ScriptedServer, ScriptedSettings
from launch.sglang_cpu.pair import free_ports
from shell_router.app import load_config, serve_deployment
from shell_router.app.launching import launch_engines, plan_launch
from tests.fakes import fake_engine, scripted_as_sglang

ROOT = Path(__file__).parents[2]
DEPLOYMENT = """
models:
  small:
    path: {models}/small
    pairs: [{{prefill: "http://127.0.0.1:{}", decode: "http://127.0.0.1:{}", bootstrap_port: {}, launch: {{}}}}]
  medium:
    path: {models}/medium
    pairs: [{{prefill: "http://127.0.0.1:{}", decode: "http://127.0.0.1:{}", bootstrap_port: {}, launch: {{}}}}]
swapping: {{max_loaded_models: 1, usage: {{small: 0.5}}}}
launch: {{python: {python}, folder: {folder}, environment: {{PYTHONPATH: {root}}}, flags: --enable-weights-cpu-backup}}
embedder: {{model: none}}
listen: {{port: 0}}
"""


async def test_launched_models_start_one_after_the_other_asleep_and_are_woken_for_their_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="shell_router.launching")
    python = fake_engine.interpreter(tmp_path, Path(scripted_as_sglang.__file__))
    file = tmp_path / "launch.yaml"
    at = {"models": ROOT / "models", "python": python, "folder": tmp_path / "logs", "root": ROOT}
    file.write_text(DEPLOYMENT.format(*free_ports(6), **at), encoding="utf-8")
    config = load_config(file, {})
    urls = [
        url
        for model in config.models.values()
        for pair in model.pairs
        for url in pair.urls.values()
    ]

    async with aiohttp.ClientSession() as http:

        async def awake() -> list[bool]:
            """Of each server whether it is awake."""
            infos = [await (await http.get(f"{url}/model_info")).json() for url in urls]
            assert {info["weight_version"].removeprefix("default") for info in infos} <= {
                "",
                " (asleep)",
            }
            return [info["weight_version"] == "default" for info in infos]

        async with launch_engines(plan_launch(config, "launch", None, {})) as engines:
            steps = [
                message.partition(";")[0].partition(" after")[0] for message in caplog.messages
            ]
            assert steps[:2] == ["small/prefill: started", "small/decode: started"]
            assert sorted(steps[2:4]) == ["small/decode: ready", "small/prefill: ready"]
            assert steps[4:6] == ["medium/prefill: started", "medium/decode: started"]
            assert await awake() == [False] * 4
            async with (
                serve_deployment(config) as url,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                assert await awake() == [True, True, False, False]
                for name in ("medium", "small", "medium"):
                    asked = [{"role": "user", "content": "What is it?"}]
                    found = await client.chat.completions.create(
                        model=name, messages=asked, max_tokens=5
                    )
                    assert found.usage and found.usage.completion_tokens == 5
                    ready = await (await http.get(f"{url}/ready")).json()
                    assert (
                        ready["checks"].items()
                        >= {"engine small": True, "engine medium": True}.items()
                    )
                assert await awake() == [False, False, True, True]
            assert set(engines.restarts().values()) == {0}


async def asleep(stack: AsyncExitStack, ports: Sequence[int]) -> list[ScriptedServer]:
    """The servers of the deployment, while the stack is open."""
    servers = []
    for role, port in (
        ("prefill", ports[0]),
        ("decode", ports[1]),
        ("prefill", ports[3]),
        ("decode", ports[4]),
    ):
        settings = ScriptedSettings(role, vocabulary=30, memory_saver=True, cpu_backup=True)
        servers.append(ScriptedServer(settings))
        servers[-1].memory.asleep, servers[-1].memory.version = True, "default (asleep)"
        await servers[-1].start(port)
        stack.push_async_callback(servers[-1].stop)
    return servers


async def test_a_router_says_which_models_have_no_server_left_and_wakes_nothing_next_to_what_may_be_starting(
    tmp_path: Path,
) -> None:
    ports, file = free_ports(6), tmp_path / "serve.yaml"
    at = {"models": ROOT / "models", "python": "python", "folder": tmp_path, "root": ROOT}
    file.write_text(DEPLOYMENT.format(*ports, **at), encoding="utf-8")
    async with AsyncExitStack() as stack:
        servers = await asleep(stack, ports)
        url = await stack.enter_async_context(serve_deployment(load_config(file, {})))
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def ready() -> tuple[int, list[bool]]:
            """The router's status, and of each model whether it is ready."""
            answer = await http.get(f"{url}/ready")
            listed = (await (await http.get(f"{url}/v1/models")).json())["data"]
            found = {model["id"]: model.get("ready") for model in listed}
            return answer.status, [found["small"], found["medium"]]

        assert await ready() == (200, [True, True])
        servers[0].memory.die("killed")
        assert await ready() == (200, [False, True])
        body = {
            "model": "medium",
            "messages": [{"role": "user", "content": "What is it?"}],
            "max_tokens": 5,
        }
        answer = await http.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status == 502 and "the engines of 'small' do not sleep" in await answer.text()
        servers[3].memory.die("killed")
        assert await ready() == (503, [False, False])


@pytest.mark.parametrize(("is_swapped", "named"), [(False, "small"), (True, "pair 1")])
async def test_a_server_of_models_that_take_turns_shows_its_failures_and_breaker_in_the_metrics(
    tmp_path: Path, is_swapped: bool, named: str
) -> None:
    ports, file = free_ports(6), tmp_path / "serve.yaml"
    at = {"models": ROOT / "models", "python": "python", "folder": tmp_path, "root": ROOT}
    deployment = yaml.safe_load(DEPLOYMENT.format(*ports, **at))
    deployment["limits"] = {"engine_attempts": 1, "breaker_failures": 1}
    async with AsyncExitStack() as stack:
        servers = await asleep(stack, ports)
        if is_swapped:
            (pair,) = deployment["models"]["small"].pop("pairs")
            deployment["swapping"] = {"pairs": [{**pair, "launch": None}]}
            del deployment["models"]["medium"], deployment["launch"]
            for server in servers:
                server.memory.begin()
                server.memory.model_path = deployment["models"]["small"]["path"]
        file.write_text(yaml.safe_dump(deployment), encoding="utf-8")
        url = await stack.enter_async_context(serve_deployment(load_config(file, {})))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        servers[1].settings = replace(servers[1].settings, fault=Fault("close"))
        body = {
            "model": "small",
            "messages": [{"role": "user", "content": "What is it?"}],
            "max_tokens": 5,
        }
        assert (await http.post(f"{url}/v1/chat/completions", json=body)).status == 502
        found = (await (await http.get(f"{url}/metrics")).text()).splitlines()
        labels = f'{{model="{named}",role="decode",url="http://127.0.0.1:{ports[1]}"}}'
        assert f"shell_router_engine_failures_total{labels} 1.0" in found
        assert f"shell_router_engine_breaker_open{labels} 1.0" in found
