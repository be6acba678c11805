import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.errors import ComponentError, ComponentFailed, ConfigError
from shell_router.experts.components import ComponentPool, Costs, Event, Policies, Request, Switched
from shell_router.experts.components.engine_components import (
    Generated,
    Prompt,
    SwappedComponents,
    SwapPlace,
    WeightServer,
    swap_executor,
    swapped_component,
)
from shell_router.experts.components.measuring import Amount, Bench, measured
from tests.fakes.http_engines import SwappingEngine, served

COSTS = {"tiny": Costs(0.01, 0.01, 8, 0, 0.1, 0.1)}
NAMES = "abc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one shape; one that is cut off, and one that is larger."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate([*NAMES, "cut"]):
        make_checkpoint(folder / name, hidden=32, layers=1, vocab_size=512, seed=seed)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    make_checkpoint(folder / "large", hidden=64, layers=1, vocab_size=512)
    return folder


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[tuple[SwappingEngine, str]]:
    engine = SwappingEngine(folder / "a")
    async with served(engine) as url:
        yield engine, url


def pool_on(folder: Path, session: aiohttp.ClientSession, *urls: str, **more: object) -> ComponentPool:
    servers = tuple(WeightServer(session, url) for url in urls)
    components = SwappedComponents(lambda name: folder / name, {"one": SwapPlace(servers, servers[0], "a")})
    catalog = [swapped_component(name, "tiny", 0.1) for name in [*NAMES, "cut", "large", "none"]]
    return ComponentPool(catalog, [swap_executor("one", COSTS)], components, Policies(), **more)  # type: ignore[arg-type]


async def answered(pool: ComponentPool, number: int, name: str, ids: tuple[int, ...] = (1, 2)) -> str:
    """The weights that answered, or the name of the error."""
    try:
        answer = await pool.ask(Request(f"{name}-{number}", (name,), Prompt(ids)))
    except ComponentError as error:
        return type(error).__name__
    assert isinstance(answer.final, Generated) and answer.final.ids == ids
    return answer.final.text


async def test_every_request_is_answered_by_its_own_weights_with_few_swaps(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str]
) -> None:
    running, url = engine
    async with asyncio.timeout(20), pool_on(folder, session, url) as pool:
        asked = "abcabcabc"
        assert await asyncio.gather(*(answered(pool, number, name) for number, name in enumerate(asked))) == list(asked)
    assert running.swaps == running.flushed == ["b", "c"]  # it began with a


async def test_a_checkpoint_that_is_missing_cut_off_or_of_another_shape_reaches_no_server(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str]
) -> None:
    running, url = engine
    async with asyncio.timeout(20), pool_on(folder, session, url) as pool:
        names = ["cut", "b", "large", "none", "a"]
        found = await asyncio.gather(*(answered(pool, number, name) for number, name in enumerate(names)))
    assert found == ["ComponentFailed", "b", "ComponentFailed", "ComponentFailed", "a"]
    assert set(running.swaps) <= {"a", "b"}


async def test_an_expert_that_comes_back_before_another_took_its_place_needs_no_swap(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str]
) -> None:
    running, url = engine
    async with asyncio.timeout(20), pool_on(folder, session, url) as pool:
        assert [await answered(pool, number, name) for number, name in enumerate(["a", "cut", "a"])] == [
            "a",
            "ComponentFailed",
            "a",
        ]
    assert running.swaps == []


async def test_both_servers_of_a_pair_get_the_weights_and_again_after_one_failed(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str]
) -> None:
    first, url = engine
    second = SwappingEngine(folder / "a")
    async with asyncio.timeout(20), served(second) as other, pool_on(folder, session, url, other) as pool:
        assert await answered(pool, 0, "b") == "b"
        assert (first.swaps, second.swaps) == (["b"], ["b"])
        second.broken = True
        assert await answered(pool, 1, "c") == "ComponentFailed"
        second.broken = False
        assert await answered(pool, 2, "b") == "b"
    assert (first.swaps, second.swaps) == (["b", "c", "b"], ["b", "b"])


async def test_a_server_that_was_started_again_gets_the_weights_again(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str], caplog: pytest.LogCaptureFixture
) -> None:
    running, url = engine
    async with asyncio.timeout(20), pool_on(folder, session, url) as pool:
        assert await answered(pool, 0, "b") == "b"
        running.restart()
        assert await answered(pool, 1, "b") == "b"
    assert running.swaps == ["b", "b"]
    assert "one has not the weights of b any more" in caplog.text


async def test_what_other_weights_wrote_is_no_answer(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str]
) -> None:
    running, url = engine
    async with asyncio.timeout(20), pool_on(folder, session, url) as pool:
        assert await answered(pool, 0, "b") == "b"
        running.restarts = True
        assert [await answered(pool, number, "b") for number in (1, 2)] == ["ComponentFailed", "b"]


async def test_a_server_that_is_still_busy_is_asked_until_it_has_dropped_its_kv(
    folder: Path, session: aiohttp.ClientSession
) -> None:
    running = SwappingEngine(folder / "a", busy=3)
    async with asyncio.timeout(20), served(running) as url, pool_on(folder, session, url) as pool:
        assert await answered(pool, 0, "b") == "b"
    assert (running.busy, running.flushed) == (0, ["b"])


async def test_a_prompt_that_the_engine_refuses_costs_that_request_alone(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str]
) -> None:
    _, url = engine
    async with asyncio.timeout(20), pool_on(folder, session, url) as pool:
        long = tuple(range(9))
        found = await asyncio.gather(answered(pool, 0, "a"), answered(pool, 1, "a", long), answered(pool, 2, "a"))
    assert found == ["a", "ComponentFailed", "a"]


async def test_a_server_that_is_away_fails_the_requests_by_name(folder: Path, session: aiohttp.ClientSession) -> None:
    running, events = SwappingEngine(folder / "a"), list[Event]()
    async with served(running) as url:
        pass
    async with asyncio.timeout(20), pool_on(folder, session, url, watch=events.append) as pool:
        with pytest.raises(ComponentFailed, match="No answer from an engine"):
            await pool.ask(Request("r", ("b",), Prompt((1,))))
    assert not [event for event in events if isinstance(event, Switched)]


async def test_a_pool_that_wants_host_memory_for_weights_is_refused(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, url = engine
    async with asyncio.timeout(20), pool_on(folder, session, url, host_bytes=2) as pool:
        with pytest.raises(ComponentFailed, match="host_bytes=0"):
            await pool.ask(Request("r", ("b",), Prompt((1,))))


async def test_what_swaps_and_prompts_cost_can_be_measured(
    folder: Path, session: aiohttp.ClientSession, engine: tuple[SwappingEngine, str]
) -> None:
    async def no_bytes(*_: object) -> int:
        return 0

    _, url = engine
    server = WeightServer(session, url)
    components = SwappedComponents(lambda name: folder / name, {"one": SwapPlace((server,), server)})
    some = [swapped_component(name, "tiny") for name in NAMES]
    bench = Bench(components, some, "one", 2, Prompt((1, 2)), no_bytes, time.perf_counter, host_tier=False)
    async with asyncio.timeout(20):
        found = await measured(bench, Amount((1, 2, 4), rounds=2))
    assert found.costs.disk_load_s > 0 and found.costs.activation_bytes == 0
    assert swap_executor("one", {"tiny": found.costs}).takes(some[0])


def test_costs_that_count_the_servers_own_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="activation_bytes"):
        swap_executor("one", {"tiny": Costs(0.01, 0.01, 8, 5, 0.1, 0.1)})
