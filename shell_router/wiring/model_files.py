"""What is read from a model's folder, and what the settings of its pair become."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from yarl import URL

from shell_router.config import EmbeddedSection, ModelSettings, PairSettings, RandomWeights
from shell_router.core.model import Tokenizer
from shell_router.engines.address import PairAddress
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder and what it says."""

    folder: Path
    tokenizer: Tokenizer
    context_length: int


def read_files(models: Mapping[str, ModelSettings], scratch: Path) -> dict[str, ModelFiles]:
    """Per alias its model's files; models with random weights are made in `scratch`. Blocks. Raises ConfigError."""
    if any(not settings.pairs for settings in models.values()):
        _require_embedded_extra()
    return {alias: _read(alias, settings, scratch) for alias, settings in models.items()}


def _require_embedded_extra() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"embedded pairs need {', '.join(missing)}, not installed here.",
            remedy="pip install 'shell-router[embedded]', or give the models SGLang pairs.",
        )


def _read(alias: str, settings: ModelSettings, scratch: Path) -> ModelFiles:
    folder = settings.path or _make(settings.random or RandomWeights(), scratch / alias)
    length = settings.context_length or _own_context_length(folder, alias)
    return ModelFiles(folder, HfTokenizer.from_folder(folder), length)


def _make(weights: RandomWeights, folder: Path) -> Path:
    from shell_router.engines.embedded.checkpoint import make_checkpoint  # noqa: PLC0415 - needs an extra

    heads = weights.hidden // 16
    return make_checkpoint(
        folder, hidden=weights.hidden, layers=weights.layers, heads=heads, kv_heads=heads // 2, seed=weights.seed
    )


def _own_context_length(folder: Path, alias: str) -> int:
    try:
        length = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the model {alias!r} has no context length: {folder / 'config.json'} names no max_position_embeddings.",
            remedy=f"Set models.{alias}.context_length, or check models.{alias}.path.",
        ) from error
    return int(length)


def embedded_settings(model: ModelSettings, files: ModelFiles) -> EmbeddedSettings:
    """What the model's embedded pair is told."""
    wanted = model.embedded or EmbeddedSection()
    return EmbeddedSettings(
        str(files.folder),
        device=wanted.device,
        dtype=wanted.dtype,
        threads=wanted.threads,
        context_length=files.context_length,
        max_total_tokens=wanted.max_total_tokens,
        max_running_requests=wanted.max_running_requests,
        incremental_streaming_output=True,
    )


def address_of(pair: PairSettings) -> PairAddress:
    """The pair as its client wants it; the bootstrap server is on the prefill server's host unless said otherwise."""
    host = pair.bootstrap_host or URL(pair.prefill).host or ""
    return PairAddress(pair.prefill, pair.decode, host, pair.bootstrap_port)
