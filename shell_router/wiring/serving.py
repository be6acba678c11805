"""A deployment on a socket, until it is told to stop."""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

from shell_router.api import ApiSettings, bound_sockets, create_app, listening, opened_folder
from shell_router.config import Config, Listen
from shell_router.errors import ConfigError
from shell_router.wiring.pool_lines import loaded_pools, pool_runners
from shell_router.wiring.services import running_services

log = logging.getLogger(__name__)

LISTEN_REMEDIES = {
    errno.EADDRINUSE: "Stop what listens there, or choose another port, or 0 for a free one.",
    errno.EACCES: "Choose a port above 1023.",
    errno.EADDRNOTAVAIL: "Set listen.host to an address of this machine.",
}


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
    hurry: asyncio.Event | None = None,
) -> AsyncIterator[str]:
    """Serve `config` while the context is open; gives its base URL. `tell` gets a line per step of the start.

    `engine_restarts` is asked for a metric: by engine, how often it was started again.

    On leaving, running requests get the deployment's `drain_s` to end, or none once `hurry` is set; then everything
    that was started is ended.
    """
    with ExitStack() as stack:  # before engines start, so that what is taken shows at once
        sockets = stack.enter_context(taken_address(config.listen))
        kept = config.batches.folder
        folder = stack.enter_context(opened_folder(kept)) if kept else None
        pools = loaded_pools(config)
        async with running_services(config, tell=tell, engine_restarts=engine_restarts) as services:
            runners = pool_runners(pools, kept, services) if kept else {}
            batching = replace(services, batch_folder=folder, batch_pools=runners)
            app = create_app(batching, api_settings(config))
            async with listening(app, sockets, drain_s=config.limits.drain_s, hurry=hurry) as url:
                yield url


@contextmanager
def taken_address(listen: Listen) -> Iterator[list[socket.socket]]:
    """The sockets to listen on. Raises ConfigError."""
    with ExitStack() as stack:
        try:
            sockets = stack.enter_context(bound_sockets(listen.host, listen.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen.host}, port {listen.port}: {error.strerror}.",
                remedy=LISTEN_REMEDIES.get(error.errno or 0, "Correct listen.host."),
            ) from error
        yield sockets


async def serve(
    config: Config, *, ready: Callable[[str], None], engine_restarts: Callable[[], Mapping[str, int]] = dict
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal cuts what runs. `ready` is told the URL."""
    loop, stopped, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    async with running_server(config, engine_restarts=engine_restarts, hurry=hurry) as url:

        def stop(name: str) -> None:
            if stopped.is_set():
                log.info("%s again: running requests are cut", name)
                hurry.set()
                return
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
        max_file_bytes=config.batches.max_file_bytes,
        batch_concurrency=config.batches.concurrency,
    )
