from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio

from shell_router.engines.pair import SglangPair
from tests.fakes.pairs_under_test import PairUnderTest


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


@pytest_asyncio.fixture
async def pair(real_sglang: PairUnderTest) -> AsyncIterator[SglangPair]:
    """The router's client of the real pair, its way of prefill-only chosen."""
    pair = SglangPair(real_sglang.address)
    await pair.probe(vocabulary=real_sglang.vocabulary)
    yield pair
    await pair.aclose()
