import asyncio
import statistics
from itertools import combinations

import pytest

from shell_router.early_exit.algorithm1 import features, similarity
from shell_router.errors import ConfigError
from shell_router.lab.simulation.settings import SimulatedEmbedding
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.standins.simulated.text import SimulatedEmbedder, write_closing


def alike(embedder_of: tuple[float, float], texts: list[str]) -> list[float]:
    async def run() -> list[float]:
        embedder = SimulatedEmbedder(*embedder_of)
        embedded = [features(await embedder.embed(text)) for text in texts]
        return [similarity(one, other) for one, other in combinations(embedded, 2)]

    return run_virtual(run())


@pytest.mark.parametrize("wanted", [(0.8, 0.5), (0.95, 0.2), (1.0, 1.0), (0.6, 0.6)])
def test_outputs_are_as_alike_as_was_asked(wanted: tuple[float, float]) -> None:
    same = alike(wanted, [f"{n} draft{write_closing('q1', '7')}" for n in range(12)])
    assert statistics.mean(same) == pytest.approx(wanted[0], abs=0.04)
    different = alike(wanted, [f"draft{write_closing('q1', str(n))}" for n in range(12)])
    assert statistics.mean(different) == pytest.approx(wanted[1], abs=0.04)


def ends(*texts: tuple[float, int, float | None]) -> list[float | None]:
    """When texts of given arrival times and token counts are embedded; None for one that is given
    up at another.
    """

    async def run() -> list[float | None]:
        embedder, loop = (
            SimulatedEmbedder(0.8, 0.5, request_s=1.0, token_s=0.1),
            asyncio.get_running_loop(),
        )

        async def one(at_s: float, tokens: int, until_s: float | None) -> float | None:
            await asyncio.sleep(at_s)
            try:
                async with asyncio.timeout_at(until_s):
                    await embedder.embed("一" * tokens)
            except TimeoutError:
                return None
            return loop.time()

        return await asyncio.gather(*(one(*text) for text in texts))

    return run_virtual(run())


def test_texts_that_wait_are_embedded_together() -> None:
    assert ends((0, 10, None), (0.5, 20, None), (1.0, 10, None)) == pytest.approx([2, 6, 6])


def test_no_more_than_sixteen_are_embedded_together() -> None:
    found = ends(*[(0.0, 10, None)] * 18)
    assert found == pytest.approx([2.0] + [2 + 1 + 16] * 16 + [2 + 17 + 2])


def test_a_text_that_is_given_up_is_not_embedded() -> None:
    assert ends((0, 10, None), (0.5, 50, 1.0), (0.6, 10, None)) == [2, None, 4]


@pytest.mark.parametrize("wrong", [(0.5, 0.8), (0.0, 0.0), (1.1, 0.5)])
def test_similarities_that_cannot_be_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="0 < different <= same <= 1"):
        SimulatedEmbedding(same=wrong[0], different=wrong[1])
