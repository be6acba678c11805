"""A deployment with adapters, as its users see it: by name in topologies, requests, the list of
models and metrics.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.scripted.server import ScriptedPair, ScriptedSettings
from shell_router.app import running_server
from shell_router.app.model_files import adapters_of, model_names
from shell_router.app.topologies import load_topologies
from shell_router.config import (
    AdaptersSection,
    Config,
    EmbedderSettings,
    Listen,
    ModelSettings,
    PairSettings,
)
from shell_router.errors import ConfigError
from tests.fakes.adapters import write_adapters

MODEL = Path(__file__).parents[2] / "models" / "small"
SERVERS = ScriptedSettings(max_loaded_adapters=2, vocabulary=30)
TREE = """
name: exam
agents:
  algebra: {model: "large:algebra"}
  biology: {model: "large:biology"}
  judge: {model: large, precursors: [algebra, biology]}
"""


@dataclass(frozen=True)
class Deployment:
    """Where it listens, and the servers behind it."""

    url: str
    servers: ScriptedPair
    client: aiohttp.ClientSession

    async def chat(self, model: str, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "2 + 2"}],
            "max_tokens": 8,
            **more,
        }
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path) as answer:
            return await answer.json() if "json" in answer.content_type else await answer.text()


def settings(folder: Path, servers: ScriptedPair | None = None, room: int = 2) -> Config:
    urls = (
        (servers.prefill.url, servers.decode.url)
        if servers
        else ("http://127.0.0.1:1", "http://127.0.0.1:2")
    )
    model = ModelSettings(
        MODEL, pairs=(PairSettings(*urls),), adapters=AdaptersSection(folder / "adapters", room)
    )
    return Config({"large": model}, embedder=EmbedderSettings("none"), listen=Listen(port=0))


@asynccontextmanager
async def deployed(
    folder: Path, names: Sequence[str] = ("algebra", "biology", "chemistry")
) -> AsyncIterator[Deployment]:
    write_adapters(folder / "adapters", names)
    topology = folder / "exam.yaml"
    topology.write_text(TREE, encoding="utf-8")
    async with ScriptedPair(SERVERS) as servers, aiohttp.ClientSession() as client:
        config = replace(settings(folder, servers), topologies=(topology,))
        async with running_server(config) as url:
            yield Deployment(url, servers, client)


async def test_an_adapter_is_a_model_in_requests_and_topologies(tmp_path: Path) -> None:
    async with deployed(tmp_path) as at:
        answers = {}
        for model in (
            "large",
            "large:algebra",
            "large:biology",
            "large:chemistry",
            "large:algebra",
        ):
            status, body = await at.chat(model)
            assert status == 200
            text = body["choices"][0]["message"]["content"]
            assert answers.setdefault(model, text) == text
        assert len(set(answers.values())) == 4
        status, body = await at.chat("exam", include_agents=True)
        assert status == 200
        assert {agent: one["model"] for agent, one in body["agents"].items()} == {
            "algebra": "large:algebra",
            "biology": "large:biology",
            "judge": "large",
        }
        assert at.servers.decode.adapters.most == 2


async def test_adapters_are_listed_with_their_parent_and_auto_stands_for_base_models_alone(
    tmp_path: Path,
) -> None:
    async with deployed(tmp_path) as at:
        listed = {one["id"]: one for one in (await at.get("/v1/models"))["data"]}
        assert {
            name: one.get("parent") for name, one in listed.items() if one["kind"] == "model"
        } == {
            "large": None,
            "large:algebra": "large",
            "large:biology": "large",
            "large:chemistry": "large",
        }
        assert listed["large:algebra"]["engine"] == listed["large"]["engine"]
        _, body = await at.chat("auto", include_agents=True)
        assert [one["model"] for one in body["agents"].values()] == ["large"]
        status, body = await at.chat(["large:algebra", "large:biology"])
        assert status == 200


async def test_an_adapter_that_does_not_exist_is_an_unknown_model(tmp_path: Path) -> None:
    async with deployed(tmp_path) as at:
        status, body = await at.chat("large:zoology")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert "large:algebra" in body["error"]["message"]


async def test_a_corrupt_adapter_fails_the_requests_that_name_it_and_no_others(
    tmp_path: Path,
) -> None:
    async with deployed(tmp_path) as at:
        (tmp_path / "adapters" / "chemistry" / "adapter_config.json").write_text("{")
        corrupt, fine = await asyncio.gather(at.chat("large:chemistry"), at.chat("large:algebra"))
        assert (corrupt[0], corrupt[1]["error"]["code"], fine[0]) == (502, "adapter_failed", 200)
        assert "chemistry" in corrupt[1]["error"]["message"]


async def test_loads_waits_and_failures_are_counted_by_server_and_waits_are_in_the_trace(
    tmp_path: Path,
) -> None:
    async with deployed(tmp_path) as at:
        for adapter in ("algebra", "biology", "chemistry"):
            await at.chat(f"large:{adapter}")
        metrics = await at.get("/metrics")
        labels = f'{{model="large",role="decode",url="{at.servers.decode.url}"}}'
        assert f"shell_router_adapter_load_seconds_count{labels} 3.0" in metrics
        assert f"shell_router_adapters_loaded{labels} 2.0" in metrics
        assert f"shell_router_adapter_wait_seconds_count{labels} 3.0" in metrics
        assert f"shell_router_adapters_missing_total{labels} 0.0" in metrics
        async with at.client.post(
            f"{at.url}/v1/chat/completions",
            json={"model": "large:algebra", "messages": [{"role": "user", "content": "2"}]},
        ) as answer:
            trace = await at.get(f"/v1/traces/{answer.headers['x-trace-id']}")
        (agent,) = trace["agents"].values()
        assert all(one["adapter_s"] > 0 for one in agent["engines"])


async def test_native_requests_name_an_adapter_by_its_model(tmp_path: Path) -> None:
    async with deployed(tmp_path) as at:
        answers = []
        for headers in ({}, {"x-model": "large"}, {"x-model": "large:algebra"}):
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
            async with at.client.post(f"{at.url}/generate", json=body, headers=headers) as answer:
                answers.append((answer.status, (await answer.json())["output_ids"]))
        assert [status for status, _ in answers] == [200, 200, 200]
        assert answers[0][1] == answers[1][1] != answers[2][1]


def test_a_topology_that_names_an_adapter_which_is_not_there_is_refused_by_line(
    tmp_path: Path,
) -> None:
    write_adapters(tmp_path / "adapters", ["algebra"])
    file = tmp_path / "exam.yaml"
    file.write_text(TREE, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"exam\.yaml:5: Unknown model 'large:biology'"):
        load_topologies(replace(settings(tmp_path), topologies=(file,)))


def test_folders_that_hold_no_adapters_are_refused_by_setting(tmp_path: Path) -> None:
    model = settings(tmp_path).models["large"]
    with pytest.raises(ConfigError, match=r"models\.large\.adapters\.folder: there is no folder"):
        adapters_of("large", model)
    (tmp_path / "adapters" / "empty").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"holds an adapter_config\.json\. Save each adapter there"
    ):
        adapters_of("large", model)
    write_adapters(tmp_path / "adapters", ["no colon: please"])
    with pytest.raises(ConfigError, match="is named 'no colon: please'"):
        adapters_of("large", model)


def test_auto_may_name_adapters_and_only_those_that_exist(tmp_path: Path) -> None:
    write_adapters(tmp_path / "adapters", ["algebra"])
    config = settings(tmp_path)
    named = replace(config, auto=replace(config.auto, models=("large", "large:algebra")))
    assert model_names(named) == ("large", "large:algebra")
    with pytest.raises(ConfigError, match="auto names 'large:zoology'"):
        model_names(replace(config, auto=replace(config.auto, models=("large:zoology",))))
    with pytest.raises(ConfigError, match="auto names 'small:algebra'"):
        replace(config, auto=replace(config.auto, models=("small:algebra",)))


def test_hundreds_of_adapters_are_found_in_their_folder(tmp_path: Path) -> None:
    write_adapters(tmp_path / "adapters", [f"a{number}" for number in range(400)])
    assert len(model_names(settings(tmp_path))) == 401
