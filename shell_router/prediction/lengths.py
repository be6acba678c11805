"""The prediction of output lengths by features and two quantile forests (Chimera, 3.4)."""

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
    """The nodes of all trees in one array: a row goes left if its `feature` is at most `threshold`.

    `left` of a leaf is LEAF, and `values[begins[leaf]:ends[leaf]]` are its training targets.
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
        """Return per row [rows, features] the median of the targets in the leaves of all trees."""
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
    """A projection of TF-IDF weights.

    `vocabulary` gives each term its row in `idf` [terms] and `projection` [terms, components].
    """

    vocabulary: Mapping[str, int]
    idf: NDArray[np.float64]
    projection: NDArray[np.float64]

    def of(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the sketches [texts, components]; a text without a known term is all zeros."""
        sketches = np.zeros((len(texts), self.projection.shape[1]))
        for place, text in enumerate(texts):
            counts = Counter(
                row for term in _list_terms(text) if (row := self.vocabulary.get(term)) is not None
            )
            if counts:
                rows = np.fromiter(counts, dtype=np.int64)
                weights = np.fromiter(counts.values(), dtype=np.float64) * self.idf[rows]
                sketches[place] = (weights / np.linalg.norm(weights)) @ self.projection[rows]
        return sketches


def _list_terms(text: str) -> list[str]:
    """Return the words of two characters or more in lower case, and pairs of neighbors."""
    words = _WORD.findall(text.lower())
    return [*words, *(f"{word} {following}" for word, following in pairwise(words))]


@dataclass(frozen=True, slots=True)
class LengthFeatures:
    """The features of a prospect and a model.

    They are token counts, workflow, stage and model one-hot, and the text's sketch, if any. A value
    that training did not meet is all zeros.
    """

    workflows: Sequence[str]
    stages: Sequence[str]
    models: Sequence[str]
    sketch: Sketch | None

    def rows(self, pairs: Sequence[tuple[Prospect, str]]) -> Floats:
        """Return the features [pairs, features]."""
        counts = [
            (prospect.system_tokens, prospect.user_tokens, prospect.known_tokens)
            for prospect, _ in pairs
        ]
        parts = [
            np.array(counts, dtype=np.float32).reshape(len(pairs), 3),
            _encode_one_hot([prospect.workflow for prospect, _ in pairs], self.workflows),
            _encode_one_hot([prospect.stage for prospect, _ in pairs], self.stages),
            _encode_one_hot([model for _, model in pairs], self.models),
        ]
        if self.sketch is not None:
            texts = list(dict.fromkeys(prospect.user for prospect, _ in pairs))
            sketched = dict(zip(texts, self.sketch.of(texts), strict=True))
            parts.append(
                np.array([sketched[prospect.user] for prospect, _ in pairs], dtype=np.float32)
            )
        return np.hstack(parts).astype(np.float32)


def _encode_one_hot(values: Sequence[str], categories: Sequence[str]) -> Floats:
    same: NDArray[np.bool_] = np.equal.outer(
        np.array(values, dtype=object), np.array(categories, dtype=object)
    )
    return same.astype(np.float32)


@dataclass(frozen=True, slots=True)
class LengthModel:
    """A trained length predictor."""

    features: LengthFeatures
    own: Forest
    total: Forest

    def answers(self, prospects: Sequence[Prospect]) -> list[Mapping[str, Mapping[str, float]]]:
        """Return the medians per prospect and model, without models that training did not meet."""
        models = self.features.models
        pairs = [
            (prospect, model)
            for prospect in prospects
            for model in prospect.models
            if model in models
        ]
        if not pairs:
            return [{} for _ in prospects]
        rows = self.features.rows(pairs)
        medians = iter(zip(self.own.medians(rows), self.total.medians(rows), strict=True))
        each = [
            {model: next(medians) for model in prospect.models if model in models}
            for prospect in prospects
        ]
        return [
            {
                "own_tokens": {model: own for model, (own, _) in forecast.items()},
                "total_tokens": {model: total for model, (_, total) in forecast.items()},
            }
            for forecast in each
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
        features = LengthFeatures(
            described["workflows"], described["stages"], described["models"], sketch
        )
        own, total = (
            Forest(*(arrays[f"{of}.{name}"] for name in Forest.__slots__))
            for of in ("own", "total")
        )
        return cls(features, own, total)
