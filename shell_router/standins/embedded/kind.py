"""The engine kind `embedded`: a prefill and a decode process per model, started by the router."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import ClassVar

from shell_router.app.model_files import ModelFiles
from shell_router.app.pairs import build_engine, run_pairs
from shell_router.app.wings import Progress, StartedEngine
from shell_router.config import Config
from shell_router.errors import ConfigError
from shell_router.standins.embedded.fleet import EmbeddedFleet, preload_servers
from shell_router.standins.embedded.settings import EmbeddedSection, EmbeddedSettings

LOOPBACK = "127.0.0.1"
NEEDED = ("torch", "transformers", "safetensors")


class Embedded:
    """The kind; see `EngineKind`. Servers listen on `host`, an address of this machine."""

    settings: ClassVar[type] = EmbeddedSection

    def __init__(self, host: str = LOOPBACK) -> None:
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ConfigError(
                f"embedded pairs need {', '.join(missing)}, not installed here.",
                remedy="pip install 'shell-router[embedded]', or give the models SGLang pairs.",
            )
        self._host = host
        preload_servers()

    @asynccontextmanager
    async def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AsyncIterator[Mapping[str, StartedEngine]]:
        """See `EngineKind`."""
        settings = {
            alias: EmbeddedSettings(
                str(model_files.folder),
                **asdict(config.models[alias].engine.get("embedded") or EmbeddedSection()),
                context_length=model_files.context_length,
                incremental_streaming_output=True,
                host=self._host,
            )
            for alias, model_files in files.items()
        }
        limit_s = config.limits.engine_start_s
        async with EmbeddedFleet(settings, start_limit_s=limit_s, on_progress=on_progress) as fleet:
            addresses = {alias: [fleet[alias].address] for alias in files}
            async with run_pairs(addresses, files, config, on_progress) as pools:
                yield {
                    alias: build_engine(
                        pool,
                        f"embedded pair, {settings[alias].device}",
                        settings[alias].max_running_requests,
                        config.models[alias],
                        partial(fleet.restarts_of, alias),
                    )
                    for alias, pool in pools.items()
                }
