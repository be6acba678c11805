"""Components, their costs, the requests for them, and the protocol of what holds the real ones
(CoServe, 4.2, 4.5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Protocol

from shell_router.errors import InvalidRequest, require
from shell_router.files.types import Amount, Count, Index


class Tier(StrEnum):
    """Where the weights of a component are that has to be loaded."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Component:
    """A model of `architecture` whose weights take `memory_bytes`.

    `usage` is the probability that a request needs it. `after` names the components whose output
    leads to it; without any it is the first of its requests (a preliminary component, section 4.3).
    """

    name: str
    architecture: str
    memory_bytes: int
    usage: float = 0.0
    after: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Costs:
    """What components of one architecture cost on one kind of processor (section 4.5).

    A batch of n samples takes `sample_s` * n + `batch_s` (K and B), and `activation_bytes` * n
    besides the weights. More than `largest_batch` samples bring no further gain. A load takes
    `host_load_s` from host memory, `disk_load_s` from disk through host memory.
    """

    sample_s: Annotated[Amount, "Measured: K of a batch, K n + B."]
    batch_s: Annotated[Amount, "Measured: B."]
    largest_batch: Annotated[Count, "Measured: a larger batch gains nothing."]
    activation_bytes: Annotated[Index, "Measured: bytes of each sample."]
    host_load_s: Annotated[Amount, "Measured: load from host memory."]
    disk_load_s: Annotated[Amount, "Measured: load from disk."]

    def __post_init__(self) -> None:
        require(
            self.disk_load_s >= self.host_load_s,
            f"disk_load_s is {self.disk_load_s}, less than host_load_s, {self.host_load_s}.",
            "Count what comes after the disk in both.",
        )

    def load_s(self, tier: Tier) -> float:
        """How long a component takes to load from there."""
        if tier is Tier.HOST:
            return self.host_load_s
        return self.disk_load_s

    def read_s(self, tier: Tier) -> float:
        """How much of that the disk is occupied for."""
        if tier is Tier.HOST:
            return 0.0
        return self.disk_load_s - self.host_load_s

    def added_seconds(self, load_s: float, *, joins: bool) -> float:
        """The additional latency of a request on a queue: K behind others for the same component,
        else K + B.
        """
        return self.sample_s + (0.0 if joins else self.batch_s) + load_s

    def batch_seconds(self, samples: int) -> float:
        """K * n + B."""
        return self.sample_s * samples + self.batch_s


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """One queue, one share of a processor's memory, and what each architecture costs there.

    Of `memory_bytes` at most `component_share` holds components (0.75 is the paper's casual choice,
    section 5.2); the rest is for the samples of running batches. An architecture without costs
    never runs here.
    """

    name: str
    memory_bytes: int
    costs: Mapping[str, Costs]
    component_share: float = 0.75

    @property
    def shelf_bytes(self) -> int:
        """Most that components take."""
        return int(self.component_share * self.memory_bytes)

    def takes(self, component: Component) -> bool:
        """Whether the component and one sample fit, were nothing else there."""
        costs = self.costs.get(component.architecture)
        if costs is None or component.memory_bytes > self.shelf_bytes:
            return False
        return component.memory_bytes + costs.activation_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sample for a chain of components: the first one, and those that follow as far as is known
    beforehand.
    """

    id: str
    chain: tuple[str, ...]
    sample: Any = None

    def __post_init__(self) -> None:
        if not self.chain or len(set(self.chain)) < len(self.chain):
            raise InvalidRequest(
                (
                    f"The chain of request {self.id!r} names "
                    f"{'a component twice' if self.chain else 'no component'}."
                ),
                remedy="Name each component once, and the first at least.",
            )

    def after(self, component: str) -> str | None:
        """The component that its chain names after `component`; None at its end, and for one that
        it does not name.
        """
        if component in self.chain:
            index = self.chain.index(component) + 1
        else:
            index = len(self.chain)
        if index < len(self.chain):
            return self.chain[index]
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A request at one of its components, which gets `sample`."""

    request: Request
    component: str
    sample: Any
    arrived_s: float


class Components(Protocol):
    """Loads, unloads and runs components at places: an executor's name, or `Tier.HOST` for host
    memory.

    It is asked for one load at a time per place, of a component that is not there. What `load` and
    `run` raise fails the requests for that component alone.
    """

    async def load(self, component: Component, place: str) -> None:
        """Weights into a place's memory: from host memory where they are loaded there, from disk
        otherwise.

        A load that raises, or is cancelled, leaves nothing behind.
        """
        ...

    async def unload(self, component: Component, place: str) -> None:
        """Free the memory. What this raises is logged."""
        ...

    async def run(self, component: Component, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """One output per sample, in their order; a ComponentError instead of one fails that request
        alone.
        """
        ...
