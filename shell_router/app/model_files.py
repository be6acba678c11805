"""What is read from the folders of models and adapters, before anything is started."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shell_router.config import Config, ModelSettings
from shell_router.engines.sglang import NO_ADAPTERS
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.errors import ConfigError
from shell_router.routing.adapter_cache import AdapterSettings

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
CONFIG = "adapter_config.json"


def adapters_of(alias: str, model: ModelSettings) -> AdapterSettings:
    """The model's adapters, which are the folders in its folder of adapters. Blocks. Raises
    ConfigError.
    """
    if model.adapters is None:
        return NO_ADAPTERS
    where = f"models.{alias}.adapters.folder"
    folder = model.adapters.folder
    if not folder.is_dir():
        raise ConfigError(
            f"{where}: there is no folder {folder}.",
            remedy=(
                "Name the folder that holds a folder per adapter; a relative path counts from "
                "the configuration's."
            ),
        )
    found = {one.parent.name: one.parent.resolve() for one in sorted(folder.glob(f"*/{CONFIG}"))}
    if not found:
        raise ConfigError(
            f"{where}: no folder in {folder} holds an {CONFIG}.",
            remedy="Save each adapter there, in PEFT's form.",
        )
    if wrong := [name for name in found if not NAME.fullmatch(name)]:
        raise ConfigError(
            f"{where}: an adapter's folder is named {wrong[0]!r}.",
            remedy=(
                "Take up to 100 letters, digits, '.', '_' or '-': requests name it behind the "
                "model and a colon."
            ),
        )
    return model.adapters.of(found)


def model_names(config: Config) -> tuple[str, ...]:
    """Every name that topologies and requests may give a model, adapters included. Blocks. Raises
    ConfigError.
    """
    names = [*config.models]
    for alias, model in config.models.items():
        names += [named(alias, adapter) for adapter in adapters_of(alias, model).folders]
    if twice := sorted({name for name in names if names.count(name) > 1} & config.models.keys()):
        raise ConfigError(
            f"models.{twice[0]} is also the name of an adapter.", remedy="Rename one of them."
        )
    if unknown := sorted({*config.auto.models, *config.auto.max_batch} - set(names)):
        raise ConfigError(
            f"auto names {unknown[0]!r}, which is not among the models.",
            remedy=f"Name some of: {', '.join(sorted(names))}.",
        )
    return tuple(names)


def named(alias: str, adapter: str) -> str:
    """How requests name an adapter: as SGLang does."""
    return f"{alias}:{adapter}"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder and what it says."""

    folder: Path
    tokenizer: HfTokenizer
    context_length: int
    vocabulary: int


def read_files(models: Mapping[str, ModelSettings]) -> dict[str, ModelFiles]:
    """Per alias its model's files. Blocks. Raises ConfigError."""
    files = {alias: _read(alias, settings) for alias, settings in models.items()}
    first: dict[str, HfTokenizer] = {}
    for one in (
        files.values()
    ):  # models of a family tokenize alike: what one has tokenized the others need not
        one.tokenizer.remember_with(first.setdefault(one.tokenizer.fingerprint, one.tokenizer))
    return files


def _read(alias: str, settings: ModelSettings) -> ModelFiles:
    folder = settings.path
    config = _config(folder, alias)
    length = settings.context_length or _count(config, "max_position_embeddings", folder, alias)
    vocabulary = _count(config, "vocab_size", folder, alias)
    tokenizer = HfTokenizer.from_folder(folder, settings.chat_template_kwargs)
    return ModelFiles(folder, tokenizer, length, vocabulary)


def _config(folder: Path, alias: str) -> Mapping[str, Any]:
    """The model's configuration; that of its text part where it has several (vision-language
    models).
    """
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
    found = config.get(name)
    if not isinstance(found, int):
        raise ConfigError(
            f"models.{alias}.path: {folder / 'config.json'} names no {name}.",
            remedy=(
                f"Check the folder, or set models.{alias}.context_length where only the "
                "length is missing."
            ),
        )
    return found
