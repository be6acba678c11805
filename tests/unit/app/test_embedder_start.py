"""What the start of the embedder says of its speed, in virtual time."""

import asyncio

import numpy as np
import pytest

from shell_router.app.services import load_embedder
from shell_router.core.predictors import TokenStates
from shell_router.engines.embedding import SentenceTransformerEmbedder
from shell_router.lab.simulation.virtual_time import run_virtual


@pytest.mark.parametrize(("probe_s", "warnings"), [(0.4, 0), (15.0, 1)])
def test_a_start_says_that_judging_takes_longer_than_writing(
    probe_s: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    class SlowEmbedder(SentenceTransformerEmbedder):
        async def start(self) -> None:
            pass

        async def embed(self, text: str) -> TokenStates:
            await asyncio.sleep(probe_s)
            return np.zeros((1, 1))

    run_virtual(load_embedder(SlowEmbedder("none")))
    assert [record.levelname for record in caplog.records] == warnings * ["WARNING"]
    assert warnings == 0 or "takes about 150 s for an output of 500 tokens" in caplog.text
