"""Storage for KV in the shape that transformers' attention expects.

transformers has a continuous-batching engine of its own (`transformers.generation.continuous_batching`). It is not
used: it cannot hand a request's KV to another process or take one in, its prefix cache shares whole blocks only and
reports no per-request count of cached tokens, its scheduler owns prefill and decode together, and its paged path on a
CPU gathers every row's keys anew on each step. What is used are the models, their SDPA attention and the `Cache`
protocol: the two layers below are cache layers whose `update` writes into storage that is kept elsewhere.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's KV is made of."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, tokens: int) -> Tensor:
        """Room for one sequence: `[layers, 2, kv_heads, tokens, head_dim]`."""
        size = (self.layers, 2, self.kv_heads, tokens, self.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)


class _StoredLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers ships no types
    """What both layers share: the storage exists before the first token, and masks are given, not derived."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@dataclass(slots=True)
class Window:
    """The part of a prompt that the next forward pass computes."""

    start: int = 0
    stop: int = 0


class _PromptLayer(_StoredLayer):
    def __init__(self, keys: Tensor, values: Tensor, window: Window) -> None:
        super().__init__()
        self.keys, self.values, self._window = keys, values, window

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start, stop = self._window.start, self._window.stop
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class PromptKv:
    """One prompt's KV, filled chunk by chunk: `kv` is `[layers, 2, kv_heads, tokens, head_dim]`."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self.window = Window()
        self.cache = Cache(layers=[_PromptLayer(layer[0][None], layer[1][None], self.window) for layer in kv])


@dataclass(slots=True)
class Rows:
    """Which rows of the slot storage the next step uses, where each writes, and how far attention reads."""

    count: int = 0
    longest: int = 0
    index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))


class _SlotLayer(_StoredLayer):
    def __init__(self, keys: Tensor, values: Tensor, rows: Rows) -> None:
        super().__init__()
        self.keys, self.values, self._rows = keys, values, rows

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        rows = self._rows
        self.keys[rows.index, :, rows.positions] = keys[:, :, 0]
        self.values[rows.index, :, rows.positions] = values[:, :, 0]
        return self.keys[: rows.count, :, : rows.longest], self.values[: rows.count, :, : rows.longest]


class SlotKv:
    """A row of KV per running request, kept in rows 0 to n-1; grows by doubling in rows and length.

    Storage is `[layers, 2, rows, kv_heads, tokens, head_dim]`. It starts as zeros, not as whatever memory holds:
    masked positions still enter the arithmetic, and a NaN there would spread.
    """

    def __init__(self, shape: KvShape, *, rows: int = 4, tokens: int = 512) -> None:
        self._shape = shape
        self.rows = Rows()
        self._storage = self._allocate(rows, tokens)
        self.cache = self._build_cache()

    def ensure(self, rows: int, tokens: int) -> None:
        """Make room for `rows` rows of `tokens` tokens, keeping what is stored."""
        have_rows, have_tokens = self._storage.shape[2], self._storage.shape[4]
        if rows <= have_rows and tokens <= have_tokens:
            return
        old = self._storage
        self._storage = self._allocate(_doubled(have_rows, rows), _doubled(have_tokens, tokens))
        self._storage[:, :, :have_rows, :, :have_tokens] = old
        self.cache = self._build_cache()

    def fill(self, row: int, kv: Tensor) -> None:
        """Copy a prompt's KV `[layers, 2, kv_heads, tokens, head_dim]` into `row`."""
        self._storage[:, :, row, :, : kv.shape[3]] = kv

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of row `source` over row `target`."""
        self._storage[:, :, target, :, :tokens] = self._storage[:, :, source, :, :tokens]

    def _allocate(self, rows: int, tokens: int) -> Tensor:
        shape = self._shape
        size = (shape.layers, 2, rows, shape.kv_heads, tokens, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def _build_cache(self) -> Cache:
        return Cache(layers=[_SlotLayer(layer[0], layer[1], self.rows) for layer in self._storage])


def _doubled(have: int, wanted: int) -> int:
    while have < wanted:
        have *= 2
    return have
