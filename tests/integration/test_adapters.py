"""A deployment with adapters, as its users see it: by name in topologies, requests and the list of
models.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.scripted.server import ScriptedPair, ScriptedSettings
from shell_router.app import serve_deployment
from shell_router.app.topologies import load_topologies
from shell_router.config import (
    Config,
    EmbedderSettings,
    Listen,
    ModelSettings,
    PairSettings,
)
from shell_router.core.engine import Generation
from shell_router.engines.sglang import random_rid
from shell_router.errors import ConfigError, InvalidRequest
from tests.fakes.scripted_pair import collect, scripted_pool

MODEL = Path(__file__).parents[2] / "models" / "small"
NAMES = ("algebra", "biology", "chemistry")
TREE = """
name: exam
agents:
  algebra: {model: "large:algebra"}
  biology: {model: "large:biology"}
  judge: {model: large, precursors: [algebra, biology]}
defaults: {sampling: {max_new_tokens: 128}}
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


def deployment(names: Sequence[str], servers: ScriptedPair | None = None) -> Config:
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    if servers is not None:
        urls = (servers.prefill.url, servers.decode.url)
    adapters = {name: Path("adapters") / name for name in names}
    model = ModelSettings(MODEL, pairs=(PairSettings(*urls),), adapters=adapters)
    return Config({"large": model}, embedder=EmbedderSettings("none"), listen=Listen(port=0))


def request(adapter: str, prompt_tokens: int) -> Generation:
    sampling = {"max_new_tokens": 8, "temperature": 0}
    return Generation(random_rid(), list(range(1, prompt_tokens + 1)), sampling, adapter=adapter)


@asynccontextmanager
async def deployed(folder: Path, served: tuple[str, ...] = NAMES) -> AsyncIterator[Deployment]:
    topology = folder / "exam.yaml"
    topology.write_text(TREE, encoding="utf-8")
    settings = ScriptedSettings(adapters=served, vocabulary=30)
    async with ScriptedPair(settings) as servers, aiohttp.ClientSession() as client:
        config = replace(deployment(NAMES, servers), topologies=(topology,))
        async with serve_deployment(config) as url:
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


async def test_an_adapter_that_the_servers_were_not_started_with_is_an_error_with_the_remedy(
    tmp_path: Path,
) -> None:
    async with deployed(tmp_path, served=("algebra",)) as at:
        status, body = await at.chat("large:biology")
        assert (status, body["error"]["code"]) == (502, "adapter_missing")
        assert "biology" in body["error"]["message"]
        assert "--lora-paths" in body["error"]["message"]
        status, _ = await at.chat("large:algebra")
        assert status == 200


async def test_prefill_only_requests_warm_the_adapters_own_prefix() -> None:
    served = ScriptedSettings(adapters=NAMES)
    for settings in (served, replace(served, warms=())):
        async with scripted_pool(settings=settings, adapters=NAMES) as at:
            await at.pool.fleet.probe()
            await at.pool.prefill(request("algebra", 40))
            _, of_another = await collect(at.pool, request("biology", 60))
            _, of_the_same = await collect(at.pool, request("algebra", 60))
            assert (of_another.cached_tokens, of_the_same.cached_tokens) == (0, 40)


async def test_native_requests_name_an_adapter_by_its_model(tmp_path: Path) -> None:
    async with deployed(tmp_path) as at:
        answers = []
        for headers in ({}, {"x-model": "large"}, {"x-model": "large:algebra"}):
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
            async with at.client.post(f"{at.url}/generate", json=body, headers=headers) as answer:
                answers.append((answer.status, (await answer.json())["output_ids"]))
        assert [status for status, _ in answers] == [200, 200, 200]
        assert answers[0][1] == answers[1][1] != answers[2][1]


async def test_a_native_body_may_not_name_an_adapter_itself() -> None:
    async with scripted_pool(adapters=NAMES) as at:
        with pytest.raises(InvalidRequest, match="lora_path"):
            async with at.pool.forward("generate", b'{"input_ids": [1], "lora_path": "algebra"}'):
                pass


def test_a_topology_that_names_an_adapter_which_is_not_there_is_refused_by_line(
    tmp_path: Path,
) -> None:
    file = tmp_path / "exam.yaml"
    file.write_text(TREE, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"exam\.yaml:5: Unknown model 'large:biology'"):
        load_topologies(replace(deployment(("algebra",)), topologies=(file,)))


def test_auto_may_name_adapters_and_only_those_that_exist() -> None:
    config = deployment(("algebra",))
    auto = replace(config.auto, models=("large", "large:algebra"))
    assert replace(config, auto=auto).model_names == ("large", "large:algebra")
    for name in ("large:zoology", "small:algebra"):
        with pytest.raises(ConfigError, match=f"auto names '{name}'"):
            replace(config, auto=replace(config.auto, models=(name,)))


def test_a_model_may_not_be_named_as_an_adapter_of_another() -> None:
    config = deployment(("algebra",))
    models = {**config.models, "large:algebra": ModelSettings(MODEL)}
    with pytest.raises(ConfigError, match="also the name of an adapter"):
        replace(config, models=models)
