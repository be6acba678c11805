"""The contract of holders of a pool's components: simulated, torch modules."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from benchmarks.coserve.pool import Component, Components, Costs, ExecutorSettings, Tier
from benchmarks.coserve.pool.simulated import SimulatedComponents
from benchmarks.coserve.pool.torch_components import TorchComponents, components_in
from tests.coserve.nets import linear

pytestmark = pytest.mark.slow


LIMIT_S = 120.0
FIRST, SECOND = "one", "two"
COSTS = Costs(0.001, 0.001, 8, 1, 0.001, 0.002)


@dataclass(frozen=True)
class UnderTest:
    """Components `a` and `b` that load at the places FIRST and SECOND, and `bad`, which does not.

    `plain` makes outputs comparable.
    """

    components: Components
    a: Component
    b: Component
    bad: Component | None
    samples: Sequence[Any]
    plain: Callable[[Any], Any] = lambda output: output

    async def outputs(self, component: Component, place: str) -> list[Any]:
        return [
            self.plain(output)
            for output in await self.components.run(component, place, self.samples)
        ]


@asynccontextmanager
async def simulated(_: Path) -> AsyncIterator[UnderTest]:
    executors = [ExecutorSettings(name, 100, {"net": COSTS}) for name in (FIRST, SECOND)]
    components = SimulatedComponents(
        executors, {FIRST: "gpu", SECOND: "gpu"}, lambda name, sample: (name, sample)
    )
    yield UnderTest(components, Component("a", "net", 1), Component("b", "net", 1), None, [1, 2, 3])


def _rounded(output: torch.Tensor) -> list[float]:
    """A batch rounds otherwise than a sample alone."""
    return [round(number, 4) for number in output.tolist()]


@asynccontextmanager
async def modules(folder: Path) -> AsyncIterator[UnderTest]:
    for seed, name in enumerate(("a", "b", "bad")):
        torch.manual_seed(seed)
        save_file(linear().state_dict(), folder / f"{name}.safetensors")
    (folder / "bad.safetensors").write_bytes(b"no weights")
    a, b, bad = components_in(folder, lambda _: "linear")
    cpu = torch.device("cpu")
    components = TorchComponents(folder, {"linear": linear}, {FIRST: cpu, SECOND: cpu})
    samples = [torch.full((16,), float(number)) for number in range(3)]
    yield UnderTest(components, a, b, bad, samples, plain=_rounded)


KINDS: dict[str, Callable[[Path], AbstractAsyncContextManager[UnderTest]]] = {
    "simulated": simulated,
    "modules": modules,
}


@pytest_asyncio.fixture(params=[*KINDS])
async def under_test(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[UnderTest]:
    async with asyncio.timeout(LIMIT_S), KINDS[request.param](tmp_path) as found:
        yield found


async def test_an_expert_that_was_unloaded_and_loaded_again_answers_as_before(
    under_test: UnderTest,
) -> None:
    components, a, b = under_test.components, under_test.a, under_test.b
    seen = {}
    for component in (a, b, a, b):
        await components.load(component, FIRST)
        outputs = await under_test.outputs(component, FIRST)
        await components.unload(component, FIRST)
        assert len(outputs) == len(under_test.samples)
        assert seen.setdefault(component.name, outputs) == outputs
    assert seen["a"] != seen["b"]


async def test_outputs_come_in_the_order_of_the_samples(under_test: UnderTest) -> None:
    await under_test.components.load(under_test.a, FIRST)
    together = await under_test.outputs(under_test.a, FIRST)
    alone = [
        (await under_test.components.run(under_test.a, FIRST, [sample]))[0]
        for sample in under_test.samples
    ]
    assert together == [under_test.plain(output) for output in alone]
    await under_test.components.unload(under_test.a, FIRST)


async def test_an_expert_at_two_places_stays_at_one_when_it_leaves_the_other(
    under_test: UnderTest,
) -> None:
    components, a = under_test.components, under_test.a
    await asyncio.gather(components.load(a, FIRST), components.load(a, SECOND))
    both = await asyncio.gather(under_test.outputs(a, FIRST), under_test.outputs(a, SECOND))
    await components.unload(a, FIRST)
    assert both[0] == both[1] == await under_test.outputs(a, SECOND)
    await components.unload(a, SECOND)


async def test_a_load_that_fails_leaves_the_place_to_others(under_test: UnderTest) -> None:
    if under_test.bad is None:
        pytest.skip("simulated components all load")
    with pytest.raises(Exception):  # noqa: B017 # whatever the libraries raise: a pool names it
        await under_test.components.load(under_test.bad, FIRST)
    await under_test.components.load(under_test.b, FIRST)
    assert len(await under_test.outputs(under_test.b, FIRST)) == len(under_test.samples)
    await under_test.components.unload(under_test.b, FIRST)


async def test_a_load_that_was_cancelled_leaves_the_place_to_others(under_test: UnderTest) -> None:
    loading = asyncio.create_task(under_test.components.load(under_test.a, FIRST))
    await asyncio.sleep(0)
    loading.cancel()
    await asyncio.wait({loading})
    await under_test.components.load(under_test.b, FIRST)
    assert len(await under_test.outputs(under_test.b, FIRST)) == len(under_test.samples)
    await under_test.components.unload(under_test.b, FIRST)


async def test_host_memory_is_a_tier_of_its_own(under_test: UnderTest) -> None:
    components, a = under_test.components, under_test.a
    await components.load(a, Tier.HOST)
    await components.load(a, FIRST)
    await components.unload(a, Tier.HOST)
    assert len(await under_test.outputs(a, FIRST)) == len(under_test.samples)
    await components.unload(a, FIRST)
