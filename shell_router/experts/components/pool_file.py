"""A component pool's YAML file: what a user writes, and what `components profile` adds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from shell_router.config.read import read_file
from shell_router.errors import ConfigError, require
from shell_router.experts.components.splitting import CASUAL_SHARE
from shell_router.experts.components.usage import ChainRule
from shell_router.experts.components.values import Component, Costs, ExecutorSettings, Tier
from shell_router.topology.forms import ListOf, MappingOf, Number, Text

SEE = "docs/how-to/component-pools.md explains component pools."
Dtype = Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8"]
PROFILE = "Run `shell-router components profile` on this file."


@dataclass(frozen=True, slots=True)
class ArchitectureSettings:
    """Modules of one kind: `module` is a function without arguments that makes one, as `package.module:function`.

    `components` are patterns of names, as in a shell. One sample is a tensor of the shape `sample`.
    """

    module: Annotated[
        str,
        Text(
            "Function without arguments that makes a module: `package.module:function`.",
            r"[^:]+:[^:]+",
            "a function that makes one, as in `shop.nets:classifier`",
        ),
    ]
    sample: Annotated[tuple[int, ...], ListOf("Shape of one sample's tensor.", Number("Size.", at_least=1, whole=True))]
    components: Annotated[
        tuple[str, ...], ListOf("Patterns of the names that are of this kind.", Text("Pattern."), at_least=1)
    ] = ("*",)
    dtype: Annotated[Dtype, "Type of a sample's tensor."] = "float32"


@dataclass(frozen=True, slots=True)
class ExecutorSection:
    """One queue on a torch device, with `memory_bytes` of its memory."""

    device: Annotated[str, "Torch device."]
    memory_bytes: Annotated[int, Number("Memory on that device.", at_least=1, whole=True)]


@dataclass(frozen=True, slots=True)
class ComponentSection:
    """What is known of one component; see `Component`."""

    architecture: Annotated[str, "Measured."]
    memory_bytes: Annotated[int, Number("Measured: bytes of its weights.", at_least=1, whole=True)]
    usage: Annotated[float, Number("Measured: probability that a request needs it.", at_least=0, at_most=1)] = 0.0
    after: Annotated[tuple[str, ...], "Measured: components whose output leads to it."] = ()


@dataclass(frozen=True, slots=True)
class ComponentPoolFile:
    """A pool of torch modules, one file of weights each in `folder`.

    `folder`, `architectures`, `executors`, `host_bytes` and `rules` are the user's. `costs` (per device and
    architecture), `components` and `component_shares` (per executor) are what was measured, and may be edited.
    """

    folder: Annotated[Path, "Weights, one file per component, named as the component."]
    architectures: Mapping[str, ArchitectureSettings]
    executors: Mapping[str, ExecutorSection]
    host_bytes: Annotated[int, Number("Host memory that caches what was read from disk.", at_least=0, whole=True)] = 0
    rules: Annotated[tuple[ChainRule, ...], "Which chains are requested."] = ()
    costs: Mapping[str, Mapping[str, Costs]] = field(default_factory=dict)
    components: Mapping[str, ComponentSection] = field(default_factory=dict)
    component_shares: Annotated[
        Mapping[str, float],
        MappingOf(
            "Measured: share of each executor's memory for components (0.75 if absent).",
            Text("Executor."),
            Number("Share.", above=0, at_most=1),
            at_least=0,
        ),
    ] = field(default_factory=dict)

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
        found = [name for name, kind in kinds if any(fnmatchcase(component, one) for one in kind.components)]
        if len(found) != 1:
            raise ConfigError(
                f"Component {component!r} is of {len(found)} architectures{': ' if found else ''}{', '.join(found)}.",
                remedy="Give exactly one of them a pattern in `components` that matches it.",
            )
        return found[0]

    def catalog(self) -> list[Component]:
        """The components, as far as they are known."""
        return [
            Component(name, one.architecture, one.memory_bytes, one.usage, frozenset(one.after))
            for name, one in self.components.items()
        ]

    def executor_settings(self) -> list[ExecutorSettings]:
        """The executors of a profiled pool, with what was measured on their devices."""
        return [
            ExecutorSettings(
                name, one.memory_bytes, self.costs[one.device], self.component_shares.get(name, CASUAL_SHARE)
            )
            for name, one in self.executors.items()
        ]


def read_component_pool(file: Path) -> ComponentPoolFile:
    """The pool that `file` describes, measured or not. Raises ConfigError, which begins with the file and the line."""
    found, where = read_file(file, ComponentPoolFile, see=SEE)
    assert isinstance(found, ComponentPoolFile)
    _check_names(found, where)
    return found


def read_profiled_pool(file: Path) -> ComponentPoolFile:
    """As `read_component_pool`, of a pool that was measured: it has components, and costs for each device."""
    found = read_component_pool(file)
    if not found.components:
        raise ConfigError(f"{file}: no components are known.", remedy=PROFILE)
    for device in found.devices:
        if not found.costs.get(device):
            raise ConfigError(f"{file}: nothing is known of what components cost on {device}.", remedy=PROFILE)
    return found


def _check_names(found: ComponentPoolFile, where: Callable[[tuple[str | int, ...]], str]) -> None:
    """Raise ConfigError, with the line, for names that lead nowhere or are reserved."""

    def known(name: str, among: Mapping[str, object], what: str, *at: str | int) -> None:
        if name not in among:
            shown = ", ".join(list(among)[:10])
            raise ConfigError(f"{where(at)}: there is no {what} {name!r}.", remedy=f"There are: {shown}.")

    if Tier.HOST in found.executors:
        at = where(("executors", Tier.HOST))
        raise ConfigError(f"{at}: an executor is named 'host'.", remedy="That is host memory: take another name.")
    for name, one in found.components.items():
        known(one.architecture, found.architectures, "architecture", "components", name)
        for before in one.after:
            known(before, found.components, "component", "components", name, "after")
        if name in one.after:
            at = where(("components", name, "after"))
            raise ConfigError(f"{at}: {name!r} cannot come before itself.", remedy="Take it out of `after`.")
    for device, costs in found.costs.items():
        for architecture in costs:
            known(architecture, found.architectures, "architecture", "costs", device, architecture)
    for name in found.component_shares:
        known(name, found.executors, "executor", "component_shares", name)
    for number, rule in enumerate(found.rules if found.components else ()):
        for component in rule.chain:
            known(component, found.components, "component", "rules", number)
