"""Expert pools of torch modules, as their files describe them. Imports torch; nothing of the router imports this."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from shell_router.config.expert_pool import ExpertPoolFile, read_profiled_pool
from shell_router.engines.torch_experts import TorchExperts
from shell_router.errors import ConfigError
from shell_router.expert_pools import POLICIES, ExpertPool, Policies
from shell_router.expert_pools.events import Watch
from shell_router.expert_pools.pool import Route, follow_chain, tell_nobody

OURS = POLICIES["ours"]


def load_pool(
    file: Path, policies: Policies = OURS, *, route: Route = follow_chain, watch: Watch = tell_nobody
) -> ExpertPool:
    """The pool of a file that `shell-router experts profile` has measured, not yet open.

    Raises ConfigError, which names the file.
    """
    found = read_profiled_pool(file)
    return ExpertPool(
        found.catalogue(),
        found.executor_settings(),
        torch_experts(found, file),
        policies,
        host_bytes=found.host_bytes,
        route=route,
        watch=watch,
    )


def torch_experts(found: ExpertPoolFile, file: Path) -> TorchExperts:
    """The modules that the pool's `file` describes. Raises ConfigError."""
    architectures = {
        name: _factory(kind.module, f"{file}: architectures.{name}") for name, kind in found.architectures.items()
    }
    devices = {name: _device(one.device, f"{file}: executors.{name}") for name, one in found.executors.items()}
    return TorchExperts(found.folder, architectures, devices)


def sample_of(found: ExpertPoolFile, architecture: str) -> torch.Tensor:
    """One sample of the architecture: zeros, on which dense layers work as long as on anything else."""
    kind = found.architectures[architecture]
    return torch.zeros(kind.sample, dtype=getattr(torch, kind.dtype))


def _factory(name: str, at: str) -> Callable[[], torch.nn.Module]:
    package, _, function = name.partition(":")
    try:
        made: Callable[[], torch.nn.Module] = getattr(import_module(package), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{at}: {name} cannot be imported: {error}.", remedy="Correct it, or set PYTHONPATH to where it lies."
        ) from error
    return made


def _device(name: str, at: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{at}: {name!r} is no device of torch's.", remedy="Name one, as in cuda:0 or cpu."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{at}: torch finds no GPU for {name}.", remedy="Name another device.")
    return device
