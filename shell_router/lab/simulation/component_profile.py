"""`shell-router components profile`: the components of a pool measured, and their costs written to its file."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shell_router.errors import ComponentTooLarge, ConfigError
from shell_router.experts.components import Component
from shell_router.experts.components.measuring import MORE, Amount, Bench, Measured, measured
from shell_router.experts.components.pool_file import ComponentPoolFile, ComponentSection, read_component_pool
from shell_router.experts.components.splitting import Split
from shell_router.experts.components.torch_components import (
    TorchComponents,
    components_in,
    sample_of,
    torch_components,
)
from shell_router.lab.simulation.yaml_entries import entry_line, entry_text, rounded, with_entries, write_entries

DIGITS = 4


def write_costs(file: Path, device: str, known: Mapping[str, Measured], amount: Amount, date: str) -> None:
    """Put what was measured on a device in the place of what was known of it."""
    costs = {architecture: rounded(asdict(one.costs), DIGITS) for architecture, one in known.items()}
    errors = [f"{architecture} {one.error:.1%}" for architecture, one in known.items() if one.error is not None]
    comments = (
        f"measured {date}: medians of {amount.rounds} rounds, batches of {', '.join(map(str, amount.batches))}",
        f"mean relative error on batches that K and B were not fitted to: {', '.join(errors) or 'not known'}",
    )
    write_entries(file, "costs", {device: entry_text(device, costs, comments)})


def write_components(file: Path, components: Mapping[str, ComponentSection]) -> None:
    """Put components in the place of those of their names; lines that say the same already stay as they are."""
    known = read_component_pool(file).components
    written = {name: ComponentSection(**rounded(asdict(one), DIGITS)) for name, one in components.items()}
    lines = {
        name: entry_line(name, {**asdict(one), "after": list(one.after)})
        for name, one in written.items()
        if known.get(name) != one
    }
    write_entries(file, "components", lines)


def write_shares(file: Path, split: Split, executors: list[str], comment: str) -> None:
    """Put a device's share at each of its executors."""
    share = min(1.0, (int(split.share * 10_000) + 1) / 10_000)  # up, or the largest component might not fit any more
    write_entries(file, "component_shares", {name: entry_text(name, share, [comment]) for name in executors})


Progress = Callable[[str], None]


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


def update_components(options: ProfileOptions, on_progress: Progress) -> None:
    """Write which components the folder holds; their known usage stays. Raises ConfigError."""
    file = options.file
    found = read_component_pool(file)
    for section in ("costs", "components", "component_shares"):  # each can be added to
        with_entries(file.read_text(encoding="utf-8"), section, {}, file)
    if unknown := sorted(set(options.devices) - set(found.devices)):
        raise ConfigError(f"{file}: no executor is on {unknown[0]}.", remedy=f"Name one of {', '.join(found.devices)}.")
    try:
        there = components_in(found.folder, found.architecture_of)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    sections = {}
    for one in there:
        known = found.components.get(one.name)
        usage, after = (known.usage, known.after) if known else (0.0, ())
        sections[one.name] = ComponentSection(one.architecture, one.memory_bytes, usage, after)
    write_components(file, sections)
    on_progress(f"{found.folder} holds {len(sections)} components")
    if missing := sorted(found.components.keys() - sections.keys()):
        on_progress(
            f"{len(missing)} components of {file} have no weights there any more, {missing[0]} first: remove them"
        )


async def measure_costs(options: ProfileOptions, on_progress: Progress) -> None:
    """Measure every architecture on every device, and write each device's costs once they are known.

    An architecture that does not fit on a device is left out there. Raises ConfigError.
    """
    found = read_component_pool(options.file)
    components = torch_components(found, options.file)
    kinds: dict[str, list[Component]] = {}
    for component in components_in(found.folder, found.architecture_of):
        kinds.setdefault(component.architecture, []).append(component)
    for device in options.devices or found.devices:
        known = {}
        for architecture, some in kinds.items():
            try:
                known[architecture] = await _measured(options, found, components, device, architecture, some)
                on_progress(f"{device}: {_line(architecture, known[architecture])}")
            except ComponentTooLarge as error:
                on_progress(f"{device}: {architecture} is left out: it does not fit. {error}")
        if not known:
            raise ConfigError(f"{options.file}: no architecture fits on {device}.", remedy=MORE)
        write_costs(options.file, device, known, options.amount, options.date)


async def _measured(
    options: ProfileOptions,
    found: ComponentPoolFile,
    components: TorchComponents,
    device: str,
    architecture: str,
    some: list[Component],
) -> Measured:
    """On the device's executor with the most memory."""
    on_device = [name for name, one in found.executors.items() if one.device == device]
    place = max(on_device, key=lambda name: found.executors[name].memory_bytes)
    bench = Bench(
        components,
        some,
        place,
        found.executors[place].memory_bytes,
        sample_of(found, architecture),
        components.working_bytes,
        time.perf_counter,
        forget=components.forget if options.cold else lambda _: None,
    )
    try:
        return await measured(bench, options.amount)
    except ComponentTooLarge:
        raise
    except Exception as error:
        raise ConfigError(
            f"{options.file}: {architecture} cannot be measured on {device}: {type(error).__name__}: {error}.",
            remedy=f"Check architectures.{architecture}: its module, its sample and its components' files.",
        ) from error


def _line(architecture: str, found: Measured) -> str:
    costs = found.costs
    off = "" if found.error is None else f" (held out: off by {found.error:.1%})"
    return (
        f"{architecture} takes {1e3 * costs.sample_s:.3g} ms a sample and {1e3 * costs.batch_s:.3g} ms a batch{off}, "
        f"largest batch {costs.largest_batch}, {costs.activation_bytes / 1e6:.3g} MB a sample; loads "
        f"{1e3 * costs.host_load_s:.3g} ms from host memory, {1e3 * costs.disk_load_s:.3g} ms from disk"
    )
