"""A Hugging Face causal LM folder, loaded: the two forward passes that serving needs, and the tokenizer."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from shell_router.engines.embedded.adapted_linears import AdaptedLinears, AdaptedRows, Adapter
from shell_router.engines.embedded.kv_layers import KvShape, PromptKv, SlotKv
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CausalLm:
    """A model ready to serve. `eos_ids` end an answer unless the request ignores them.

    `adapted` is None where no adapter may be loaded.
    """

    network: Any
    tokenizer: Tokenizer
    kv_shape: KvShape
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    model_type: str
    architectures: tuple[str, ...]
    adapted: AdaptedLinears | None = None

    def prefill(
        self, prompt: PromptKv, input_ids: Tensor, start: int, kept: int = 1, adapter: Adapter | None = None
    ) -> Tensor:
        """Compute `input_ids` `[n]` at positions from `start`; returns the last tokens' logits `[kept, vocab]`."""
        stop = start + input_ids.shape[0]
        prompt.window.start, prompt.window.stop = start, stop
        positions = torch.arange(start, stop, device=input_ids.device)
        mask = torch.arange(stop, device=input_ids.device) <= positions[:, None]
        adapted = () if adapter is None else (AdaptedRows(adapter),)
        return self._forward(input_ids[None], positions[None], mask[None, None], prompt.cache, adapted, kept)[0]

    def decode(
        self, slots: SlotKv, input_ids: Tensor, positions: Tensor, adapted: tuple[AdaptedRows, ...] = ()
    ) -> Tensor:
        """One step for rows 0 to n-1: `input_ids` `[n]` at `positions` `[n]`; returns logits `[n, vocab]`.

        `adapted` says which of the rows have which adapter.
        """
        rows = slots.rows
        rows.count, rows.positions = input_ids.shape[0], positions
        if rows.index.shape[0] != rows.count:
            rows.index = torch.arange(rows.count, device=input_ids.device)
        rows.longest = int(positions.max()) + 1
        mask = torch.arange(rows.longest, device=input_ids.device) <= positions[:, None]
        return self._forward(input_ids[:, None], positions[:, None], mask[:, None, None], slots.cache, adapted)[:, -1]

    def _forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: Any,
        adapted: tuple[AdaptedRows, ...],
        kept: int = 1,
    ) -> Tensor:
        with nullcontext() if self.adapted is None else self.adapted.adding(adapted):
            output = self.network(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=kept,
            )
        logits: Tensor = output.logits
        return logits


def load_causal_lm(settings: EmbeddedSettings) -> CausalLm:
    """Load model and tokenizer; raises `ConfigError` on a folder that cannot be served."""
    folder = Path(settings.model_path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json.", remedy="Name a Hugging Face model folder.")
    network = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa", local_files_only=True
    )
    network = network.to(settings.device).eval()
    config = network.config
    _refuse_partial_attention(config)
    return CausalLm(
        network=network,
        tokenizer=load_tokenizer(folder),
        kv_shape=_kv_shape(config, network),
        vocab_size=config.vocab_size,
        context_length=_context_length(settings, config),
        eos_ids=_eos_ids(folder, config),
        model_type=config.model_type,
        architectures=tuple(config.architectures or ()),
        adapted=None if settings.lora is None else AdaptedLinears(network),
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json, without the truncation or padding that it may ask for."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json.", remedy="Save its fast tokenizer there.")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _refuse_partial_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{config.model_type} has layers of {', '.join(sorted(kinds))}.",
            remedy="The embedded engine serves models with full attention only; use SGLang.",
        )


def _kv_shape(config: Any, network: Any) -> KvShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvShape(
        config.num_hidden_layers, config.num_key_value_heads, head_dim, network.dtype, torch.device(network.device)
    )


def _context_length(settings: EmbeddedSettings, config: Any) -> int:
    own = int(config.max_position_embeddings)
    if settings.context_length is not None and settings.context_length > own:
        raise ConfigError(
            f"context_length {settings.context_length} is more than the model's own {own}.", remedy="Lower it."
        )
    return settings.context_length or own


def _eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Stop tokens of both configs, as SGLang joins them."""
    found = [config.eos_token_id]
    generation = folder / "generation_config.json"
    if generation.is_file():
        found.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    return frozenset(
        token for each in found for token in (each if isinstance(each, list) else [each]) if token is not None
    )
