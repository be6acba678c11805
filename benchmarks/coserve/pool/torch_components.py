"""Components that are torch modules: one file of weights each, in a folder. Imports torch; the
router does not.
"""

import asyncio
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile

from benchmarks.coserve.pool import ComponentPool, Policies
from benchmarks.coserve.pool.executor import Watch
from benchmarks.coserve.pool.pool import Route, follow_chain, ignore
from benchmarks.coserve.pool.pool_file import ComponentPoolFile, read_profiled_pool
from benchmarks.coserve.pool.values import Component, Tier
from shell_router.errors import ConfigError

MEMORY_EVENT = "[memory]"


def most_held(device: torch.device, work: Callable[[], Any]) -> int:
    """Bytes that `work` held at most on `device` beyond what was held before, as torch's allocator
    counts them.

    On CUDA nothing else may run there meanwhile. What libraries allocate by themselves is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    # the events that the profiler's tables are made of: those leave out what an operation frees
    # again before it ends
    found = seen.profiler.kineto_results.events()
    changes = sorted(
        (event for event in found if event.name() == MEMORY_EVENT),
        key=lambda event: event.start_ns(),
    )
    return int(max(accumulate((event.nbytes() for event in changes), initial=0)))


Weights = Mapping[str, torch.Tensor]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_header(opened: BinaryIO) -> dict[str, dict[str, Any]]:
    """Read the header of a safetensors file, and leave the file at its data.

    Returns:
        Per tensor its `dtype`, `shape` and `data_offsets`, which count from the data.
    """
    (length,) = struct.unpack("<Q", opened.read(8))
    header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return header


def read_weights(file: Path, *, pinned: bool = False) -> Weights:
    """The tensors of a safetensors file, on the CPU; `pinned` pages can be copied to a GPU while it
    computes.

    They are read into the memory where they stay, all of them into one block: neither mapped, since
    the system may drop what is mapped and read it again at any time, nor there a second time
    meanwhile. Raises what safetensors and the system raise for a file that is missing, cut off or
    malformed.
    """
    with safe_open(file, framework="pt"):
        pass  # has the header checked: offsets, shapes and the file's length agree
    with file.open("rb") as data:
        header = read_header(data)
        length = file.stat().st_size - data.tell()
        block = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
        read = data.readinto(block.numpy().data)
    if read < block.numel():
        raise EOFError(f"{file} was cut off while it was read")
    tensors = {}
    for name, tensor in header.items():
        dtype, (begin, end) = tensor["dtype"], tensor["data_offsets"]
        if dtype not in _DTYPES:
            raise TypeError(
                f"weights of the kind {dtype} cannot be read; save them as one of "
                f"{', '.join(_DTYPES)}"
            )
        part = block[begin:end]
        kind = _DTYPES[dtype]
        if begin % kind.itemsize:
            part = part.clone()  # aligned for its kind
        tensors[name] = part.view(kind).reshape(tensor["shape"])
    return tensors


SUFFIX = ".safetensors"


def components_in(
    folder: Path,
    architecture_of: Callable[[str], str],
    usage_of: Callable[[str], float] = lambda _: 0.0,
) -> list[Component]:
    """One component per file of weights, named as the file without its suffix.

    It takes as much memory as its file is long, which is a little more than its weights. Raises
    ConfigError for a folder without any.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(
            f"{folder} holds no weights.", remedy=f"Put one {SUFFIX} file per component there."
        )
    return [
        Component(file.stem, architecture_of(file.stem), file.stat().st_size, usage_of(file.stem))
        for file in files
    ]


class TorchComponents:
    """Meets `values.Components` with modules on torch devices; a sample is a tensor, and a batch
    their stack.

    `architectures` makes a module without weights of its own for each architecture; `devices` names
    each executor's device. Reading, copying and inference happen on threads, so that the event loop
    goes on. Weights on their way to another device are in memory once more than the pool's budgets
    say. Each executor of a GPU has a stream for batches and one for copies of weights, so that
    neither waits for the other, nor for other executors; a load ends when its copy has.
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
        self._pinned = any(device.type == "cuda" for device in devices.values())
        self._runs_on = {name: _new_stream(device) for name, device in devices.items()}
        self._copies_on = {name: _new_stream(device) for name, device in devices.items()}
        self._in_host: dict[str, Weights] = {}
        self._modules: dict[tuple[str, str], torch.nn.Module] = {}

    async def load(self, component: Component, place: str) -> None:
        """Raises what torch and safetensors raise for a file that is missing, cut off, or of
        another architecture.
        """
        weights = self._in_host.get(component.name)
        stays = weights is not None
        if weights is None:
            file = self._file(component.name)
            weights = await asyncio.to_thread(read_weights, file, pinned=self._pinned)
        if place == Tier.HOST:
            self._in_host[component.name] = weights
        else:
            module = await asyncio.to_thread(self._made, component, weights, place, copied=stays)
            self._modules[component.name, place] = module

    async def unload(self, component: Component, place: str) -> None:
        """Nothing else holds the weights, so that their memory is free at once."""
        if place == Tier.HOST:
            del self._in_host[component.name]
        else:
            del self._modules[component.name, place]

    async def run(self, component: Component, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """One tensor per sample, on the CPU."""
        module = self._modules[component.name, place]
        device, stream = self._devices[place], self._runs_on[place]
        return await asyncio.to_thread(_infer, module, samples, device, stream)

    async def working_bytes(self, component: Component, place: str, samples: Sequence[Any]) -> int:
        """Run a batch; gives the bytes that it held at most besides the weights, samples and
        outputs included.

        It blocks the event loop, since torch's profiler works on its thread only.
        """
        module = self._modules[component.name, place]
        device, stream = self._devices[place], self._runs_on[place]
        return most_held(device, lambda: _infer(module, samples, device, stream))

    def forget(self, component: Component) -> None:
        """Have the system drop its copy of the component's file, so that the next load is from the
        disk.

        It may keep it, as for files that are mapped or not yet written. Without posix_fadvise
        (macOS) nothing happens.
        """
        if hasattr(os, "posix_fadvise"):
            with self._file(component.name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _made(
        self, component: Component, weights: Weights, place: str, *, copied: bool
    ) -> torch.nn.Module:
        device, stream = self._devices[place], self._copies_on[place]
        with torch.device("meta"):
            module = self._architectures[component.architecture]()
        with torch.cuda.stream(stream):
            own = {
                key: weight.to(device, non_blocking=True, copy=copied)
                for key, weight in weights.items()
            }
        if stream is not None:
            stream.synchronize()
        module.load_state_dict(own, assign=True)
        return module.eval()


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """None for a CPU, which `torch.cuda.stream` takes for no change."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@torch.inference_mode()
def _infer(
    module: torch.nn.Module,
    samples: Sequence[torch.Tensor],
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> list[torch.Tensor]:
    with torch.cuda.stream(stream):
        outputs: torch.Tensor = module(torch.stack(list(samples)).to(device))
        return list(outputs.cpu().unbind())


def load_pool(
    file: Path,
    policies: Policies | None = None,
    *,
    route: Route = follow_chain,
    watch: Watch = ignore,
) -> ComponentPool:
    """The pool of a file that `python -m benchmarks.coserve.pool` has measured, not yet open.

    Raises ConfigError, which names the file.
    """
    found = read_profiled_pool(file)
    return ComponentPool(
        found.catalog(),
        found.executor_settings(),
        torch_components(found, file),
        policies or Policies(),
        host_bytes=found.host_bytes,
        route=route,
        watch=watch,
    )


def torch_components(found: ComponentPoolFile, file: Path) -> TorchComponents:
    """The modules that the pool's `file` describes. Raises ConfigError."""
    architectures = {}
    devices = {}
    for name, kind in found.architectures.items():
        package, _, function = kind.module.partition(":")
        try:
            architectures[name] = getattr(import_module(package), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{file}: architectures.{name}: {kind.module} cannot be imported: {error}.",
                remedy="Correct it, or set PYTHONPATH to where it lies.",
            ) from error
    for name, one in found.executors.items():
        at = f"{file}: executors.{name}"
        try:
            devices[name] = torch.device(one.device)
        except RuntimeError as error:
            raise ConfigError(
                f"{at}: {one.device!r} is no device of torch's.",
                remedy="Name one, as in cuda:0 or cpu.",
            ) from error
        if devices[name].type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"{at}: torch finds no GPU for {one.device}.", remedy="Name another device."
            )
    return TorchComponents(found.folder, architectures, devices)


def sample_of(found: ComponentPoolFile, architecture: str) -> torch.Tensor:
    """One sample of the architecture: zeros, on which dense layers work as long as on anything
    else.
    """
    kind = found.architectures[architecture]
    return torch.zeros(kind.sample, dtype=getattr(torch, kind.dtype))
