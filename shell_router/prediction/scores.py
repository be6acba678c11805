"""The semantic router: per text and model the chance of a right answer (Chimera, 3.3)."""

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
    """One model's answer to one question, and whether it was right."""

    question: str
    model: str
    right: bool


@dataclass(frozen=True, slots=True)
class Head:
    """q[m] = sigmoid(l_m), a logit per model: `weights` [features, models], `bias` [models]."""

    models: tuple[str, ...]
    weights: NDArray[np.float64]
    bias: NDArray[np.float64]

    def scores(self, vectors: Vectors) -> NDArray[np.float64]:
        """[texts, models], each from 0 to 1."""
        logits = np.clip(vectors @ self.weights + self.bias, -50.0, 50.0)
        found: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-logits))
        return found


@dataclass(frozen=True, slots=True)
class ScoreModel:
    """An encoder and its head."""

    encode: Encode
    head: Head

    def scores(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """[texts, models]."""
        return self.head.scores(self.encode(texts))

    def answers(self, prospects: Sequence[Prospect]) -> list[Mapping[str, Mapping[str, float]]]:
        """Per prospect the scores of its models; those that training did not meet are left out."""
        texts = list(dict.fromkeys(one.user for one in prospects))
        if not texts:
            return []
        rows = dict(zip(texts, self.scores(texts), strict=True))
        places = {name: place for place, name in enumerate(self.head.models)}
        return [
            {
                "scores": {
                    name: float(rows[one.user][places[name]])
                    for name in one.models
                    if name in places
                }
            }
            for one in prospects
        ]


def save_scores(folder: Path, head: Head, encoder: str) -> None:
    """Write the folder. `encoder` is "default", a path or name as sentence-transformers takes it,
    or "encoder" for the fine-tuned one in the folder itself. Raises ConfigError.
    """
    arrays = {"weights": head.weights, "bias": head.bias}
    write_predictor(folder, "scores", {"models": list(head.models), "encoder": encoder}, arrays)


def load_scores(folder: Path, *, device: str, threads: int) -> ScoreModel:
    """Read the folder, and load its encoder. Raises ConfigError."""
    described, arrays = read_predictor(folder, "scores")
    head = Head(tuple(described["models"]), arrays["weights"], arrays["bias"])
    return ScoreModel(
        encoder_of(folder, described["encoder"], device=device, threads=threads), head
    )


def encoder_of(folder: Path, named: str, *, device: str, threads: int) -> Encode:
    """The encoder that a folder's description names; a relative path counts from the folder. Raises
    ConfigError.
    """
    from shell_router.prediction.encoders import frozen_encoder, tuned_encoder  # noqa: PLC0415 - loads torch

    if named == ENCODER:
        return tuned_encoder(folder / ENCODER, device=device, threads=threads)
    if named.startswith("."):
        named = str((folder / named).resolve())
        if not Path(named).is_dir():
            raise ConfigError(
                f"{folder}: its encoder {named} is not there.", remedy="Train the predictor again."
            )
    return frozen_encoder(named, device=device, threads=threads)
