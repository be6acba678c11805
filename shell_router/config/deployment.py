"""A whole deployment, and the checks of sections against one another."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from shell_router.config.models import (
    LaunchSettings,
    ModelSettings,
    SwappingSettings,
    flags_of,
    name_adapter,
)
from shell_router.config.settings import (
    AccessLogSettings,
    AutoSettings,
    BatchesSettings,
    CacheSettings,
    EmbedderSettings,
    GivenKey,
    Limits,
    Listen,
    PredictionSettings,
    RecordSettings,
    Traces,
    UsageCount,
)
from shell_router.errors import require
from shell_router.files.types import SECRET, FilePath, Origin
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.holdout import HoldoutSettings
from shell_router.topology import AUTO, LiveSettings


@dataclass(frozen=True, slots=True)
class Config:
    """A whole deployment."""

    models: Annotated[
        Mapping[str, ModelSettings],
        "Alias by alias, the models that topologies and requests may name.",
    ]
    swapping: SwappingSettings | None = None
    topologies: Annotated[
        tuple[FilePath, ...],
        "Topology files and folders of them; each file's `name` becomes a model name.",
    ] = ()
    live_topologies: LiveSettings = field(default_factory=LiveSettings)
    listen: Listen = field(default_factory=Listen)
    api_keys: Annotated[
        Mapping[str, GivenKey],
        "Key per tenant: `{alice: {env: ALICE_KEY}}` reads it from the environment, `{alice: "
        "secret}` has it here.",
        SECRET,
    ] = field(default_factory=dict, repr=False)
    api_keys_file: Annotated[
        FilePath | None,
        ("File with further `api_keys`; its changes count within seconds."),
    ] = None
    cors: Annotated[
        tuple[Origin, ...],
        "Origins of web pages that may ask from a browser, as `https://chat.example.org`; `'*'` is "
        "all.",
    ] = ()
    usage: Annotated[
        UsageCount,
        "Agents whose tokens an answer's `usage` counts, unless the request says it: `all`, or the "
        "`root` alone, for clients that measure by it.",
    ] = "all"
    limits: Limits = field(default_factory=Limits)
    cache: CacheSettings = field(default_factory=CacheSettings)
    embedder: EmbedderSettings = field(default_factory=EmbedderSettings)
    traces: Traces = field(default_factory=Traces)
    batches: BatchesSettings = field(default_factory=BatchesSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    auto: AutoSettings = field(default_factory=AutoSettings)
    prediction: PredictionSettings = field(default_factory=PredictionSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    access_log: AccessLogSettings = field(default_factory=AccessLogSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    holdout: HoldoutSettings = field(default_factory=HoldoutSettings)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that topologies and requests may give a model, adapters included."""
        names = list(self.models)
        for alias, model in self.models.items():
            names.extend(name_adapter(alias, adapter) for adapter in model.adapters)
        return tuple(names)

    @property
    def swapped(self) -> tuple[str, ...]:
        """The models that take turns in memory."""
        if self.swapping is None:
            return ()
        return self.swapping.models or tuple(self.models)

    @property
    def sleeping(self) -> tuple[str, ...]:
        """The models that take turns and have SGLang engines of their own, which sleep in turns."""
        return tuple(alias for alias in self.swapped if self.models[alias].sglang)

    def __post_init__(self) -> None:
        self._require_names()
        require(
            self.cache.ttl_s > self.limits.request_timeout_s,
            f"cache.ttl_s ({self.cache.ttl_s:g}) must be above limits.request_timeout_s"
            f" ({self.limits.request_timeout_s:g}): an output must outlive the requests that "
            "read it",
        )
        folders = [log.folder.resolve() for log in (self.record, self.access_log) if log.folder]
        require(
            len({*folders}) == len(folders),
            "record.folder and access_log.folder are one",
            "Name one for each.",
        )
        if self.swapping is not None:
            self._require_swappable(self.swapping)
        self._require_engine_keys()
        require(
            bool(self.api_keys) or self.api_keys_file is not None or self.listen.loopback,
            f"other machines can reach {self.listen.host}, and there are no api_keys",
            remedy="Add api_keys, or listen on 127.0.0.1.",
        )

    def _require_names(self) -> None:
        require(bool(self.models), "models is empty", remedy="Name at least one model.")
        require(
            AUTO not in self.models,
            f"a model is named {AUTO!r}, which means any of them",
            "Rename it.",
        )
        names = self.model_names
        for alias in self.models:
            require(
                names.count(alias) == 1,
                f"models.{alias} is also the name of an adapter",
                "Rename one of them.",
            )
        for name in (*self.auto.models, *self.auto.max_batch):
            require(
                name in names,
                f"auto names {name!r}, which is not among the models",
                f"Name some of: {', '.join(sorted(names))}.",
            )

    def _require_swappable(self, swapping: SwappingSettings) -> None:
        """Require that models that take turns have engines that can be swapped or sleep."""
        for alias in (*self.swapped, *swapping.usage):
            require(
                alias in self.models,
                f"swapping names {alias!r}, which is not among the models",
                f"Name some of: {', '.join(self.models)}.",
            )
        for alias in self.swapped:
            model = self.models[alias]
            has_others = bool(model.engine.keys() - {"embedded"})
            has_own = bool(model.sglang or model.engine)
            require(
                not has_others and not (swapping.pairs and has_own),
                f"models.{alias} takes turns with others, and names engines of its own",
                "Leave them or swapping.pairs out, or name the models that take turns in "
                "swapping.models.",
            )
        require(
            len(self.sleeping) in (0, len(self.swapped)),
            "some of the models that take turns have engines of their own, and others have none",
            "Give engines to all of them, or name those that take turns in swapping.models.",
        )
        self._require_own_urls(swapping)
        for alias in self.sleeping:
            self._require_sleeper(f"models.{alias}", self.models[alias])

    def _require_own_urls(self, swapping: SwappingSettings) -> None:
        """Require that no server of models that take turns serves anything else."""
        uses = Counter(url for pair in swapping.pairs for url in pair.urls.values())
        for model in self.models.values():
            uses.update({url for at in model.sglang for url in at.urls.values()})
        own = [at for alias in self.sleeping for at in self.models[alias].sglang]
        for at in (*swapping.pairs, *own):
            for url in at.urls.values():
                require(
                    uses[url] == 1,
                    f"{url} is named twice, and serves models that take turns",
                    "Name it once.",
                )

    def _require_sleeper(self, where: str, model: ModelSettings) -> None:
        remedy = "Leave them out, or name the models that take turns in swapping.models."
        require(not model.adapters, f"{where} takes turns with others, and has adapters", remedy)
        for flags in self._list_flags(model):
            require(
                "--device=cpu" not in flags and ("--device", "cpu") not in pairwise(flags),
                f"{where} sleeps while others are awake, and is started on a CPU, where SGLang "
                "cannot",
                "Sleeping gives GPU memory back: start it on GPUs, or swap weights of one shape by "
                "swapping.pairs.",
            )

    def _require_engine_keys(self) -> None:
        """Require that launched engines ask for their key.

        The router does not pass it on: every user of the machine can read a command line.
        """
        for alias, model in self.models.items():
            for flags in self._list_flags(model) if model.engine_key is not None else ():
                require(
                    any(flag.partition("=")[0] == "--api-key" for flag in flags),
                    f"models.{alias} has an engine_key, and the engines that `launch` starts ask "
                    "for none",
                    remedy="Give them `--api-key` in launch.flags, or leave engine_key out.",
                )

    def _list_flags(self, model: ModelSettings) -> list[list[str]]:
        """List the flags of each engine that `shell-router launch` starts for the model."""
        return [
            flags_of(role, self.launch, at.launch)
            for at in model.sglang
            if at.launch is not None
            for role in at.urls
        ]
