"""`shell-router experts profile`: a pool's experts measured, and written to its file with their usage and the split."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shell_router.config.expert_pool import ExpertPoolFile, ExpertSection, read_expert_pool
from shell_router.engines.torch_experts import TorchExperts, experts_in
from shell_router.errors import ConfigError, ExpertTooLarge
from shell_router.expert_pools import Expert
from shell_router.expert_pools.measuring import MORE, Amount, Bench, Measured, measured
from shell_router.simulation.expert_profile_file import write_costs, write_experts
from shell_router.wiring.expert_pools import sample_of, torch_experts

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """A pool's file, the devices that are measured (all where none are named), how much, and on which day.

    With `cold` files the system forgets what it holds of a file before it is read, so that a load is from the disk.
    """

    file: Path
    date: str
    devices: tuple[str, ...] = ()
    amount: Amount = field(default_factory=Amount)
    cold: bool = True


def require_devices(file: Path, devices: tuple[str, ...]) -> None:
    """Raise ConfigError for a device that no executor of the pool is on."""
    known = read_expert_pool(file).devices
    if unknown := sorted(set(devices) - set(known)):
        raise ConfigError(f"{file}: no executor is on {unknown[0]}.", remedy=f"Name one of {', '.join(known)}.")


def know_experts(file: Path, tell: Tell) -> None:
    """Write which experts the folder holds; what is known of their usage stays. Raises ConfigError."""
    found = read_expert_pool(file)
    try:
        there = experts_in(found.folder, found.architecture_of)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    sections = {one.name: _section(one, found.experts.get(one.name)) for one in there}
    write_experts(file, sections)
    tell(f"{found.folder} holds {len(sections)} experts")
    if missing := sorted(found.experts.keys() - sections.keys()):
        tell(f"{len(missing)} experts of {file} have no weights there any more, {missing[0]} first: take them out")


def _section(expert: Expert, known: ExpertSection | None) -> ExpertSection:
    usage, after = (known.usage, known.after) if known else (0.0, ())
    return ExpertSection(expert.architecture, expert.memory_bytes, usage, after)


async def measure_costs(options: ProfileOptions, tell: Tell) -> None:
    """Measure every architecture on every device, and write each device's costs once they are known.

    An architecture that does not fit on a device is left out there. Raises ConfigError.
    """
    found = read_expert_pool(options.file)
    experts, kinds = torch_experts(found, options.file), _by_architecture(found)
    for device in options.devices or found.devices:
        known = {}
        for architecture, some in kinds.items():
            try:
                known[architecture] = await _measured(options, found, experts, device, architecture, some)
                tell(f"{device}: {_line(architecture, known[architecture])}")
            except ExpertTooLarge as error:
                tell(f"{device}: {architecture} is left out, as it does not fit. {error}")
        if not known:
            raise ConfigError(f"{options.file}: no architecture fits on {device}.", remedy=MORE)
        write_costs(options.file, device, known, options.amount, options.date)


def _by_architecture(found: ExpertPoolFile) -> Mapping[str, list[Expert]]:
    """Those whose weights are there."""
    kinds: dict[str, list[Expert]] = {}
    for expert in experts_in(found.folder, found.architecture_of):
        kinds.setdefault(expert.architecture, []).append(expert)
    return kinds


async def _measured(
    options: ProfileOptions,
    found: ExpertPoolFile,
    experts: TorchExperts,
    device: str,
    architecture: str,
    some: list[Expert],
) -> Measured:
    """On the device's executor with the most memory."""
    on_device = [name for name, one in found.executors.items() if one.device == device]
    place = max(on_device, key=lambda name: found.executors[name].memory_bytes)
    bench = Bench(
        experts,
        some,
        place,
        found.executors[place].memory_bytes,
        sample_of(found, architecture),
        experts.working_bytes,
        time.perf_counter,
        forget=experts.forget if options.cold else lambda _: None,
    )
    try:
        return await measured(bench, options.amount)
    except ExpertTooLarge:
        raise
    except Exception as error:
        raise ConfigError(
            f"{options.file}: {architecture} cannot be measured on {device}: {type(error).__name__}: {error}.",
            remedy=f"Check architectures.{architecture}: its module, its sample and its experts' files.",
        ) from error


def _line(architecture: str, found: Measured) -> str:
    costs = found.costs
    off = "" if found.error is None else f" (held out: off by {found.error:.1%})"
    return (
        f"{architecture} takes {1e3 * costs.sample_s:.3g} ms a sample and {1e3 * costs.batch_s:.3g} ms a batch{off}, "
        f"{costs.largest_batch} at once, {costs.activation_bytes / 1e6:.3g} MB a sample; loads "
        f"{1e3 * costs.host_load_s:.3g} ms from host memory, {1e3 * costs.disk_load_s:.3g} ms from disk"
    )
