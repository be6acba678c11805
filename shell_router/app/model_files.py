"""The files in models' folders, read before anything is started."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shell_router.config import ModelSettings
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder and its content."""

    folder: Path
    tokenizer: HfTokenizer
    context_length: int
    vocabulary: int


def read_files(models: Mapping[str, ModelSettings]) -> dict[str, ModelFiles]:
    """Read the files of each model by its alias; blocks. Raises ConfigError."""
    files = {alias: _read(alias, settings) for alias, settings in models.items()}
    # models of a family tokenize alike, so they share what one of them has tokenized
    first: dict[str, HfTokenizer] = {}
    for model in files.values():
        tokenizer = model.tokenizer
        tokenizer.remember_with(first.setdefault(tokenizer.fingerprint, tokenizer))
    return files


def _read(alias: str, settings: ModelSettings) -> ModelFiles:
    folder = settings.path
    config = _config(folder, alias)
    length = settings.context_length or _count(config, "max_position_embeddings", folder, alias)
    vocabulary = _count(config, "vocab_size", folder, alias)
    tokenizer = HfTokenizer.from_folder(folder, settings.chat_template_kwargs)
    return ModelFiles(folder, tokenizer, length, vocabulary)


def _config(folder: Path, alias: str) -> Mapping[str, Any]:
    """Read the model's configuration, or its text part in vision-language models."""
    if not folder.is_dir():
        raise ConfigError(
            f"models.{alias}.path: there is no folder {folder}.",
            remedy=(
                "Name the folder that holds the model; a relative path counts from the "
                "configuration's folder."
            ),
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"models.{alias}.path: {folder / 'config.json'} cannot be read: {error}.",
            remedy="Name a Hugging Face model folder, with config.json and tokenizer.json.",
        ) from error


def _count(config: Mapping[str, Any], name: str, folder: Path, alias: str) -> int:
    count = config.get(name)
    if not isinstance(count, int):
        raise ConfigError(
            f"models.{alias}.path: {folder / 'config.json'} names no {name}.",
            remedy=(
                f"Check the folder, or set models.{alias}.context_length where only the "
                "length is missing."
            ),
        )
    return count
