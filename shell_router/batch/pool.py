"""The YAML file of a pool: its models, the workers that run them, and how it answers.

See docs/how-to/batch-a-file.md.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shell_router.batch.questions import read_answer
from shell_router.config import EmbedderSettings, LaunchSettings, Limits, PairLaunch, PairSettings
from shell_router.core.exact_json import NewValues
from shell_router.core.sampling import RANGES
from shell_router.early_exit.answers import find_answer, parse_number
from shell_router.errors import ConfigError, require
from shell_router.files.read import read_file
from shell_router.files.types import Amount, Count, FilePath
from shell_router.standins.embedded.settings import EmbeddedSection

SEE = "docs/how-to/batch-a-file.md explains pools."
ALWAYS = 2.0
"""A tau that no agreement reaches, so that the aggregator answers all questions."""

AnswerKind = Literal["auto", "exact", "numeric", "choice"]
Agreement = Literal["plurality", "probability"]
Parallel = Literal["data", "tensor"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a model, in SGLang's terms."""

    temperature: Annotated[
        float,
        "0 takes the likeliest token, as `aggregate` without `sampling` does.",
        RANGES["temperature"],
    ] = 0.7
    top_p: Annotated[float, "Probability mass that is drawn from.", RANGES["top_p"]] = 0.95
    max_new_tokens: Annotated[Count, "Longest output, in tokens."] = 512

    def params(self, seed: int) -> NewValues:
        """Return the engine's `sampling_params`.

        The output is read at its end, so the engine need not send single tokens.
        """
        return {**asdict(self), "sampling_seed": seed, "stream_interval": self.max_new_tokens}


@dataclass(frozen=True, slots=True)
class Recruiting:
    """The choice of proposers for a question whose line names none."""

    proposers: Annotated[Count, "Proposers per question whose line names none."] = 3
    skills: Annotated[
        FilePath | None, "Folder of a finished run, from which proposers are drawn by skill."
    ] = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The rule by which an answer is extracted from a text."""

    kind: Annotated[
        AnswerKind, "How an answer is found: `auto`, `numeric`, `choice` or `exact`."
    ] = "auto"
    pattern: Annotated[
        str | None, "A regular expression instead; its last match counts, or the group in it."
    ] = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            require(False, f"pattern is no regular expression: {error}")

    def read(self, text: str) -> str | None:
        """Return the answer, None if there is none (EXTRACT in MOSAIC's Algorithm 1).

        Answers of one meaning are equal.
        """
        if self.pattern is not None:
            answer = None
            for match in re.finditer(self.pattern, text):
                answer = match[1 if match.re.groups else 0]
            return answer or None
        if self.kind != "auto":
            value = read_answer(text, self.kind)
            return None if value is None else str(value)
        stated = find_answer(text)
        if stated is None:
            return None
        number = parse_number(stated)
        if number is not None:
            return str(number)
        return " ".join(stated.casefold().split())


@dataclass(frozen=True, slots=True)
class Aggregating:
    """The aggregator, and the gate that decides when it is asked (MOSAIC, equation 11)."""

    model: Annotated[str, "One of the models."]
    tau: Annotated[
        float, "Agreement that needs no aggregator; 1 is all, 0.67 two of three, above 1 never."
    ] = 1.0
    confidence: Annotated[Agreement, "Measure of agreement: `plurality` or `probability`."] = (
        "plurality"
    )
    parallel: Annotated[
        Parallel, "`data`: an engine per worker; `tensor`: one over the GPUs of all."
    ] = "data"
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))

    def __post_init__(self) -> None:
        require(
            self.tau > 0,
            f"tau must be above 0, not {self.tau:g}.",
            remedy="1 means all proposers, 0.67 two of three; above 1 the aggregator always runs.",
        )


@dataclass(frozen=True, slots=True)
class PoolModel:
    """A model of the pool."""

    path: Annotated[FilePath, "Folder of the model."]
    system: Annotated[str, "A system prompt."] = ""
    context_length: Annotated[Count | None, "Tokens of prompt and output together."] = None
    adapter: Annotated[
        FilePath | None,
        "Folder of a LoRA adapter; needs SGLang pairs, and no Ray cluster.",
    ] = None


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A worker, which holds one model at a time: an embedded pair, or an SGLang pair."""

    embedded: EmbeddedSection | None = None
    pair: PairSettings | None = None
    node: Annotated[str | None, "Address of the only node that this worker may run on (Ray)."] = (
        None
    )

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


Address = Annotated[
    str, Field(pattern=r"^(auto|(ray://)?[^/]+:\d+)$", title="auto, host:port or ray://host:port")
]


@dataclass(frozen=True, slots=True)
class RaySettings:
    """The Ray cluster whose nodes the workers run on."""

    address: Annotated[
        Address,
        "`auto` or `host:port` on a machine of the cluster, `ray://host:port` on any other.",
    ]
    cpus: Annotated[Amount, "CPUs that each worker reserves."] = 1.0


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool, which has more models than its workers hold at once."""

    models: Mapping[str, PoolModel]
    workers: tuple[PoolWorker, ...]
    proposers: Annotated[tuple[str, ...], "Models that answer questions; by default all."] = ()
    capacity: Annotated[Count | None, "Most models that a worker loads by one plan (K)."] = None
    concurrency: Annotated[Count, "Prompts that a worker gives its engine at a time."] = 32
    replan_above: Annotated[
        Amount,
        "If a session is off its planned time by this share, the rest is replanned; 0: never.",
    ] = 0.25
    sampling: Sampling = field(default_factory=Sampling)
    recruit: Recruiting = field(default_factory=Recruiting)
    answers: Answers = field(default_factory=Answers)
    aggregate: Aggregating | None = None
    embedder: EmbedderSettings = field(default_factory=EmbedderSettings)
    profile: Annotated[FilePath | None, "Required: the file that `batch profile` writes."] = None
    limits: Limits = field(default_factory=Limits)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    ray: RaySettings | None = None

    def __post_init__(self) -> None:
        require(bool(self.models), "models is empty", remedy="Name at least one model.")
        require(
            bool(self.workers),
            "workers is empty",
            remedy="Name at least one, as in `workers: [embedded: {}]`.",
        )
        require(
            self.ray is not None or all(worker.node is None for worker in self.workers),
            "a worker names its node, and the pool runs on no Ray cluster",
            remedy="Add `ray: {address: auto}`, or leave node out.",
        )
        has_local_pairs = self.ray is None and all(worker.pair for worker in self.workers)
        for name, pool_model in self.models.items():
            require(
                pool_model.adapter is None or has_local_pairs,
                f"model {name!r} has an adapter, which embedded workers and a Ray cluster's do not "
                "load",
                remedy="Give the pool SGLang pairs on this machine, or merge the adapter into the "
                "model's weights.",
            )
        for name in self.proposers:
            require(name in self.models, f"proposers names {name!r}, which is none of the models")
        require(len(set(self.proposers)) == len(self.proposers), "proposers names a model twice")
        if self.aggregate is not None:
            model = self.aggregate.model
            require(model in self.models, f"aggregate names {model!r}, none of the models")
            require(
                self.aggregate.parallel == "data" or has_local_pairs,
                "aggregate.parallel is tensor, and not all workers are SGLang pairs on this "
                "machine",
                remedy="Give the pool SGLang pairs and no Ray cluster, or write `parallel: data`.",
            )
        _ = self.spanning  # refuses GPUs that only some workers name

    @property
    def proposer_names(self) -> tuple[str, ...]:
        """The models that answer questions."""
        return self.proposers or tuple(self.models)

    @property
    def spanning(self) -> PoolWorker | None:
        """The worker of an aggregator with `parallel: tensor` (MOSAIC, section 5.3).

        It is a pair at the first worker's addresses over the GPUs of all workers, which are stopped
        then. A worker that names no GPUs counts as one.
        """
        pairs = [worker.pair for worker in self.workers if worker.pair is not None]
        if self.aggregate is None or self.aggregate.parallel == "data" or not pairs:
            return None
        launches = [pair.launch or PairLaunch() for pair in pairs]
        return PoolWorker(pair=replace(pairs[0], launch=_merge_launches(launches)))

    def with_tau(self, tau: float | None) -> "Pool":
        """Return the pool with another tau for its gate, or itself for None. Raises ConfigError."""
        if tau is None:
            return self
        if self.aggregate is None:
            raise ConfigError(
                "tau needs an aggregator, and the pool has none.", remedy="Add `aggregate` to it."
            )
        return replace(self, aggregate=replace(self.aggregate, tau=tau))


def _merge_launches(launches: Sequence[PairLaunch]) -> PairLaunch:
    """Return one launch with the GPUs of all; a role without GPUs gets a rank per launch.

    Raises ConfigError.
    """
    changed: NewValues = {}
    for role in ("prefill", "decode"):
        gpus = [getattr(launch, f"{role}_gpus") for launch in launches]
        require(
            all(gpus) or not any(gpus),
            f"aggregate.parallel is tensor, and only some workers name {role}_gpus",
            remedy=f"Name {role}_gpus for every worker, or for none.",
        )
        changed[f"{role}_gpus"] = tuple(dict.fromkeys(chain.from_iterable(gpus)))
        if not any(gpus):
            flags = getattr(launches[0], f"{role}_flags")
            changed[f"{role}_flags"] = f"{flags} --tp-size {len(launches)}".strip()
    return replace(launches[0], **changed)


def load_pool(path: Path) -> Pool:
    """Read a pool's file. Raises ConfigError, which begins with the file and the line."""
    pool, _ = read_file(path, Pool, see=SEE)
    return replace(pool, embedder=pool.embedder.resolve_from(path.parent))
