"""How many tokens an agent and its program from it on will write (Chimera, 3.4): features, and two
quantile forests.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shell_router.core.predictors import Prospect
from shell_router.prediction.files import read_predictor, write_predictor

Floats = NDArray[np.float32]
Places = NDArray[np.int32]
LEAF = -1


@dataclass(frozen=True, slots=True)
class Forest:
    """The nodes of all trees one behind the other: a row goes left where its `feature` is at most
    `threshold`.

    `left` of a leaf is LEAF, and `values[begins[node]:ends[node]]` are the targets that fell into
    it.
    """

    roots: Places
    left: Places
    right: Places
    feature: Places
    threshold: NDArray[np.float64]
    begins: Places
    ends: Places
    values: Floats

    def medians(self, rows: Floats) -> list[float]:
        """Per row [rows, features] the median of the targets in its leaves, all trees' together."""
        nodes = np.tile(self.roots, (len(rows), 1))
        row = np.arange(len(rows))[:, None]
        while (inner := self.left[nodes] != LEAF).any():
            goes_left = rows[row, self.feature[nodes]] <= self.threshold[nodes]
            nodes = np.where(inner, np.where(goes_left, self.left[nodes], self.right[nodes]), nodes)
        fell = (
            [self.values[self.begins[leaf] : self.ends[leaf]] for leaf in leaves]
            for leaves in nodes
        )
        return [float(np.median(np.concatenate(targets))) for targets in fell]


_WORD = re.compile(r"(?u)\b\w\w+\b")


@dataclass(frozen=True, slots=True)
class Sketch:
    """`vocabulary` gives each term its row in `idf` [terms] and `projection` [terms,
    components]."""

    vocabulary: Mapping[str, int]
    idf: NDArray[np.float64]
    projection: NDArray[np.float64]

    def of(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """[texts, components]; a text without a known term is all zeros."""
        found = np.zeros((len(texts), self.projection.shape[1]))
        for place, text in enumerate(texts):
            counts = Counter(
                row for term in _terms(text) if (row := self.vocabulary.get(term)) is not None
            )
            if counts:
                rows = np.fromiter(counts, dtype=np.int64)
                weights = np.fromiter(counts.values(), dtype=np.float64) * self.idf[rows]
                found[place] = (weights / np.linalg.norm(weights)) @ self.projection[rows]
        return found


def _terms(text: str) -> list[str]:
    """Words of at least two characters in lower case, and neighbouring pairs of them."""
    words = _WORD.findall(text.lower())
    return [*words, *(f"{one} {other}" for one, other in pairwise(words))]


@dataclass(frozen=True, slots=True)
class Features:
    """A row per prospect and model: token counts, workflow, stage and model as ones among zeros,
    the text's sketch.

    What training did not meet is all zeros. Without a `sketch` nothing is known of texts.
    """

    workflows: Sequence[str]
    stages: Sequence[str]
    models: Sequence[str]
    sketch: Sketch | None

    def rows(self, asked: Sequence[tuple[Prospect, str]]) -> Floats:
        """[asked, features]."""
        counts = [(one.system_tokens, one.user_tokens, one.known_tokens) for one, _ in asked]
        parts = [
            np.array(counts, dtype=np.float32).reshape(len(asked), 3),
            _ones([one.workflow for one, _ in asked], self.workflows),
            _ones([one.stage for one, _ in asked], self.stages),
            _ones([model for _, model in asked], self.models),
        ]
        if self.sketch is not None:
            texts = list(dict.fromkeys(one.user for one, _ in asked))
            sketched = dict(zip(texts, self.sketch.of(texts), strict=True))
            parts.append(np.array([sketched[one.user] for one, _ in asked], dtype=np.float32))
        return np.hstack(parts).astype(np.float32)


def _ones(values: Sequence[str], known: Sequence[str]) -> Floats:
    same: NDArray[np.bool_] = np.equal.outer(
        np.array(values, dtype=object), np.array(known, dtype=object)
    )
    return same.astype(np.float32)


@dataclass(frozen=True, slots=True)
class LengthModel:
    """A trained length predictor."""

    features: Features
    own: Forest
    total: Forest

    def answers(self, prospects: Sequence[Prospect]) -> list[Mapping[str, Mapping[str, float]]]:
        """Per prospect the medians per model; models that training did not meet are left out."""
        known = self.features.models
        asked = [(one, model) for one in prospects for model in one.models if model in known]
        if not asked:
            return [{} for _ in prospects]
        rows = self.features.rows(asked)
        medians = iter(zip(self.own.medians(rows), self.total.medians(rows), strict=True))
        each = [
            {model: next(medians) for model in one.models if model in known} for one in prospects
        ]
        return [
            {
                "own_tokens": {model: own for model, (own, _) in found.items()},
                "total_tokens": {model: total for model, (_, total) in found.items()},
            }
            for found in each
        ]

    def save(self, folder: Path) -> None:
        """Write the folder. Raises ConfigError."""
        features = self.features
        sketch = self.features.sketch
        content: dict[str, Any] = {
            name: list(getattr(features, name)) for name in ("workflows", "stages", "models")
        }
        content["vocabulary"] = None if sketch is None else dict(sketch.vocabulary)
        forests = {"own": self.own, "total": self.total}
        arrays = {
            f"{of}.{name}": getattr(forest, name)
            for of, forest in forests.items()
            for name in Forest.__slots__
        }
        if sketch is not None:
            arrays |= {"idf": sketch.idf, "projection": sketch.projection}
        write_predictor(folder, "lengths", content, arrays)

    @classmethod
    def load(cls, folder: Path) -> "LengthModel":
        """Read the folder. Raises ConfigError."""
        described, arrays = read_predictor(folder, "lengths")
        words = described["vocabulary"]
        if words:
            sketch = Sketch(words, arrays["idf"], arrays["projection"])
        else:
            sketch = None
        features = Features(
            described["workflows"], described["stages"], described["models"], sketch
        )
        own, total = (
            Forest(*(arrays[f"{of}.{name}"] for name in Forest.__slots__))
            for of in ("own", "total")
        )
        return cls(features, own, total)
