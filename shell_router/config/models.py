"""The sections of a deployment's YAML file for models and the engines that serve them."""

import re
import shlex
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval
from yarl import URL

from shell_router.core.budget import Price
from shell_router.core.exact_json import Values
from shell_router.core.marks import CALL_MARKS, REASONING_PARSERS
from shell_router.core.sampling import MODEL_SAMPLING
from shell_router.errors import ConfigError, SettingError, require
from shell_router.files.types import (
    CODE_ONLY,
    DISTINCT,
    SECRET,
    Amount,
    Count,
    FilePath,
    Index,
    Name,
    OneOf,
    Seconds,
    Share,
    Switch,
    Url,
)
from shell_router.topology.graph import TEMPLATE_VARIABLES

Role = Literal["prefill", "decode", "server"]
"""The role of an engine; a server that is not of a pair prefills and decodes."""
GPUS = Annotated[tuple[Index, ...], DISTINCT]
"""GPUs, counted from 0."""


SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class FromEnvironment:
    """A secret in an environment variable."""

    env: Annotated[str, "Name of the environment variable."]


def read_secret(
    source: str | FromEnvironment | None, name: str, environ: Mapping[str, str]
) -> str | None:
    """Return the secret that a file holds or names, None if it does neither.

    Raises:
        ConfigError: The secret, called `name` in messages, is empty or no UTF-8 text.
    """
    if source is None:
        return None
    text = source
    remedy = "Write it, or {env: NAME}."
    if isinstance(source, FromEnvironment):
        text = environ.get(source.env, "")
        remedy = f"Set the environment variable {source.env}."
    text = str(text).strip()
    require(bool(text), f"{name} is empty.", remedy)
    require(not SURROGATE.search(text), f"{name} is not UTF-8 text.", "Choose another.")
    return text


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path, name: str) -> None:
    """Have `context` present the certificate, without asking the terminal for a password.

    Raises:
        ConfigError: The files cannot be used; `name` begins the message.
    """

    def refuse_password() -> str:
        raise ConfigError(
            f"{name}: {key} is encrypted.",
            remedy="Write it decrypted to a file that only the router can read: openssl pkey -in "
            "KEY -out FILE.",
        )

    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except OSError as error:  # so are ssl's
        raise ConfigError(
            f"{name}: {certificate} and {key} cannot be used: {error}.",
            remedy="Name PEM files of a certificate and of the private key that belongs to it.",
        ) from error


@dataclass(frozen=True, slots=True)
class TlsClient:
    """Certificates of a client: trusted authorities, and its own for servers that ask (mTLS)."""

    ca: Annotated[
        FilePath | None, "PEM file of the authorities that are trusted; the system's by default."
    ] = None
    certificate: Annotated[
        FilePath | None, "PEM file of the router's own certificate, with its chain."
    ] = None
    key: Annotated[FilePath | None, "PEM file of its private key."] = None

    def __post_init__(self) -> None:
        require(
            (self.certificate is None) == (self.key is None),
            "certificate and key go together",
            "Set both.",
        )

    def context(self, name: str) -> ssl.SSLContext:
        """Make the context that a client connects with.

        Raises:
            ConfigError: The files cannot be used; `name` begins the message.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:  # so are ssl's
            raise ConfigError(
                f"{name} cannot be used: {error}.", remedy="Name PEM files."
            ) from error
        if self.certificate is not None and self.key is not None:
            load_certificate(context, self.certificate, self.key, name)
        return context


@dataclass(frozen=True, slots=True)
class PairLaunch:
    """`shell-router launch` starts this pair; `{}` is enough."""

    prefill_gpus: Annotated[GPUS, "The prefill engine's GPUs; SGLang chooses without them."] = ()
    decode_gpus: Annotated[GPUS, "The decode engine's GPUs; SGLang chooses without them."] = ()
    flags: Annotated[
        str, "Further flags of both engines, as in a shell: quantization, memory, parallelism."
    ] = ""
    prefill_flags: Annotated[str, "Further flags of the prefill engine."] = ""
    decode_flags: Annotated[str, "Further flags of the decode engine."] = ""
    expert_placement: Annotated[
        Literal["swap", "gimbal"] | None,
        "Moves a mixture-of-experts model's experts between an engine's GPUs while it serves.",
    ] = None

    def gpus_of(self, role: Role) -> Sequence[int]:
        """Return the GPUs of the pair's engine of this role."""
        return self.prefill_gpus if role == "prefill" else self.decode_gpus

    def __post_init__(self) -> None:
        require(
            self.expert_placement is None or max(len(self.prefill_gpus), len(self.decode_gpus)) > 1,
            "expert_placement is set, and neither engine has several GPUs",
            "Name them in prefill_gpus or decode_gpus, or leave expert_placement out.",
        )
        _require_flags(self)


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    """`shell-router launch` starts this server; `{}` is enough."""

    gpus: Annotated[GPUS, "Its GPUs; SGLang chooses without them."] = ()
    flags: Annotated[str, "Further flags, as in a shell: quantization, memory, parallelism."] = ""
    expert_placement: Annotated[
        Literal["swap", "gimbal"] | None,
        "Moves a mixture-of-experts model's experts between its GPUs while it serves.",
    ] = None

    def gpus_of(self, role: Role) -> Sequence[int]:
        """Return the server's GPUs."""
        return self.gpus

    def __post_init__(self) -> None:
        require(
            self.expert_placement is None or len(self.gpus) > 1,
            "expert_placement is set, and the server has not several GPUs",
            "Name them in gpus, or leave expert_placement out.",
        )
        _require_flags(self)


EngineLaunch = PairLaunch | ServerLaunch


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How `shell-router launch` starts engines."""

    python: Annotated[
        FilePath | None, "The interpreter that has SGLang; by default the router's own."
    ] = None
    transfer_backend: Annotated[str, "How KV moves between engines, as your network allows."] = (
        "mooncake"
    )
    drafts: Annotated[
        Switch, "Decode drafts what requests ask for; needs the plugin in SGLang's environment."
    ] = False
    flags: Annotated[
        str, "Further flags of `sglang.launch_server` for all engines, as in a shell."
    ] = ""
    prefill_flags: Annotated[str, "Further flags of all prefill engines."] = ""
    decode_flags: Annotated[str, "Further flags of all decode engines."] = ""
    environment: Annotated[Mapping[str, str], "Variables of all engines."] = field(
        default_factory=dict
    )
    folder: Annotated[FilePath | None, "Takes logs; by default in the user's cache folder."] = None
    restart_limit: Annotated[
        Index, "Restarts of one engine within 10 minutes before it is left down."
    ] = 5
    restart_delay_s: Annotated[Seconds, "Wait before the first restart; it doubles with each."] = (
        1.0
    )

    def __post_init__(self) -> None:
        _require_flags(self)


def flags_of(role: Role, *sections: LaunchSettings | EngineLaunch) -> list[str]:
    """List the further flags of an engine of this role, in their order."""
    return [
        flag
        for section in sections
        for flag in shlex.split(f"{section.flags} {getattr(section, f'{role}_flags', '')}")
    ]


def _require_flags(section: EngineLaunch | LaunchSettings) -> None:
    for name in ("flags", "prefill_flags", "decode_flags"):
        try:
            shlex.split(getattr(section, name, ""))
        except ValueError as error:
            wrong = f"{name} cannot be split as a shell would: {error}"
            raise SettingError(wrong, remedy="Close every quote.") from None


@dataclass(frozen=True, slots=True)
class PairSettings:
    """An SGLang pair. Any prefill server of a model works with any of its decode servers."""

    prefill: Annotated[Url, "URL of the prefill server."]
    decode: Annotated[Url, "URL of the decode server."]
    bootstrap_port: Annotated[
        int,
        "The prefill server's `--disaggregation-bootstrap-port`.",
        Interval(ge=1, le=65535),
    ] = 8998
    bootstrap_host: Annotated[
        str | None,
        "The prefill server as decode servers reach it; by default the prefill URL's host.",
    ] = None
    launch: PairLaunch | None = None

    def __post_init__(self) -> None:
        _require_whole_urls(self.urls.values())

    @property
    def urls(self) -> Mapping[Role, str]:
        """The URLs of both servers."""
        return {"prefill": self.prefill, "decode": self.decode}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """An undivided SGLang server, which prefills and decodes."""

    server: Annotated[Url, "URL of the server."]
    launch: ServerLaunch | None = None

    def __post_init__(self) -> None:
        _require_whole_urls(self.urls.values())

    @property
    def urls(self) -> Mapping[Role, str]:
        """The URL of the server."""
        return {"server": self.server}


def _require_whole_urls(urls: Iterable[str]) -> None:
    require(
        not any(mark in url for url in urls for mark in "?#"),
        "the URL of an engine has a query or a fragment, which is never sent",
        "Leave it out; the model's engine_key holds a key.",
    )


@dataclass(frozen=True, slots=True)
class SwappingSettings:
    """More models than memory holds: they are loaded when requests ask for them, and take turns."""

    max_loaded_models: Annotated[
        Count | None, "Models that are loaded at a time, unless there are `pairs`."
    ] = None
    models: Annotated[
        tuple[str, ...], "The models that take turns; all of the deployment's by default."
    ] = ()
    pairs: Annotated[
        tuple[PairSettings, ...],
        ("SGLang pairs whose weights are replaced."),
    ] = ()
    usage: Annotated[
        Mapping[str, Share],
        "Share of the requests that ask for a model: the most used are loaded first and "
        "leave last.",
    ] = field(default_factory=dict)
    window_s: Annotated[
        Amount,
        "How long requests for loaded models go before one that waits; 0 is first come, "
        "first served.",
    ] = 10.0
    wait_s: Annotated[Seconds, "Longest wait for a model before the request fails."] = 300.0

    def __post_init__(self) -> None:
        require(
            (self.max_loaded_models is None) == bool(self.pairs),
            "swapping has both max_loaded_models and pairs, or neither",
            "Give max_loaded_models for models with engines of their own, and pairs for those "
            "that share some.",
        )
        require(
            not any(pair.launch for pair in self.pairs),
            "`launch` starts no pairs of swapping",
            "Start them before.",
        )

    @property
    def places(self) -> int:
        """The number of models that are loaded at a time."""
        return self.max_loaded_models or len(self.pairs)


def name_adapter(alias: str, adapter: str) -> str:
    """Name an adapter as requests do, in SGLang's form."""
    return f"{alias}:{adapter}"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model that topologies and requests may name, and what serves it.

    `engine` holds the settings of the engine kind that serves it, by the kind's name, unless
    `pairs` or `servers` do; without any it is `embedded` with its defaults.
    """

    path: Annotated[
        FilePath,
        "Hugging Face folder with the tokenizer and the weights; none with `openai`.",
    ] = field(default_factory=Path)
    pairs: Annotated[
        tuple[PairSettings, ...],
        "SGLang pairs that serve it; any prefill server works with any decode server.",
    ] = ()
    servers: Annotated[
        tuple[Url | ServerSettings, ...],
        "Undivided SGLang servers that serve it, each a URL, or a mapping to `launch` it.",
    ] = ()
    context_length: Annotated[
        Count | None,
        "Prompt and output tokens together; by default the model's `max_position_embeddings`.",
    ] = None
    chat_template_kwargs: Annotated[Values, TEMPLATE_VARIABLES] = field(default_factory=dict)
    quote_control_text: Annotated[
        Switch,
        "Control tokens that clients write in messages stay text, as always in outputs and in "
        "results of tools; but for chats that SGLang's own route answers.",
    ] = False
    sampling: Annotated[
        Mapping[Annotated[str, OneOf(MODEL_SAMPLING)], int | float],
        "`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` where neither topology "
        "nor request sets them; above the model's `generation_config.json`.",
    ] = field(default_factory=dict)
    reasoning_parser: Annotated[
        Annotated[str, OneOf(REASONING_PARSERS)] | None,
        "Separates the model's thinking from its answers, as SGLang's parser of this name does.",
    ] = None
    tool_call_parser: Annotated[
        Annotated[str, OneOf(CALL_MARKS)] | None,
        "How the model writes calls of tools, as SGLang's parser of this name reads them; by "
        "default as its servers' parser or its chat template.",
    ] = None
    engine_key: Annotated[
        str | FromEnvironment | None,
        "Key that its engines ask for, SGLang's `--api-key`, which is sent as a bearer.",
        SECRET,
    ] = field(default=None, repr=False)
    engine_tls: Annotated[TlsClient | None, "Certificates, for engines with https:// URLs."] = None
    adapters: Annotated[
        Mapping[Name, FilePath],
        "LoRA adapters by name, served as `<alias>:<name>`: folders in PEFT's form, at "
        "the same path on the engines' machines.",
    ] = field(default_factory=dict)
    price: Annotated[
        Price | None, "What its tokens cost, for `usage.cost` and for budgets; nothing by default."
    ] = None
    drafts: Annotated[
        Switch | Literal["auto"],
        "Drafts: `auto`, where topologies ask and they pay; `on`, wherever topologies ask; "
        "`off`, none.",
    ] = "auto"
    engine: Annotated[Values, CODE_ONLY] = field(default_factory=dict)

    @property
    def sglang(self) -> tuple[PairSettings | ServerSettings, ...]:
        """The pairs or the undivided servers that serve it."""
        return self.pairs or tuple(
            ServerSettings(at) if isinstance(at, str) else at for at in self.servers
        )

    def __post_init__(self) -> None:
        kinds = [*(name for name in ("pairs", "servers") if getattr(self, name)), *self.engine]
        require(
            len(kinds) < 2,
            f"a model is served by one kind of engine, not by both {' and '.join(kinds)}",
            remedy="Leave one of them out.",
        )
        for name in ("engine_key", "engine_tls", "adapters"):
            require(
                bool(self.sglang) or not getattr(self, name),
                f"{name} is for pairs or servers, and there are none",
            )
        require(
            self.engine_tls is None
            or all(url.startswith("https://") for at in self.sglang for url in at.urls.values()),
            "engine_tls is set, and not all of the engines have https:// URLs",
            remedy="Give them https:// URLs, or leave engine_tls out.",
        )
        named = [tuple(map(_spell, at.urls.values())) for at in self.sglang]
        require(
            len(named) == len({*named}),
            "a pair or a server is there twice",
            "Name it once, in one spelling.",
        )
        bootstraps = {
            (_spell(pair.prefill), pair.bootstrap_host, pair.bootstrap_port) for pair in self.pairs
        }
        require(
            len(bootstraps) == len({prefill for prefill, *_ in bootstraps}),
            "several pairs name one prefill server with different bootstrap hosts or ports",
            remedy="It has one; correct the others.",
        )


def _spell(url: str) -> str:
    """Return the URL of a server in one spelling."""
    address = URL(url).with_user(None)
    if address.host == "localhost":
        address = address.with_host("127.0.0.1")
    return str(address).rstrip("/")
