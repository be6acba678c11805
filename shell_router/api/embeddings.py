"""POST /v1/embeddings: a vector for each text, from the embedder that early exit uses."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Literal, Required

import numpy as np
from annotated_types import Interval, MaxLen, MinLen
from typing_extensions import TypedDict

from shell_router.api.admission import permit
from shell_router.api.bodies import read_object
from shell_router.api.fields import NoEffect
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TOKENS
from shell_router.core.predictors import Embedder, TokenStates
from shell_router.core.validation import (
    Array,
    JsonObject,
    Name,
    field_error,
)
from shell_router.errors import DeadlineExceeded, UnknownModel
from shell_router.http.app import Key, Reply, Request
from shell_router.moa.deadline import Deadline

MAX_TEXTS = 1024
MAX_CHARACTERS = 2**15
"""The limit of one text, and of all in a call of the embedder: early exit waits no longer."""
MAX_TOGETHER = 16

Text = Annotated[str, MinLen(1), MaxLen(MAX_CHARACTERS)]


class EmbeddingsBody(TypedDict, total=False):
    """Texts to embed."""

    model: Required[Name]
    input: Required[Text | Annotated[Array[Text], MinLen(1), MaxLen(MAX_TEXTS)]]
    encoding_format: Literal["float", "base64"]
    dimensions: Annotated[int, Interval(ge=1, le=2**20)]
    user: NoEffect


EMBEDDINGS = JsonObject(
    EmbeddingsBody,
    {
        "input": "Send texts, not token ids: in LangChain with check_embedding_ctx_length=False. "
        f"At most {MAX_TEXTS} texts of {MAX_CHARACTERS} characters fit."
    },
)

EMBEDDING = Key[asyncio.Semaphore]("EMBEDDING")
"""Held while texts of a request are with the embedder."""


async def create_embeddings(request: Request) -> Reply:
    """Embed the texts, and answer with their vectors in order."""
    sent = await read_object(request)
    body = EMBEDDINGS.read(sent)
    services = request.app[SERVICES]
    name = body["model"]
    permit(request, (name,))
    if name not in services.embedders:
        names = ", ".join(services.embedders)
        remedy = f"Known: {names}." if names else "Set embedder.model."
        raise UnknownModel(f"No embedder is named {name!r}.", remedy=remedy)
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    as_text = body.get("encoding_format") == "base64"
    dimensions = body.get("dimensions")
    warnings = note_ignored(request, EMBEDDINGS.find_unknown(sent))
    limit_s = request.app[SETTINGS].request_timeout_s
    try:
        with Deadline(limit_s, request.app[SERVICES].deadlines):
            vectors = []
            tokens = 0
            embedded = _embed(services.embedders[name], texts, request.app[EMBEDDING])
            async for vector, count in embedded:
                if dimensions not in (None, vector.size):
                    what = f"must be {vector.size}, as {name} has"
                    raise field_error("dimensions", what, "Leave it out.")
                vectors.append(vector)
                tokens += count
    except TimeoutError:
        raise DeadlineExceeded(
            f"The texts were not embedded within {limit_s:g} s.", remedy="Send fewer."
        ) from None
    written = [b64encode(vector.tobytes()).decode() for vector in vectors] if as_text else vectors
    data = [
        {"object": "embedding", "index": at, "embedding": vector}
        for at, vector in enumerate(written)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    request[TOKENS] = tokens, 0
    services.rates.add(request[TENANT], tokens, services.clock())
    return json_reply(
        request, {"object": "list", "data": data, "model": name, "usage": usage, **warnings}
    )


async def _embed(
    embedder: Embedder, texts: Sequence[str], turn: asyncio.Semaphore
) -> AsyncIterator[tuple[TokenStates, int]]:
    """Yield each text's vector and its number of tokens."""
    for group in _group(texts):
        async with turn:
            states = await asyncio.gather(*map(embedder.embed, group))
        for of_text in states:
            yield pool_states(of_text), len(of_text)


def _group(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in groups that the embedder gets at a time."""
    group: list[str] = []
    for text in texts:
        if len(group) == MAX_TOGETHER or sum(map(len, group)) + len(text) > MAX_CHARACTERS:
            yield group
            group = []
        group.append(text)
    yield group


def pool_states(states: TokenStates) -> TokenStates:
    """Return the mean over the tokens, of length 1, as most sentence-transformers models do."""
    mean: TokenStates = states.mean(axis=0, dtype=np.float32)
    return mean / np.float32(np.linalg.norm(mean) or 1.0)
