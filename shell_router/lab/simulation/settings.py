"""The YAML file of a simulation: topologies, engines and their costs, a workload.

docs/how-to/evaluate.md explains it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from shell_router.core.budget import Price
from shell_router.errors import ConfigError, require
from shell_router.files.read import read_file
from shell_router.files.types import Amount, Count, FilePath, Positive, Share
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    Gpu,
    PairCosts,
    PrefillCosts,
    Roofline,
    TransferCosts,
    costs_of,
)
from shell_router.topology import Topology, load_topology

SEE = "docs/how-to/evaluate.md explains simulations."
Engines = Literal["disaggregated", "data_parallel", "data_parallel_chunked"]
ENDLESS_TOKENS = 1 << 30
Arrivals = Literal["one_by_one", "poisson", "closed"]
Deviation = Annotated[float, Interval(ge=0, le=100)]
"""A standard deviation, relative to the mean."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """A model on a kind of engine: its measured costs, or the roofline that they follow from."""

    prefill: PrefillCosts | None = None
    decode: DecodeCosts | None = None
    transfer: TransferCosts = field(default_factory=TransferCosts)
    roofline: Roofline | None = None
    measured: Annotated[str, "When, on what, and how well the costs fit."] = ""

    def __post_init__(self) -> None:
        measured = self.prefill is not None and self.decode is not None
        require(
            measured != (self.roofline is not None),
            "a profile is measured or a roofline, and not both",
            remedy="Write `prefill:` and `decode:`, or `roofline:`.",
        )

    def costs(self, gpus: Mapping[str, Gpu]) -> PairCosts:
        """Return the costs of such a pair. Raises ConfigError for a GPU that is none of `gpus`."""
        if self.roofline is not None:
            require(
                self.roofline.gpu in gpus,
                f"gpu {self.roofline.gpu!r} is none of: {', '.join(gpus) or 'none'}",
            )
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
    """A length in tokens: constant `tokens`, uniform from `low` to `high`, or log-normal.

    The log-normal has `mean` and deviation `mean` * `cv`. With `mean`, a share of `runaways` never
    ends: they write until their limit.
    """

    tokens: Count | None = None
    low: Count | None = None
    high: Count | None = None
    mean: Annotated[float, Ge(1)] | None = None
    cv: Deviation = 0.0
    runaways: Share = 0.0

    def __post_init__(self) -> None:
        between = (self.low, self.high) != (None, None)
        kinds = (self.tokens is not None, between, self.mean is not None)
        require(sum(kinds) == 1, "a length is tokens, low and high, or mean (and cv)")
        low = self.low or 0
        high = self.high or 0
        require(
            not between or 1 <= low <= high,
            f"low and high must satisfy 1 <= low <= high, not {low}, {high}",
        )
        require(
            not (self.cv or self.runaways) or self.mean is not None, "cv and runaways go with mean"
        )

    def at(self, uniform: float, normal: float) -> int:
        """Return the length for a uniform draw from [0, 1) and a standard normal one."""
        if self.tokens is not None:
            return self.tokens
        if self.low is not None and self.high is not None:
            return self.low + int(uniform * (self.high - self.low + 1))
        assert self.mean is not None
        if uniform < self.runaways:
            return ENDLESS_TOKENS
        return max(1, round(self.mean * _scale_lognormal(self.cv, normal)))


@dataclass(frozen=True, slots=True)
class Drafted:
    """The gain of drafts: tokens per pass, log-normal with mean `per_pass`.

    The deviation is `per_pass` * `cv`. A pass accepts 1 to `width` tokens; it computes `width`.
    """

    per_pass: Annotated[float, Ge(1)]
    cv: Deviation = 0.0
    width: Annotated[int, Interval(ge=1, le=1024)] = 16

    def __post_init__(self) -> None:
        require(
            self.per_pass <= self.width,
            f"per_pass is {self.per_pass:g}, more than the width {self.width}",
        )

    def at(self, normal: float) -> float:
        """Return the tokens per pass for a standard normal draw."""
        return min(float(self.width), max(1.0, self.per_pass * _scale_lognormal(self.cv, normal)))


def _scale_lognormal(cv: float, normal: float) -> float:
    """Return a log-normal value with mean 1 and this deviation."""
    variance = math.log(1 + cv**2)
    return math.exp(math.sqrt(variance) * normal - variance / 2)


@dataclass(frozen=True, slots=True)
class Step:
    """A request that the root answers with a call, and the call's result.

    The call's tokens are the root's whole output, which is never less than the text of the call at
    its end.
    """

    call_tokens: Annotated[Count, "Tokens of the root's output, which ends with a call."]
    result_tokens: Annotated[Count, "Tokens of the result."]
    tool_s: Annotated[Amount, "Seconds from the call to the result."] = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """A question whose answer takes several requests: one for each step, and a last one."""

    steps: Annotated[tuple[Step, ...], "Calls before the answer, in order."] = ()
    answer_tokens: Annotated[
        Count | None, "Tokens of the root's last output; by default as in `outputs`."
    ] = None


NO_STEPS = Program()


@dataclass(frozen=True, slots=True)
class Workload:
    """The questions, their arrival, and the outputs.

    `one_by_one` asks the next question after the last answer, `closed` does so for `clients` at a
    time, `poisson` asks `per_s` a second. An agent writes `outputs` tokens by its model, is right
    with probability `right`, and gives every token the probability `confidence`; wrong answers all
    differ. `drafts` are the gains of agents that ask for drafts, by role (aggregator, root) or by
    agent. With `programs` each question is the first request of one of them.
    """

    requests: Count
    outputs: Mapping[str, Length]
    question: Length = Length(tokens=128)
    arrivals: Arrivals = "one_by_one"
    per_s: Positive = 1.0
    clients: Count = 8
    right: Share = 0.7
    confidence: Annotated[float, Interval(gt=0, le=1)] = 0.9
    drafts: Mapping[str, Drafted] = field(default_factory=dict)
    programs: tuple[Program, ...] = ()

    def choose_program(self, number: int) -> Program:
        """Return the steps of the question with this number, from 0; the programs take turns."""
        if not self.programs:
            return NO_STEPS
        return self.programs[number % len(self.programs)]


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model alias: the profile of its engines, and its number of prefill-decode pairs.

    For comparison, every pair may be replaced by engines of both kinds, one for each of its two
    GPUs: `data_parallel` prefills first, `data_parallel_chunked` shares itself between prefill and
    decode.
    """

    profile: str
    pairs: Count = 1
    engines: Engines = "disaggregated"
    price: Price | None = None


@dataclass(frozen=True, slots=True)
class SimulatedEmbedding:
    """The early-exit gate's embedding model: its cost per text, and the similarities of outputs."""

    request_s: Amount = 0.0
    token_s: Amount = 0.0
    same: float = 0.8
    different: float = 0.5

    def __post_init__(self) -> None:
        alike = 0 < self.different <= self.same <= 1
        require(
            alike,
            f"0 < different <= same <= 1 does not hold for {self.different:g} and {self.same:g}",
        )


@dataclass(frozen=True, slots=True)
class Simulation:
    """A workload, asked of one topology after another on the same engines.

    `cores` is the CPU that all engines share; without it each engine has a GPU of its own.
    `max_new_tokens` replaces the topologies' own, by which outputs are cut.
    """

    topologies: tuple[FilePath, ...]
    profiles: FilePath
    models: Mapping[str, SimulatedModel]
    workload: Workload
    embedder: SimulatedEmbedding = SimulatedEmbedding()
    context_length: Count = 131_072
    cores: Positive | None = None
    timeout_s: Positive = 86_400.0
    max_new_tokens: Count | None = None
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)

    def __post_init__(self) -> None:
        require(bool(self.topologies), "topologies is empty", remedy="Name at least one file.")
        disaggregated = all(model.engines == "disaggregated" for model in self.models.values())
        require(
            self.cores is None or disaggregated,
            "engines that share a CPU are disaggregated here",
            "Leave `cores` out.",
        )


def load_profiles(file: Path) -> Profiles:
    """Read the profiles in `file`. Raises ConfigError, which begins with the file and the line."""
    return read_file(file, Profiles, see=SEE)[0]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A simulation, its topologies by name, and per model a pair's costs."""

    simulation: Simulation
    topologies: Mapping[str, Topology]
    costs: Mapping[str, PairCosts]


def load(file: Path, clients: int | None = None) -> Loaded:
    """Read the simulation in `file`; `clients` replace its arrivals. Raises ConfigError."""
    simulation, _ = read_file(file, Simulation, see=SEE)
    if clients is not None:
        asked = replace(simulation.workload, arrivals="closed", clients=clients)
        simulation = replace(simulation, workload=asked)
    profiles = load_profiles(simulation.profiles)
    costs = {}
    for alias, model in simulation.models.items():
        if model.profile not in profiles.models:
            raise ConfigError(
                f"{file}: models.{alias} has the profile {model.profile!r}, which "
                f"{simulation.profiles} lacks.",
                remedy=f"Choose one of: {', '.join(profiles.models)}.",
            )
        profile = profiles.models[model.profile]
        try:
            costs[alias] = profile.costs(profiles.gpus)
        except ConfigError as error:
            where = f"{simulation.profiles}: models.{model.profile}"
            raise ConfigError(f"{where}: {error.args[0]}", remedy=error.remedy) from error
    topologies = [load_topology(path, models=simulation.models) for path in simulation.topologies]
    if (most := simulation.max_new_tokens) is not None:
        topologies = [
            replace(
                topology,
                agents={
                    name: replace(agent, sampling={**agent.sampling, "max_new_tokens": most})
                    for name, agent in topology.agents.items()
                },
            )
            for topology in topologies
        ]
    by_name = {topology.name: topology for topology in topologies}
    if len(by_name) < len(topologies):
        raise ConfigError(f"{file}: two of the topologies have one name.", remedy="Rename one.")
    return Loaded(simulation, by_name, costs)
