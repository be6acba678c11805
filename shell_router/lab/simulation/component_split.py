"""How often a pool's components are needed, and how its memory is split for that: tried in virtual time."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from random import Random

import orjson

from shell_router.errors import ConfigError, DataError
from shell_router.experts.components import Component, ComponentPool, ExecutorSettings, Policies, Request
from shell_router.experts.components.pool_file import read_component_pool, read_profiled_pool
from shell_router.experts.components.simulated import SimulatedComponents
from shell_router.experts.components.splitting import CASUAL_SHARE, SplitSettings, memory_split
from shell_router.experts.components.usage import ChainRule, Usage, check_chain, rules_of, usage_of
from shell_router.lab.simulation.component_profile import write_components, write_shares
from shell_router.lab.simulation.virtual_time import run_virtual

FORM = 'Write one object per line: {"chain": ["type-7", "detector-3"]}.'


def read_chains(file: Path, known: Collection[str]) -> list[tuple[str, ...]]:
    """The chains in their order, all of them of `known` components.

    Raises DataError, with file and line, for the first line that is none, and for a file without any.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy="Name a JSONL file of chains.") from error
    found = [_chain(line, f"{file}:{number}", known) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{file} holds no chain.", remedy=FORM)
    return found


def _chain(line: bytes, at: str, known: Collection[str]) -> tuple[str, ...]:
    try:
        chain = orjson.loads(line)["chain"]
        if not isinstance(chain, list) or not all(isinstance(name, str) for name in chain):
            raise TypeError("chain must be a list of names")
        check_chain(chain)
    except ConfigError as error:
        raise DataError(f"{at}: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{at}: this is no chain ({error}).", remedy=FORM) from error
    for name in chain:
        if name not in known:
            raise DataError(
                f"{at}: there is no component {name!r}.", remedy="Name those whose weights are in the folder."
            )
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
        """Requests a second, until the last is answered, of a pool that begins with its most probable components."""
        return len(self.chains) / max(INSTANT_S, run_virtual(self._seconds(executors)))

    async def _seconds(self, executors: Sequence[ExecutorSettings]) -> float:
        loop, components = asyncio.get_running_loop(), SimulatedComponents(executors, self.device_of)
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
UNUSED = Usage(0.0, frozenset())


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """What the split of a pool's memory is tried on: a `sample` of chains, or `requests` drawn from the file's rules.

    One comes each `every_s` seconds.
    """

    file: Path
    date: str
    sample: Path | None = None
    requests: int = 2000
    every_s: float = 0.0
    settings: SplitSettings = field(default_factory=SplitSettings)


def know_usage(options: SplitOptions, on_progress: Progress) -> list[tuple[str, ...]]:
    """Write how often each component is needed and what it follows on, and return the requests to try splits on.

    Empty where there is neither a sample nor a rule; then nothing is written. Raises ConfigError.
    """
    found = read_component_pool(options.file)
    if options.sample is not None:
        chains = read_chains(options.sample, found.components)
        source, rules = str(options.sample), rules_of(chains)
    elif found.rules:
        chains = drawn_chains(found.rules, options.requests, Random(0))
        source, rules = "its rules", list(found.rules)
    else:
        on_progress("neither rules nor --sample: usage and the split of memory stay unchanged")
        return []
    usage = usage_of(rules)
    write_components(
        options.file,
        {
            name: replace(one, usage=used.probability, after=tuple(sorted(used.after)))
            for name, one in found.components.items()
            for used in (usage.get(name, UNUSED),)
        },
    )
    needed = len({name for rule in rules for name in rule.chain})
    on_progress(f"{needed} of {len(found.components)} components are needed, by {source}")
    return chains


def find_split(options: SplitOptions, chains: Sequence[tuple[str, ...]], on_progress: Progress) -> None:
    """Try splits in virtual time, and write the best share for each executor. Raises ConfigError."""
    found = read_profiled_pool(options.file)
    device_of = {name: one.device for name, one in found.executors.items()}
    trials = ComponentTrials(found.catalog(), device_of, chains, Policies(), found.host_bytes, options.every_s)
    casual = [replace(one, component_share=CASUAL_SHARE) for one in found.executor_settings()]
    largest = {
        device: max(one.memory_bytes for one in found.catalog() if one.architecture in found.costs[device])
        for device in found.devices
    }
    best, splits = memory_split(casual, device_of, largest, trials.throughput, options.settings)
    for split in splits:
        executors = [name for name, device in device_of.items() if device == split.device]
        how = "the largest useful batch has the rest"
        if split.window is not None:
            window = f"{split.window.lower:.0f} to {split.window.upper:.0f} %"
            how = f"searched: window {window}, {len(split.tried)} trials"
        write_shares(options.file, split, executors, f"{options.date}: {how}")
        on_progress(f"{split.device}: {split.share:.1%} of the memory for components; {how}")
    ours, theirs = trials.throughput(best), trials.throughput(casual)
    shares = f"with these shares in virtual time, {theirs:.4g} with {CASUAL_SHARE} everywhere"
    on_progress(f"{ours:.4g} requests a second {shares}")
