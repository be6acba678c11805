import asyncio
import statistics
from itertools import combinations

import pytest

from shell_router.early_exit import features
from shell_router.early_exit.agreement import similarity
from shell_router.engines.simulated.embedder import SimulatedEmbedder, closing
from shell_router.errors import ConfigError
from shell_router.simulation.virtual_time import run_virtual


def alike(embedder_of: tuple[float, float], texts: list[str]) -> list[float]:
    async def run() -> list[float]:
        embedder = SimulatedEmbedder(*embedder_of)
        embedded = [features(await embedder.embed(text)) for text in texts]
        return [similarity(one, other) for one, other in combinations(embedded, 2)]

    return run_virtual(run())


@pytest.mark.parametrize("wanted", [(0.8, 0.5), (0.95, 0.2), (1.0, 1.0), (0.6, 0.6)])
def test_outputs_are_as_alike_as_was_asked(wanted: tuple[float, float]) -> None:
    same = alike(wanted, [f"{n} draft{closing('q1', '7')}" for n in range(12)])
    assert statistics.mean(same) == pytest.approx(wanted[0], abs=0.04)
    different = alike(wanted, [f"draft{closing('q1', str(n))}" for n in range(12)])
    assert statistics.mean(different) == pytest.approx(wanted[1], abs=0.04)


def test_texts_are_embedded_one_after_the_other() -> None:
    async def run() -> list[float]:
        embedder, loop = SimulatedEmbedder(0.8, 0.5, request_s=1.0, token_s=0.1), asyncio.get_running_loop()

        async def one(text: str) -> float:
            await embedder.embed(text)
            return loop.time()

        return await asyncio.gather(one("一" * 10), one("一" * 20))

    assert run_virtual(run()) == pytest.approx([2, 5])


@pytest.mark.parametrize("wrong", [(0.5, 0.8), (0.0, 0.0), (1.1, 0.5)])
def test_similarities_that_cannot_be_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="0 < different <= same <= 1"):
        SimulatedEmbedder(*wrong)
