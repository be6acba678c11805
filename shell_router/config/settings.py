"""What a deployment's YAML file says, section by section."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from shell_router.config.models import LaunchSettings, ModelSettings, count, seconds
from shell_router.config.read import NO_KINDS, Kinds, read_file
from shell_router.errors import require
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.holdout import HoldoutSettings
from shell_router.routing.model_choice import ModelChoiceSettings, ModelPolicy
from shell_router.topology import AUTO, LiveSettings
from shell_router.topology.forms import MappingOf, Number, Text


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the router listens."""

    host: Annotated[str, "Address to listen on; one that other machines reach needs `api_keys`."] = "127.0.0.1"
    port: Annotated[int, Number("TCP port; 0 takes a free one.", at_least=0, at_most=65535, whole=True)] = 8000

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port must be between 0 and 65535, not {self.port}")

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
    """A secret in an environment variable."""

    env: Annotated[str, "Name of the environment variable."]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the router refuses, and when it ends what takes too long."""

    max_running: Annotated[int, count("Requests that run at a time; one more is answered 429.")] = 1024
    max_agents_per_tenant: Annotated[
        int,
        count("Agents that one of several tenants may have running or waiting at a time; more are answered 429."),
    ] = 512
    max_connections: Annotated[int, count("Open connections; for one more the longest idle one is closed.")] = 4096
    idle_timeout_s: Annotated[
        float, seconds("How long a connection may be idle; make it longer than your reverse proxy's.")
    ] = 620.0
    max_body_bytes: Annotated[int, count("Largest body of a request and line of a batch.")] = 8 * 2**20
    request_timeout_s: Annotated[float, seconds("Longest time that a request may take.")] = 600.0
    body_timeout_s: Annotated[
        float, seconds("Longest time to send a body, and pause while a file is uploaded; raise it for slow uplinks.")
    ] = 30.0
    write_timeout_s: Annotated[
        float, seconds("How long a client may read nothing of its stream before its run is canceled.")
    ] = 60.0
    native_fields: Annotated[
        tuple[str, ...],
        "Further fields that are forwarded to engines. Some of SGLang's load code or files, or choose servers; "
        "`image_url` lets engines fetch images from any host.",
    ] = ()
    isolate_tenants: Annotated[
        bool,
        "Give each tenant a prefix cache of its own on the engines, so that `cached_tokens` tells of no other tenant's "
        "prompts; prefixes that tenants share are then prefilled for each.",
    ] = False
    engine_stall_s: Annotated[
        float, seconds("How long an engine may be silent on a request, queue included; raise it for long prefills.")
    ] = 60.0
    engine_start_s: Annotated[
        float, seconds("How long engines may take to start; then models with engines are served.")
    ] = 180.0
    engine_attempts: Annotated[
        int, count("How often a request that fails before its first token is sent in all; 1 never retries.")
    ] = 3
    breaker_failures: Annotated[int, count("Failures in a row that open a server's circuit breaker.")] = 5
    breaker_open_s: Annotated[float, seconds("Time between probes of a server whose circuit breaker is open.")] = 5.0
    drain_s: Annotated[
        float,
        seconds(
            "How long running requests may go on after SIGTERM. Then, or at a second signal, they end with "
            "`router_stopping`; "
            "stay below your orchestrator's grace period."
        ),
    ] = 30.0


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The Agent Prompt Cache: what each agent has written so far."""

    backend: Annotated[
        Literal["memory", "redis"], "`redis` where replicas of the router share agents, else `memory`."
    ] = "memory"
    url: Annotated[
        str,
        Text(
            "Where Redis is; TLS and Unix sockets work too.",
            r"(redis|rediss|unix)://.*",
            "a redis://, rediss:// or unix:// URL",
        ),
    ] = "redis://127.0.0.1:6379/0"
    ttl_s: Annotated[
        float, seconds("When outputs expire that were not removed; must be above `limits.request_timeout_s`.")
    ] = 3600.0


@dataclass(frozen=True, slots=True)
class EmbedderSettings:
    """The embedding model that early exit and classifiers compare texts with."""

    model: Annotated[
        str,
        "`default` (small, needs no download), a sentence-transformers name or folder (`./...` counts from the file), "
        "`hash` (no model, for tests), or `none` (topologies that embed are refused).",
    ] = "default"
    device: Annotated[str, "Where it runs: `cpu`, `cuda`, `cuda:1`, ..."] = "cpu"

    def found_from(self, folder: Path) -> "EmbedderSettings":
        """A model that begins with a dot is a folder, as seen from `folder`; another may be a name."""
        return replace(self, model=str(folder / self.model)) if self.model.startswith(".") else self


@dataclass(frozen=True, slots=True)
class Traces:
    """Finished requests that can still be looked up."""

    kept: Annotated[int, count("Requests that `GET /v1/traces/{id}` still finds; each takes some kilobytes.")] = 1000


@dataclass(frozen=True, slots=True)
class BatchesSettings:
    """The Batch API: files of requests that are answered while online requests run."""

    folder: Annotated[Path | None, "Keeps files, batches and their results. Without it there is no Batch API."] = None
    concurrency: Annotated[int, count("Lines that run at a time, all batches together, besides online requests.")] = 32
    max_file_bytes: Annotated[int, count("Largest file that may be uploaded.")] = 200 * 2**20
    max_tenant_files: Annotated[int, count("Files that a tenant may keep; results count, and are always kept.")] = 1000
    max_tenant_bytes: Annotated[int, count("Bytes of files that a tenant may keep, likewise.")] = 2 * 2**30
    pools: Annotated[Mapping[str, Path], "Files of pools, by the name that lines give as their model."] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        require(not self.pools or self.folder is not None, "pools answer batches, which are off", "Set batches.folder.")


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """What the model `auto` stands for, and how one of its models is chosen."""

    models: Annotated[tuple[str, ...], "Models to choose from; all of the deployment's by default."] = ()
    policy: Annotated[
        ModelPolicy, "How a model is chosen: `chimera`, `worth`, `least_loaded`, `round_robin` or `best_score`."
    ] = "chimera"
    latency_slack: Annotated[
        float, "Chimera's tau: a model may be expected to take (1 + tau) times as long as the fastest."
    ] = 1.0
    score_margin: Annotated[float, "Chimera's Delta s: by how much a slower model's score must be higher."] = 0.05
    slack_s: Annotated[float, "Seconds added to the latency slack, which is 0 while any model is idle."] = 0.0
    answer_worth_s: Annotated[float, "Of policy `worth`: seconds of waiting that a right answer makes up for."] = 20.0
    profile: Annotated[Path | None, "File of `shell-router profile`: measured costs."] = None
    max_batch: Annotated[
        Mapping[str, int],
        MappingOf(
            "Sequences that a model decodes together.",
            Text("Model."),
            count("Sequences."),
            at_least=0,
        ),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(set(self.models)) == len(self.models), "models names one twice", "Name each model once.")
        try:
            self.choice()
        except ValueError as error:
            require(False, str(error))

    def choice(self) -> ModelChoiceSettings:
        """The part that the policies read."""
        return ModelChoiceSettings(
            self.policy, self.latency_slack, self.score_margin, self.slack_s, self.answer_worth_s
        )


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """Trained predictors, each in a process of its own."""

    scores: Annotated[Path | None, "Folder of `shell-router train router`: scores of models."] = None
    lengths: Annotated[Path | None, "Folder of `shell-router train lengths`: expected output tokens."] = None
    limit_s: Annotated[float, seconds("Longest wait for predictions; then requests go on without.")] = 0.2
    device: Annotated[str, "Where they run: `cpu`, `cuda`, ..."] = "cpu"
    threads: Annotated[int, count("CPU threads of each predictor.")] = 1


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Trace files with a line per agent run, to train predictors on."""

    folder: Annotated[Path | None, "Takes the files; nothing is recorded without it."] = None
    prompts: Annotated[bool, "Whether questions are recorded too, which training scores needs."] = False
    max_file_bytes: Annotated[int, count("When a file is full and the next is begun.")] = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Config:
    """A whole deployment."""

    models: Annotated[Mapping[str, ModelSettings], "Alias by alias, the models that topologies and requests may name."]
    topologies: Annotated[
        tuple[Path, ...], "Topology files and folders of them; each file's `name` becomes a model name."
    ] = ()
    live_topologies: LiveSettings = field(default_factory=LiveSettings)
    listen: Listen = Listen()
    api_keys: Annotated[
        Mapping[str, str | FromEnvironment],
        "Key per tenant: `{alice: {env: ALICE_KEY}}` reads it from the environment, `{alice: secret}` has it here.",
    ] = field(default_factory=dict)
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
    holdout: HoldoutSettings = field(default_factory=HoldoutSettings)

    def __post_init__(self) -> None:
        require(bool(self.models), "models is empty", remedy="Name at least one model.")
        require(AUTO not in self.models, f"a model is named {AUTO!r}, which means any of them", "Rename it.")
        for name in (*self.auto.models, *self.auto.max_batch):
            require(
                self._may_name(name),
                f"auto names {name!r}, which is not among the models",
                f"Name some of: {', '.join(self.models)}.",
            )
        require(
            self.cache.ttl_s > self.limits.request_timeout_s,
            f"cache.ttl_s ({self.cache.ttl_s:g}) must be above limits.request_timeout_s"
            f" ({self.limits.request_timeout_s:g}): an output must outlive the requests that read it",
        )
        self._require_own_servers()
        require(
            bool(self.api_keys) or self.listen.loopback,
            f"other machines can reach {self.listen.host}, and there are no api_keys",
            remedy="Add api_keys, or listen on 127.0.0.1.",
        )

    def _require_own_servers(self) -> None:
        """Adapters of one server are loaded for one model: two would unload each other's."""
        taken: dict[str, str] = {}
        for alias, model in self.models.items():
            for url in {url for pair in model.pairs for url in (pair.prefill, pair.decode) if model.adapters}:
                other = taken.setdefault(url, alias)
                require(
                    other == alias,
                    f"models {other!r} and {alias!r} both load adapters on {url}",
                    remedy="Give the adapters to one of them.",
                )

    def _may_name(self, name: str) -> bool:
        """Whether it is a model, or may be an adapter of one; the adapters' folder has their names."""
        base = self.models.get(name.partition(":")[0])
        return name in self.models or (base is not None and base.adapters is not None)


def read_config(path: Path, environ: Mapping[str, str], *, with_keys: bool = True, kinds: Kinds = NO_KINDS) -> Config:
    """The deployment that `path` describes, with API keys from the environment unless `with_keys` is off.

    `kinds` are the engine kinds that models may name. Raises ConfigError, whose message begins with the file and, where
    known, the line.
    """
    config, where = read_file(path, Config, kinds=kinds)
    assert isinstance(config, Config)
    config = replace(config, embedder=config.embedder.found_from(path.parent))
    if not with_keys:
        return config
    keys: dict[str, str] = {}
    for tenant, key in config.api_keys.items():
        found = environ.get(key.env, "") if isinstance(key, FromEnvironment) else key
        require(
            bool(found),
            f"{where(('api_keys', tenant))}: the API key of {tenant!r} is empty.",
            f"Set the environment variable {key.env}."
            if isinstance(key, FromEnvironment)
            else "Write a key, or {env: NAME}.",
        )
        other = next((one for one, theirs in keys.items() if theirs == found), None)
        same = f"{path}: {other!r} and {tenant!r} have the same API key."
        require(other is None, same, "Give each tenant its own.")
        keys[tenant] = found
    return replace(config, api_keys=keys)
