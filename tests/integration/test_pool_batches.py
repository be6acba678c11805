"""Batches of the official client whose lines name a pool, answered by real models on embedded workers."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
import yaml

from shell_router.app import load_config, running_server
from shell_router.errors import ConfigError
from tests.fakes.api_server import ENDPOINT, ENDS, jsonl, line
from tests.fakes.pools import ROOT, write_pool


def write_deployment(at: Path, **batches: Any) -> Path:
    """A router that serves `small`, and answers batches for the pool `experts`."""
    write_pool(at)
    (at / "pair.yaml").write_text("tree: {shape: [2, 1], models: [small]}\nearly_exit: off\n")
    deployment = {
        "topologies": ["pair.yaml"],
        "models": {"small": {"path": str(ROOT / "models/small")}},
        "listen": {"port": 0},
        "embedder": {"model": "hash"},
        "batches": {"folder": "kept", "pools": {"panel": "pool.yaml"}, **batches},
    }
    file = at / "router.yaml"
    file.write_text(yaml.safe_dump(deployment))
    return file


@asynccontextmanager
async def client(deployment: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running_server(load_config(deployment, {})) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as ai,
    ):
        yield ai


async def answered(ai: openai.AsyncOpenAI, *lines: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a batch of these lines gives: response bodies by custom_id, of those answered and of those refused."""
    file = await ai.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    batch = await ai.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status not in ENDS:
        batch = await ai.batches.retrieve(batch.id)
    assert batch.status == "completed"
    return await _bodies(ai, batch.output_file_id), await _bodies(ai, batch.error_file_id)


async def _bodies(ai: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    lines = map(orjson.loads, (await ai.files.content(file)).text.splitlines())
    return {one["custom_id"]: one["response"]["body"] for one in lines}


@pytest.mark.slow
async def test_lines_that_name_a_pool_are_answered_by_its_experts_and_the_others_as_ever(tmp_path: Path) -> None:
    asked = [orjson.loads(one) for one in (ROOT / "models/data/test.jsonl").read_bytes().splitlines()[:12]]
    pooled = [line(str(place), one["question"], model="panel") for place, one in enumerate(asked)]
    async with client(write_deployment(tmp_path)) as ai:
        done, refused = await answered(
            ai,
            *pooled,
            line("online", asked[0]["question"], model="small", max_tokens=64),
            line("hot", asked[0]["question"], model="panel", temperature=1.0),
        )
        async with aiohttp.ClientSession() as session, session.get(str(ai.base_url.join("/metrics"))) as answer:
            metrics = await answer.text()
    assert re.search(r'pool_load_seconds_count\{kind="engine started"\} [1-9]', metrics)
    assert set(done) == {*map(str, range(12)), "online"}
    assert "temperature" in refused["hot"]["error"]["message"]
    right = [
        done[str(place)]["choices"][0]["message"]["content"].endswith(f" {one['answer']}")
        for place, one in enumerate(asked)
    ]
    assert sum(right) >= 6
    assert {done[str(place)]["pool"]["by"] for place in range(12)} == {"proposers", "aggregator"}
    assert all(done[str(place)]["usage"]["completion_tokens"] > 0 for place in range(12))
    assert "pool" not in done["online"]
    assert list((tmp_path / "kept" / "pools").iterdir()) == []


@pytest.mark.slow
async def test_a_pool_that_cannot_run_says_why_for_each_of_its_lines(tmp_path: Path) -> None:
    deployment = write_deployment(tmp_path)
    (tmp_path / "costs.yaml").unlink()
    async with client(deployment) as ai:
        done, refused = await answered(ai, line("one", "Why?", model="panel"), line("two", model="small", max_tokens=4))
    assert set(done) == {"two"}
    assert "shell-router batch profile" in refused["one"]["error"]["message"]


@pytest.mark.parametrize(
    ("batches", "complaint"),
    [
        ({"pools": {"small": "pool.yaml"}}, "'small' is a model"),
        ({"pools": {"pair": "pool.yaml"}}, "'pair' is a topology"),
        ({"folder": None}, "Set batches.folder"),
    ],
)
async def test_pools_that_could_not_be_asked_are_refused(
    tmp_path: Path, batches: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        async with running_server(load_config(write_deployment(tmp_path, **batches), {})):
            pass
