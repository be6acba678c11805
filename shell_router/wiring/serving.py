"""A deployment on a socket, until it is told to stop."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from shell_router.api import ApiSettings, create_app, listening
from shell_router.config import Config
from shell_router.errors import ConfigError
from shell_router.wiring.services import running_services

log = logging.getLogger(__name__)


def with_address(config: Config, host: str | None, port: int | None) -> Config:
    """The same deployment listening elsewhere. Raises ConfigError where that would leave it open to all."""
    listen = config.listen
    chosen = replace(listen, host=host or listen.host, port=listen.port if port is None else port)
    return replace(config, listen=chosen)


@asynccontextmanager
async def running_server(
    config: Config,
    *,
    tell: Callable[[str], None] = log.info,
    engine_restarts: Callable[[], Mapping[str, int]] = dict,
) -> AsyncIterator[str]:
    """Serve `config` while the context is open; gives its base URL. `tell` gets a line per step of the start.

    `engine_restarts` is asked for a metric: by engine, how often it was started again.

    On leaving, running requests get the deployment's `drain_s` to end; then everything that was started is ended.
    """
    async with running_services(config, tell=tell, engine_restarts=engine_restarts) as services:
        app = create_app(services, api_settings(config))
        listen = config.listen
        try:
            async with listening(app, listen.host, listen.port, drain_s=config.limits.drain_s) as url:
                yield url
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen.host}, port {listen.port}: {error.strerror}.",
                remedy="Choose another port, or 0 for a free one.",
            ) from error


async def serve(
    config: Config, *, ready: Callable[[str], None], engine_restarts: Callable[[], Mapping[str, int]] = dict
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends at once. `ready` is told the URL."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    async with running_server(config, engine_restarts=engine_restarts) as url:

        def stop(name: str) -> None:
            if stopped.is_set():
                task.cancel()
            log.info("%s: no new requests; running ones may end (%g s)", name, config.limits.drain_s)
            stopped.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number.name)
        ready(url)
        await stopped.wait()


def api_settings(config: Config) -> ApiSettings:
    """The part of a deployment that the API reads."""
    limits = config.limits
    return ApiSettings(
        keys={tenant: key for tenant, key in config.api_keys.items() if isinstance(key, str)},
        max_body_bytes=limits.max_body_bytes,
        max_running=limits.max_running,
        request_timeout_s=limits.request_timeout_s,
        body_timeout_s=limits.body_timeout_s,
        write_timeout_s=limits.write_timeout_s,
    )
