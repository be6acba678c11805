"""Experts, what they cost, and who asks for them: plain values (CoServe, sections 4.2 and 4.5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from shell_router.errors import ConfigError, InvalidRequest


class Tier(StrEnum):
    """Where the weights of an expert lie that has to be loaded."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Expert:
    """A model of `architecture` whose weights take `memory_bytes`.

    `usage` is the probability that a request needs it. `after` names the experts whose output leads to it; without any
    it is the first of its requests (a preliminary expert, section 4.3).
    """

    name: str
    architecture: str
    memory_bytes: int
    usage: float = 0.0
    after: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ConfigError(f"An expert is named {self.name!r}.", remedy="Give it a name of printable characters.")
        if self.memory_bytes < 1:
            self._refuse("memory_bytes", "Give the bytes of its weights.")
        if not 0 <= self.usage <= 1:
            self._refuse("usage", "Give a probability from 0 to 1.")
        if self.name in self.after:
            self._refuse("after", "An expert cannot come before itself.")

    def _refuse(self, field: str, remedy: str) -> NoReturn:
        raise ConfigError(f"Expert {self.name!r} has {field} {getattr(self, field)!r}.", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Costs:
    """What experts of one architecture cost on one kind of processor (section 4.5).

    A batch of n samples takes `sample_s` * n + `batch_s` (K and B), and `activation_bytes` * n beside the weights. More
    than `largest_batch` samples bring no further gain. A load takes `host_load_s` from host memory, `disk_load_s` from
    disk, host memory passed through on the way included.
    """

    sample_s: float
    batch_s: float
    largest_batch: int
    activation_bytes: int
    host_load_s: float
    disk_load_s: float

    def __post_init__(self) -> None:
        for field in ("sample_s", "batch_s", "activation_bytes", "host_load_s", "disk_load_s"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}.", remedy="Give 0 or more.")
        if self.disk_load_s < self.host_load_s:
            raise ConfigError(
                f"disk_load_s is {self.disk_load_s}, less than host_load_s, {self.host_load_s}.",
                remedy="Count what comes after the disk in both.",
            )
        if self.largest_batch < 1:
            raise ConfigError(f"largest_batch is {self.largest_batch}.", remedy="Give 1 or more.")

    def load_s(self, tier: Tier) -> float:
        """How long an expert takes to load from there."""
        return self.host_load_s if tier is Tier.HOST else self.disk_load_s

    def read_s(self, tier: Tier) -> float:
        """How much of that the disk is occupied for."""
        return 0.0 if tier is Tier.HOST else self.disk_load_s - self.host_load_s

    def batch_seconds(self, samples: int) -> float:
        """K * n + B."""
        return self.sample_s * samples + self.batch_s


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """One queue, one share of a processor's memory, and what each architecture costs there.

    Of `memory_bytes` at most `expert_share` holds experts (0.75 is the paper's casual choice, section 5.2); the rest is
    for the samples that are being worked on. An architecture without costs never runs here.
    """

    name: str
    memory_bytes: int
    costs: Mapping[str, Costs]
    expert_share: float = 0.75

    def __post_init__(self) -> None:
        if self.memory_bytes < 1:
            raise ConfigError(f"Executor {self.name!r} has memory_bytes {self.memory_bytes}.", remedy="Give 1 or more.")
        if not 0 < self.expert_share <= 1:
            raise ConfigError(
                f"Executor {self.name!r} has expert_share {self.expert_share}.", remedy="Give a share up to 1."
            )
        if self.name == Tier.HOST:
            raise ConfigError(f"An executor is named {self.name!r}.", remedy="That is host memory: take another name.")

    @property
    def shelf_bytes(self) -> int:
        """Most that experts take."""
        return int(self.expert_share * self.memory_bytes)

    def takes(self, expert: Expert) -> bool:
        """Whether the expert and one sample fit, were nothing else there."""
        costs = self.costs.get(expert.architecture)
        if costs is None or expert.memory_bytes > self.shelf_bytes:
            return False
        return expert.memory_bytes + costs.activation_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sample for a chain of experts: the first one, and those that follow as far as is known beforehand."""

    id: str
    chain: tuple[str, ...]
    sample: Any = None

    def __post_init__(self) -> None:
        if not self.chain:
            raise InvalidRequest(f"Request {self.id!r} names no expert.", remedy="Name the first expert of its chain.")
        if len(set(self.chain)) < len(self.chain):
            raise InvalidRequest(
                f"The chain of request {self.id!r} names an expert twice.", remedy="Name each expert once."
            )

    def after(self, expert: str) -> str | None:
        """The expert that its chain names behind `expert`; None at its end, and for one that it does not name."""
        place = self.chain.index(expert) + 1 if expert in self.chain else len(self.chain)
        return self.chain[place] if place < len(self.chain) else None


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A request at one of its experts, which gets `sample`."""

    request: Request
    expert: str
    sample: Any
    arrived_s: float
