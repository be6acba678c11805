"""Experts that are plain torch modules: one file of weights each, in a folder. Imports torch; the router does not."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shell_router.engines.torch_memory import most_held
from shell_router.engines.weight_files import Weights, read_weights
from shell_router.errors import ConfigError
from shell_router.expert_pools.values import Expert, Tier

SUFFIXES = (".safetensors", ".pt")


def experts_in(
    folder: Path, architecture_of: Callable[[str], str], usage_of: Callable[[str], float] = lambda _: 0.0
) -> list[Expert]:
    """One expert per file of weights, named as the file without its suffix.

    It takes as much memory as its file is long, which is a little more than its weights. Raises ConfigError for a
    folder without any, and for two files of one name.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES) if folder.is_dir() else []
    if not files or len({file.stem for file in files}) < len(files):
        raise ConfigError(
            f"{folder} holds {len(files)} files of weights, or two of one name.",
            remedy=f"Put one {' or '.join(SUFFIXES)} file per expert there.",
        )
    return [Expert(file.stem, architecture_of(file.stem), file.stat().st_size, usage_of(file.stem)) for file in files]


class TorchExperts:
    """Meets `expert_pools.Experts` with modules on torch devices; a sample is a tensor, and a batch their stack.

    `architectures` makes a module without weights of its own for each architecture; `devices` names each executor's
    device. Reading, copying and inference happen on threads, so that the event loop goes on. A .pt file is in memory
    once more than the pool's budgets say while it is read; so are weights on their way to another device.
    """

    def __init__(
        self,
        folder: Path,
        architectures: Mapping[str, Callable[[], torch.nn.Module]],
        devices: Mapping[str, torch.device],
    ) -> None:
        self._folder = folder
        self._architectures = architectures
        self._devices = devices
        self._in_host: dict[str, Weights] = {}
        self._modules: dict[tuple[str, str], torch.nn.Module] = {}

    async def load(self, expert: Expert, place: str) -> None:
        """Raises what torch and safetensors raise for a file that is missing, cut off, or of another architecture."""
        weights = self._in_host.get(expert.name)
        stays = weights is not None
        if weights is None:
            weights = await asyncio.to_thread(read_weights, self._file(expert.name))
        if place == Tier.HOST:
            self._in_host[expert.name] = weights
        else:
            module = await asyncio.to_thread(self._made, expert, weights, self._devices[place], copied=stays)
            self._modules[expert.name, place] = module

    async def unload(self, expert: Expert, place: str) -> None:
        """Nothing else holds the weights, so that their memory is free at once."""
        if place == Tier.HOST:
            del self._in_host[expert.name]
        else:
            del self._modules[expert.name, place]

    async def run(self, expert: Expert, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """One tensor per sample, on the CPU."""
        module, device = self._modules[expert.name, place], self._devices[place]
        return await asyncio.to_thread(_infer, module, samples, device)

    async def working_bytes(self, expert: Expert, place: str, samples: Sequence[Any]) -> int:
        """Run a batch, and tell how many bytes it held at most beside the weights, samples and outputs included.

        On the event loop's own thread, where torch's profiler starts without complaint: it is for measuring.
        """
        module, device = self._modules[expert.name, place], self._devices[place]
        return most_held(device, lambda: _infer(module, samples, device))

    def forget(self, expert: Expert) -> None:
        """Have the system drop its copy of the expert's file, so that the next load is from the disk.

        It is free to keep it, and does so for files that are mapped or not yet written. Nothing happens where systems
        cannot be told (macOS).
        """
        if hasattr(os, "posix_fadvise"):
            with self._file(expert.name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _file(self, name: str) -> Path:
        file = self._folder / f"{name}.safetensors"
        return file if file.exists() else self._folder / f"{name}.pt"

    def _made(self, expert: Expert, weights: Weights, device: torch.device, *, copied: bool) -> torch.nn.Module:
        with torch.device("meta"):
            module = self._architectures[expert.architecture]()
        own = {key: weight.to(device, copy=copied) for key, weight in weights.items()}
        module.load_state_dict(own, assign=True)
        return module.eval()


@torch.inference_mode()
def _infer(module: torch.nn.Module, samples: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    outputs: torch.Tensor = module(torch.stack(list(samples)).to(device))
    return list(outputs.cpu().unbind())
