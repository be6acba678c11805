"""A pool's components measured, and its memory split in virtual time."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.coserve.pool import (
    Component,
    ComponentPool,
    ExecutorSettings,
    Policies,
    Request,
)
from benchmarks.coserve.pool.errors import ComponentTooLarge
from benchmarks.coserve.pool.measuring import MORE, Amount, Bench, Measured, measured
from benchmarks.coserve.pool.pool_file import (
    ComponentPoolFile,
    ComponentSection,
    read_component_pool,
    read_profiled_pool,
)
from benchmarks.coserve.pool.simulated import SimulatedComponents
from benchmarks.coserve.pool.splitting import CASUAL_SHARE, executor_counts, memory_split
from benchmarks.coserve.pool.torch_components import (
    TorchComponents,
    components_in,
    sample_of,
    torch_components,
)
from benchmarks.coserve.pool.usage import ChainRule, Usage, check_chain, rules_of, usage_of
from shell_router.errors import ConfigError, DataError
from shell_router.files.document import read_json_lines
from shell_router.files.write import write_measured
from shell_router.lab.simulation.virtual_time import run_virtual

FORM = 'Write one object per line: {"chain": ["type-7", "detector-3"]}.'


def read_chains(file: Path, known: Collection[str]) -> list[tuple[str, ...]]:
    """The chains in their order, all of them of `known` components.

    Raises DataError, with file and line, for the first line that is none, and for a file without
    any.
    """
    found = [_chain(line.get("chain"), where, known) for where, line in read_json_lines(file, FORM)]
    if not found:
        raise DataError(f"{file} holds no chain.", remedy=FORM)
    return found


def _chain(chain: Any, where: str, known: Collection[str]) -> tuple[str, ...]:
    if not isinstance(chain, list) or not all(isinstance(name, str) for name in chain):
        raise DataError(f"{where}: this is no chain: it must be a list of names.", remedy=FORM)
    try:
        check_chain(chain)
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error
    if unknown := next((name for name in chain if name not in known), None):
        remedy = "Name those whose weights are in the folder."
        raise DataError(f"{where}: there is no component {unknown!r}.", remedy=remedy)
    return tuple(chain)


def drawn_chains(rules: Sequence[ChainRule], number: int, draw: Random) -> list[tuple[str, ...]]:
    """`number` chains, each drawn by the rules' shares."""
    upto = list(accumulate(rule.share for rule in rules))
    return [rule.chain for rule in draw.choices(rules, cum_weights=upto, k=number)]


INSTANT_S = 1e-9
"""Of a pool whose costs are all 0."""


@dataclass(frozen=True, slots=True)
class ComponentTrials:
    """What is tried: `chains`, one each `every_s` seconds, all that a pool is but its executors.

    `device_of` names each executor's device; executors of one share its processor.
    """

    catalog: Sequence[Component]
    device_of: Mapping[str, str]
    chains: Sequence[tuple[str, ...]]
    policies: Policies
    host_bytes: int = 0
    every_s: float = 0.0

    def throughput(self, executors: Sequence[ExecutorSettings]) -> float:
        """Requests a second, until the last is answered, of a pool that begins with its most
        probable components.
        """
        return len(self.chains) / max(INSTANT_S, run_virtual(self._seconds(executors)))

    def throughput_of(self, by_device: Mapping[str, Sequence[ExecutorSettings]]) -> float:
        """The same of executors that are told by device, whatever their names."""
        names = {one.name: device for device, some in by_device.items() for one in some}
        executors = [one for some in by_device.values() for one in some]
        return replace(self, device_of=names).throughput(executors)

    async def _seconds(self, executors: Sequence[ExecutorSettings]) -> float:
        loop = asyncio.get_running_loop()
        components = SimulatedComponents(executors, self.device_of)
        async with ComponentPool(
            self.catalog, executors, components, self.policies, host_bytes=self.host_bytes
        ) as pool:
            begun_s = loop.time()
            async with asyncio.TaskGroup() as tasks:
                for number, chain in enumerate(self.chains):
                    tasks.create_task(pool.ask(Request(str(number), chain)))
                    await asyncio.sleep(self.every_s)
            return loop.time() - begun_s


Progress = Callable[[str], None]
HEAD = "# What was measured of a component pool; docs/how-to/component-pools.md explains it.\n"
UNUSED = Usage(0.0, frozenset())


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """A pool's file, the devices that are measured (all where none are named), how much, and on
    which day.

    With `cold` files the system forgets what it holds of a file before it is read, so that a load
    is from the disk; without `costs` nothing is measured. The split is tried on a `sample` of
    chains, or on `requests` drawn from the file's rules, one each `every_s` seconds.
    """

    file: Path
    date: str
    devices: tuple[str, ...] = ()
    amount: Amount = field(default_factory=Amount)
    cold: bool = True
    costs: bool = True
    sample: Path | None = None
    requests: int = 2000
    every_s: float = 0.0


async def measure(options: ProfileOptions, on_progress: Progress) -> Sequence[tuple[str, ...]]:
    """Write which components the folder holds, how often each is needed, and what they cost.

    Returns the requests to try splits on; none where there is neither a sample nor a rule, and then
    known usage stays. Raises ConfigError, and DataError for a bad sample before anything is
    measured.
    """
    found = read_component_pool(options.file)
    if unknown := sorted(set(options.devices) - set(found.devices)):
        remedy = f"Name one of {', '.join(found.devices)}."
        raise ConfigError(f"{options.file}: no executor is on {unknown[0]}.", remedy=remedy)
    try:
        there = components_in(found.folder, found.architecture_of)
    except ConfigError as error:
        raise ConfigError(f"{options.file}: {error}") from error
    on_progress(f"{found.folder} holds {len(there)} components")
    if missing := sorted(found.profiled.components.keys() - {one.name for one in there}):
        on_progress(
            f"{len(missing)} components of {found.profile} have no weights there any more, "
            f"{missing[0]} first"
        )
    chains = _requests(options, found, {one.name for one in there}, on_progress)
    rules = (found.rules) if (options.sample is None) else (rules_of(chains))
    usage = usage_of(rules) if chains else {}
    known = found.profiled.components
    sections = {}
    for one in there:
        used = usage.get(one.name, UNUSED)
        before = known.get(one.name)
        if not chains and before is not None:
            used = Usage(before.usage, frozenset(before.after))
        after = tuple(sorted(used.after))
        sections[one.name] = ComponentSection(
            one.architecture, one.memory_bytes, used.probability, after
        )
    _write(found, "components", sections)
    read_component_pool(options.file)  # its rules may name components that are not there
    if options.costs:
        await _measure_costs(options, found, there, on_progress)
    return chains


def _requests(
    options: ProfileOptions, found: ComponentPoolFile, known: Collection[str], on_progress: Progress
) -> Sequence[tuple[str, ...]]:
    if options.sample is not None:
        chains = read_chains(options.sample, known)
        source = str(options.sample)
    elif found.rules:
        chains = drawn_chains(found.rules, options.requests, Random(0))
        source = "its rules"
    else:
        on_progress("neither rules nor --sample: usage and the split of memory stay unchanged")
        return ()
    needed = {name for chain in chains for name in chain}
    on_progress(f"{len(needed)} of {len(known)} components are needed, by {source}")
    return chains


def _write(found: ComponentPoolFile, section: str, entries: Mapping[str, Any]) -> None:
    plain = {
        name: one if isinstance(one, float | str | Mapping) else asdict(one)
        for name, one in entries.items()
    }
    write_measured(found.profile, section, plain, HEAD)


async def _measure_costs(
    options: ProfileOptions,
    found: ComponentPoolFile,
    there: Sequence[Component],
    on_progress: Progress,
) -> None:
    """Measure every architecture on every device, and write each device's costs once they are
    known.

    An architecture that does not fit on a device is left out there. Raises ConfigError.
    """
    components = torch_components(found, options.file)
    amount = options.amount
    kinds: dict[str, list[Component]] = {}
    for component in there:
        kinds.setdefault(component.architecture, []).append(component)
    for device in options.devices or found.devices:
        known: dict[str, Measured] = {}
        for architecture, some in kinds.items():
            try:
                known[architecture] = await _measured(
                    options, found, components, device, architecture, some
                )
                on_progress(f"{device}: {_line(architecture, known[architecture])}")
            except ComponentTooLarge as error:
                on_progress(f"{device}: {architecture} is left out: it does not fit. {error}")
        if not known:
            raise ConfigError(f"{options.file}: no architecture fits on {device}.", remedy=MORE)
        _write(found, "costs", {device: {name: asdict(one.costs) for name, one in known.items()}})
        errors = [f"{name} {one.error:.1%}" for name, one in known.items() if one.error is not None]
        how = f"medians of {amount.rounds} rounds, batches of {', '.join(map(str, amount.batches))}"
        off = (
            "mean relative error on batches that K and B were not fitted to: "
            f"{', '.join(errors) or 'not known'}"
        )
        _write(found, "measured", {f"costs of {device}": f"{options.date}: {how}; {off}"})


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
            (
                f"{options.file}: {architecture} cannot be measured on {device}: "
                f"{type(error).__name__}: {error}."
            ),
            remedy=(
                f"Check architectures.{architecture}: its module, its sample and its "
                "components' files."
            ),
        ) from error


def _line(architecture: str, found: Measured) -> str:
    costs = found.costs
    if found.error is None:
        off = ""
    else:
        off = f" (held out: off by {found.error:.1%})"
    return (
        f"{architecture} takes {1e3 * costs.sample_s:.3g} ms a sample and "
        f"{1e3 * costs.batch_s:.3g} ms a batch{off}, "
        f"largest batch {costs.largest_batch}, {costs.activation_bytes / 1e6:.3g} MB a sample; "
        "loads "
        f"{1e3 * costs.host_load_s:.3g} ms from host memory, {1e3 * costs.disk_load_s:.3g} ms "
        "from disk"
    )


def find_split(
    options: ProfileOptions, chains: Sequence[tuple[str, ...]], on_progress: Progress
) -> None:
    """Try splits in virtual time, and write the best share for each executor. Raises
    ConfigError."""
    found = read_profiled_pool(options.file)
    device_of = {name: one.device for name, one in found.executors.items()}
    trials = ComponentTrials(
        found.catalog(), device_of, chains, Policies(), found.host_bytes, options.every_s
    )
    casual = [replace(one, component_share=CASUAL_SHARE) for one in found.executor_settings()]
    largest = {
        device: max(
            one.memory_bytes
            for one in found.catalog()
            if one.architecture in found.profiled.costs[device]
        )
        for device in found.devices
    }
    best, splits = memory_split(casual, device_of, largest, trials.throughput)
    for split in splits:
        how = "the largest useful batch has the rest"
        if split.window is not None:
            window = f"{split.window.lower:.0f} to {split.window.upper:.0f} %"
            how = f"searched: window {window}, {len(split.tried)} trials"
        share = min(
            1.0, (int(split.share * 10_000) + 1) / 10_000
        )  # up, or the largest component might not fit
        _write(
            found,
            "component_shares",
            {name: share for name, on in device_of.items() if on == split.device},
        )
        _write(found, "measured", {f"share of {split.device}": f"{options.date}: {how}"})
        on_progress(f"{split.device}: {split.share:.1%} of the memory for components; {how}")
    _find_counts(options, found, trials, best, largest, on_progress)
    ours = trials.throughput(best)
    theirs = trials.throughput(casual)
    shares = f"with these shares in virtual time, {theirs:.4g} with {CASUAL_SHARE} everywhere"
    on_progress(f"{ours:.4g} requests a second {shares}")


def _find_counts(
    options: ProfileOptions,
    found: ComponentPoolFile,
    trials: ComponentTrials,
    executors: Sequence[ExecutorSettings],
    largest: Mapping[str, int],
    on_progress: Progress,
) -> None:
    """Try numbers of executors in virtual time, and write what each gives; the pool's file
    decides."""
    by_device = {
        device: [one for one in executors if trials.device_of[one.name] == device]
        for device in found.devices
    }
    for device, tried in executor_counts(by_device, largest, trials.throughput_of).items():
        given = ", ".join(f"{count}: {per_s:.4g}" for count, per_s in tried.items())
        line = f"requests a second by the number of executors: {given or 'none fits'}"
        _write(found, "measured", {f"executors of {device}": f"{options.date}: {line}"})
        on_progress(f"{device}: {line}; the file has {len(by_device[device])}")
