"""A text in a few numbers: TF-IDF of words and pairs of words, projected (Chimera, 3.4: the text sketch).

The same numbers as scikit-learn's TfidfVectorizer (ngram_range=(1, 2)) and TruncatedSVD give, which fit it.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"(?u)\b\w\w+\b")


@dataclass(frozen=True, slots=True)
class Sketch:
    """`vocabulary` gives each term its row in `idf` [terms] and `projection` [terms, components]."""

    vocabulary: Mapping[str, int]
    idf: NDArray[np.float64]
    projection: NDArray[np.float64]

    def of(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """[texts, components]; a text without a known term is all zeros."""
        return np.array([self._one(text) for text in texts]).reshape(len(texts), self.projection.shape[1])

    def _one(self, text: str) -> NDArray[np.float64]:
        counts = Counter(row for term in terms(text) if (row := self.vocabulary.get(term)) is not None)
        if not counts:
            return np.zeros(self.projection.shape[1])
        rows = np.fromiter(counts, dtype=np.int64)
        weights = np.fromiter(counts.values(), dtype=np.float64) * self.idf[rows]
        found: NDArray[np.float64] = (weights / np.linalg.norm(weights)) @ self.projection[rows]
        return found


def terms(text: str) -> list[str]:
    """Words of at least two characters in lower case, and neighbouring pairs of them."""
    words = _WORD.findall(text.lower())
    return [*words, *(f"{one} {other}" for one, other in pairwise(words))]
