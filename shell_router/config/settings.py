"""What a deployment's YAML file may say, section by section. docs/configuration.md explains each setting."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from shell_router.config.adapters_section import AdaptersSection
from shell_router.config.batches_settings import BatchesSettings
from shell_router.config.choice_settings import AutoSettings, PredictionSettings, RecordSettings
from shell_router.config.launch_settings import LaunchSettings, PairLaunch
from shell_router.config.refusal import require as _require
from shell_router.engines.embedded.settings import LoraSettings
from shell_router.scheduling.settings import SchedulingSettings
from shell_router.topology import AUTO


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the router listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, f"port must be between 0 and 65535, not {self.port}")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class FromEnvironment:
    """A secret that stands in an environment variable."""

    env: str


@dataclass(frozen=True, slots=True)
class Limits:
    """What the router refuses, and when it ends what takes too long. docs/configuration.md explains each."""

    max_running: int = 1024
    max_body_bytes: int = 32 * 2**20
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    engine_stall_s: float = 60.0
    engine_start_s: float = 180.0
    engine_attempts: int = 3
    breaker_failures: int = 5
    breaker_open_s: float = 5.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            _require(value > 0, f"{limit.name} must be above 0, not {value}")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The Agent Prompt Cache: in the router's memory, or in Redis, where replicas of the router share it."""

    backend: Literal["memory", "redis"] = "memory"
    url: str = "redis://127.0.0.1:6379/0"
    ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        _require(self.ttl_s > 0, f"ttl_s must be above 0, not {self.ttl_s}")
        scheme = self.url.partition("://")[0]
        _require(
            scheme in ("redis", "rediss", "unix"),
            f"url must begin with redis://, rediss:// or unix://, not {self.url!r}",
        )


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A small model with random weights, made when the router starts: for trials and tests."""

    hidden: int = 64
    layers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.hidden % 32 == 0 and self.hidden > 0, f"hidden must be a multiple of 32, not {self.hidden}")
        _require(self.layers > 0, f"layers must be at least 1, not {self.layers}")


@dataclass(frozen=True, slots=True)
class EmbeddedSection:
    """A prefill and a decode process that the router starts and ends itself."""

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    threads: int = 1
    cores: tuple[int, ...] = ()
    max_total_tokens: int = 65_536
    max_running_requests: int = 32
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "max_total_tokens", "max_running_requests"):
            value = getattr(self, name)
            _require(value > 0, f"{name} must be above 0, not {value}")
        for core in self.cores:
            _require(core >= 0, f"cores counts from 0, so {core} is none")


@dataclass(frozen=True, slots=True)
class PairSettings:
    """An SGLang pair. `bootstrap_host` is where decode finds prefill, by default prefill's host.

    It runs already, or has `launch`: `shell-router launch` then starts it where its URLs say.
    """

    prefill: str
    decode: str
    bootstrap_port: int = 8998
    bootstrap_host: str | None = None
    launch: PairLaunch | None = None

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            url = getattr(self, name)
            _require(url.startswith(("http://", "https://")), f"{name} must be an http(s) URL, not {url!r}")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model: its folder (or random weights) and who serves it, an embedded pair or an SGLang pair.

    `path` holds the tokenizer and, for an embedded pair, the weights. `adapters` are models beside it, on its servers.
    """

    path: Path | None = None
    random: RandomWeights | None = None
    embedded: EmbeddedSection | None = None
    pairs: tuple[PairSettings, ...] = ()
    context_length: int | None = None
    adapters: AdaptersSection | None = None

    def __post_init__(self) -> None:
        _require(
            (self.path is None) != (self.random is None),
            "a model needs path or random, and not both",
            remedy="Give the model's folder as path, or random to have one made.",
        )
        _require(
            not (self.pairs and self.embedded),
            "a model is served either by an embedded pair or by pairs, not by both",
            remedy="Leave one of them out.",
        )
        bootstraps = {(pair.prefill, pair.bootstrap_host, pair.bootstrap_port) for pair in self.pairs}
        _require(
            len(bootstraps) == len({pair.prefill for pair in self.pairs}),
            "a prefill server stands in several pairs with different bootstrap hosts or ports",
            remedy="It has one; correct the others.",
        )
        _require(
            not (self.random and any(pair.launch is None for pair in self.pairs)),
            "pairs serve weights of their own, so random has no place beside them",
            remedy="Give the folder of the pairs' model as path, or each pair launch, to start it with these weights.",
        )
        lora = self.embedded.lora if self.embedded else None
        _require(
            lora is None or self.adapters is None or lora.room >= self.adapters.room,
            "embedded.lora.room is below adapters.room",
            remedy="Raise it, or leave embedded.lora out: it then has room for the adapters.",
        )
        _require(
            self.context_length is None or self.context_length > 0,
            f"context_length must be above 0, not {self.context_length}",
        )


@dataclass(frozen=True, slots=True)
class EmbedderSettings:
    """The embedding model of the early-exit gate.

    `model` is `default` (a small one that needs no download), `hash` (no model: word hashes, for tests),
    `none` (topologies with an early exit are refused), or a sentence-transformers name or folder.
    """

    model: str = "default"
    device: str = "cpu"

    def found_from(self, folder: Path) -> "EmbedderSettings":
        """A model that begins with a dot is a folder, as seen from `folder`; another may be a name."""
        return replace(self, model=str(folder / self.model)) if self.model.startswith(".") else self


@dataclass(frozen=True, slots=True)
class Traces:
    """How many finished requests can still be looked up."""

    kept: int = 1000

    def __post_init__(self) -> None:
        _require(self.kept > 0, f"kept must be at least 1, not {self.kept}")


@dataclass(frozen=True, slots=True)
class Config:
    """A whole deployment. `topologies` are folders or files; `api_keys` name their tenants."""

    models: Mapping[str, ModelSettings]
    topologies: tuple[Path, ...] = ()
    listen: Listen = Listen()
    api_keys: Mapping[str, str | FromEnvironment] = field(default_factory=dict)
    limits: Limits = Limits()
    cache: CacheSettings = CacheSettings()
    embedder: EmbedderSettings = EmbedderSettings()
    traces: Traces = Traces()
    batches: BatchesSettings = field(default_factory=BatchesSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    auto: AutoSettings = field(default_factory=AutoSettings)
    prediction: PredictionSettings = field(default_factory=PredictionSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)

    def __post_init__(self) -> None:
        _require(AUTO not in self.models, f"a model is named {AUTO!r}, which means any of them", "Rename it.")
        for name in (*self.auto.models, *self.auto.max_batch):
            _require(
                self._may_name(name),
                f"auto names {name!r}, which is not among the models",
                f"Name some of: {', '.join(self.models)}.",
            )
        _require(
            self.cache.ttl_s > self.limits.request_timeout_s,
            f"cache.ttl_s ({self.cache.ttl_s:g}) must be above limits.request_timeout_s"
            f" ({self.limits.request_timeout_s:g}): an output must outlive the requests that read it",
        )
        _require(bool(self.models), "models is empty", remedy="Name at least one model.")
        self._require_own_servers()
        _require(
            bool(self.api_keys) or self.listen.loopback,
            f"listening on {self.listen.host} lets other machines in, and there are no api_keys",
            remedy="Add api_keys, or listen on 127.0.0.1.",
        )

    def _require_own_servers(self) -> None:
        """Adapters of one server are loaded for one model: two would unload each other's."""
        taken: dict[str, str] = {}
        for alias, model in self.models.items():
            for url in {url for pair in model.pairs for url in (pair.prefill, pair.decode) if model.adapters}:
                other = taken.setdefault(url, alias)
                _require(
                    other == alias,
                    f"models {other!r} and {alias!r} both load adapters on {url}",
                    remedy="Give the adapters to one of them.",
                )

    def _may_name(self, name: str) -> bool:
        """Whether it is a model, or may be an adapter of one: which there are, their folder says."""
        base = self.models.get(name.partition(":")[0])
        return name in self.models or (base is not None and base.adapters is not None)
