"""POST /v1/embeddings: one vector for each text, from the embedder that early exit reads answers
with.
"""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np

from shell_router.api.drain import DRAIN
from shell_router.api.fields import Fields, parse_body, read_body
from shell_router.api.keys import permit
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TOKENS
from shell_router.core.predictors import Embedder, TokenStates
from shell_router.errors import DeadlineExceeded, UnknownModel
from shell_router.http.app import Key, Reply, Request

MAX_TEXTS = 1024
MAX_CHARACTERS = 2**15
"""Of one text, and of those that the embedder gets at a time: what early exit asks waits no longer
than for those.
"""
MAX_TOGETHER = 16

EMBEDDING = Key[asyncio.Semaphore]("EMBEDDING")
"""Held while texts of a request are with the embedder."""


async def create_embeddings(request: Request) -> Reply:
    """The texts' vectors, in their order."""
    body = parse_body(await read_body(request))
    services = request.app[SERVICES]
    name = body.required_text("model")
    permit(request, (name,))
    if name not in services.embedders:
        if services.embedders:
            known = f"Known: {', '.join(services.embedders)}."
        else:
            known = "Set embedder.model."
        raise UnknownModel(f"No embedder is named {name!r}.", remedy=known)
    texts = _texts(body)
    as_text = _as_text(body)
    dimensions = body.integer("dimensions", 1, 2**20)
    body.raw("user")
    body.check_spelling()
    warnings = note_ignored(request, body.unread)
    limit_s = request.app[SETTINGS].request_timeout_s
    try:
        with request.app[DRAIN].deadline(limit_s):
            states = []
            async for one in _embedded(services.embedders[name], texts, request.app[EMBEDDING]):
                if dimensions not in (None, width := one[0].size):
                    raise body.refuse(
                        "dimensions", f"must be {width}, what {name} has", "Leave it out."
                    )
                states.append(one)
    except TimeoutError:
        raise DeadlineExceeded(
            f"The texts were not embedded within {limit_s:g} s.", remedy="Send fewer."
        ) from None
    vectors = [b64encode(one.tobytes()).decode() if as_text else one for one, _ in states]
    data = [
        {"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(vectors)
    ]
    tokens = sum(count for _, count in states)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    request[TOKENS] = tokens, 0
    services.rates.add(request[TENANT], tokens, services.clock())
    return json_reply(
        request, {"object": "list", "data": data, "model": name, "usage": usage, **warnings}
    )


def _texts(body: Fields) -> list[str]:
    given = body.raw("input")
    texts = [given] if isinstance(given, str) else given
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(one, str) and one for one in texts)
    ):
        remedy = "Send texts, not token ids: in LangChain with check_embedding_ctx_length=False."
        raise body.refuse(
            "input", "must be a string or an array of strings, none of them empty", remedy
        )
    if len(texts) > MAX_TEXTS:
        raise body.refuse(
            "input", f"holds {len(texts)} texts", f"Send at most {MAX_TEXTS} at a time."
        )
    for at, one in enumerate(texts):
        if len(one) > MAX_CHARACTERS:
            raise body.refuse(f"input[{at}]", f"has over {MAX_CHARACTERS} characters", "Split it.")
    return texts


def _as_text(body: Fields) -> bool:
    if (form := body.text("encoding_format")) not in (None, "float", "base64"):
        raise body.refuse("encoding_format", "must be float or base64")
    return form == "base64"


async def _embedded(
    embedder: Embedder, texts: Sequence[str], turn: asyncio.Semaphore
) -> AsyncIterator[tuple[TokenStates, int]]:
    """Each text's vector and its number of tokens."""
    for some in _some_at_a_time(texts):
        async with turn:
            states = await asyncio.gather(*map(embedder.embed, some))
        for one in states:
            yield sentence_vector(one), len(one)


def _some_at_a_time(texts: Sequence[str]) -> Iterator[list[str]]:
    some: list[str] = []
    for text in texts:
        if len(some) == MAX_TOGETHER or sum(map(len, some)) + len(text) > MAX_CHARACTERS:
            yield some
            some = []
        some.append(text)
    yield some


def sentence_vector(states: TokenStates) -> TokenStates:
    """The mean over the tokens, of length 1: what most sentence-transformers models pool by."""
    mean: TokenStates = states.mean(axis=0, dtype=np.float32)
    return mean / np.float32(np.linalg.norm(mean) or 1.0)
