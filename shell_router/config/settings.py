"""What a deployment's YAML file says, section by section."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from annotated_types import Interval
from pydantic import Field

from shell_router.config.models import (
    FromEnvironment,
    LaunchSettings,
    ModelSettings,
    SwappingSettings,
    TlsClient,
    adapted_name,
    flags_of,
    secret,
)
from shell_router.errors import ConfigError, SettingError, require
from shell_router.files.document import Document
from shell_router.files.document import Path as Place
from shell_router.files.read import SEE_PAGE, check, load_document, problem_of, read_file
from shell_router.files.schema import Schema, json_schema
from shell_router.files.types import SECRET, Amount, Count, FilePath, Seconds, Switch, Url
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.holdout import HoldoutSettings
from shell_router.routing.model_choice import ModelChoiceSettings
from shell_router.topology import AUTO, LiveSettings

Kinds = Mapping[str, Callable[[], type]]
"""The class of each engine kind's settings, imported when it is called."""
NO_KINDS: Kinds = {}


@dataclass(frozen=True, slots=True)
class ListenTls:
    """The router's own certificate. A file that changes takes effect within seconds, without a
    restart.
    """

    certificate: Annotated[FilePath, "PEM file of the certificate, with its chain."]
    key: Annotated[FilePath, "PEM file of its private key."]


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the router listens, and whether it serves its page there."""

    host: Annotated[
        str, "Address to listen on; one that other machines reach needs `api_keys`."
    ] = "127.0.0.1"
    port: Annotated[int, "TCP port; 0 takes a free one.", Interval(ge=0, le=65535)] = 8000
    ui: Annotated[
        Switch, "Serve the live page at `/ui`; it asks for a key where there are `api_keys`."
    ] = False
    tls: Annotated[ListenTls | None, "Serves https, and no http, with this certificate."] = None

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
class ApiKey:
    """A key, and what it may do. A tenant may have several, so that a new one is in use before an
    old one ends.
    """

    key: Annotated[str | None, "The secret itself.", SECRET] = field(default=None, repr=False)
    env: Annotated[str | None, "Name of the environment variable that holds it."] = None
    tenant: Annotated[str | None, "Whose key it is; by default the tenant has the key's name."] = (
        None
    )
    expires: Annotated[
        str | None,
        (
            "When it ends, in UTC by default: `'2027-01-31'`, `'2027-01-31T12:00:00+01:00'` (in "
            "quotes)."
        ),
    ] = None
    models: Annotated[
        tuple[str, ...], "Models and topologies that it may ask; all by default."
    ] = ()
    routes: Annotated[
        tuple[str, ...], "Paths that it may ask, with all below them; all by default."
    ] = ()
    tokens_per_minute: Annotated[
        Count | None,
        "Tokens of prompts and outputs that its tenant may use a minute; then it is answered 429.",
    ] = None
    native_fields: Annotated[
        tuple[str, ...], "Fields that it may send to engines besides `limits.native_fields`."
    ] = ()
    operator: Annotated[
        Switch, "Whether it may read `/metrics`, and change topologies and engine pairs."
    ] = False

    def __post_init__(self) -> None:
        require(
            (self.key is None) != (self.env is None),
            "a key has either `key` or `env`",
            "Set one of them.",
        )
        try:
            _ = self.expires_s
        except ValueError:
            require(
                False,
                f"expires is {self.expires!r}, which is no time",
                "Write it as 2027-01-31T12:00:00Z.",
            )

    @property
    def expires_s(self) -> float:
        """In Unix time."""
        if self.expires is None:
            return inf
        at = datetime.fromisoformat(self.expires)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


GivenKey = Annotated[str | ApiKey, SECRET]


@dataclass(frozen=True, slots=True)
class KeysFile:
    """The file that `api_keys_file` names."""

    api_keys: Annotated[Mapping[str, GivenKey], "As in the deployment's file.", SECRET] = field(
        repr=False
    )

    def __post_init__(self) -> None:
        require(bool(self.api_keys), "api_keys is empty", "Name at least one key.")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the router refuses, and when it ends what takes too long."""

    max_running: Annotated[Count, "Requests that run at a time; one more is answered 429."] = 1024
    max_agents_per_tenant: Annotated[
        Count,
        "Agents that one of several tenants may have running or waiting at a time; more "
        "are "
        "answered 429.",
    ] = 512
    max_connections: Annotated[
        Count, "Open connections; for one more the longest idle one is closed."
    ] = 4096
    idle_timeout_s: Annotated[
        Seconds, "How long a connection may be idle; make it longer than your reverse proxy's."
    ] = 620.0
    max_body_bytes: Annotated[Count, "Largest body of a request and line of a batch."] = 8 * 2**20
    request_timeout_s: Annotated[Seconds, "Longest time that a request may take."] = 600.0
    body_timeout_s: Annotated[
        Seconds,
        "Longest time to send a body, and pause while a file is uploaded; raise it for "
        "slow "
        "uplinks.",
    ] = 30.0
    write_timeout_s: Annotated[
        Seconds, "How long a client may read nothing of its stream before its run is canceled."
    ] = 60.0
    native_fields: Annotated[
        tuple[str, ...],
        "Further fields that are forwarded to engines. Some of SGLang's load code or files, or "
        "choose servers; "
        "`image_url` lets engines fetch images from any host.",
    ] = ()
    isolate_tenants: Annotated[
        Switch,
        "Give each tenant a prefix cache of its own on the engines, so that `cached_tokens` "
        "tells of no other tenant's "
        "prompts; prefixes that tenants share are then prefilled for each.",
    ] = False
    engine_stall_s: Annotated[
        Seconds,
        "How long an engine may be silent on a request, queue included; raise it for long "
        "prefills.",
    ] = 60.0
    engine_start_s: Annotated[
        Seconds, "How long engines may take to start; then models with engines are served."
    ] = 180.0
    engine_attempts: Annotated[
        Count,
        "How often a request that fails before its first token is sent in all; 1 never retries.",
    ] = 3
    breaker_failures: Annotated[
        Count, "Failures in a row that open a server's circuit breaker."
    ] = 5
    breaker_open_s: Annotated[
        Seconds, "Time between probes of a server whose circuit breaker is open."
    ] = 5.0
    lame_duck_s: Annotated[
        Amount,
        (
            "How long `/ready` says no after SIGTERM before requests are refused, for load "
            "balancers to leave in time."
        ),
    ] = 0.0
    drain_s: Annotated[
        Seconds,
        "How long running requests may go on after SIGTERM and `lame_duck_s`. Then, or at a "
        "second signal, they "
        "end with `router_stopping`; stay below your orchestrator's grace period.",
    ] = 30.0


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The Agent Prompt Cache: what each agent has written so far. `tls` and `password` are
    Redis's."""

    backend: Annotated[
        Literal["memory", "redis"],
        "`redis` where replicas of the router share agents, else `memory`.",
    ] = "memory"
    url: Annotated[
        str,
        "Where Redis is; TLS and Unix sockets work too.",
        Field(pattern="^(redis|rediss|unix)://.*$", title="a redis://, rediss:// or unix:// URL"),
        SECRET,
    ] = field(default="redis://127.0.0.1:6379/0", repr=False)
    password: Annotated[
        str | FromEnvironment | None,
        "Redis's password, `{env: REDIS_PASSWORD}` from the environment.",
        SECRET,
    ] = field(default=None, repr=False)
    tls: Annotated[TlsClient | None, "Certificates, for a rediss:// URL."] = None
    prefix: Annotated[
        str,
        "Begins all keys; deployments that share a Redis need different ones.",
        Field(pattern=r"^[\w.:-]+$", title="a plain name"),
    ] = "agent-prompt-cache"
    ttl_s: Annotated[
        Seconds,
        "When outputs expire that were not removed; must be above `limits.request_timeout_s`.",
    ] = 3600.0
    run_ttl_s: Annotated[
        Seconds,
        "How long a run with an `Idempotency-Key` can be asked for again after its last token.",
    ] = 3600.0
    lease_s: Annotated[
        Seconds,
        "Silence after which another router takes over the runs of one that died; only with keys.",
    ] = 5.0

    def __post_init__(self) -> None:
        try:
            twice = bool(urlsplit(self.url).password) and self.password is not None
        except ValueError:
            raise SettingError(
                "url is no URL.", remedy="Write redis://HOST:PORT/0."
            ) from None  # it may show a password
        require(not twice, "both url and password hold a password", "Leave it out of the url.")
        require(self.tls is None or self.url.startswith("rediss://"), "tls needs a rediss:// url")
        sets = {"protocol", "decode_responses"} & parse_qs(urlsplit(self.url).query).keys()
        require(
            not sets,
            f"url sets {', '.join(sorted(sets))}",
            "Leave it out: the router needs its own.",
        )


@dataclass(frozen=True, slots=True)
class EmbedderSettings:
    """The embedding model that early exit and classifiers compare texts with."""

    model: Annotated[
        str,
        "`default` (small, needs no download), a sentence-transformers name or folder (`./...` "
        "counts from the file), "
        "`hash` (no model, for tests), or `none` (topologies that embed are refused).",
    ] = "default"
    device: Annotated[str, "Where it runs: `cpu`, `cuda`, `cuda:1`, ..."] = "cpu"

    @property
    def name(self) -> str:
        """What requests for embeddings call it."""
        if self.model == "default":
            return "all-MiniLM-L6-v2"
        return Path(self.model).name

    def found_from(self, folder: Path) -> "EmbedderSettings":
        """A model that begins with a dot is a folder, as seen from `folder`; another may be a
        name."""
        if self.model.startswith("."):
            return replace(self, model=str(folder / self.model))
        return self


@dataclass(frozen=True, slots=True)
class Traces:
    """Finished requests that can still be looked up, and where their spans go."""

    kept: Annotated[
        Count, "Requests that `GET /v1/traces/{id}` still finds; each takes some kilobytes."
    ] = 1000
    otlp: Annotated[
        Url | None,
        (
            "Takes OpenTelemetry spans of finished requests: the URL of an OTLP/HTTP receiver, "
            "such as `http://127.0.0.1:4318/v1/traces`. Needs the extra `otel`."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class BatchesSettings:
    """The Batch API: files of requests that are answered while online requests run."""

    folder: Annotated[
        FilePath | None, "Keeps files, batches and their results. Without it there is no Batch API."
    ] = None
    concurrency: Annotated[
        Count, "Lines that run at a time, all batches together, besides online requests."
    ] = 32
    max_file_bytes: Annotated[Count, "Largest file that may be uploaded."] = 200 * 2**20
    file_ttl_s: Annotated[
        Seconds | None, "Age at which files, results too, are deleted; without it they are kept."
    ] = None
    max_tenant_files: Annotated[
        Count, "Files that a tenant may keep; results count, and are always kept."
    ] = 1000
    max_tenant_bytes: Annotated[Count, "Bytes of files that a tenant may keep, likewise."] = (
        2 * 2**30
    )
    pools: Annotated[
        Mapping[str, FilePath], "Files of pools, by the name that lines give as their model."
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            not self.pools or self.folder is not None,
            "pools answer batches, which are off",
            "Set batches.folder.",
        )


@dataclass(frozen=True, slots=True)
class AutoSettings(ModelChoiceSettings):
    """What the model `auto` stands for, and how one of its models is chosen."""

    models: Annotated[
        tuple[str, ...], "Models to choose from; all of the deployment's by default."
    ] = ()
    profile: Annotated[FilePath | None, "File of `shell-router profile`: measured costs."] = None
    max_batch: Annotated[Mapping[str, Count], "Sequences that a model decodes together."] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        require(
            len(set(self.models)) == len(self.models),
            "models names one twice",
            "Name each model once.",
        )
        ModelChoiceSettings.__post_init__(self)


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """Trained predictors, each in a process of its own."""

    scores: Annotated[
        FilePath | None, "Folder of `shell-router train router`: scores of models."
    ] = None
    lengths: Annotated[
        FilePath | None, "Folder of `shell-router train lengths`: expected output tokens."
    ] = None
    limit_s: Annotated[Seconds, "Longest wait for predictions; then requests go on without."] = 0.2
    device: Annotated[str, "Where they run: `cpu`, `cuda`, ..."] = "cpu"
    threads: Annotated[Count, "CPU threads of each predictor."] = 1


@dataclass(frozen=True, slots=True)
class AccessLogSettings:
    """Files with a JSON line per request: tenant, request id, model, status, tokens, times."""

    folder: Annotated[FilePath | None, "Takes the files; nothing is written without it."] = None
    max_file_bytes: Annotated[Count, "When a file is full and the next is begun."] = 64 * 2**20


@dataclass(frozen=True, slots=True)
class RecordSettings(AccessLogSettings):
    """Trace files with a line per agent run, to train predictors on."""

    prompts: Annotated[
        Switch, "Whether questions are recorded too, which training scores needs."
    ] = False


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
    listen: Listen = Listen()
    api_keys: Annotated[
        Mapping[str, GivenKey],
        (
            "Key per tenant: `{alice: {env: ALICE_KEY}}` reads it from the environment, `{alice: "
            "secret}` has it here."
        ),
        SECRET,
    ] = field(default_factory=dict, repr=False)
    api_keys_file: Annotated[
        FilePath | None,
        (
            "File with further `api_keys`; what it says from then on counts within seconds, "
            "without "
            "a restart."
        ),
    ] = None
    limits: Limits = Limits()
    cache: CacheSettings = CacheSettings()
    embedder: EmbedderSettings = EmbedderSettings()
    traces: Traces = Traces()
    batches: BatchesSettings = field(default_factory=BatchesSettings)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    auto: AutoSettings = field(default_factory=AutoSettings)
    prediction: PredictionSettings = field(default_factory=PredictionSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    access_log: AccessLogSettings = AccessLogSettings()
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    holdout: HoldoutSettings = field(default_factory=HoldoutSettings)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that topologies and requests may give a model, adapters included."""
        names = list(self.models)
        for alias, model in self.models.items():
            names.extend(adapted_name(alias, adapter) for adapter in model.adapters)
        return tuple(names)

    def __post_init__(self) -> None:
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
        require(
            self.cache.ttl_s > self.limits.request_timeout_s,
            f"cache.ttl_s ({self.cache.ttl_s:g}) must be above limits.request_timeout_s"
            f" ({self.limits.request_timeout_s:g}): an output must outlive the requests that "
            "read it",
        )
        folders = [one.folder.resolve() for one in (self.record, self.access_log) if one.folder]
        require(
            len({*folders}) == len(folders),
            "record.folder and access_log.folder are one",
            "Name one for each.",
        )
        self._require_swapped_models()
        self._require_asked_keys()
        require(
            bool(self.api_keys) or self.api_keys_file is not None or self.listen.loopback,
            f"other machines can reach {self.listen.host}, and there are no api_keys",
            remedy="Add api_keys, or listen on 127.0.0.1.",
        )

    @property
    def swapped(self) -> tuple[str, ...]:
        """The models that take turns in memory."""
        if self.swapping is None:
            return ()
        return self.swapping.models or tuple(self.models)

    @property
    def sleeping(self) -> tuple[str, ...]:
        """Those of them that have SGLang pairs of their own, which sleep in turns."""
        return tuple(alias for alias in self.swapped if self.models[alias].pairs)

    def _require_swapped_models(self) -> None:
        if (swapping := self.swapping) is None:
            return
        for alias in (*self.swapped, *swapping.usage):
            known = f"Name some of: {', '.join(self.models)}."
            require(
                alias in self.models,
                f"swapping names {alias!r}, which is not among the models",
                known,
            )
        for alias in self.swapped:
            model = self.models[alias]
            require(
                not (swapping.pairs and (model.pairs or model.engine))
                and not model.engine.keys() - {"embedded"},
                f"models.{alias} takes turns with others, and names engines of its own",
                remedy=(
                    "Leave them or swapping.pairs out, or name the models that take turns in "
                    "swapping.models."
                ),
            )
        require(
            len(self.sleeping) in (0, len(self.swapped)),
            "some of the models that take turns have pairs of their own, and others have none",
            "Give pairs to all of them, or name those that take turns in swapping.models.",
        )
        taken = Counter(url for pair in swapping.pairs for url in pair.urls)
        for model in self.models.values():
            taken.update({url for pair in model.pairs for url in pair.urls})
        own = (pair for alias in self.sleeping for pair in self.models[alias].pairs)
        for url in (url for pair in (*swapping.pairs, *own) for url in pair.urls):
            require(
                taken[url] == 1,
                f"{url} is named twice, and serves models that take turns",
                "Name it once.",
            )
        for alias in self.sleeping:
            self._require_sleeper(f"models.{alias}", self.models[alias])

    def _require_sleeper(self, where: str, model: ModelSettings) -> None:
        remedy = "Leave them out, or name the models that take turns in swapping.models."
        require(not model.adapters, f"{where} takes turns with others, and has adapters", remedy)
        for launch in (pair.launch for pair in model.pairs if pair.launch):
            for flags in (flags_of(role, self.launch, launch) for role in ("prefill", "decode")):
                require(
                    "--device=cpu" not in flags and ("--device", "cpu") not in pairwise(flags),
                    (
                        f"{where} sleeps while others are awake, and is started on a CPU, where "
                        "SGLang cannot"
                    ),
                    (
                        "Sleeping gives GPU memory back: start it on GPUs, or swap weights of one "
                        "shape by swapping.pairs."
                    ),
                )

    def _require_asked_keys(self) -> None:
        """Engines that the router starts get no `engine_key` from it: all of the machine can read a
        command line.
        """
        for alias, model in self.models.items():
            launched = [
                pair.launch for pair in model.pairs if pair.launch and model.engine_key is not None
            ]
            for flags in (
                flags_of(role, self.launch, one)
                for one in launched
                for role in ("prefill", "decode")
            ):
                require(
                    any(flag.partition("=")[0] == "--api-key" for flag in flags),
                    (
                        f"models.{alias} has an engine_key, and the engines that `launch` starts "
                        "ask "
                        "for none"
                    ),
                    remedy="Give them `--api-key` in launch.flags, or leave engine_key out.",
                )


def read_config(
    path: Path, environ: Mapping[str, str], *, with_keys: bool = True, kinds: Kinds = NO_KINDS
) -> Config:
    """Read a deployment's file, with API keys from the environment unless `with_keys` is off.

    Args:
        path: The deployment's file.
        environ: The environment that names of secrets are looked up in.
        with_keys: Whether API keys are read.
        kinds: The engine kinds that models may name.

    Raises:
        ConfigError: Its message begins with the file and, where known, the line.
    """
    document = load_document(path, SEE_PAGE)
    config = _with_engines(document, path.parent, kinds)
    config = replace(config, embedder=config.embedder.found_from(path.parent))
    if not with_keys:
        return config

    def locate(place: Place) -> str:
        return f"{path}:{document.line_of(place)}"

    return replace(config, api_keys=_with_secrets(config.api_keys, locate, environ))


def _with_engines(document: Document, folder: Path, kinds: Kinds) -> Config:
    """Build the deployment, and the settings of its models' engine kinds by the kinds' classes."""
    value, sections = _split_engines(document.value, kinds)
    config, problems = check(
        Config, value, folder=folder, see=SEE_PAGE, schema=lambda: deployment_schema(kinds)
    )
    engines: dict[str, dict[str, Any]] = {}
    for (alias, name), section in sections.items():
        at = ("models", alias, name)
        settings, wrong = check(kinds[name](), section, at, folder=folder, see=SEE_PAGE)
        engines.setdefault(alias, {})[name] = settings
        problems += wrong
    document.require_none(problems)
    deployment: Config = config
    models = dict(deployment.models)
    place: Place = ()
    try:
        for alias, engine in engines.items():
            place = ("models", alias)
            models[alias] = replace(models[alias], engine=engine)
        place = ()
        return replace(deployment, models=models)
    except ConfigError as error:
        document.require_none([problem_of(error, place, SEE_PAGE)])
        raise


def _split_engines(value: Any, kinds: Kinds) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Take the sections of engine kinds out of the models, by alias and kind."""
    models = value.get("models") if isinstance(value, Mapping) else None
    if not isinstance(models, Mapping):
        return value, {}
    others: dict[str, Any] = {}
    sections: dict[tuple[str, str], Any] = {}
    for alias, model in models.items():
        others[alias] = model
        if isinstance(model, Mapping):
            others[alias] = {key: item for key, item in model.items() if key not in kinds}
            named = [name for name in kinds if model.get(name) is not None]
            sections |= {(alias, name): model[name] for name in named}
    return {**value, "models": others}, sections


def deployment_schema(kinds: Kinds = NO_KINDS) -> Schema:
    """Write the JSON Schema of a deployment's file, with the sections of these engine kinds."""
    schema = json_schema(Config, "Shell router deployment")
    properties = schema["$defs"]["ModelSettings"]["properties"]
    for name, load in kinds.items():
        section = json_schema(load(), name)
        schema["$defs"] |= section.pop("$defs", {})
        del section["$schema"]
        properties[name] = {"anyOf": [section, {"type": "null"}], "default": None}
    return schema


def read_keys(config: Config, environ: Mapping[str, str]) -> Mapping[str, str | ApiKey]:
    """Return the deployment's API keys and those that its file of keys holds now.

    Raises:
        ConfigError: The file of keys is wrong, or names a key that the deployment's file has.
    """
    if config.api_keys_file is None:
        return config.api_keys
    file, locate = read_file(config.api_keys_file, KeysFile)
    twice = sorted(config.api_keys.keys() & file.api_keys.keys())
    require(
        not twice,
        f"{config.api_keys_file}: the deployment's own file has {twice} already.",
        "Rename them.",
    )
    return {**config.api_keys, **_with_secrets(file.api_keys, locate, environ)}


def _with_secrets(
    keys: Mapping[str, str | ApiKey],
    locate: Callable[[Place], str],
    environ: Mapping[str, str],
) -> Mapping[str, ApiKey]:
    """Look up the secret of each key, and require that no two keys share one."""
    read: dict[str, ApiKey] = {}
    owners: dict[str | None, str] = {}
    for name, entry in keys.items():
        place = locate(("api_keys", name))
        key = ApiKey(key=entry) if isinstance(entry, str) else entry
        source = key.key if key.env is None else FromEnvironment(key.env)
        text = secret(source, f"{place}: the API key of {name!r}", environ)
        owner = owners.setdefault(text, name)
        same = f"{place}: {owner!r} and {name!r} have the same API key."
        require(owner == name, same, "Give each tenant its own.")
        read[name] = replace(key, key=text, env=None)
    return read
