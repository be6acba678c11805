"""Serve a deployment on a socket until it is stopped."""

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, replace

from shell_router.api import ApiSettings, add_page, create_app, serve_app
from shell_router.api.admission import ADMISSION
from shell_router.app.rereads import Reread
from shell_router.app.services import run_services
from shell_router.app.wings import Progress, wing
from shell_router.config import Config, Listen, ListenTls, read_keys
from shell_router.config.models import load_certificate
from shell_router.errors import ConfigError
from shell_router.http.app import App
from shell_router.http.server import bind_sockets

log = logging.getLogger(__name__)

SHARED_SOCKETS = "SHELL_ROUTER_SHARED_SOCKETS"
"""The variable with the numbers of the open sockets that all workers of a router listen on."""

SAME_STOP_S = 1.0
"""Seconds within which a second signal to a worker counts as the first one."""

LISTEN_REMEDIES = {
    errno.EADDRINUSE: "Stop what listens there, or choose another port, or 0 for a free one.",
    errno.EACCES: "Choose a port above 1023.",
    errno.EADDRNOTAVAIL: "Set listen.host to an address of this machine.",
}


def with_address(config: Config, host: str | None, port: int | None) -> Config:
    """Return the deployment with another address.

    Raises:
        ConfigError: It would be open to all.
    """
    listen = config.listen
    chosen = replace(listen, host=host or listen.host, port=listen.port if port is None else port)
    return replace(config, listen=chosen)


@asynccontextmanager
async def serve_deployment(
    config: Config,
    *,
    on_progress: Progress = log.info,
    engine_restarts: Callable[[], Mapping[str, int]] = dict,
    force_shutdown: asyncio.Event | None = None,
) -> AsyncIterator[str]:
    """Serve `config` while the context is open; gives its base URL.

    On leaving, the deployment's `lame_duck_s` pass, and running requests get its `drain_s` to end;
    neither once `force_shutdown` is set. Then all that was started is stopped.

    Args:
        config: The deployment.
        on_progress: Gets a line per step of the start.
        engine_restarts: Gives, for a metric, the restarts of each engine.
        force_shutdown: Ends running requests at once.
    """
    with ExitStack() as stack:  # before engines start, so that what is taken shows at once
        sockets = [*inherit_sockets(), *stack.enter_context(bind_address(config.listen))]
        batches = None
        if config.batches.folder:
            batches = stack.enter_context(wing("batch")(config))
        app: App
        rereads: list[Reread] = []
        tls: ssl.SSLContext | None = None
        if file := config.api_keys_file:

            async def take_keys() -> None:
                app[ADMISSION].keys.take(await asyncio.to_thread(read_keys, config, os.environ))

            rereads.append(Reread("api_keys_file", lambda: (file,), take_keys))
        if files := config.listen.tls:
            context = tls = load_tls(files)

            async def take_certificate() -> None:
                renew_certificate(context, files)

            rereads.append(
                Reread("listen.tls", lambda: (files.certificate, files.key), take_certificate)
            )
        settings = read_settings(config)
        async with run_services(
            config, on_progress=on_progress, engine_restarts=engine_restarts
        ) as services:
            app = create_app(services, settings)
            if batches is not None:
                batches(app)
            if config.listen.ui:
                add_page(app)
            async with AsyncExitStack() as watching:
                for reread in rereads:
                    await watching.enter_async_context(reread.watch())
                url = await watching.enter_async_context(
                    serve_app(app, sockets, force_shutdown=force_shutdown, tls=tls)
                )
                if SHARED_SOCKETS in os.environ:
                    own = sockets[-1].getsockname()
                    log.info("a worker serves %s, and alone port %d", url, own[1])
                yield url


def read_settings(config: Config) -> ApiSettings:
    """Return the API's settings; raises ConfigError for a key that is not there."""
    keys = read_keys(config, os.environ)
    return ApiSettings(**asdict(config.limits), keys=keys, cors=config.cors, usage=config.usage)


def load_tls(files: ListenTls) -> ssl.SSLContext:
    """Load the certificate of the listener; raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, files.certificate, files.key, "listen.tls")
    return context


def renew_certificate(context: ssl.SSLContext, files: ListenTls) -> None:
    """Make new connections use the files' present content.

    Raises:
        ConfigError: The files are wrong; the context stays as it was.
    """
    load_tls(files)  # one half of a pair must not replace the pair that serves
    load_certificate(context, files.certificate, files.key, "listen.tls")


def inherit_sockets() -> list[socket.socket]:
    """Return the sockets that this process shares with a router's other workers, if it is one."""
    numbers = os.environ.get(SHARED_SOCKETS, "").split()
    return [socket.socket(fileno=int(number)) for number in numbers]


@contextmanager
def bind_address(listen: Listen) -> Iterator[list[socket.socket]]:
    """Bind the sockets to listen on; raises ConfigError."""
    with ExitStack() as stack:
        try:
            sockets = stack.enter_context(bind_sockets(listen.host, listen.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen.host}, port {listen.port}: {error.strerror}.",
                remedy=LISTEN_REMEDIES.get(error.errno or 0, "Correct listen.host."),
            ) from error
        yield sockets


async def serve(
    config: Config,
    *,
    ready: Callable[[str], None],
    engine_restarts: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends running requests.

    `ready` gets the URL.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    force_shutdown = asyncio.Event()
    limits = config.limits
    stops: list[float] = []
    async with serve_deployment(
        config, engine_restarts=engine_restarts, force_shutdown=force_shutdown
    ) as url:

        def stop(name: str) -> None:
            stops.append(loop.time())
            if stopped.is_set():
                if SHARED_SOCKETS in os.environ and stops[-1] < stops[0] + SAME_STOP_S:
                    return  # of a service manager, from which its parent hands on the same
                log.info("%s again: running requests are cut", name)
                force_shutdown.set()
                return
            log.info(
                "%s: no new requests in %g s; running ones may end (%g s)",
                name,
                limits.lame_duck_s,
                limits.drain_s,
            )
            stopped.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number.name)
        ready(url)
        await stopped.wait()
