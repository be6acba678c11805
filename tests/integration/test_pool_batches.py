"""Batches of the official client whose lines name a pool, answered by real models on embedded
workers.
"""

import asyncio
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
from openai.types import Batch

from shell_router.api import Services
from shell_router.app import load_config, serve_deployment
from shell_router.app.fleet_changes import FleetChanges
from shell_router.batch.api.lines import BatchLine, LineResult
from shell_router.batch.api.runner import PoolLines
from shell_router.batch.journal import Output, Role
from shell_router.batch.pool import load_pool
from shell_router.batch.questions import Question
from shell_router.batch.workers import open_workers
from shell_router.errors import ConfigError, EngineError, StorageFailed
from tests.fakes.api_server import ENDPOINT, ENDS, jsonl, line, live, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.pools import ROOT, write_pool
from tests.fakes.turns import Turns, counted

PROPOSERS_AND_AGGREGATOR: tuple[tuple[Role, str], ...] = (
    ("proposer", "small"),
    ("proposer", "medium"),
    ("aggregator", "large"),
)


PAIR = {"prefill": "http://127.0.0.1:1", "decode": "http://127.0.0.1:2", "launch": {}}


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
        serve_deployment(load_config(deployment, {})) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as ai,
    ):
        yield ai


async def begun(ai: openai.AsyncOpenAI, *lines: object) -> Batch:
    """A new batch of these lines."""
    file = await ai.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await ai.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
    )


async def ended(ai: openai.AsyncOpenAI, batch: Batch) -> Batch:
    """The batch once it has ended."""
    while batch.status not in ENDS:
        batch = await ai.batches.retrieve(batch.id)
    return batch


async def answered(ai: openai.AsyncOpenAI, *lines: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a batch of these lines gives: response bodies by custom_id, of those answered and of
    those refused.
    """
    batch = await ended(ai, await begun(ai, *lines))
    assert batch.status == "completed"
    return await _bodies(ai, batch.output_file_id), await _bodies(ai, batch.error_file_id)


def scripted_services() -> Services:
    """What a runner of lines needs besides its pool."""
    moa = ScriptedMoa()
    return Services(
        moa.executor, moa.programs, live(moa.models), moa.models, {}, FleetChanges({}, {})
    )


async def no_run_is_left(deployment: Path) -> None:
    """Wait until the folder of the batches holds no run of a pool any more."""
    await until(lambda: not list((deployment.parent / "kept" / "pools").iterdir()))


async def _bodies(ai: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    lines = map(orjson.loads, (await ai.files.content(file)).text.splitlines())
    return {one["custom_id"]: one["response"]["body"] for one in lines}


@pytest.mark.slow
async def test_lines_that_name_a_pool_are_answered_by_its_experts_and_the_others_as_ever(
    tmp_path: Path,
) -> None:
    asked = [
        orjson.loads(one)
        for one in (ROOT / "models/data/test.jsonl").read_bytes().splitlines()[:12]
    ]
    pooled = [line(str(place), one["question"], model="panel") for place, one in enumerate(asked)]
    deployment = write_deployment(tmp_path)
    async with client(deployment) as ai:
        done, refused = await answered(
            ai,
            *pooled,
            line("online", asked[0]["question"], model="small", max_tokens=64),
            line("hot", asked[0]["question"], model="panel", temperature=1.0),
        )
        async with (
            aiohttp.ClientSession() as session,
            session.get(str(ai.base_url.join("/metrics"))) as answer,
        ):
            metrics = await answer.text()
        await no_run_is_left(deployment)
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


@pytest.mark.slow
async def test_lines_that_failed_are_answered_once_their_pools_file_is_corrected(
    tmp_path: Path,
) -> None:
    """The sampling is another then, which a run that was begun before would not take."""
    deployment = write_deployment(tmp_path)
    write_pool(tmp_path, ray={"address": "127.0.0.1:1"}, sampling={"temperature": 0.7})
    pooled = [line(name, "What is 2 plus 3?", model="panel") for name in "ab"]
    async with client(deployment) as ai:
        done, refused = await answered(ai, *pooled)
        assert not done and all(
            "could not run" in one["error"]["message"] for one in refused.values()
        )
        await no_run_is_left(deployment)
    write_pool(tmp_path)
    async with client(deployment) as ai:
        done, refused = await answered(ai, *pooled)
    assert (set(done), refused) == ({"a", "b"}, {})


@pytest.mark.slow
async def test_a_run_that_ended_while_its_results_were_kept_asks_nothing_twice(
    tmp_path: Path,
) -> None:
    pooled = PoolLines("panel", load_pool(write_pool(tmp_path)), tmp_path, scripted_services())
    questions = [Question(str(place), f"What is 2 plus {place}?", line=place) for place in range(4)]
    kept: list[str] = []
    is_full = True

    def asked() -> dict[Question, BatchLine]:
        return {one: BatchLine(one.line, one.id, {}, one.id in kept) for one in questions}

    async def keep(result: LineResult) -> None:
        if is_full and len(kept) == 2:
            raise StorageFailed("full")
        kept.append(result.custom_id)

    with pytest.raises(StorageFailed):
        await pooled.run("batch_1", asked(), keep)
    outputs = (tmp_path / "batch_1" / "panel" / "outputs.jsonl").read_bytes()
    is_full = False
    await pooled.run("batch_1", asked(), keep)
    assert sorted(kept) == ["0", "1", "2", "3"]
    assert (tmp_path / "batch_1" / "panel" / "outputs.jsonl").read_bytes() == outputs


async def test_logs_lie_where_the_pools_launch_says(tmp_path: Path) -> None:
    launch = {"python": "/bin/false", "folder": "kept/logs"}
    pool = load_pool(write_pool(tmp_path, workers=[{"pair": PAIR}], launch=launch))
    async with open_workers(pool, tmp_path / "run") as workers:
        with pytest.raises(EngineError):
            async with workers.session(0, "small"):
                pass
    assert (
        list((tmp_path / "kept" / "logs" / "worker-0").glob("*.log"))
        and not (tmp_path / "run").exists()
    )


async def test_no_turn_of_the_event_loop_does_much_for_a_large_run(tmp_path: Path) -> None:
    """All outputs were written before a stop, so that what reads and judges them is all that
    runs."""
    number = 3000
    pool = load_pool(write_pool(tmp_path, workers=[{"pair": PAIR}], recruit={"proposers": 2}))
    outputs = [
        Output(str(place), role, model, f"{model} says. Answer: {model}.", 0.9, 5, 5)
        for place in range(number)
        for role, model in PROPOSERS_AND_AGGREGATOR
    ]
    (tmp_path / "batch_1" / "panel").mkdir(parents=True)
    (tmp_path / "batch_1" / "panel" / "outputs.jsonl").write_bytes(
        b"".join(orjson.dumps(one) + b"\n" for one in outputs)
    )
    asked = {
        Question(str(place), "What is it?", line=place): BatchLine(
            place, str(place), {}, is_answered=place % 2 == 0
        )
        for place in range(number)
    }
    panel = PoolLines("panel", pool, tmp_path, scripted_services())
    kept: list[LineResult] = []
    turns = Turns()

    async def keep(result: LineResult) -> None:
        kept.append(result)
        await asyncio.sleep(0)

    with counted(turns):
        await panel.run("batch_1", asked, keep)
    assert len(kept) == number / 2 and all(
        one.body and one.body["pool"]["by"] == "aggregator" for one in kept
    )
    assert 100 < turns.most < number, turns.most


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
        async with serve_deployment(load_config(write_deployment(tmp_path, **batches), {})):
            pass
