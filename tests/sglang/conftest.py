from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import CpuPair, cpu_pair
from shell_router.engines.sglang import SglangPair
from tests.fakes.pairs_under_test import PairUnderTest
from tests.fakes.random_adapter import make_adapter

OWN_SERVERS = ("launch", "batch_run", "experts", "key_and_traces", "smollm2", "swapping")
TWO_PAIRS = ("adapters", "several_pairs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with servers of their own first, and those that keep a second pair last.

    A pair takes 5 GB, and the pairs of many tests stay until the end.
    """

    def turn(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        if item.path.parent != Path(__file__).parent or name not in (*OWN_SERVERS, *TWO_PAIRS):
            return 1
        return 0 if name in OWN_SERVERS else 2 + TWO_PAIRS.index(name)

    items.sort(key=turn)


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


@dataclass(frozen=True)
class AdaptedPair:
    """A pair that was started with adapters, and their folders by name."""

    servers: CpuPair
    adapters: Mapping[str, Path]


@pytest.fixture(scope="session")
def adapted_sglang(
    sglang_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdaptedPair]:
    """A second pair of the model, with more adapters than a batch takes, that schedules by
    priority.
    """
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {BUILD_COMMAND}")
    folder = tmp_path_factory.mktemp("adapted")
    adapters = {
        name: make_adapter(folder / name, sglang_model, seed=seed)
        for seed, name in enumerate(("algebra", "biology", "chemistry", "drama"))
    }
    adapters["history"] = make_adapter(folder / "history", sglang_model, seed=12, rank=8, alpha=4.0)
    adapters["poems"] = make_adapter(
        folder / "poems", sglang_model, seed=13, rank=1, modules=("q_proj", "v_proj"), strength=1.0
    )
    options = (
        "--enable-lora",
        "--lora-paths",
        *(f"{name}={path}" for name, path in adapters.items()),
        *("--max-loras-per-batch", "2", "--lora-backend", "torch_native"),
        "--enable-priority-scheduling",
        *("--tool-call-parser", "qwen25"),  # as the first pair: the router asks for one parser
    )
    with cpu_pair(sglang_model, venv, folder / "pair", options=options) as servers:
        yield AdaptedPair(servers, adapters)


@pytest.fixture
def environment() -> None:
    """For tests that start engines of their own."""
    if built_environment() is None:
        pytest.skip(
            f"real SGLang is not built for these tests: {BUILD_COMMAND} && python -m pytest -m "
            "sglang"
        )
