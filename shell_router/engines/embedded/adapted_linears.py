"""LoRA inside a network: what an adapter holds in memory, and hooks on linear layers that add its part to its rows.

W x becomes W x + scaling * B (A x), for each row of a batch with the adapter of its own request; rows without one are
left as the network computed them, and cost nothing beyond the call of the hook.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shell_router.errors import ConfigError

# Not every layer of such a name: one within a mixture of experts sees tokens, not the rows of a batch.
ADAPTED = re.compile(r"(?:^|.*\.)layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter in memory. `number` is unique among all that its server ever loads, 1 being the first.

    `factors` has, by the linear layer's path in the network, A `[rank, inputs]` and scaling * B `[outputs, rank]`.
    Adapters of one `fingerprint` were made of the same files.
    """

    name: str
    path: str
    number: int
    fingerprint: str
    factors: Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """The rows of a batch that `adapter` changes: their indices `[n]`, or None for all rows."""

    adapter: Adapter
    rows: Tensor | None = None


def rows_by_adapter(adapters: Sequence[Adapter | None], device: torch.device) -> tuple[AdaptedRows, ...]:
    """One entry per adapter of a batch whose row i has `adapters[i]`."""
    rows: dict[Adapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        if adapter is not None:
            rows.setdefault(adapter, []).append(row)
    if len(rows) == 1 and None not in adapters:
        return (AdaptedRows(next(iter(rows))),)
    return tuple(AdaptedRows(adapter, torch.tensor(indices, device=device)) for adapter, indices in rows.items())


class AdaptedLinears:
    """Hooks on the linear layers of `network`, which is used by one thread only.

    `shapes` has outputs and inputs of each layer that can be adapted, by its path. Raises `ConfigError` where there is
    none.
    """

    def __init__(self, network: nn.Module) -> None:
        self._rows: tuple[AdaptedRows, ...] = ()
        self.shapes: dict[str, tuple[int, int]] = {}
        for path, module in network.named_modules():
            if isinstance(module, nn.Linear) and ADAPTED.fullmatch(path):
                self.shapes[path] = (module.out_features, module.in_features)
                module.register_forward_hook(self._hook(path))
        if not self.shapes:
            raise ConfigError(
                "The model has no linear layers that a LoRA adapter could change.",
                remedy="Leave lora out, or use SGLang.",
            )

    @contextmanager
    def adding(self, rows: tuple[AdaptedRows, ...]) -> Iterator[None]:
        """The forward pass within the block is that of these adapters; nothing of them is kept after it."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = ()

    def _hook(self, path: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for each in self._rows:
                factors = each.adapter.factors.get(path)
                if factors is not None:
                    _add(output, inputs[0], each.rows, *factors)

        return add


def _add(output: Tensor, inputs: Tensor, rows: Tensor | None, down: Tensor, up: Tensor) -> None:
    """Add up (down x) to `rows` of `output` `[batch, tokens, outputs]` in place."""
    if rows is None:
        # one pass over the output less than to add the product to it, which for long prompts is half of the time
        output.view(-1, up.shape[0]).addmm_(linear(inputs, down).view(-1, down.shape[0]), up.t())
    else:
        output.index_add_(0, rows, linear(linear(inputs.index_select(0, rows), down), up))
