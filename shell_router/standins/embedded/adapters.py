"""LoRA adapters in memory: hooks that add their part to rows of a batch, weights read from files, who uses them."""

import asyncio
import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from shell_router.errors import ConfigError, InvalidRequest
from shell_router.standins.embedded.adapter_files import AdapterConfig, AdapterRefused, read_adapter_config

logger = logging.getLogger(__name__)

# Not every layer of such a name: one within a mixture of experts sees tokens, not the rows of a batch.
ADAPTED = re.compile(r"(?:^|.*\.)layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter in memory, which is the owner of all KV that was computed with it.

    `factors` has, by the linear layer's path in the network, A `[rank, inputs]` and scaling * B `[outputs, rank]`.
    Adapters of one `fingerprint` were made of the same files.
    """

    name: str
    path: str
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
        output.view(-1, up.shape[0]).addmm_(functional.linear(inputs, down).view(-1, down.shape[0]), up.t())
    else:
        output.index_add_(0, rows, functional.linear(functional.linear(inputs.index_select(0, rows), down), up))


WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?P<linear>.+)\.lora_(?P<side>[AB])\.weight")

Names = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReader:
    """Reads adapters for the linear layers in `shapes` (outputs and inputs by path), as `dtype` on `device`."""

    shapes: Mapping[str, tuple[int, int]]
    max_rank: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str, path: str) -> Adapter:
        """The adapter in folder `path`. Blocks. Raises `AdapterRefused`; shapes are checked before weights are read."""
        folder = Path(path)
        config = read_adapter_config(folder, max_rank=self.max_rank)
        weights = folder / WEIGHTS
        if not weights.is_file():
            raise AdapterRefused(f"{weights} is missing.", remedy="Save the adapter with safetensors.")
        try:
            factors = self._read(weights, config)
            return Adapter(name, path, _fingerprint(folder), factors)
        # torch says RuntimeError where the device has no memory left
        except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
            raise AdapterRefused(f"{weights} cannot be read: {error}.", remedy="Save the adapter anew.") from error

    def _read(self, weights: Path, config: AdapterConfig) -> dict[str, tuple[Tensor, Tensor]]:
        with safe_open(weights, "pt") as file:
            names = _by_linear(weights, list(file.keys()))
            _require_modules(weights, names, config)
            for linear, sides in names.items():
                found = tuple(tuple(file.get_slice(sides[side]).get_shape()) for side in "AB")
                self._check(weights, linear, found, config.rank)
            return {
                linear: (
                    self._kept(weights, sides["A"], file.get_tensor(sides["A"])),
                    self._kept(weights, sides["B"], file.get_tensor(sides["B"]), config.scaling),
                )
                for linear, sides in names.items()
            }

    def _check(self, weights: Path, linear: str, found: tuple[tuple[int, ...], ...], rank: int) -> None:
        if linear not in self.shapes:
            raise AdapterRefused(
                f"{weights}: the model has no layer {linear!r} that can be adapted.",
                remedy="Load an adapter of this very model.",
            )
        outputs, inputs = self.shapes[linear]
        wanted = ((rank, inputs), (outputs, rank))
        if found != wanted:
            raise AdapterRefused(
                f"{weights}: {linear} has A {list(found[0])} and B {list(found[1])}, "
                f"where the model needs {list(wanted[0])} and {list(wanted[1])}.",
                remedy="Load an adapter of this very model.",
            )

    def _kept(self, weights: Path, name: str, tensor: Tensor, scaling: float = 1.0) -> Tensor:
        """What is kept in memory of a tensor. The scaling is applied before rounding to the model's own numbers."""
        wide = torch.promote_types(self.dtype, torch.float32)
        kept = (tensor.to(wide) * scaling).to(self.dtype)
        # A NaN in one row's KV would outlive the row and spread: see SlotKv.
        if not torch.isfinite(kept).all():
            raise AdapterRefused(f"{weights}: {name} has numbers that are not finite.", remedy="Train it anew.")
        return kept.to(self.device)


def _by_linear(weights: Path, tensors: list[str]) -> Names:
    """The names of A and B by the linear layer that they change."""
    names: Names = defaultdict(dict)
    for tensor in tensors:
        match = TENSOR.fullmatch(tensor)
        if match is None:
            raise AdapterRefused(
                f"{weights}: tensor {tensor!r} is no part of a LoRA adapter that is supported.",
                remedy="Save one with A and B of linear layers alone.",
            )
        names[match["linear"]][match["side"]] = tensor
    for linear, sides in names.items():
        if missing := {"A", "B"} - sides.keys():
            raise AdapterRefused(f"{weights}: {linear} has no lora_{missing.pop()}.", remedy="Save the adapter anew.")
    return names


def _require_modules(weights: Path, names: Names, config: AdapterConfig) -> None:
    present = {linear.rpartition(".")[2] for linear in names}
    wanted = set(config.modules or ())
    if not names or wanted - present:
        lacking = min(wanted - present, default="any layer")
        raise AdapterRefused(f"{weights}: there are no weights for {lacking}.", remedy="Save the adapter anew.")
    if config.modules is not None and present - wanted:
        raise AdapterRefused(
            f"{weights}: there are weights for {min(present - wanted)}, which target_modules does not name.",
            remedy="Save the adapter anew.",
        )


def _fingerprint(folder: Path) -> str:
    hashes = [hashlib.sha256((folder / "adapter_config.json").read_bytes())]
    with (folder / WEIGHTS).open("rb") as file:
        hashes.append(hashlib.file_digest(file, "sha256"))
    return "".join(each.hexdigest()[:32] for each in hashes)


@dataclass(slots=True, eq=False)
class _Held:
    """An adapter in memory, and how many requests use it; `unused` is set where none does."""

    adapter: Adapter
    unused: asyncio.Event
    users: int = 0


class LoadedAdapters:
    """At most `limit` adapters by name; 0 means that LoRA is off. One event loop only.

    `read` makes an adapter of its name and folder in a thread, so that the server goes on meanwhile; `forget` lets go
    of what was computed with one. Changes come one after the other, and are completed even if their caller has left.
    """

    def __init__(
        self, limit: int, read: Callable[[str, str], Adapter], forget: Callable[[Adapter], Awaitable[None]]
    ) -> None:
        self.limit = limit
        self._read = read
        self._forget = forget
        self._held: dict[str, _Held] = {}
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()

    @property
    def paths(self) -> Mapping[str, str]:
        """The folders of the adapters that requests may name, by name."""
        return {name: held.adapter.path for name, held in self._held.items()}

    @contextmanager
    def used(self, name: str | None) -> Iterator[Adapter | None]:
        """The adapter `name`, which stays for the length of the block; None for no name.

        Raises `InvalidRequest` where no such adapter is loaded.
        """
        if not name:
            yield None
            return
        held = self._find(name)
        held.users += 1
        held.unused.clear()
        try:
            yield held.adapter
        finally:
            held.users -= 1
            if not held.users:
                held.unused.set()

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in folder `path`; requests may name it from then on. Raises `AdapterRefused`."""
        await self._to_the_end(self._load(name, path))

    async def unload(self, name: str) -> None:
        """Refuse further requests for the adapter at once, wait for those in work, and free its memory.

        Raises `AdapterRefused` where it is not loaded.
        """
        await self._to_the_end(self._unload(name))

    async def stop(self) -> None:
        """Give up changes that have not ended."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _to_the_end(self, change: Coroutine[Any, Any, None]) -> None:
        if not self.limit:
            change.close()
            raise AdapterRefused("LoRA is not enabled.", remedy="Start the server with --enable-lora.")
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, path: str) -> None:
        async with self._changing:
            if name in self._held:
                raise AdapterRefused(
                    f"Failed to load LoRA adapter {name} because it is already loaded.", remedy="Unload it first."
                )
            if len(self._held) >= self.limit:
                raise AdapterRefused(
                    f"Failed to load LoRA adapter {name}: at most {self.limit} can be loaded, and are "
                    f"({', '.join(self._held)}).",
                    remedy="Unload one first, or start the server with more (--max-loaded-loras).",
                )
            held = _Held(await asyncio.to_thread(self._read, name, path), asyncio.Event())
            held.unused.set()
            self._held[name] = held
            logger.info("LoRA adapter %s is loaded from %s", name, path)

    async def _unload(self, name: str) -> None:
        async with self._changing:
            held = self._held.pop(name, None)
            if held is None:
                raise AdapterRefused(f"LoRA with name {name} does not exist. {self._listing()}")
            await held.unused.wait()
            await self._forget(held.adapter)
            logger.info("LoRA adapter %s is unloaded", name)

    def _find(self, name: str) -> _Held:
        if not self.limit:
            raise InvalidRequest(
                f"LoRA adapter '{name}' was requested, but LoRA is not enabled.",
                remedy="Start the server with --enable-lora.",
            )
        if name not in self._held:
            raise InvalidRequest(
                f"The following requested LoRA adapters are not loaded: {name}. {self._listing()}",
                remedy="Load it with /load_lora_adapter.",
            )
        return self._held[name]

    def _listing(self) -> str:
        return f"Loaded adapters: {', '.join(self._held) or 'none'}."
