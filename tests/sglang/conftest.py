from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from shell_router.engines.sglang import SglangPair
from tests.fakes.pairs_under_test import PairUnderTest

LAUNCHES = (
    *(
        Path(__file__).with_name(f"test_{name}.py")
        for name in (
            "adapters",
            "launch",
            "batch_run",
            "drafts",
            "experts",
            "kept_runs",
            "smollm2",
            "swapping",
        )
    ),
    Path(__file__).parents[1] / "conformance" / "test_lora.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with pairs of their own first, so that those are gone when the others' pair starts:
    each takes 5 GB.
    """
    items.sort(key=lambda item: item.path not in LAUNCHES)


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


@pytest_asyncio.fixture
async def pair(real_sglang: PairUnderTest) -> AsyncIterator[SglangPair]:
    """The router's client of the real pair, its way of prefill-only chosen."""
    pair = SglangPair(real_sglang.address)
    await pair.fleet.probe()
    yield pair
    await pair.aclose()


@pytest.fixture
def environment() -> None:
    """For tests that start engines of their own."""
    if built_environment() is None:
        pytest.skip(
            f"real SGLang is not built for these tests: {BUILD_COMMAND} && python -m pytest -m "
            "sglang"
        )
