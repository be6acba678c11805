"""How many tokens an agent will write, and its program from it on (Chimera, 3.4): the paper's features, two forests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shell_router.core.prediction import Prospect
from shell_router.prediction.files import read_arrays, read_description, write_arrays, write_description
from shell_router.prediction.forest import Floats, Forest
from shell_router.prediction.sketch import Sketch

FORM = "shell-router lengths 1"
DESCRIPTION, ARRAYS = "lengths.json", "lengths.npz"


@dataclass(frozen=True, slots=True)
class Features:
    """A row per prospect and model: token counts, workflow, stage and model as ones among zeros, the text's sketch.

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
    places = {name: place for place, name in enumerate(known)}
    found = np.zeros((len(values), len(known)), dtype=np.float32)
    for row, value in enumerate(values):
        if value in places:
            found[row, places[value]] = 1.0
    return found


@dataclass(frozen=True, slots=True)
class LengthModel:
    """A trained length predictor."""

    features: Features
    own: Forest
    total: Forest

    def answers(self, prospects: Sequence[Prospect]) -> list[Mapping[str, Mapping[str, float]]]:
        """Per prospect the medians per model; models that training did not meet are left out."""
        asked = [(one, model) for one in prospects for model in one.models if model in self.features.models]
        if not asked:
            return [{} for _ in prospects]
        rows = self.features.rows(asked)
        found: list[dict[str, dict[str, float]]] = [{"own_tokens": {}, "total_tokens": {}} for _ in prospects]
        medians = iter(zip(self.own.medians(rows), self.total.medians(rows), strict=True))
        for place, one in enumerate(prospects):
            for model in one.models:
                if model in self.features.models:
                    found[place]["own_tokens"][model], found[place]["total_tokens"][model] = next(medians)
        return [*found]

    def save(self, folder: Path) -> None:
        """Write the folder. Raises ConfigError."""
        features = self.features
        vocabulary = None if features.sketch is None else dict(features.sketch.vocabulary)
        content = {
            "workflows": list(features.workflows),
            "stages": list(features.stages),
            "models": list(features.models),
            "vocabulary": vocabulary,
        }
        write_description(folder / DESCRIPTION, FORM, content)
        arrays = {**self.own.arrays("own"), **self.total.arrays("total")}
        if features.sketch is not None:
            arrays |= {"idf": features.sketch.idf, "projection": features.sketch.projection}
        write_arrays(folder / ARRAYS, arrays)

    @classmethod
    def load(cls, folder: Path) -> "LengthModel":
        """Read the folder. Raises ConfigError."""
        told = read_description(folder / DESCRIPTION, FORM)
        arrays = read_arrays(folder / ARRAYS)
        sketch = Sketch(told["vocabulary"], arrays["idf"], arrays["projection"]) if told["vocabulary"] else None
        features = Features(told["workflows"], told["stages"], told["models"], sketch)
        return cls(features, Forest.of_arrays("own", arrays), Forest.of_arrays("total", arrays))
