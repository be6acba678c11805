"""A component pool's YAML files: what a user writes, and what the profile command measures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval, Len
from pydantic import Field

from benchmarks.coserve.pool.splitting import CASUAL_SHARE
from benchmarks.coserve.pool.usage import ChainRule
from benchmarks.coserve.pool.values import Component, Costs, ExecutorSettings, Tier
from shell_router.errors import ConfigError, require
from shell_router.files.read import read_file
from shell_router.files.types import CODE_ONLY, Count, FilePath, Index, Share

SEE = "docs/how-to/component-pools.md explains component pools."
Dtype = Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8"]
PROFILE = "Run `python -m benchmarks.coserve.pool` on this file."


@dataclass(frozen=True, slots=True)
class ArchitectureSettings:
    """Modules of one kind: `module` is a function without arguments that makes one, as
    `package.module:function`.

    `components` are patterns of names, as in a shell. One sample is a tensor of the shape `sample`.
    """

    module: Annotated[
        str,
        "Function without arguments that makes a module: `package.module:function`.",
        Field(
            pattern="^[^:]+:[^:]+$", title="a function that makes one, as in `shop.nets:classifier`"
        ),
    ]
    sample: Annotated[tuple[Count, ...], "Shape of one sample's tensor."]
    components: Annotated[
        tuple[str, ...], "Patterns of the names that are of this kind.", Len(1)
    ] = ("*",)
    dtype: Annotated[Dtype, "Type of a sample's tensor."] = "float32"


@dataclass(frozen=True, slots=True)
class ExecutorSection:
    """One queue on a torch device, with `memory_bytes` of its memory."""

    device: Annotated[str, "Torch device."]
    memory_bytes: Annotated[Count, "Memory on that device."]


@dataclass(frozen=True, slots=True)
class ComponentSection:
    """What is known of one component; see `Component`."""

    architecture: Annotated[str, "Measured."]
    memory_bytes: Annotated[Count, "Measured: bytes of its weights."]
    usage: Annotated[Share, "Measured: probability that a request needs it."] = 0.0
    after: Annotated[tuple[str, ...], "Measured: components whose output leads to it."] = ()


@dataclass(frozen=True, slots=True)
class ComponentProfile:
    """What was measured of a pool; it may be edited."""

    costs: Annotated[Mapping[str, Mapping[str, Costs]], "Costs by device and architecture."] = (
        field(default_factory=dict)
    )
    components: Annotated[Mapping[str, ComponentSection], "The components in the folder."] = field(
        default_factory=dict
    )
    component_shares: Annotated[
        Mapping[str, Annotated[float, Interval(gt=0, le=1)]],
        "Measured: share of each executor's memory for components (0.75 if absent).",
    ] = field(default_factory=dict)
    measured: Annotated[Mapping[str, str], "When and how, by what was measured."] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class ComponentPoolFile:
    """A pool of torch modules, one file of weights each in `folder`."""

    folder: Annotated[FilePath, "Weights, one file per component, named as the component."]
    architectures: Mapping[str, ArchitectureSettings]
    executors: Mapping[str, ExecutorSection]
    profile: Annotated[FilePath, "File that the profile command writes."]
    host_bytes: Annotated[Index, "Host memory that caches what was read from disk."] = 0
    rules: Annotated[tuple[ChainRule, ...], "Which chains are requested."] = ()
    profiled: Annotated[ComponentProfile, CODE_ONLY] = field(default_factory=ComponentProfile)

    def __post_init__(self) -> None:
        require(bool(self.architectures), "architectures is empty", remedy="Name at least one.")
        require(bool(self.executors), "executors is empty", remedy="Name at least one.")

    @property
    def devices(self) -> tuple[str, ...]:
        """Those of the executors, each once."""
        return tuple(dict.fromkeys(executor.device for executor in self.executors.values()))

    def architecture_of(self, component: str) -> str:
        """The only architecture that has a pattern for the component. Raises ConfigError."""
        kinds = self.architectures.items()
        found = [
            name
            for name, kind in kinds
            if any(fnmatchcase(component, one) for one in kind.components)
        ]
        if len(found) != 1:
            raise ConfigError(
                (
                    f"Component {component!r} is of {len(found)} "
                    f"architectures{': ' if found else ''}{', '.join(found)}."
                ),
                remedy="Give exactly one of them a pattern in `components` that matches it.",
            )
        return found[0]

    def catalog(self) -> list[Component]:
        """The components, as far as they are known."""
        return [
            Component(name, one.architecture, one.memory_bytes, one.usage, frozenset(one.after))
            for name, one in self.profiled.components.items()
        ]

    def executor_settings(self) -> list[ExecutorSettings]:
        """The executors of a profiled pool, with what was measured on their devices."""
        costs = self.profiled.costs
        shares = self.profiled.component_shares
        return [
            ExecutorSettings(
                name, one.memory_bytes, costs[one.device], shares.get(name, CASUAL_SHARE)
            )
            for name, one in self.executors.items()
        ]


def read_component_pool(file: Path) -> ComponentPoolFile:
    """The pool that `file` describes, measured or not. Raises ConfigError, which begins with a file
    and the line.
    """
    pool, where = read_file(file, ComponentPoolFile, see=SEE)
    if Tier.HOST in pool.executors:
        at = where(("executors", Tier.HOST))
        raise ConfigError(
            f"{at}: an executor is named 'host'.", remedy="That is host memory: take another name."
        )
    if not pool.profile.exists():
        return pool
    profiled, there = read_file(pool.profile, ComponentProfile, see=SEE)
    found = replace(pool, profiled=profiled)
    _check_names(found, there)
    for number, rule in enumerate(pool.rules if profiled.components else ()):
        for component in rule.chain:
            _known(component, profiled.components, "component", where(("rules", number)))
    return found


def read_profiled_pool(file: Path) -> ComponentPoolFile:
    """As `read_component_pool`, of a pool that was measured: it has components, and costs for each
    device.
    """
    found = read_component_pool(file)
    if not found.profiled.components:
        raise ConfigError(f"{file}: no components are known.", remedy=PROFILE)
    for device in found.devices:
        if not found.profiled.costs.get(device):
            raise ConfigError(
                f"{file}: nothing is known of what components cost on {device}.", remedy=PROFILE
            )
    return found


def _known(name: str, among: Mapping[str, object], what: str, at: str) -> None:
    if name not in among:
        shown = ", ".join(list(among)[:10])
        raise ConfigError(f"{at}: there is no {what} {name!r}.", remedy=f"There are: {shown}.")


def _check_names(found: ComponentPoolFile, where: Callable[[tuple[str | int, ...]], str]) -> None:
    """Raise ConfigError, with the line of the profile, for names that lead nowhere."""
    profiled = found.profiled
    for name, one in profiled.components.items():
        _known(one.architecture, found.architectures, "architecture", where(("components", name)))
        at = where(("components", name, "after"))
        for before in one.after:
            _known(before, profiled.components, "component", at)
        require(
            name not in one.after,
            f"{at}: {name!r} cannot come before itself.",
            "Take it out of `after`.",
        )
    for device, costs in profiled.costs.items():
        for architecture in costs:
            _known(
                architecture,
                found.architectures,
                "architecture",
                where(("costs", device, architecture)),
            )
    for name in profiled.component_shares:
        _known(name, found.executors, "executor", where(("component_shares", name)))
