"""What class a text is of, by the example most like it, as the deployment's embedder sees them."""

import asyncio
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shell_router.core.embedding import Embedder, TokenStates
from shell_router.errors import ConfigError
from shell_router.topology.rules import Classed, Classifier

Vectors = NDArray[np.float32]
READ_CHARACTERS = 2048
"""A text is classified by its beginning: the request waits while a CPU takes 0.05 to 0.2 s for 1,000."""


class Classes:
    """Asks classifiers. The examples of each are embedded when it is first asked."""

    def __init__(self, embedder: Embedder | None) -> None:
        self._embedder = embedder
        self._examples: dict[tuple[str, str], Mapping[str, Vectors]] = {}
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
            known = self._examples.get((topology, classifier.id))
            if known is None:
                known = {name: await _embedded(embedder, texts) for name, texts in classifier.examples.items()}
                self._examples[topology, classifier.id] = known
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


async def _embedded(embedder: Embedder, texts: tuple[str, ...]) -> Vectors:
    states = await asyncio.gather(*(embedder.embed(text) for text in texts))
    return np.stack([direction(one) for one in states])
