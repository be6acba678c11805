"""What is read from a model's folder, and what the settings of its pair become."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from yarl import URL

from shell_router.config import EmbeddedSection, ModelSettings, PairSettings, RandomWeights
from shell_router.engines.address import PairAddress
from shell_router.engines.embedded.settings import EmbeddedSettings, LoraSettings
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.errors import ConfigError
from shell_router.launching.weights import make_random_model


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder and what it says."""

    folder: Path
    tokenizer: HfTokenizer
    context_length: int
    vocabulary: int


def read_files(models: Mapping[str, ModelSettings], scratch: Path) -> dict[str, ModelFiles]:
    """Per alias its model's files; models with random weights are made in `scratch`. Blocks. Raises ConfigError."""
    if any(not settings.pairs for settings in models.values()):
        _require_embedded_extra()
    files = {alias: _read(alias, settings, scratch) for alias, settings in models.items()}
    _share_ids([one.tokenizer for one in files.values()])
    return files


def _share_ids(tokenizers: Sequence[HfTokenizer]) -> None:
    """Models of a family tokenize alike: what one of them has tokenized the others need not."""
    first: dict[str, HfTokenizer] = {}
    for tokenizer in tokenizers:
        tokenizer.remember_with(first.setdefault(tokenizer.fingerprint, tokenizer))


def _require_embedded_extra() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"embedded pairs need {', '.join(missing)}, not installed here.",
            remedy="pip install 'shell-router[embedded]', or give the models SGLang pairs.",
        )


def _read(alias: str, settings: ModelSettings, scratch: Path) -> ModelFiles:
    if settings.path is not None and not settings.path.is_dir():
        raise ConfigError(
            f"models.{alias}.path: there is no folder {settings.path}.",
            remedy="Name the folder that holds the model; a relative path counts from the configuration's folder.",
        )
    folder = settings.path or make_random_model(settings.random or RandomWeights(), scratch / alias)
    config = _config(folder, alias)
    length = settings.context_length or _count(config, "max_position_embeddings", folder, alias)
    vocabulary = _count(config, "vocab_size", folder, alias)
    return ModelFiles(folder, HfTokenizer.from_folder(folder), length, vocabulary)


def _config(folder: Path, alias: str) -> Mapping[str, Any]:
    """The model's configuration; that of its text part where it has several (vision-language models)."""
    if not folder.is_dir():
        raise ConfigError(
            f"models.{alias}.path: there is no folder {folder}.",
            remedy="Name a Hugging Face model folder, with config.json and tokenizer.json.",
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
            remedy=f"Check the folder, or set models.{alias}.context_length where only the length is missing.",
        )
    return found


def embedded_settings(model: ModelSettings, files: ModelFiles, host: str) -> EmbeddedSettings:
    """What the model's embedded pair is told, which listens on `host`."""
    wanted = model.embedded or EmbeddedSection()
    return EmbeddedSettings(
        str(files.folder),
        device=wanted.device,
        dtype=wanted.dtype,
        threads=wanted.threads,
        cores=wanted.cores,
        context_length=files.context_length,
        max_total_tokens=wanted.max_total_tokens,
        max_running_requests=wanted.max_running_requests,
        incremental_streaming_output=True,
        host=host,
        lora=_lora(model, wanted),
    )


def _lora(model: ModelSettings, wanted: EmbeddedSection) -> LoraSettings | None:
    """Room for the model's adapters, unless the deployment says what else there is."""
    if wanted.lora is not None or model.adapters is None:
        return wanted.lora
    return LoraSettings(model.adapters.room, model.adapters.max_rank)


def address_of(pair: PairSettings) -> PairAddress:
    """The pair as its client wants it; the bootstrap server is on the prefill server's host unless said otherwise."""
    host = pair.bootstrap_host or URL(pair.prefill).host or ""
    return PairAddress(pair.prefill, pair.decode, host, pair.bootstrap_port)
