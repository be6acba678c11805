"""The engines of a deployment that this machine starts, with their commands. Pure."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from yarl import URL

from shell_router.config import (
    Config,
    LaunchSettings,
    ModelSettings,
    PairSettings,
)
from shell_router.config.models import EngineLaunch, Role, ServerSettings, flags_of
from shell_router.errors import ConfigError

DRAFT_VARIABLES: Mapping[str, str] = {"SHELL_ROUTER_DRAFTS": "1"}
DRAFT_OPTIONS = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *(
        "--speculative-ngram-capacity",
        "1024",
    ),  # SGLang's own trie, 1.8 GB by default, in which nothing is looked up
    *("--speculative-num-draft-tokens", "16", "--disable-overlap-schedule"),
    *("--max-running-requests", "256"),  # by default speculation allows 48
)
PLACEMENT = "SHELL_ROUTER_EXPERT_PLACEMENT"
EPLB_OPTIONS = (
    "--enable-eplb",
    "--eplb-rebalance-num-iterations",
    "3000",
)  # Gimbal's tau: each placement stalls it
# decode forgets a dead prefill after two missed heartbeats; one that is back sooner is taken for
# the old one, and every later transfer hangs. 2 s is the shortest that SGLang takes.
HEARTBEAT_S = 2
DECODE_VARIABLES: Mapping[str, str] = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(HEARTBEAT_S)}
# over TCP, a transfer in more pieces fails, and with it all that follow for 30 s or more:
# docs/reference/sglang.md
TCP_QUEUES = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
TRANSFER_VARIABLES: Mapping[str, str] = {**TCP_QUEUES, "MC_TCP_ADMISSION_TIMEOUT_MS": "60000"}
# of an idle server /health generates, and one that sleeps has no memory for that and ends
SLEEPER_VARIABLES: Mapping[str, str] = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """The command of one engine, and the URL that answers 200 when it serves.

    Attributes:
        host: The machine's name in the deployment's URLs.
        ports: The ports that the engine takes there.
        env: Variables, in addition to the inherited ones.
        sleeper: The model's alias, if it takes turns in memory by sleeping.
    """

    name: str
    role: Role
    host: str
    ports: tuple[int, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready_url: str
    sleeper: str | None = None

    @property
    def shell(self) -> str:
        """The command as a line for a shell, with its variables in front."""
        return " ".join(
            [
                *(f"{name}={shlex.quote(value)}" for name, value in self.env.items()),
                shlex.join(self.argv),
            ]
        )


def commands(config: Config, *, python: str) -> list[EngineCommand]:
    """Return the engines of every pair and server that has `launch`.

    Aliases of equal settings share their engines. `python` is the interpreter if the deployment
    names none. Raises ConfigError if two engines of one host would share a port.
    """
    distinct: dict[str, ModelSettings] = {}
    for alias, model in config.models.items():
        if model not in distinct.values():
            distinct[alias] = model
    engines: list[EngineCommand] = []
    for alias, model in distinct.items():
        launched = _model_engines(config.launch, alias, model, python)
        if alias in config.sleeping:
            engines.extend(_let_sleep(engine, alias) for engine in launched)
        else:
            engines.extend(launched)
    _require_distinct_ports(engines)
    return engines


def _model_engines(
    settings: LaunchSettings, alias: str, model: ModelSettings, python: str
) -> Iterator[EngineCommand]:
    """Yield the engines of a model's pairs or servers.

    An engine that several pairs name is started once, by its first pair's settings; the others must
    agree.
    """
    launched: dict[tuple[Role, str], EngineLaunch] = {}
    for number, at in enumerate(model.sglang):
        launch = at.launch
        if launch is None:
            continue
        for role, url in at.urls.items():
            if (role, url) in launched:
                _require_agreement(
                    f"models.{alias}.pairs[{number}]", role, launched[role, url], launch
                )
                continue
            launched[role, url] = launch
            if len(model.sglang) == 1:
                name = alias
            else:
                name = f"{alias}-{number + 1}"
            yield _engine(f"{name}/{role}", role, model, at, launch, settings, python)


def _let_sleep(engine: EngineCommand, alias: str) -> EngineCommand:
    """Return the engine of a model that takes turns by sleeping."""
    argv = (*engine.argv, "--enable-memory-saver")
    env = {**SLEEPER_VARIABLES, **engine.env}
    return replace(engine, argv=argv, env=env, sleeper=alias)


def _require_agreement(where: str, role: Role, first: EngineLaunch, launch: EngineLaunch) -> None:
    for setting in ("flags", f"{role}_flags", f"{role}_gpus", "expert_placement"):
        if getattr(first, setting) != getattr(launch, setting):
            raise ConfigError(
                f"{where} launches a {role} engine that an earlier pair launches with other "
                f"{setting}.",
                remedy="Give both the same, or the engine another URL.",
            )


def _engine(
    name: str,
    role: Role,
    model: ModelSettings,
    at: PairSettings | ServerSettings,
    launch: EngineLaunch,
    settings: LaunchSettings,
    python: str,
) -> EngineCommand:
    url = URL(at.urls[role])
    host = url.host or ""
    port = url.port or 0
    gpus = launch.gpus_of(role)
    options = [
        *("--model-path", str(model.path), "--host", host, "--port", str(port)),
        # by default every streamed event repeats all earlier tokens
        *("--incremental-streaming-output", "--enable-metrics"),
        # xgrammar, the default, reads some patterns for minutes, and no other request meanwhile
        *("--grammar-backend", "llguidance"),
    ]
    ports = [port]
    variables: dict[str, str] = {}
    if isinstance(at, PairSettings):
        options += ("--disaggregation-mode", role)
        options += ("--disaggregation-transfer-backend", settings.transfer_backend)
        options += ("--disaggregation-bootstrap-port", str(at.bootstrap_port))
        if role == "decode":
            variables |= DECODE_VARIABLES
        else:
            ports.append(at.bootstrap_port)
            if settings.transfer_backend.startswith("mooncake"):
                variables |= TRANSFER_VARIABLES
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if len(gpus) > 1:
        options += ("--tp-size", str(len(gpus)))
    if model.context_length:
        options += ("--context-length", str(model.context_length))
    if model.adapters:  # SGLang reads their ranks and modules, and pages them by itself
        named = [f"{adapter}={folder}" for adapter, folder in model.adapters.items()]
        options += ("--enable-lora", "--lora-paths", *named)
    if settings.drafts and role != "prefill" and model.drafts is not False:
        options += DRAFT_OPTIONS
        variables |= DRAFT_VARIABLES
    if len(gpus) > 1 and launch.expert_placement:
        options += ("--ep-size", str(len(gpus)), *EPLB_OPTIONS)
        variables[PLACEMENT] = launch.expert_placement
    options += flags_of(role, settings, launch)
    return EngineCommand(
        name=name,
        role=role,
        host=host,
        ports=tuple(ports),
        argv=(str(settings.python or python), "-m", "sglang.launch_server", *options),
        env={**variables, **settings.environment},
        ready_url=str(url / "health"),
    )


def _require_distinct_ports(engines: Sequence[EngineCommand]) -> None:
    taken = Counter((engine.host, port) for engine in engines for port in engine.ports)
    for (host, port), times in taken.items():
        if times > 1:
            names = " and ".join(e.name for e in engines if e.host == host and port in e.ports)
            raise ConfigError(
                f"port {port} of {host} is given {times} times: {names}.",
                remedy="Give each engine's URL, and each bootstrap_port, a port of its own.",
            )


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The `engines` that are started here, and those `elsewhere`, which are waited for."""

    config: Config
    folder: Path
    engines: tuple[EngineCommand, ...]
    elsewhere: tuple[EngineCommand, ...] = ()


def plan(config: Config, *, folder: Path, python: str, machine: str | None = None) -> LaunchPlan:
    """Return the engines to start on `machine`, a host of the deployment's URLs.

    `machine` may be None if the URLs name one host only. `folder` takes logs, `python` is the
    router's own interpreter. Raises ConfigError.
    """
    engines = commands(config, python=python)
    here = _choose_machine(engines, machine)
    local = tuple(engine for engine in engines if engine.host == here)
    elsewhere = tuple(engine for engine in engines if engine.host != here)
    return LaunchPlan(config, folder, local, elsewhere)


def _choose_machine(engines: list[EngineCommand], machine: str | None) -> str:
    hosts = list(dict.fromkeys(engine.host for engine in engines))
    if not hosts:
        raise ConfigError(
            "no engine of this deployment is to be started.",
            remedy="Add `launch: {}` to a pair or a server; see docs/how-to/launch-engines.md.",
        )
    if machine is None and len(hosts) == 1:
        return hosts[0]
    if machine not in hosts:
        if machine is None:
            problem = "which of them is this machine is not known"
        else:
            problem = f"{machine!r} is not among them"
        raise ConfigError(
            f"the engines are on {', '.join(hosts)}; {problem}.",
            remedy=f"Name this machine, as in --machine {hosts[0]}.",
        )
    return machine
