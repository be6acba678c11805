"""Predictors on disk: JSON and NumPy arrays, which cannot hold code."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shell_router.errors import ConfigError

Arrays = Mapping[str, NDArray[Any]]


def write_description(file: Path, form: str, content: Mapping[str, Any]) -> None:
    """Write `content`, marked with its form. Raises ConfigError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"form": form, **content}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.", remedy="Name a folder that you may write to.") from error


def read_description(file: Path, form: str) -> dict[str, Any]:
    """What `write_description` wrote in this form. Raises ConfigError for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", remedy="Train the predictor again.") from error
    if not isinstance(found, dict) or found.get("form") != form:
        raise ConfigError(f"{file} is not of the form {form!r}.", remedy="Train the predictor again with this version.")
    return found


def write_arrays(file: Path, arrays: Arrays) -> None:
    """Write arrays by name, compressed."""
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(file, **named)


def read_arrays(file: Path) -> Arrays:
    """Arrays by name; objects, which could hold code, are refused. Raises ConfigError."""
    try:
        with np.load(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} cannot be read: {error}.", remedy="Train the predictor again.") from error
