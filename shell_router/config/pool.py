"""A pool's YAML file: models, the workers that run them, and how questions are answered. docs/pools.md explains it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shell_router.batch.settings import Aggregating, Answers, Recruiting, Sampling
from shell_router.config.launch_settings import LaunchSettings
from shell_router.config.read import read_file
from shell_router.config.refusal import require
from shell_router.config.settings import EmbeddedSection, EmbedderSettings, Limits, PairSettings
from shell_router.errors import ConfigError

SEE = "docs/pools.md explains pools."


@dataclass(frozen=True, slots=True)
class PoolModel:
    """A model of the pool: its folder, what it is told before every question, and the LoRA adapter it answers with."""

    path: Path
    system: str = ""
    context_length: int | None = None
    adapter: Path | None = None

    def __post_init__(self) -> None:
        length = self.context_length
        require(length is None or length > 0, f"context_length must be above 0, not {length}")


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A place that holds one model at a time: an embedded pair, or an SGLang pair that is started there.

    On a Ray cluster `node` is the address of the only node that it may run on.
    """

    embedded: EmbeddedSection | None = None
    pair: PairSettings | None = None
    node: str | None = None

    def __post_init__(self) -> None:
        require(
            (self.embedded is None) != (self.pair is None),
            "a worker is embedded or a pair, and not both",
            remedy="Write `embedded: {}`, or `pair:` with its URLs.",
        )
        require(
            self.pair is None or self.pair.launch is not None,
            "a worker's pair is started with one model after the other, and has no launch",
            remedy="Add `launch: {}` to it.",
        )


@dataclass(frozen=True, slots=True)
class RaySettings:
    """The Ray cluster whose nodes the workers run on; each reserves `cpus` there, beside its GPUs."""

    address: str
    cpus: float = 1.0

    def __post_init__(self) -> None:
        require(
            self.address == "auto" or re.fullmatch(r"(ray://)?[^/]+:\d+", self.address) is not None,
            f"address must be auto, host:port or ray://host:port, not {self.address!r}",
        )
        require(self.cpus >= 0, f"cpus must be at least 0, not {self.cpus}")


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool: more models than its workers hold at once.

    `experts` are the models that answer questions, all of them unless named. A worker loads at most `capacity` models
    in one run, and is asked `at_once` prompts at the same time.
    """

    models: Mapping[str, PoolModel]
    workers: tuple[PoolWorker, ...]
    experts: tuple[str, ...] = ()
    capacity: int | None = None
    at_once: int = 32
    sampling: Sampling = field(default_factory=Sampling)
    recruit: Recruiting = field(default_factory=Recruiting)
    answers: Answers = field(default_factory=Answers)
    aggregate: Aggregating | None = None
    embedder: EmbedderSettings = field(default_factory=EmbedderSettings)
    profile: Path | None = None
    limits: Limits = field(default_factory=Limits)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    ray: RaySettings | None = None

    def __post_init__(self) -> None:
        require(bool(self.models), "models is empty", remedy="Name at least one model.")
        require(bool(self.workers), "workers is empty", remedy="Name at least one, as in `workers: [embedded: {}]`.")
        require(self.capacity is None or self.capacity > 0, f"capacity must be above 0, not {self.capacity}")
        require(self.at_once > 0, f"at_once must be above 0, not {self.at_once}")
        require(
            self.ray is not None or all(worker.node is None for worker in self.workers),
            "a worker names its node, and the pool runs on no Ray cluster",
            remedy="Add `ray: {address: auto}`, or leave node out.",
        )
        adapted = [name for name, model in self.models.items() if model.adapter is not None]
        require(
            self.ray is None or not adapted,
            f"model {(*adapted, '')[0]!r} has an adapter, which workers on a Ray cluster do not load",
            remedy="Run the pool on this machine, or merge the adapter into the model's weights.",
        )
        for name in self.experts:
            require(name in self.models, f"experts names {name!r}, which is none of the models")
        require(len(set(self.experts)) == len(self.experts), "experts names a model twice")
        if self.aggregate is not None:
            require(
                self.aggregate.model in self.models, f"aggregate names {self.aggregate.model!r}, none of the models"
            )
            require(
                self.aggregate.confidence != "similarity" or self.embedder.model != "none",
                "aggregate.confidence is similarity, and embedder.model none",
                remedy="Name an embedding model, or another confidence.",
            )

    @property
    def expert_names(self) -> tuple[str, ...]:
        """The models that answer questions."""
        return self.experts or tuple(self.models)

    def with_tau(self, tau: float | None) -> "Pool":
        """The pool with another tau for its gate, if one is given. Raises ConfigError."""
        if tau is None:
            return self
        if self.aggregate is None:
            raise ConfigError("the pool has no aggregator that tau could spare.", remedy="Add `aggregate` to it.")
        return replace(self, aggregate=replace(self.aggregate, tau=tau))


def load_pool(path: Path) -> Pool:
    """The pool that `path` describes. Raises ConfigError, which begins with the file and the line."""
    pool, _ = read_file(path, Pool, see=SEE)
    assert isinstance(pool, Pool)
    return replace(pool, embedder=pool.embedder.found_from(path.parent))
