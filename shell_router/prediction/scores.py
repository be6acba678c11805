"""The semantic router: the chance of a right answer per text and model (Chimera, 3.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shell_router.core.predictors import Prospect
from shell_router.errors import ConfigError
from shell_router.prediction.files import Encode, Vectors, read_predictor, write_predictor

ENCODER = "encoder"


@dataclass(frozen=True, slots=True)
class Graded:
    """A graded answer of a model to a question."""

    question: str
    model: str
    right: bool


@dataclass(frozen=True, slots=True)
class Head:
    """A logit per model, with q[m] = sigmoid(l_m).

    `weights` are [features, models], `bias` is [models].
    """

    models: tuple[str, ...]
    weights: NDArray[np.float64]
    bias: NDArray[np.float64]

    def scores(self, vectors: Vectors) -> NDArray[np.float64]:
        """Return the scores [texts, models], each from 0 to 1."""
        logits = np.clip(vectors @ self.weights + self.bias, -50.0, 50.0)
        scores: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-logits))
        return scores


@dataclass(frozen=True, slots=True)
class ScoreModel:
    """An encoder and its head."""

    encode: Encode
    head: Head

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the scores [texts, models]."""
        return self.head.scores(self.encode(texts))

    def answers(self, prospects: Sequence[Prospect]) -> list[Mapping[str, Mapping[str, float]]]:
        """Return the scores per prospect and model, without models that training did not meet."""
        texts = list(dict.fromkeys(prospect.user for prospect in prospects))
        if not texts:
            return []
        rows = dict(zip(texts, self.scores(texts), strict=True))
        places = {name: place for place, name in enumerate(self.head.models)}
        return [
            {
                "scores": {
                    name: float(rows[prospect.user][places[name]])
                    for name in prospect.models
                    if name in places
                }
            }
            for prospect in prospects
        ]


def save_scores(folder: Path, head: Head, encoder: str) -> None:
    """Write the folder. Raises ConfigError.

    `encoder` is "default", a path or name for sentence-transformers, or "encoder" for the
    fine-tuned one in the folder itself.
    """
    arrays = {"weights": head.weights, "bias": head.bias}
    write_predictor(folder, "scores", {"models": list(head.models), "encoder": encoder}, arrays)


def load_scores(folder: Path, *, device: str, threads: int) -> ScoreModel:
    """Read the folder, and load its encoder. Raises ConfigError."""
    described, arrays = read_predictor(folder, "scores")
    head = Head(tuple(described["models"]), arrays["weights"], arrays["bias"])
    encode = load_encoder(folder, described["encoder"], device=device, threads=threads)
    return ScoreModel(encode, head)


def load_encoder(folder: Path, name: str, *, device: str, threads: int) -> Encode:
    """Load the encoder that a folder's description names; a relative path counts from the folder.

    Raises ConfigError.
    """
    from shell_router.prediction.encoders import (  # noqa: PLC0415 - loads torch
        load_frozen_encoder,
        load_tuned_encoder,
    )

    if name == ENCODER:
        return load_tuned_encoder(folder / ENCODER, device=device, threads=threads)
    if name.startswith("."):
        name = str((folder / name).resolve())
        if not Path(name).is_dir():
            raise ConfigError(
                f"{folder}: its encoder {name} is not there.", remedy="Train the predictor again."
            )
    return load_frozen_encoder(name, device=device, threads=threads)
