"""What is run for each engine of a deployment. Pure: nothing is started here."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from yarl import URL

from shell_router.config import AdaptersSection, Config, LaunchSettings, ModelSettings, PairLaunch, PairSettings
from shell_router.errors import ConfigError

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEARTBEAT = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"
# decode forgets a dead prefill after two missed heartbeats; one that is back sooner is taken for the old one, and every
# later transfer hangs. 2 s is the shortest that SGLang takes.
HEARTBEAT_S = 2


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """What to run for one engine, and the URL that answers 200 when it serves.

    `env` is set beside the inherited variables; `host` is the machine's name in the deployment's URLs, `ports` are
    taken there.
    """

    name: str
    role: Role
    host: str
    ports: tuple[int, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready_url: str

    @property
    def shell(self) -> str:
        """The command as a line for a shell, its variables in front."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


def commands(config: Config, *, python: str) -> list[EngineCommand]:
    """Prefill and decode of every pair that has `launch`; aliases of equal settings share their engines.

    `python` is the interpreter where the deployment names none. Every launched model has a path. Raises ConfigError
    where two engines of one host would share a port.
    """
    found = [engine for alias, model in _distinct(config.models).items() for engine in _of_model(config, alias, model)]
    _require_distinct_ports(found)
    return [_with_python(engine, str(config.launch.python or python)) for engine in found]


def _distinct(models: Mapping[str, ModelSettings]) -> dict[str, ModelSettings]:
    kept: dict[str, ModelSettings] = {}
    for alias, model in models.items():
        if model not in kept.values():
            kept[alias] = model
    return kept


def _of_model(config: Config, alias: str, model: ModelSettings) -> Iterator[EngineCommand]:
    """An engine that several pairs name is started once, as its first pair says and the others must agree."""
    launched: dict[tuple[Role, str], PairLaunch] = {}
    for number, pair in enumerate(model.pairs, start=1):
        name = alias if len(model.pairs) == 1 else f"{alias}-{number}"
        if pair.launch is None:
            continue
        for role in ROLES:
            url = getattr(pair, role)
            if (role, url) in launched:
                _require_agreement(f"models.{alias}.pairs[{number - 1}]", role, launched[role, url], pair.launch)
            else:
                launched[role, url] = pair.launch
                yield _engine(name, role, model, pair, pair.launch, config.launch)


def _require_agreement(where: str, role: Role, first: PairLaunch, launch: PairLaunch) -> None:
    for setting in ("flags", f"{role}_flags", f"{role}_gpus"):
        if getattr(first, setting) != getattr(launch, setting):
            raise ConfigError(
                f"{where} launches a {role} engine that an earlier pair launches with other {setting}.",
                remedy="Give both the same, or the engine another URL.",
            )


def _engine(
    name: str, role: Role, model: ModelSettings, pair: PairSettings, launch: PairLaunch, settings: LaunchSettings
) -> EngineCommand:
    url = URL(getattr(pair, role))
    host, port = url.host or "", url.port or 0
    gpus: Sequence[int] = getattr(launch, f"{role}_gpus")
    options = (
        *("--model-path", str(model.path), "--host", host, "--port", str(port)),
        *("--disaggregation-mode", role, "--disaggregation-transfer-backend", settings.transfer_backend),
        *("--disaggregation-bootstrap-port", str(pair.bootstrap_port)),
        # by default every streamed event repeats all earlier tokens
        *("--incremental-streaming-output", "--enable-metrics"),
        *(("--tp-size", str(len(gpus))) if len(gpus) > 1 else ()),
        *(("--context-length", str(model.context_length)) if model.context_length else ()),
        *(_adapter_options(model.adapters) if model.adapters else ()),
        *(flag for section in (settings, launch) for flag in _flags(section, role)),
    )
    return EngineCommand(
        name=f"{name}/{role}",
        role=role,
        host=host,
        ports=(port, pair.bootstrap_port) if role == "prefill" else (port,),
        argv=("-m", "sglang.launch_server", *options),
        env={**_variables(role, gpus), **settings.environment},
        ready_url=str(url / "health"),
    )


def _adapter_options(adapters: AdaptersSection) -> tuple[str, ...]:
    """Room in memory and in a batch; SGLang counts requests without an adapter as one more of a batch."""
    return (
        *("--enable-lora", "--max-lora-rank", str(adapters.max_rank), "--lora-target-modules", *ADAPTED),
        *("--max-loras-per-batch", str(adapters.room + 1), "--max-loaded-loras", str(adapters.room + 1)),
    )


def _flags(section: LaunchSettings | PairLaunch, role: Role) -> list[str]:
    return shlex.split(f"{section.flags} {getattr(section, f'{role}_flags')}")


def _variables(role: Role, gpus: Sequence[int]) -> dict[str, str]:
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    return visible | ({HEARTBEAT: str(HEARTBEAT_S)} if role == "decode" else {})


def _require_distinct_ports(engines: Sequence[EngineCommand]) -> None:
    taken = Counter((engine.host, port) for engine in engines for port in engine.ports)
    for (host, port), times in taken.items():
        if times > 1:
            names = " and ".join(e.name for e in engines if e.host == host and port in e.ports)
            raise ConfigError(
                f"port {port} of {host} is given {times} times: {names}.",
                remedy="Give each engine's URL, and each bootstrap_port, a port of its own.",
            )


def _with_python(engine: EngineCommand, python: str) -> EngineCommand:
    return replace(engine, argv=(python, *engine.argv))
