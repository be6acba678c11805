import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.coserve.pool import (
    ComponentPool,
    Costs,
    ExecutorSettings,
    Policies,
    Request,
)
from benchmarks.coserve.pool.errors import ComponentFailed
from benchmarks.coserve.pool.torch_components import TorchComponents, components_in
from shell_router.errors import ConfigError

pytestmark = pytest.mark.slow


COSTS = {"linear": Costs(0.001, 0.001, 4, 100, 0.001, 0.002)}


def linear() -> torch.nn.Module:
    return torch.nn.Linear(16, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six components."""
    for number in range(6):
        torch.manual_seed(number)
        save_file(linear().state_dict(), tmp_path / f"e{number}.safetensors")
    return tmp_path


def alone(number: int, sample: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(number)
    output: torch.Tensor = linear()(sample)
    return output.detach()


def pool_on(folder: Path, room: int = 2, device: str = "cpu") -> ComponentPool:
    catalog = components_in(folder, lambda _: "linear")
    budget = room * max(component.memory_bytes for component in catalog)
    executors = [ExecutorSettings(name, 2 * budget, COSTS, 0.5) for name in ("one", "two")]
    components = TorchComponents(
        folder, {"linear": linear}, dict.fromkeys(("one", "two"), torch.device(device))
    )
    return ComponentPool(catalog, executors, components, Policies(), host_bytes=budget)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
async def test_many_modules_in_little_memory_answer_as_each_does_alone(
    folder: Path, device: str
) -> None:
    samples = [torch.randn(16) for _ in range(60)]
    async with asyncio.timeout(30), pool_on(folder, device=device) as pool:
        answers = await asyncio.gather(
            *(
                pool.ask(Request(str(number), (f"e{number % 6}",), sample))
                for number, sample in enumerate(samples)
            )
        )
        peaks = [(one.memory.peak_bytes, one.memory.budget_bytes) for one in pool.executors]
    for number, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
        assert torch.allclose(answer.final, alone(number % 6, sample), atol=1e-6)
    assert all(peak <= budget for peak, budget in peaks)


async def test_a_file_that_is_cut_off_or_of_another_shape_costs_only_its_own_requests(
    folder: Path,
) -> None:
    cut = folder / "e1.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    save_file(torch.nn.Linear(3, 3).state_dict(), folder / "e2.safetensors")
    async with asyncio.timeout(30), pool_on(folder) as pool:
        found = await asyncio.gather(
            *(
                pool.ask(Request(str(number), (f"e{number}",), torch.zeros(16)))
                for number in range(6)
            ),
            return_exceptions=True,
        )
    assert [isinstance(one, ComponentFailed) for one in found] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e1.pt").write_bytes(b"")
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="file per component"):
            components_in(wrong, lambda _: "linear")
