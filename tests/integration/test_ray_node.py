"""A worker as it runs in an actor of Ray, without Ray: real engines on an address of this
machine."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientSession

from shell_router.batch.pool import PoolModel, load_pool
from shell_router.batch.workers.node import NodeWorker
from shell_router.batch.workers.ray_cluster import RayWorker
from shell_router.engines.address import PairAddress
from shell_router.errors import EngineError, EngineUnreachable
from tests.fakes.pools import write_pool

HOST = "127.0.0.2"


def node() -> tuple[str, Sequence[str]]:
    return HOST, []


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[NodeWorker]:
    pool = load_pool(write_pool(tmp_path))
    pool = replace(pool, models={**pool.models, "absent": PoolModel(tmp_path / "absent")})
    worker = NodeWorker(pool, pool.workers[0], tmp_path, node)
    assert await worker.start() == HOST
    yield worker
    await worker.stop()


async def serves(address: PairAddress) -> bool:
    async with ClientSession() as session:
        try:
            async with session.get(f"{address.prefill_url}/health") as answer:
                return answer.status == 200
        except ClientConnectionError:
            return False


@pytest.mark.slow
async def test_one_model_after_the_other_serves_at_the_address_of_the_node(
    worker: NodeWorker,
) -> None:
    first, load = await worker.open("small")
    assert load == "engine started"
    assert first.prefill_url.startswith(f"http://{HOST}:")
    assert first.decode_url.startswith(f"http://{HOST}:")
    assert first.bootstrap_host == HOST
    assert await serves(first)
    await worker.close()
    assert not await serves(first)
    second, _ = await worker.open("medium")
    assert await serves(second)
    await worker.close()
    assert not await serves(second)


@pytest.mark.slow
async def test_a_folder_that_the_node_has_not_is_an_error_that_names_both(
    worker: NodeWorker,
) -> None:
    with pytest.raises(EngineError, match=rf"On the node {HOST}: .*there is no folder .*/absent"):
        await worker.open("absent")
    await worker.close()
    address, _ = await worker.open("small")
    assert await serves(address)


@pytest.mark.slow
async def test_a_session_that_is_closed_while_it_begins_leaves_no_engine(
    worker: NodeWorker,
) -> None:
    opening = asyncio.create_task(worker.open("small"))
    await asyncio.sleep(0)  # until it waits
    await worker.close()
    with pytest.raises(asyncio.CancelledError):
        await opening
    address, _ = await worker.open("small")
    assert await serves(address)


class RayError(Exception):
    """What the real one raises where an actor's process is gone."""


class RayTaskError(RayError):
    """What the real one raises where the actor itself raised."""


class LostActor:
    """It loads a model on engines at `address`, and is gone with them before anyone asks those."""

    def __init__(self, address: PairAddress) -> None:
        self.address = address
        self.open, self.close = (SimpleNamespace(remote=call) for call in (self._open, self._close))

    async def _open(self, _model: str) -> tuple[PairAddress, str]:
        return self.address, "engine started"

    async def _close(self) -> None:
        raise RayError("The actor is dead.")


async def test_a_worker_lost_between_its_answer_and_the_first_request_is_not_waited_for(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = f"http://127.0.0.1:{listener.getsockname()[1]}"
    killed: list[Any] = []
    errors = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    ray = SimpleNamespace(exceptions=errors, kill=killed.append)
    actor = LostActor(PairAddress(gone, gone, "127.0.0.1", 1))
    pool = load_pool(write_pool(tmp_path))
    assert pool.limits.engine_start_s == 180.0
    worker = RayWorker(ray, pool, 0, tmp_path, actor, HOST, reach_limit_s=0.1)
    async with asyncio.timeout(60):
        with pytest.raises(
            EngineUnreachable, match=rf"Worker 0 on the node {HOST} was lost.* at {gone} and"
        ):
            async with worker.session("small"):
                pass
    assert killed == [actor]
    assert worker.actor is None  # so that the next session starts it anew
