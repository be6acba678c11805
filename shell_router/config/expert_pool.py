"""An expert pool's YAML file: what a user writes, and what `experts profile` adds. docs/expert-pools.md explains it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from shell_router.config.read import read_file
from shell_router.config.refusal import require
from shell_router.errors import ConfigError
from shell_router.expert_pools.splitting import CASUAL_SHARE
from shell_router.expert_pools.usage import Rule
from shell_router.expert_pools.values import Costs, ExecutorSettings, Expert, Tier

SEE = "docs/expert-pools.md explains expert pools."
Dtype = Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8"]
PROFILE = "Run `shell-router experts profile` on this file."
Where = Callable[[tuple[str | int, ...]], str]


@dataclass(frozen=True, slots=True)
class ArchitectureSettings:
    """Modules of one kind: `module` is a function without arguments that makes one, as `package.module:function`.

    `experts` are patterns of names, as in a shell. One sample is a tensor of the shape `sample`.
    """

    module: str
    sample: tuple[int, ...]
    experts: tuple[str, ...] = ("*",)
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        package, colon, function = self.module.partition(":")
        require(
            bool(package and colon and function),
            f"module is {self.module!r}",
            remedy="Name a function that makes one, as in `shop.nets:classifier`.",
        )
        require(all(size > 0 for size in self.sample), f"sample has a size below 1: {list(self.sample)}")
        require(bool(self.experts), "experts is empty", remedy="Name patterns, or leave it out for all.")


@dataclass(frozen=True, slots=True)
class ExecutorSection:
    """One queue on a torch device, with so many bytes of its memory."""

    device: str
    memory_bytes: int

    def __post_init__(self) -> None:
        require(self.memory_bytes > 0, f"memory_bytes must be above 0, not {self.memory_bytes}")


@dataclass(frozen=True, slots=True)
class ExpertSection:
    """What is known of one expert; see `Expert`."""

    architecture: str
    memory_bytes: int
    usage: float = 0.0
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.memory_bytes > 0, f"memory_bytes must be above 0, not {self.memory_bytes}")
        require(0 <= self.usage <= 1, f"usage must be a probability from 0 to 1, not {self.usage:g}")


@dataclass(frozen=True, slots=True)
class ExpertPoolFile:
    """A pool of torch modules, one file of weights each in `folder`.

    `folder`, `architectures`, `executors`, `host_bytes` and `rules` are the user's. `costs` (per device and
    architecture), `experts` and `expert_shares` (per executor) are what was measured, and may be edited.
    """

    folder: Path
    architectures: Mapping[str, ArchitectureSettings]
    executors: Mapping[str, ExecutorSection]
    host_bytes: int = 0
    rules: tuple[Rule, ...] = ()
    costs: Mapping[str, Mapping[str, Costs]] = field(default_factory=dict)
    experts: Mapping[str, ExpertSection] = field(default_factory=dict)
    expert_shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.architectures), "architectures is empty", remedy="Name at least one.")
        require(bool(self.executors), "executors is empty", remedy="Name at least one.")
        require(self.host_bytes >= 0, f"host_bytes must be at least 0, not {self.host_bytes}")

    @property
    def devices(self) -> tuple[str, ...]:
        """Those of the executors, each once."""
        return tuple(dict.fromkeys(executor.device for executor in self.executors.values()))

    def architecture_of(self, expert: str) -> str:
        """The only architecture that has a pattern for the expert. Raises ConfigError."""
        found = [
            name
            for name, kind in self.architectures.items()
            if any(fnmatchcase(expert, pattern) for pattern in kind.experts)
        ]
        if len(found) != 1:
            raise ConfigError(
                f"Expert {expert!r} is of {len(found)} architectures{': ' if found else ''}{', '.join(found)}.",
                remedy="Give exactly one of them a pattern in `experts` that matches it.",
            )
        return found[0]

    def catalogue(self) -> list[Expert]:
        """The experts, as far as they are known."""
        return [
            Expert(name, one.architecture, one.memory_bytes, one.usage, frozenset(one.after))
            for name, one in self.experts.items()
        ]

    def executor_settings(self) -> list[ExecutorSettings]:
        """The executors with what was measured on their devices. ConfigError where nothing was."""
        return [
            ExecutorSettings(
                name, one.memory_bytes, self._costs_on(one.device), self.expert_shares.get(name, CASUAL_SHARE)
            )
            for name, one in self.executors.items()
        ]

    def _costs_on(self, device: str) -> Mapping[str, Costs]:
        found = self.costs.get(device)
        if not found:
            raise ConfigError(f"Nothing is known of what experts cost on {device}.", remedy=PROFILE)
        return found


def read_expert_pool(file: Path) -> ExpertPoolFile:
    """The pool that `file` describes, measured or not. Raises ConfigError, which begins with the file and the line."""
    found, where = read_file(file, ExpertPoolFile, see=SEE)
    assert isinstance(found, ExpertPoolFile)
    _check_names(found, where)
    return found


def read_profiled_pool(file: Path) -> ExpertPoolFile:
    """As `read_expert_pool`, of a pool that was measured: it has experts, and costs for each device."""
    found = read_expert_pool(file)
    if not found.experts:
        raise ConfigError(f"{file}: no experts are known.", remedy=PROFILE)
    for device in found.devices:
        if device not in found.costs:
            raise ConfigError(f"{file}: nothing is known of what experts cost on {device}.", remedy=PROFILE)
    return found


def _check_names(found: ExpertPoolFile, where: Where) -> None:
    """Names that lead nowhere, or have a meaning of their own, are told with their lines."""
    if Tier.HOST in found.executors:
        at = where(("executors", Tier.HOST))
        raise ConfigError(f"{at}: an executor is named 'host'.", remedy="That is host memory: take another name.")
    for name, one in found.experts.items():
        _known(one.architecture, found.architectures, where(("experts", name)), "architecture")
        for before in one.after:
            _known(before, found.experts, where(("experts", name, "after")), "expert")
        if name in one.after:
            at = where(("experts", name, "after"))
            raise ConfigError(f"{at}: {name!r} cannot come before itself.", remedy="Take it out of `after`.")
    for device, costs in found.costs.items():
        for architecture in costs:
            _known(architecture, found.architectures, where(("costs", device, architecture)), "architecture")
    for name, share in found.expert_shares.items():
        _known(name, found.executors, where(("expert_shares", name)), "executor")
        if not 0 < share <= 1:
            raise ConfigError(
                f"{where(('expert_shares', name))}: the share of {name} is {share}.", remedy="Give one up to 1."
            )
    if found.experts:
        for number, rule in enumerate(found.rules):
            for expert in rule.chain:
                _known(expert, found.experts, where(("rules", number)), "expert")


def _known(name: str, among: Mapping[str, object] | Sequence[str], at: str, what: str) -> None:
    if name not in among:
        shown = ", ".join(list(among)[:10])
        raise ConfigError(f"{at}: there is no {what} {name!r}.", remedy=f"There are: {shown}.")
