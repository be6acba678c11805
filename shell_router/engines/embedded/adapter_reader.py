"""LoRA adapters from PEFT folders into memory, checked against the network that they are for."""

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shell_router.engines.embedded.adapted_linears import Adapter
from shell_router.engines.embedded.adapter_config import AdapterConfig, AdapterRefused, read_adapter_config

WEIGHTS = "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?P<linear>.+)\.lora_(?P<side>[AB])\.weight")

Names = dict[str, dict[str, str]]


class AdapterReader:
    """Reads adapters for the linear layers in `shapes` (outputs and inputs by path), as `dtype` on `device`."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, int]], *, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes = shapes
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._numbers = itertools.count(1)

    def __call__(self, name: str, path: str) -> Adapter:
        """The adapter in folder `path`. Blocks. Raises `AdapterRefused`; shapes are checked before weights are read."""
        folder = Path(path)
        config = read_adapter_config(folder, max_rank=self._max_rank)
        weights = folder / WEIGHTS
        if not weights.is_file():
            raise AdapterRefused(f"{weights} is missing.", remedy="Save the adapter with safetensors.")
        try:
            factors = self._read(weights, config)
            fingerprint = _fingerprint(folder)
        # torch says RuntimeError where the device has no memory left
        except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
            raise AdapterRefused(f"{weights} cannot be read: {error}.", remedy="Save the adapter anew.") from error
        return Adapter(name, path, next(self._numbers), fingerprint, factors)

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
        if linear not in self._shapes:
            raise AdapterRefused(
                f"{weights}: the model has no layer {linear!r} that can be adapted.",
                remedy="Load an adapter of this very model.",
            )
        outputs, inputs = self._shapes[linear]
        wanted = ((rank, inputs), (outputs, rank))
        if found != wanted:
            raise AdapterRefused(
                f"{weights}: {linear} has A {list(found[0])} and B {list(found[1])}, "
                f"where the model needs {list(wanted[0])} and {list(wanted[1])}.",
                remedy="Load an adapter of this very model.",
            )

    def _kept(self, weights: Path, name: str, tensor: Tensor, scaling: float = 1.0) -> Tensor:
        """What is kept in memory of a tensor. The scaling is applied before rounding to the model's own numbers."""
        wide = torch.promote_types(self._dtype, torch.float32)
        kept = (tensor.to(wide) * scaling).to(self._dtype)
        # A NaN in one row's KV would outlive the row and spread: see SlotKv.
        if not torch.isfinite(kept).all():
            raise AdapterRefused(f"{weights}: {name} has numbers that are not finite.", remedy="Train it anew.")
        return kept.to(self._device)


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
