"""What class a text is of, by the example most like it, as the deployment's embedder sees them."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shell_router.core.embedding import Embedder, TokenStates
from shell_router.errors import ConfigError
from shell_router.topology.rules import Classed, Classifier

Vectors = NDArray[np.float32]
READ_CHARACTERS = 2048
"""A text is classified by its beginning: the request waits while a CPU takes 0.05 to 0.2 s for 1,000."""
AT_ONCE = 16
"""Examples that are embedded together. An embedder's time for an answer counts from when it is asked: the last of a
thousand would be too late."""


class Classes:
    """Asks classifiers. The examples of each are embedded when it is first asked."""

    def __init__(self, embedder: Embedder | None) -> None:
        self._embedder = embedder
        self._examples: dict[tuple[str, str], dict[str, Vectors]] = {}
        self._turn = asyncio.Lock()

    async def of(self, topology: str, classifier: Classifier, text: str) -> Classed:
        """The class of `text`, as its first READ_CHARACTERS tell it, by a classifier of this topology.

        Raises EngineError where the embedder fails, ConfigError where there is none.
        """
        embedder = self._embedder
        if embedder is None:
            raise ConfigError(
                f"Topology {topology!r} asks the classifier {classifier.id!r}, but no embedder is configured.",
                remedy="Set `embedder` in the configuration, or remove the classifier.",
            )
        async with self._turn:  # so that examples are embedded once, however many requests come at first
            known = self._examples.setdefault((topology, classifier.id), {})
            await _learn(embedder, classifier, known)
        return nearest(direction(await embedder.embed(text[:READ_CHARACTERS])), known, classifier.min_similarity)


def direction(states: TokenStates) -> Vectors:
    """The mean of a text's token states as a vector of length 1, [features]; of length 0 where the mean is."""
    mean = states.mean(axis=0)
    length = float(np.linalg.norm(mean))
    return np.asarray(mean / length if length else mean, dtype=np.float32)


def nearest(text: Vectors, examples: Mapping[str, Vectors], min_similarity: float = -1.0) -> Classed:
    """The class of the example with the highest cosine similarity to `text`; of equals, the one named first.

    `text` is [features], `examples` are [examples, features] by class, all of length 1.
    """
    found = [Classed(name, float((vectors @ text).max())) for name, vectors in examples.items()]
    best = max(found, key=lambda classed: classed.similarity)
    return best if best.similarity >= min_similarity else Classed("", best.similarity)


async def _learn(embedder: Embedder, classifier: Classifier, known: dict[str, Vectors]) -> None:
    """Embed the examples that are not `known` yet: those of one who left, or of a failure, need not be asked again."""
    for name, texts in classifier.examples.items():
        for begin in range(len(known.get(name, ())), len(texts), AT_ONCE):
            rows = await _embedded(embedder, texts[begin : begin + AT_ONCE])
            known[name] = np.vstack([known[name], rows]) if name in known else rows


async def _embedded(embedder: Embedder, texts: Sequence[str]) -> Vectors:
    """[texts, features]. Where one fails, none is left at work."""
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(embedder.embed(text)) for text in texts]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    return np.stack([direction(one.result()) for one in asked])
