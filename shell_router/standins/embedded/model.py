"""A loaded Hugging Face causal LM: its KV storage, the two forward passes, the tokenizer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from shell_router.core.drafts import MOST_DRAFTED
from shell_router.engines.tokenizer import load_tokenizer
from shell_router.errors import ConfigError
from shell_router.standins.embedded.settings import EmbeddedSettings


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one token's KV."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, tokens: int) -> Tensor:
        """Allocate memory for one sequence: `[layers, 2, kv_heads, tokens, head_dim]`."""
        size = (self.layers, 2, self.kv_heads, tokens, self.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """One layer of `store`, whose memory exists before the first token. Masks are arguments."""

    def __init__(self, keys: Tensor, values: Tensor, store: "PromptKv | SlotKv") -> None:
        super().__init__()
        self.is_initialized = True
        self.keys = keys
        self.values = values
        self._store = store

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, and return all that attention reads."""
        return self._store.write(self.keys, keys), self._store.write(self.values, values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class PromptKv:
    """One prompt's KV, filled chunk by chunk: `kv` is `[layers, 2, kv_heads, tokens, head_dim]`.

    The next forward pass computes the tokens from `start` to before `stop`.
    """

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self.start = self.stop = 0

    @property
    def cache(self) -> Cache:
        """The cache for one forward pass.

        It is made anew each time: in a cycle of references the KV would outlive its prompt.
        """
        return Cache(layers=[_Layer(layer[0][None], layer[1][None], self) for layer in self.kv])

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """Store the chunk's keys or values of one layer; return those up to its end."""
        stored[:, :, self.start : self.stop] = new
        return stored[:, :, : self.stop]


class SlotKv:
    """A row of KV per running request, in rows 0 to n-1; rows and length grow by doubling.

    Behind each row there is room for drafts that turn out wrong.

    Storage is `[layers, 2, rows, kv_heads, tokens, head_dim]`. It starts as zeros, not as whatever
    memory holds: masked positions still enter the arithmetic, and a NaN there would spread. The
    next step writes at `positions` of the rows in `index`, and attention reads `longest` tokens.
    """

    def __init__(self, shape: KvShape, *, rows: int = 4, tokens: int = 512) -> None:
        self._shape = shape
        self.index = self.positions = torch.empty(0, 1, dtype=torch.long)
        self.longest = 0
        self._storage = self._allocate(rows, tokens)
        self.cache = self._build_cache()

    def ensure(self, rows: int, tokens: int) -> None:
        """Grow to `rows` rows of `tokens` tokens, and keep what is stored."""
        have_rows = self._storage.shape[2]
        have_tokens = self._storage.shape[4] - MOST_DRAFTED
        if rows <= have_rows and tokens <= have_tokens:
            return
        old = self._storage
        self._storage = self._allocate(
            _double_until(have_rows, rows), _double_until(have_tokens, tokens)
        )
        self._storage[:, :, :have_rows, :, : old.shape[4]] = old
        self.cache = self._build_cache()

    def begin(self, positions: Tensor) -> None:
        """Have the next step write at these `positions` `[n, tokens]` of rows 0 to n-1."""
        self.positions, self.longest = positions, int(positions.max()) + 1
        if self.index.shape[0] != positions.shape[0]:
            self.index = torch.arange(positions.shape[0], device=positions.device)[:, None]

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """Store a step's keys or values of one layer; return those that attention reads."""
        stored[self.index, :, self.positions] = new.transpose(1, 2)
        return stored[: self.index.shape[0], :, : self.longest]

    def fill(self, row: int, kv: Tensor) -> None:
        """Copy a prompt's KV `[layers, 2, kv_heads, tokens, head_dim]` into `row`."""
        self._storage[:, :, row, :, : kv.shape[3]] = kv

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of row `source` over row `target`."""
        self._storage[:, :, target, :, :tokens] = self._storage[:, :, source, :, :tokens]

    def _allocate(self, rows: int, tokens: int) -> Tensor:
        shape = self._shape
        size = (shape.layers, 2, rows, shape.kv_heads, tokens + MOST_DRAFTED, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def _build_cache(self) -> Cache:
        return Cache(layers=[_Layer(layer[0], layer[1], self) for layer in self._storage])


def _double_until(have: int, least: int) -> int:
    while have < least:
        have *= 2
    return have


@dataclass(frozen=True, slots=True)
class CausalLm:
    """A model ready to serve. `eos_ids` end an answer unless the request ignores them."""

    network: Any
    tokenizer: Tokenizer
    kv_shape: KvShape
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]

    def prefill(self, prompt: PromptKv, input_ids: Tensor, start: int, kept: int = 1) -> Tensor:
        """Compute `input_ids` `[n]` at positions from `start`.

        Returns the last tokens' logits `[kept, vocab]`.
        """
        stop = start + input_ids.shape[0]
        prompt.start = start
        prompt.stop = stop
        positions = torch.arange(start, stop, device=input_ids.device)
        mask = torch.arange(stop, device=input_ids.device) <= positions[:, None]
        return self._forward(
            input_ids[None], positions[None], mask[None, None], prompt.cache, kept
        )[0]

    def decode(self, slots: SlotKv, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute one step for rows 0 to n-1.

        Args:
            slots: The rows' KV.
            input_ids: `[n, tokens]`.
            positions: The position of the first token of each row, `[n]`.

        Returns:
            Logits `[n, tokens, vocab]`.
        """
        tokens = input_ids.shape[1]
        places = positions[:, None] + torch.arange(tokens, device=positions.device)
        slots.begin(places)
        mask = torch.arange(slots.longest, device=input_ids.device) <= places[:, :, None]
        return self._forward(input_ids, places, mask[:, None], slots.cache, tokens)

    def _forward(
        self, input_ids: Tensor, positions: Tensor, mask: Tensor, cache: Any, kept: int
    ) -> Tensor:
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
        raise ConfigError(
            f"{folder} has no config.json.", remedy="Name a Hugging Face model folder."
        )
    network = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, settings.dtype),
        attn_implementation="sdpa",
        local_files_only=True,
    )
    network = network.to(settings.device).eval()
    config = network.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{config.model_type} has layers of {', '.join(sorted(kinds))}.",
            remedy="The embedded engine serves models with full attention only; use SGLang.",
        )
    own = int(config.max_position_embeddings)
    limit = settings.context_length
    if limit is not None and limit > own:
        raise ConfigError(
            f"context_length {limit} is more than the model's own {own}.", remedy="Lower it."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    device = torch.device(network.device)
    return CausalLm(
        network=network,
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        kv_shape=KvShape(
            config.num_hidden_layers, config.num_key_value_heads, head_dim, network.dtype, device
        ),
        vocab_size=config.vocab_size,
        context_length=limit or own,
        eos_ids=_eos_ids(folder, config),
    )


def _eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Return the stop tokens of both configs, as SGLang joins them."""
    eos_ids = [config.eos_token_id]
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos_ids.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    return frozenset(
        token
        for each in eos_ids
        for token in (each if isinstance(each, list) else [each])
        if token is not None
    )
