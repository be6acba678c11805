"""A simulation's YAML file: a topology, engines and what they cost, a workload. docs/simulation.md explains it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shell_router.config.read import read_file
from shell_router.config.refusal import require
from shell_router.engines.simulated import DecodeCosts, PairCosts, PrefillCosts, TransferCosts
from shell_router.scheduling.settings import SchedulingSettings
from shell_router.simulation.roofline import Gpu, Roofline, costs_of

SEE = "docs/simulation.md explains simulations."
Engines = Literal["disaggregated", "data_parallel", "data_parallel_chunked"]
MOST_CV = 100.0
Arrivals = Literal["one_by_one", "poisson", "bursty", "closed"]


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """One model on one kind of engine: its costs as measured, or what a roofline needs to tell them."""

    prefill: PrefillCosts | None = None
    decode: DecodeCosts | None = None
    transfer: TransferCosts = field(default_factory=TransferCosts)
    roofline: Roofline | None = None

    def __post_init__(self) -> None:
        measured = self.prefill is not None and self.decode is not None
        require(
            measured != (self.roofline is not None),
            "a profile is measured or a roofline, and not both",
            remedy="Write `prefill:` and `decode:`, or `roofline:`.",
        )

    def costs(self, gpus: Mapping[str, Gpu]) -> PairCosts:
        """Of a pair of such engines. Raises ConfigError for a GPU that is none of `gpus`."""
        if self.roofline is not None:
            require(self.roofline.gpu in gpus, f"gpu {self.roofline.gpu!r} is none of: {', '.join(gpus) or 'none'}")
            return costs_of(self.roofline, gpus[self.roofline.gpu])
        assert self.prefill is not None and self.decode is not None
        return PairCosts(self.prefill, self.decode, self.transfer)


@dataclass(frozen=True, slots=True)
class Profiles:
    """A file of profiles: GPUs, and models on them. `shell-router profile` writes one too."""

    models: Mapping[str, EngineProfile]
    gpus: Mapping[str, Gpu] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens: always `tokens`, or from `low` to `high` alike, or log-normal with `mean` and deviation `mean` * `cv`."""

    tokens: int | None = None
    low: int | None = None
    high: int | None = None
    mean: float | None = None
    cv: float = 0.0

    def __post_init__(self) -> None:
        between = (self.low, self.high) != (None, None)
        kinds = (self.tokens is not None, between, self.mean is not None)
        require(sum(kinds) == 1, "a length is tokens, low and high, or mean (and cv)")
        if between:
            low, high = self.low or 0, self.high or 0
            require(1 <= low <= high, f"low and high must satisfy 1 <= low <= high, not {low}, {high}")
        shortest = self.tokens if self.tokens is not None else self.mean if self.mean is not None else 1
        require(1 <= shortest < math.inf, f"a length must be at least 1 token, not {shortest:g}")
        require(0 <= self.cv <= MOST_CV, f"cv must be at least 0 and at most {MOST_CV:g}, not {self.cv:g}")
        require(not self.cv or self.mean is not None, "cv goes with mean")

    def at(self, uniform: float, normal: float) -> int:
        """The length that a uniform draw from [0, 1) and one from the standard normal distribution stand for."""
        if self.tokens is not None:
            return self.tokens
        if self.low is not None and self.high is not None:
            return self.low + int(uniform * (self.high - self.low + 1))
        assert self.mean is not None
        variance = math.log(1 + self.cv**2)
        return max(1, round(self.mean * math.exp(math.sqrt(variance) * normal - variance / 2)))


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, how often, and what comes back.

    `one_by_one` asks the next question when the one before is answered, `closed` does so for `clients` at a time,
    `poisson` asks `per_s` a second, `bursty` as many in bursts of `burst`. An agent of a model writes as many tokens as
    `outputs` says, is right about its question with probability `right`, and sure of every token with `confidence`;
    wrong answers all differ.
    """

    requests: int
    outputs: Mapping[str, Length]
    question: Length = Length(tokens=128)
    arrivals: Arrivals = "one_by_one"
    per_s: float = 1.0
    burst: int = 8
    clients: int = 8
    right: float = 0.7
    confidence: float = 0.9

    def __post_init__(self) -> None:
        for name in ("requests", "burst", "clients"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(0 < self.per_s < math.inf, f"per_s must be above 0, not {self.per_s:g}")
        require(0 <= self.right <= 1, f"right must be between 0 and 1, not {self.right:g}")
        require(0 < self.confidence <= 1, f"confidence must be above 0 and at most 1, not {self.confidence:g}")


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """An alias: the profile of its engines, and how many pairs of a prefill and a decode engine there are.

    For comparison, every pair may be replaced by engines of both kinds, one for each of its two GPUs: `data_parallel`
    prefills first, `data_parallel_chunked` shares itself between prefill and decode.
    """

    profile: str
    pairs: int = 1
    engines: Engines = "disaggregated"

    def __post_init__(self) -> None:
        require(self.pairs >= 1, f"pairs must be at least 1, not {self.pairs}")


@dataclass(frozen=True, slots=True)
class SimulatedEmbedding:
    """The early-exit gate's embedding model: what a text costs, and how alike outputs are that say the same or not."""

    request_s: float = 0.0
    token_s: float = 0.0
    same: float = 0.8
    different: float = 0.5

    def __post_init__(self) -> None:
        for name in ("request_s", "token_s"):
            seconds = getattr(self, name)
            require(0 <= seconds < math.inf, f"{name} must be at least 0, not {seconds:g}")
        alike = 0 < self.different <= self.same <= 1
        require(alike, f"0 < different <= same <= 1 does not hold for {self.different:g} and {self.same:g}")


@dataclass(frozen=True, slots=True)
class Simulation:
    """One workload, asked of one topology after another on the same engines.

    `cores` is the CPU that all engines share; without it each engine has a GPU of its own. `max_new_tokens` replaces
    the topologies' own, by which outputs are cut.
    """

    topologies: tuple[Path, ...]
    profiles: Path
    models: Mapping[str, SimulatedModel]
    workload: Workload
    embedder: SimulatedEmbedding = SimulatedEmbedding()
    context_length: int = 131_072
    cores: float | None = None
    timeout_s: float = 86_400.0
    max_new_tokens: int | None = None
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)

    def __post_init__(self) -> None:
        require(bool(self.topologies), "topologies is empty", remedy="Name at least one file.")
        require(self.context_length >= 1, f"context_length must be at least 1, not {self.context_length}")
        require(self.cores is None or 0 < self.cores < math.inf, f"cores must be above 0, not {self.cores}")
        apart = all(model.engines == "disaggregated" for model in self.models.values())
        require(self.cores is None or apart, "engines that share a CPU are disaggregated here", "Leave `cores` out.")
        require(0 < self.timeout_s < math.inf, f"timeout_s must be above 0, not {self.timeout_s:g}")
        limit = self.max_new_tokens
        require(limit is None or limit >= 1, f"max_new_tokens must be at least 1, not {limit}")


def load_simulation(file: Path) -> Simulation:
    """The simulation that `file` describes. Raises ConfigError, which begins with the file and the line."""
    found, _ = read_file(file, Simulation, see=SEE)
    assert isinstance(found, Simulation)
    return found


def load_profiles(file: Path) -> Profiles:
    """The profiles in `file`. Raises ConfigError, which begins with the file and the line."""
    found, _ = read_file(file, Profiles, see=SEE)
    assert isinstance(found, Profiles)
    return found
