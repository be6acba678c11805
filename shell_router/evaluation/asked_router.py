"""The router that an evaluation asks: one that runs, or a deployment that is started for it."""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp

from shell_router.config import Config, Listen, load_config
from shell_router.errors import EngineError, EngineUnreachable
from shell_router.evaluation.client import START_LIMIT_S, Client
from shell_router.evaluation.options import EvaluationOptions
from shell_router.wiring import running_server


@asynccontextmanager
async def asked_router(
    options: EvaluationOptions, tell: Callable[[str], None]
) -> AsyncIterator[tuple[Client, Sequence[str]]]:
    """A client of the router, and the models in the order of the deployment's file, where there is one.

    `tell` gets a line per step of a start. Raises ConfigError and EngineError.
    """
    async with AsyncExitStack() as stack:
        url = options.url
        models: Sequence[str] = ()
        if url is None:
            assert options.config is not None
            url, models = await _started(options.config, options.topologies, stack, tell)
        connector = aiohttp.TCPConnector(limit=0)  # all members of a vote ask at once, whatever their number
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        client = Client(session, url, api_key=options.api_key, limit_s=options.limit_s)
        await client.wait_until_ready(limit_s=START_LIMIT_S)
        yield client, models


async def _started(
    file: Path, topologies: tuple[Path, ...], stack: AsyncExitStack, tell: Callable[[str], None]
) -> tuple[str, tuple[str, ...]]:
    """The URL of the deployment, which `stack` ends, and its models."""
    config = _for_this_machine(load_config(file, os.environ, with_keys=False))
    config = replace(config, topologies=topologies or config.topologies)
    launching = _launching(config, file)
    if launching:
        tell(launching)
    try:
        return await stack.enter_async_context(running_server(config, tell=tell)), tuple(config.models)
    except EngineError as error:
        if not launching:
            raise
        raise EngineUnreachable(str(error), remedy=launching) from error


def _for_this_machine(config: Config) -> Config:
    """On a free port and without keys, which only callers on other machines would need."""
    return replace(config, listen=Listen(port=0), api_keys={})


def _launching(config: Config, file: Path) -> str:
    """How to start the engines that the deployment launches; empty where it launches none."""
    if not any(pair.launch for model in config.models.values() for pair in model.pairs):
        return ""
    return f"Pairs with `launch` have to run already: `shell-router launch --config {file} --engines-only` starts them."
