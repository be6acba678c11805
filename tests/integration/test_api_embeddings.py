"""/v1/embeddings with the official client."""

import asyncio

import numpy as np
import openai
import pytest

from shell_router.api import ApiSettings
from shell_router.api.embeddings import MAX_TOGETHER
from shell_router.core.predictors import TokenStates
from shell_router.engines.embedding import HashEmbedder
from tests.fakes.api_server import Api, api

EMBEDDERS = {"hash": HashEmbedder(8)}


def client(served: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def test_every_text_gets_its_vector_of_length_one_in_both_encodings() -> None:
    async with api(embedders=EMBEDDERS) as served, client(served) as ai:
        texts = ["one two", "three", "one two"]
        packed = await ai.embeddings.create(model="hash", input=texts)  # the client asks for base64
        plain = await ai.embeddings.create(
            model="hash", input=texts, encoding_format="float", dimensions=8
        )
        assert [one.index for one in plain.data] == [0, 1, 2]
        vectors = np.array([one.embedding for one in plain.data])
        np.testing.assert_allclose(vectors, [one.embedding for one in packed.data], rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
        assert vectors[0].tolist() == vectors[2].tolist() != vectors[1].tolist()
        assert plain.usage.prompt_tokens == plain.usage.total_tokens == 5
        one = await ai.embeddings.create(model="hash", input="three")
        np.testing.assert_allclose(one.data[0].embedding, vectors[1], rtol=1e-6)


async def test_embedders_are_listed_and_other_names_are_unknown() -> None:
    async with api(embedders=EMBEDDERS) as served, client(served) as ai:
        kinds = {model.id: model.kind async for model in ai.models.list()}  # type: ignore[attr-defined]
        assert kinds["hash"] == "embedder" and kinds["small"] == "model"
        assert (await ai.models.retrieve("hash")).id == "hash"
        with pytest.raises(openai.NotFoundError, match="Known: hash"):
            await ai.embeddings.create(model="small", input="x")
    async with api() as served, client(served) as ai:
        with pytest.raises(openai.NotFoundError, match=r"embedder\.model"):
            await ai.embeddings.create(model="hash", input="x")


async def test_a_wrong_field_is_named() -> None:
    async with api(embedders=EMBEDDERS) as served:
        wrong = {"model": "hash", "input": ["x", ""]}
        status, body = await served.post("/v1/embeddings", wrong)
        assert (status, body["error"]["param"]) == (400, "input[1]")


class Watched(HashEmbedder):
    """Counts the texts that it has at a time, and waits where it is `shut`."""

    def __init__(self) -> None:
        super().__init__(8)
        self.now, self.most, self.asked, self.shut = 0, 0, 0, False

    async def embed(self, text: str) -> TokenStates:
        self.now += 1
        self.asked += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(3600 if self.shut else 0)
            return await super().embed(text)
        finally:
            self.now -= 1


async def test_large_requests_leave_room_for_early_exit() -> None:
    embedder = Watched()
    async with api(embedders={"watched": embedder}) as served:
        asked = {"model": "watched", "input": ["word"] * 100}
        answers = await asyncio.gather(*(served.post("/v1/embeddings", asked) for _ in range(4)))
        assert [(status, len(body["data"])) for status, body in answers] == [(200, 100)] * 4
        assert embedder.most == MAX_TOGETHER


async def test_a_wrong_number_of_dimensions_is_refused_after_the_first_texts() -> None:
    embedder = Watched()
    async with api(embedders={"watched": embedder}) as served:
        asked = {"model": "watched", "input": ["word"] * 100, "dimensions": 7}
        status, body = await served.post("/v1/embeddings", asked)
        assert (status, body["error"]["param"], embedder.asked) == (400, "dimensions", MAX_TOGETHER)


async def test_numbers_are_written_as_the_floats_that_they_are() -> None:
    async with api(embedders=EMBEDDERS) as served:
        _, body = await served.post("/v1/embeddings", {"model": "hash", "input": "one two three"})
        vector = body["data"][0]["embedding"]
        assert vector == [float(str(np.float32(one))) for one in vector]


async def test_an_embedder_that_hangs_is_given_up_at_the_limit_and_the_next_request_is_answered() -> (
    None
):
    embedder = Watched()
    async with api(
        embedders={"watched": embedder}, settings=ApiSettings(request_timeout_s=0.05)
    ) as served:
        embedder.shut = True
        status, body = await served.post("/v1/embeddings", {"model": "watched", "input": "x"})
        assert (status, body["error"]["code"], embedder.now) == (504, "deadline_exceeded", 0)
        embedder.shut = False
        assert (await served.post("/v1/embeddings", {"model": "watched", "input": "x"}))[0] == 200
