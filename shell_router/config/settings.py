"""The sections of a deployment's YAML file, but for models and their engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from annotated_types import Interval
from pydantic import Field

from shell_router.config.models import FromEnvironment, TlsClient
from shell_router.core.budget import Allowance
from shell_router.core.engine import ServiceTier
from shell_router.errors import SettingError, require
from shell_router.files.types import (
    DISTINCT,
    SECRET,
    Amount,
    Count,
    FilePath,
    Seconds,
    Switch,
    Url,
)
from shell_router.routing.model_choice import ModelChoiceSettings


@dataclass(frozen=True, slots=True)
class ListenTls:
    """The router's own certificate. A changed file takes effect in seconds, without a restart."""

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
    """A key, and what it may do.

    A tenant may have several, so that a new one is in use before an old one ends.
    """

    key: Annotated[str | None, "The secret itself.", SECRET] = field(default=None, repr=False)
    env: Annotated[str | None, "Name of the environment variable that holds it."] = None
    tenant: Annotated[str | None, "Whose key it is; by default the tenant has the key's name."] = (
        None
    )
    expires: Annotated[
        str | None,
        "When it ends, in UTC by default: `'2027-01-31'`, `'2027-01-31T12:00:00+01:00'` (in "
        "quotes).",
    ] = None
    models: Annotated[
        tuple[str, ...], "Models and topologies that it may ask; all by default."
    ] = ()
    routes: Annotated[
        tuple[str, ...], "Paths that it may ask, with all below them; all by default."
    ] = ()
    tokens_per_minute: Annotated[
        Count | None,
        "Tokens of prompts and outputs of its tenant a minute; then it is answered 429.",
    ] = None
    daily_budget: Annotated[
        Allowance | None, "What its tenant may spend on a day (UTC); then it is answered 402."
    ] = None
    program_budget: Annotated[
        Allowance | None, "What each program or session of its tenant may spend within a day."
    ] = None
    native_fields: Annotated[
        tuple[str, ...], "Fields that it may send to engines besides `limits.native_fields`."
    ] = ()
    service_tier: Annotated[
        ServiceTier,
        "The highest class of requests that it may ask for: `priority`, `default` or `flex`.",
    ] = "default"
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
            wrong = f"expires is {self.expires!r}, which is no time"
            raise SettingError(wrong, remedy="Write it as 2027-01-31T12:00:00Z.") from None

    @property
    def expires_s(self) -> float:
        """The Unix time at which the key ends."""
        if self.expires is None:
            return inf
        at = datetime.fromisoformat(self.expires)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


UsageCount = Literal["all", "root"]
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
        "Running and waiting agents of one of several tenants; more are answered 429.",
    ] = 512
    max_connections: Annotated[
        Count, "Open connections; for one more the longest idle one is closed."
    ] = 4096
    idle_timeout_s: Annotated[
        Seconds, "How long a connection may be idle; longer than your reverse proxy's."
    ] = 620.0
    max_body_bytes: Annotated[Count, "Largest body of a request and line of a batch."] = 8 * 2**20
    request_timeout_s: Annotated[Seconds, "Longest time that a request may take."] = 600.0
    body_timeout_s: Annotated[
        Seconds,
        "Longest time to send a body, and pause of an upload; raise it for slow uplinks.",
    ] = 30.0
    write_timeout_s: Annotated[
        Seconds, "How long a client may read nothing of its stream before its run is canceled."
    ] = 60.0
    native_fields: Annotated[
        tuple[str, ...],
        "Further fields that are forwarded to engines. Some load code or files; "
        "`image_url` fetches images from any host.",
    ] = ()
    isolate_tenants: Annotated[
        Switch,
        "Give each tenant its own prefix cache on the engines; shared prefixes are then "
        "prefilled for each.",
    ] = False
    engine_stall_s: Annotated[
        Seconds,
        "How long an engine may be silent on a request, queue included; raise it for "
        "long prefills.",
    ] = 60.0
    engine_start_s: Annotated[
        Seconds, "How long engines may take to start; then models with engines are served."
    ] = 180.0
    engine_attempts: Annotated[
        Count,
        "How often a request that fails before its first token is sent; 1 never retries.",
    ] = 3
    breaker_failures: Annotated[
        Count, "Failures in a row that open a server's circuit breaker."
    ] = 5
    breaker_open_s: Annotated[
        Seconds, "Time between probes of a server whose circuit breaker is open."
    ] = 5.0
    lame_duck_s: Annotated[
        Amount,
        ("How long `/ready` says no after SIGTERM before requests are refused."),
    ] = 0.0
    drain_s: Annotated[
        Seconds,
        "How long running requests may go on after SIGTERM and `lame_duck_s`; then they "
        "end with `router_stopping`.",
    ] = 30.0


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The Agent Prompt Cache, which holds each agent's output so far.

    `tls` and `password` are Redis's.
    """

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
        "When outputs expire; above `limits.request_timeout_s`.",
    ] = 3600.0
    run_ttl_s: Annotated[
        Seconds,
        "How long a run with an `Idempotency-Key` can be asked for again after its last token.",
    ] = 3600.0
    lease_s: Annotated[
        Seconds,
        "Silence after which a dead router's logs end, and others take over its runs with keys.",
    ] = 5.0

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.url)
        except ValueError:  # its text may hold the password
            raise SettingError("url is no URL.", remedy="Write redis://HOST:PORT/0.") from None
        twice = bool(url.password) and self.password is not None
        require(not twice, "both url and password hold a password", "Leave it out of the url.")
        require(self.tls is None or self.url.startswith("rediss://"), "tls needs a rediss:// url")
        sets = {"protocol", "decode_responses"} & parse_qs(url.query).keys()
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
        "`default` (small, needs no download), a sentence-transformers name or folder, "
        "`hash` (for tests), or `none`.",
    ] = "default"
    device: Annotated[str, "Where it runs: `cpu`, `cuda`, `cuda:1`, ..."] = "cpu"
    threads: Annotated[Count, "CPU threads that it uses."] = 1

    @property
    def name(self) -> str:
        """The name of the model in requests for embeddings."""
        if self.model == "default":
            return "all-MiniLM-L6-v2"
        return Path(self.model).name

    def resolve_from(self, folder: Path) -> "EmbedderSettings":
        """Resolve a model that begins with a dot, which is a folder seen from `folder`."""
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
        "URL of an OTLP/HTTP receiver of spans, such as "
        "`http://127.0.0.1:4318/v1/traces`. Needs the extra `otel`.",
    ] = None
    contents: Annotated[
        Switch,
        "Keep and export all prompts and outputs, too. The texts of the last `traces.kept` "
        "requests stay in the router's memory.",
    ] = False


@dataclass(frozen=True, slots=True)
class BatchesSettings:
    """The Batch API: files of requests that are answered while online requests run."""

    folder: Annotated[
        FilePath | None, "Keeps files, batches and their results. Without it there is no Batch API."
    ] = None
    concurrency: Annotated[
        Count,
        "Lines of a model, of all batches, that run or wait for room next to online requests.",
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
        tuple[str, ...], DISTINCT, "Models to choose from; all of the deployment's by default."
    ] = ()
    profile: Annotated[FilePath | None, "File of `shell-router profile`: measured costs."] = None
    max_batch: Annotated[Mapping[str, Count], "Sequences that a model decodes together."] = field(
        default_factory=dict
    )


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
