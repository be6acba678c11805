"""A worker as it runs in an actor of Ray, without Ray: real engines on an address of this machine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession

from shell_router.batch.pool import PoolModel, load_pool
from shell_router.batch.workers import NodeWorker
from shell_router.engines.address import PairAddress
from shell_router.errors import EngineError
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
async def test_one_model_after_the_other_serves_at_the_address_of_the_node(worker: NodeWorker) -> None:
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
async def test_a_folder_that_the_node_has_not_is_an_error_that_names_both(worker: NodeWorker) -> None:
    with pytest.raises(EngineError, match=rf"On the node {HOST}: .*there is no folder .*/absent"):
        await worker.open("absent")
    await worker.close()
    address, _ = await worker.open("small")
    assert await serves(address)


@pytest.mark.slow
async def test_a_session_that_is_closed_while_it_begins_leaves_no_engine(worker: NodeWorker) -> None:
    opening = asyncio.create_task(worker.open("small"))
    await asyncio.sleep(0)  # until it waits
    await worker.close()
    with pytest.raises(asyncio.CancelledError):
        await opening
    address, _ = await worker.open("small")
    assert await serves(address)
