"""How often a pool's experts are needed, and how its memory is split for that: read, tried and written to its file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from shell_router.config.expert_pool import ExpertPoolFile, read_expert_pool, read_profiled_pool
from shell_router.expert_pools import POLICIES, ExecutorSettings
from shell_router.expert_pools.splitting import CASUAL_SHARE, Split, SplitSettings, memory_split
from shell_router.expert_pools.usage import Rule, Usage, rules_of, usage_of
from shell_router.simulation.chains import drawn_chains, read_chains
from shell_router.simulation.expert_profile_file import write_experts, write_shares
from shell_router.simulation.expert_trials import ExpertTrials

Tell = Callable[[str], None]
NOBODY = Usage(0.0, frozenset())


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """What the split of a pool's memory is tried on: a `sample` of chains, or `requests` drawn from the file's rules.

    One comes each `every_s` seconds, to a pool with the `policies` of that name.
    """

    file: Path
    date: str
    sample: Path | None = None
    requests: int = 2000
    every_s: float = 0.0
    policies: str = "ours"
    settings: SplitSettings = field(default_factory=SplitSettings)


def know_usage(options: SplitOptions, tell: Tell) -> list[tuple[str, ...]]:
    """Write how often each expert is needed and what it follows on, and return the requests to try splits on.

    Empty where there is neither a sample nor a rule; then nothing is written. Raises ConfigError.
    """
    found = read_expert_pool(options.file)
    if options.sample is not None:
        chains = read_chains(options.sample, found.experts)
        source, rules = str(options.sample), rules_of(chains)
    elif found.rules:
        chains = drawn_chains(found.rules, options.requests, Random(0))
        source, rules = "its rules", list(found.rules)
    else:
        tell("neither rules nor --sample: usage and the split of memory stay as they are")
        return []
    _write_usage(options.file, found, rules)
    needed = len({name for rule in rules for name in rule.chain})
    tell(f"{needed} of {len(found.experts)} experts are needed, by {source}")
    return chains


def _write_usage(file: Path, found: ExpertPoolFile, rules: Sequence[Rule]) -> None:
    usage = usage_of(rules)
    told = {name: usage.get(name, NOBODY) for name in found.experts}
    write_experts(
        file,
        {
            name: replace(one, usage=told[name].probability, after=tuple(sorted(told[name].after)))
            for name, one in found.experts.items()
        },
    )


def find_split(options: SplitOptions, chains: Sequence[tuple[str, ...]], tell: Tell) -> None:
    """Try splits in virtual time, and write the best share for each executor. Raises ConfigError."""
    found = read_profiled_pool(options.file)
    device_of = {name: one.device for name, one in found.executors.items()}
    trials = ExpertTrials(
        found.catalogue(), device_of, chains, POLICIES[options.policies], found.host_bytes, options.every_s
    )
    casual = [replace(one, expert_share=CASUAL_SHARE) for one in found.executor_settings()]
    best, splits = memory_split(casual, device_of, largest_experts(found), trials.throughput, options.settings)
    for split in splits:
        executors = [name for name, device in device_of.items() if device == split.device]
        told = f"{options.date}: {how_found(split)}"
        write_shares(options.file, split, executors, told)
        tell(f"{split.device}: {split.share:.1%} of the memory for experts; {how_found(split)}")
    tell(_gain(trials, best, casual))


def _gain(trials: ExpertTrials, best: Sequence[ExecutorSettings], casual: Sequence[ExecutorSettings]) -> str:
    ours, theirs = trials.throughput(best), trials.throughput(casual)
    return (
        f"{ours:.4g} requests a second with these shares in virtual time, {theirs:.4g} with {CASUAL_SHARE} everywhere"
    )


def largest_experts(found: ExpertPoolFile) -> Mapping[str, int]:
    """Per device, the bytes of the largest expert that can run there."""
    return {
        device: max(one.memory_bytes for one in found.catalogue() if one.architecture in found.costs[device])
        for device in found.devices
    }


def how_found(split: Split) -> str:
    """In words."""
    if split.window is None:
        return "the largest useful batch has the rest"
    return f"searched: window {split.window.lower:.0f} to {split.window.upper:.0f} %, {len(split.tried)} trials"
