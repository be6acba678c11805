"""Predictors on disk: a folder with JSON and NumPy arrays, which cannot hold code."""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shell_router.core.exact_json import NewValues, Values
from shell_router.core.predictors import Prediction
from shell_router.errors import ConfigError

Arrays = Mapping[str, NDArray[Any]]
FILES: Mapping[Prediction, tuple[str, str]] = {
    "scores": ("router.json", "head.npz"),
    "lengths": ("lengths.json", "lengths.npz"),
}
"""The files of a predictor's folder: its description and its arrays."""
AGAIN = "Train the predictor again with this version."


def write_predictor(folder: Path, kind: Prediction, content: Values, arrays: Arrays) -> None:
    """Write `content`, marked with its form, and arrays by name, compressed. Raises ConfigError."""
    description, archive = (folder / name for name in FILES[kind])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        form = {"form": f"shell-router {kind} 1"}
        description.write_text(json.dumps({**form, **content}, indent=1) + "\n", encoding="utf-8")
        np.savez_compressed(archive, **NewValues(arrays))
    except OSError as error:
        raise ConfigError(
            f"{description}: {error.strerror}.", remedy="Name a folder that you may write to."
        ) from error


def read_predictor(folder: Path, kind: Prediction) -> tuple[NewValues, Arrays]:
    """Read what `write_predictor` wrote of this kind.

    Pickled objects, which could hold code, are refused. Raises ConfigError.
    """
    description, archive = (folder / name for name in FILES[kind])
    try:
        content = json.loads(description.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{description} cannot be read: {error}.", remedy=AGAIN) from error
    if not isinstance(content, dict) or content.get("form") != f"shell-router {kind} 1":
        raise ConfigError(
            f"{description} is not of the form 'shell-router {kind} 1'.", remedy=AGAIN
        )
    try:
        with np.load(archive, allow_pickle=False) as arrays:
            return content, {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{archive} cannot be read: {error}.", remedy=AGAIN) from error


DEFAULT_ENCODER = "default"
"""The embedder's default model."""

Vectors = NDArray[np.float32]
Encode = Callable[[Sequence[str]], Vectors]
"""A function from texts to vectors [texts, features]."""
