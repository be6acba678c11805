"""What everybody promises who holds a pool's experts: simulated, torch modules, embedded pairs, swapped weights."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from shell_router.engines.embedded.checkpoint import make_checkpoint
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.embedded.shared_spawner import SharedSpawner
from shell_router.engines.pair_experts import PairExperts, pair_expert
from shell_router.engines.prompted import Prompt
from shell_router.engines.simulated.experts import SimulatedExperts
from shell_router.engines.swap_experts import SwapExperts, SwapPlace, swapped_expert
from shell_router.engines.torch_experts import TorchExperts, experts_in
from shell_router.engines.weight_swapping import WeightServer
from shell_router.errors import ConfigError
from shell_router.expert_pools import Costs, ExecutorSettings, Expert, Experts, Tier
from tests.fakes.nets import linear
from tests.fakes.served import served
from tests.fakes.swapping_engine import SwappingEngine

LIMIT_S = 120.0
FIRST, SECOND = "one", "two"
COSTS = Costs(0.001, 0.001, 8, 1, 0.001, 0.002)


@dataclass(frozen=True)
class UnderTest:
    """Experts `a` and `b` that load at the places FIRST and SECOND, and, but for the simulated, `bad`, which does not.

    `plain` makes outputs comparable.
    """

    experts: Experts
    a: Expert
    b: Expert
    bad: Expert | None
    samples: Sequence[Any]
    host_tier: bool
    plain: Callable[[Any], Any] = lambda output: output

    async def outputs(self, expert: Expert, place: str) -> list[Any]:
        return [self.plain(output) for output in await self.experts.run(expert, place, self.samples)]


@asynccontextmanager
async def simulated(_: Path) -> AsyncIterator[UnderTest]:
    executors = [ExecutorSettings(name, 100, {"net": COSTS}) for name in (FIRST, SECOND)]
    experts = SimulatedExperts(executors, {FIRST: "gpu", SECOND: "gpu"}, lambda name, sample: (name, sample))
    yield UnderTest(experts, Expert("a", "net", 1), Expert("b", "net", 1), None, [1, 2, 3], host_tier=True)


def _rounded(output: torch.Tensor) -> list[float]:
    """A batch rounds otherwise than a sample alone."""
    return [round(number, 4) for number in output.tolist()]


@asynccontextmanager
async def modules(folder: Path) -> AsyncIterator[UnderTest]:
    for seed, name in enumerate(("a", "b", "bad")):
        torch.manual_seed(seed)
        save_file(linear().state_dict(), folder / f"{name}.safetensors")
    (folder / "bad.safetensors").write_bytes(b"no weights")
    a, b, bad = experts_in(folder, lambda _: "linear")
    cpu = torch.device("cpu")
    experts = TorchExperts(folder, {"linear": linear}, {FIRST: cpu, SECOND: cpu})
    samples = [torch.full((16,), float(number)) for number in range(3)]
    yield UnderTest(experts, a, b, bad, samples, host_tier=True, plain=_rounded)


PROMPTS = [Prompt((number, 6, 7), {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}) for number in (1, 2, 3)]


def _checkpoints(folder: Path) -> Path:
    for seed, name in enumerate(("a", "b", "bad")):
        make_checkpoint(folder / name, hidden=32, layers=1, vocab_size=512, context_length=512, seed=seed)
    weights = folder / "bad" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    return folder


@asynccontextmanager
async def pairs(folder: Path) -> AsyncIterator[UnderTest]:
    settings = {name: EmbeddedSettings(str(_checkpoints(folder) / name), dtype="float64") for name in ("a", "b", "bad")}
    a, b = (pair_expert(name, settings[name], "tiny") for name in ("a", "b"))
    async with SharedSpawner() as spawner:
        experts = PairExperts(lambda name, _: settings[name], spawner.lend)
        bad = Expert("bad", "tiny", a.memory_bytes)
        yield UnderTest(experts, a, b, bad, PROMPTS, host_tier=False, plain=lambda output: output.ids)


@asynccontextmanager
async def swapped(folder: Path) -> AsyncIterator[UnderTest]:
    _checkpoints(folder)
    engines = SwappingEngine(folder / "a"), SwappingEngine(folder / "a")
    async with aiohttp.ClientSession() as session, served(engines[0]) as one, served(engines[1]) as two:
        places = {}
        for name, url in ((FIRST, one), (SECOND, two)):
            server = WeightServer(session, url)
            places[name] = SwapPlace((server,), server)
        experts = SwapExperts(lambda name: folder / name, places)
        a, b, bad = (swapped_expert(name, "tiny") for name in ("a", "b", "bad"))
        yield UnderTest(experts, a, b, bad, PROMPTS, host_tier=False, plain=lambda output: (output.text, output.ids))


KINDS: dict[str, Callable[[Path], AbstractAsyncContextManager[UnderTest]]] = {
    "simulated": simulated,
    "modules": modules,
    "pairs": pairs,
    "swapped": swapped,
}


@pytest_asyncio.fixture(params=[*(pytest.param(kind, marks=[pytest.mark.slow] * (kind == "pairs")) for kind in KINDS)])
async def under_test(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[UnderTest]:
    async with asyncio.timeout(LIMIT_S), KINDS[request.param](tmp_path) as found:
        yield found


async def test_an_expert_that_was_unloaded_and_loaded_again_answers_as_before(under_test: UnderTest) -> None:
    experts, a, b = under_test.experts, under_test.a, under_test.b
    seen = {}
    for expert in (a, b, a, b):
        await experts.load(expert, FIRST)
        outputs = await under_test.outputs(expert, FIRST)
        await experts.unload(expert, FIRST)
        assert len(outputs) == len(under_test.samples)
        assert seen.setdefault(expert.name, outputs) == outputs
    assert seen["a"] != seen["b"]


async def test_outputs_come_in_the_order_of_the_samples(under_test: UnderTest) -> None:
    await under_test.experts.load(under_test.a, FIRST)
    together = await under_test.outputs(under_test.a, FIRST)
    alone = [(await under_test.experts.run(under_test.a, FIRST, [sample]))[0] for sample in under_test.samples]
    assert together == [under_test.plain(output) for output in alone]
    await under_test.experts.unload(under_test.a, FIRST)


async def test_an_expert_at_two_places_stays_at_one_when_it_leaves_the_other(under_test: UnderTest) -> None:
    experts, a = under_test.experts, under_test.a
    await asyncio.gather(experts.load(a, FIRST), experts.load(a, SECOND))
    both = await asyncio.gather(under_test.outputs(a, FIRST), under_test.outputs(a, SECOND))
    await experts.unload(a, FIRST)
    assert both[0] == both[1] == await under_test.outputs(a, SECOND)
    await experts.unload(a, SECOND)


async def test_a_load_that_fails_leaves_the_place_to_others(under_test: UnderTest) -> None:
    if under_test.bad is None:
        pytest.skip("simulated experts all load")
    with pytest.raises(Exception):  # noqa: B017 # whatever the libraries raise: a pool names it
        await under_test.experts.load(under_test.bad, FIRST)
    await under_test.experts.load(under_test.b, FIRST)
    assert len(await under_test.outputs(under_test.b, FIRST)) == len(under_test.samples)
    await under_test.experts.unload(under_test.b, FIRST)


async def test_a_load_that_was_cancelled_leaves_the_place_to_others(under_test: UnderTest) -> None:
    loading = asyncio.create_task(under_test.experts.load(under_test.a, FIRST))
    await asyncio.sleep(0)
    loading.cancel()
    await asyncio.wait({loading})
    await under_test.experts.load(under_test.b, FIRST)
    assert len(await under_test.outputs(under_test.b, FIRST)) == len(under_test.samples)
    await under_test.experts.unload(under_test.b, FIRST)


async def test_host_memory_is_a_tier_of_its_own_or_refused_by_name(under_test: UnderTest) -> None:
    experts, a = under_test.experts, under_test.a
    if not under_test.host_tier:
        with pytest.raises(ConfigError, match="host_bytes=0"):
            await experts.load(a, Tier.HOST)
        return
    await experts.load(a, Tier.HOST)
    await experts.load(a, FIRST)
    await experts.unload(a, Tier.HOST)
    assert len(await under_test.outputs(a, FIRST)) == len(under_test.samples)
    await experts.unload(a, FIRST)
