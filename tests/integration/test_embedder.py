"""The real MiniLM model in its process, and the hash that stands in for it."""

import asyncio
import os
import signal
import sys

import numpy as np
import pytest
import pytest_asyncio

from shell_router.api.embeddings import pool_states
from shell_router.early_exit.algorithm1 import features, similarity
from shell_router.engines.embedding import HashEmbedder, SentenceTransformerEmbedder, default_model
from shell_router.errors import EngineUnreachable

pytestmark = pytest.mark.asyncio(loop_scope="module")

WIDTH = 384
MOST_TOKENS = 256
ANSWER = "Add the seven apples of Monday to the five of Tuesday, so she has twelve apples."
PARAPHRASE = (
    "She picked seven apples on Monday and five on Tuesday; together that makes twelve apples."
)
UNRELATED = "The parliament rejected the new fishing treaty after a debate that lasted all night."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder():
    """One for the module: loading the model takes seconds."""
    async with SentenceTransformerEmbedder() as opened:
        yield opened


async def prepared(embedder, *texts):
    return [features(states) for states in await asyncio.gather(*map(embedder.embed, texts))]


async def test_a_paraphrase_agrees_more_than_an_unrelated_text(embedder):
    answer, paraphrase, unrelated = await prepared(embedder, ANSWER, PARAPHRASE, UNRELATED)
    assert similarity(answer, paraphrase) > similarity(answer, unrelated) + 0.1


@pytest.mark.slow
async def test_its_mean_state_is_the_vector_that_the_model_was_trained_for(embedder):
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 # seconds

    states = [await embedder.embed(text) for text in (ANSWER, PARAPHRASE, UNRELATED)]
    found = np.array([pool_states(one) for one in states])
    wanted = SentenceTransformer(str(default_model()), device="cpu").encode(
        [ANSWER, PARAPHRASE, UNRELATED]
    )
    np.testing.assert_allclose(found, wanted, atol=1e-4)


async def test_every_token_has_its_state_and_an_empty_text_its_special_tokens(embedder):
    states = await embedder.embed("hello there")
    assert states.shape == (4, WIDTH)
    assert states.dtype == np.float32
    assert (await embedder.embed("")).shape == (2, WIDTH)


async def test_features_that_the_model_never_uses_are_left_out(embedder):
    (answer,) = await prepared(embedder, ANSWER)
    assert np.flatnonzero(~answer.present).tolist() == [127, 223, 319]


async def test_a_long_text_is_embedded_in_windows_and_nothing_is_cut_off(embedder):
    words = 3 * MOST_TOKENS
    states = await embedder.embed("word " * words)
    windows = -(-words // (MOST_TOKENS - 2))
    assert len(states) == words + 2 * windows
    first = await embedder.embed("word " * (MOST_TOKENS - 2))
    np.testing.assert_allclose(states[:MOST_TOKENS], first, atol=1e-4)


async def test_texts_embedded_together_get_the_states_they_get_alone(embedder):
    texts = ["", "one", ANSWER, "word " * 400, UNRELATED, "lone surrogate \ud800"]
    together = await asyncio.gather(*map(embedder.embed, texts * 2))
    alone = [await embedder.embed(text) for text in texts] * 2
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


async def test_a_cancelled_call_does_not_disturb_the_others(embedder):
    given_up = asyncio.create_task(embedder.embed("word " * 5000))
    kept = asyncio.create_task(embedder.embed("hello there"))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (await kept).shape == (4, WIDTH)
    assert embedder.restarts == 0


@pytest.mark.slow
async def test_a_process_killed_in_mid_call_fails_the_call_and_the_next_one_works(embedder):
    call = asyncio.create_task(embedder.embed("word " * 50_000))
    await asyncio.sleep(0)
    os.kill(embedder.pid, signal.SIGKILL)
    with pytest.raises(EngineUnreachable, match="status -9"):
        await call
    assert (await embedder.embed("hello there")).shape == (4, WIDTH)
    assert embedder.restarts == 1


async def test_the_router_side_imports_no_torch():
    probe = "import sys, shell_router.engines.embedding as e; e.SentenceTransformerEmbedder()"
    probe += (
        "; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', "
        "'sentence_transformers')))"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", probe)
    assert await child.wait() == 0


async def test_the_hash_embedder_is_the_same_everywhere_and_sees_only_words():
    embedder = HashEmbedder(features=32)
    states = await embedder.embed("seven apples and seven pears")
    assert states.shape == (5, 32)
    assert np.array_equal(states[0], states[3])
    assert states[0, :2].tolist() == [0.08203125, 0.69921875]
    assert (await embedder.embed("")).shape == (1, 32)
    with pytest.raises(ValueError, match="features"):
        HashEmbedder(features=0)


async def test_shared_words_make_hashed_texts_agree():
    answer, paraphrase, unrelated = await prepared(HashEmbedder(), ANSWER, PARAPHRASE, UNRELATED)
    assert similarity(answer, paraphrase) > similarity(answer, unrelated)
