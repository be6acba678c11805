"""Weights that take turns on real SGLang, on one server and on a prefill-decode pair, next to each model alone."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from benchmarks.random_checkpoint import make_checkpoint
from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.environment import built_environment, engine_variables, install_plugin
from launch.sglang_cpu.pair import COMMON_OPTIONS, cpu_pair, free_ports, until_ready
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair
from shell_router.errors import ComponentFailed
from shell_router.experts.components import ComponentPool, Costs, Policies, Request
from shell_router.experts.components.engine_components import (
    Generated,
    Prompt,
    SwappedComponents,
    SwapPlace,
    WeightServer,
    swap_executor,
    swapped_component,
)

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

NAMES = ["a", "b", "cut", "missing"]
COSTS = {"tiny": Costs(0.1, 0.1, 8, 0, 1.0, 1.0)}
PROMPTS = [[*range(50, 250), 300 + number] for number in range(6)]
"""They share their first 200 tokens, so that KV of other weights would be found, were it still there."""
GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b", "cut")):
        make_checkpoint(tmp_path / name, seed=seed, context_length=2048)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return tmp_path


@contextmanager
def single(folder: Path, model: Path) -> Iterator[EngineServer]:
    """One SGLang server, without disaggregation."""
    venv = built_environment()
    assert venv is not None
    (folder / "site").mkdir(parents=True)
    install_plugin(folder / "site")
    shared = [option for option in COMMON_OPTIONS if "disaggregation" not in option and option != "mooncake_tcp"]
    (port,) = free_ports(1)
    command = (str(venv / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(model))
    variables = engine_variables(folder / "site")
    server = EngineServer("single", (*command, "--port", str(port), *shared), port, folder / "log", variables)
    server.start()
    try:
        until_ready(server)
        yield server
    finally:
        server.stop()


def pool_on(models: Path, place: SwapPlace) -> ComponentPool:
    components = SwappedComponents(lambda name: models / name, {"sglang": place})
    catalog = [swapped_component(name, "tiny", 0.1) for name in NAMES]
    return ComponentPool(catalog, [swap_executor("sglang", COSTS)], components, Policies())


async def answers(pool: ComponentPool, name: str) -> Sequence[Generated]:
    requests = [Request(str(number), (name,), Prompt(tuple(ids), GREEDY)) for number, ids in enumerate(PROMPTS)]
    return [answer.final for answer in await asyncio.gather(*map(pool.ask, requests))]


def ids(found: Sequence[Generated]) -> list[tuple[int, ...]]:
    return [one.ids for one in found]


async def turns(pool: ComponentPool, began_with: str, then: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """What both answer, the first before anything was swapped; checks that each comes back as it was."""
    alone = await answers(pool, began_with)
    swapped = await answers(pool, then)
    assert min(one.finish.cached_tokens for one in swapped) <= 1, "KV of other weights was found"
    assert ids(alone) != ids(swapped)
    for name in ("cut", "missing"):
        with pytest.raises(ComponentFailed):
            await pool.ask(Request(name, (name,), Prompt((1, 2), GREEDY)))
        assert ids(await answers(pool, then)) == ids(swapped), "the engine went on with what it had"
    assert ids(await answers(pool, began_with)) == ids(alone)
    assert ids(await answers(pool, then)) == ids(swapped)
    return ids(alone), ids(swapped)


async def test_weights_take_turns_and_each_answers_as_it_does_alone(models: Path, tmp_path: Path) -> None:
    venv = built_environment()
    assert venv is not None
    async with aiohttp.ClientSession() as session:
        with single(tmp_path / "single", models / "b") as server:
            weights = WeightServer(session, server.url)
            async with pool_on(models, SwapPlace((weights,), weights, "b")) as pool:
                b_alone, a_swapped = await turns(pool, "b", "a")
        with cpu_pair(models / "a", venv, tmp_path / "pair") as pair:
            engine = SglangPair(
                PairAddress(pair.prefill.url, pair.decode.url, pair.bootstrap_host, pair.bootstrap_port)
            )
            both = tuple(WeightServer(session, server.url) for server in (pair.prefill, pair.decode))
            async with pool_on(models, SwapPlace(both, engine, "a")) as pool:
                a_alone, b_swapped = await turns(pool, "a", "b")
            await engine.aclose()
    assert (a_swapped, b_swapped) == (a_alone, b_alone)
