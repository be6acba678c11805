"""Several processes that serve one deployment on one port."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from shell_router.app.serving import SHARED_SOCKETS, bind_address
from shell_router.config import Config
from shell_router.errors import ConfigError, EngineUnreachable, ShellRouterError
from shell_router.processes.restarts import DEFAULT_POLICY, keep_running
from shell_router.processes.with_parent import with_parent

REFUSED = 2
"""The exit code of a command that its user has to correct."""
LAST_PORT = 65535


async def serve_workers(config: Config, count: int, arguments: Sequence[str]) -> None:
    """Serve by `count` processes until SIGINT or SIGTERM, which each of them gets, too.

    All share the deployment's port. Each also has the next port to itself, or a free one if the
    port is 0: metrics and traces are each worker's own. One that ends is started again.

    Args:
        config: The deployment, as the workers read it.
        count: The number of workers.
        arguments: The command line of a worker, without its port.

    Raises:
        ConfigError: The deployment cannot be shared, a worker refused it, or all workers have ended
            too often.
    """
    _require_shareable(config)
    _require_ports(config.listen.port, count)
    with bind_address(config.listen) as sockets:
        workers = []
        for number in range(1, count + 1):
            port = config.listen.port and config.listen.port + number
            workers.append(_Worker(number, [*arguments, "--port", str(port)], sockets))
        running = asyncio.gather(*(worker.keep_running() for worker in workers))

        def stop(number: signal.Signals) -> None:
            running.cancel()  # nothing is started again
            for shared in sockets:
                shared.close()  # clients are refused once no worker listens
            for worker in workers:
                worker.signal(number)

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            await running
            raise ConfigError("All workers ended.", remedy="Their messages say why.")
        except asyncio.CancelledError:
            pass  # by a signal
        except ShellRouterError:
            stop(signal.SIGTERM)
            raise
        finally:
            await asyncio.gather(*(worker.join() for worker in workers))


def _require_ports(port: int, count: int) -> None:
    if port + count > LAST_PORT:
        raise ConfigError(
            f"There are no {count} ports behind {port} for the workers.",
            remedy="Choose a lower port.",
        )


def _require_shareable(config: Config) -> None:
    embedded = [
        alias
        for alias, model in config.models.items()
        if not model.sglang and not model.engine.keys() - {"embedded"}
    ]
    if embedded:
        raise ConfigError(
            f"Each worker would start engines of its own for {', '.join(embedded)}.",
            remedy="Serve engines that run by themselves: models.<alias>.pairs or servers.",
        )
    if config.cache.backend != "redis":
        raise ConfigError(
            "Workers cannot share cache.backend: memory.",
            remedy="Set cache.backend: redis and cache.url.",
        )
    if config.batches.folder:
        raise ConfigError(
            "Workers cannot share batches.folder.",
            remedy="Run batches by a router of its own, without --workers.",
        )


class _Worker:
    """A worker's process, which can be started again."""

    def __init__(
        self, number: int, arguments: Sequence[str], sockets: Sequence[socket.socket]
    ) -> None:
        self._name = f"Worker {number}"
        self._argv = with_parent((sys.executable, "-m", "shell_router", *arguments))
        self._shared = [each.fileno() for each in sockets]
        self._process: asyncio.subprocess.Process | None = None

    async def keep_running(self) -> None:
        """Start the process, again whenever it ends; return when it has ended too often."""
        await self._start()
        await keep_running(self.wait, self._start, restarted_s=[], policy=DEFAULT_POLICY)

    async def wait(self) -> str:
        """Wait for the end and return a sentence about it; ConfigError if it refused to serve."""
        code = await self.join()
        if code == REFUSED:
            raise ConfigError(f"{self._name} cannot serve.", remedy="Its message says why.")
        return f"{self._name} ended with exit code {code}."

    async def join(self) -> int:
        """Wait for the end, if it was started, and return the exit code."""
        if self._process is None:
            return 0
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _start(self) -> None:
        shared = " ".join(map(str, self._shared))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env={**os.environ, SHARED_SOCKETS: shared},
                pass_fds=self._shared,
                start_new_session=True,  # Ctrl-C in the terminal comes by this process alone
            )
        except OSError as error:
            raise EngineUnreachable(f"{self._name} cannot be started: {error}.") from error
