"""A pair whose servers a test may kill, pause, and start again at the same addresses."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.sglang_cpu.engine import HOST, EngineServer
from launch.sglang_cpu.pair import CpuPair, free_ports, until_ready
from shell_router.engines.address import PairAddress


class BreakablePair:
    """The processes of a running pair, of whichever kind. Roles are `prefill` and `decode`."""

    def __init__(self, servers: CpuPair) -> None:
        self._servers = servers
        self._with_options: set[str] = set()

    @property
    def address(self) -> PairAddress:
        servers = self._servers
        return PairAddress(servers.prefill.url, servers.decode.url, servers.bootstrap_host, servers.bootstrap_port)

    def url(self, role: str) -> str:
        """Where the server of that role is, now and after every restart."""
        return self._server(role).url

    def kill(self, role: str) -> None:
        """SIGKILL; returns when it is gone."""
        self._server(role).kill()

    async def start(self, role: str, *options: str) -> None:
        """Start what was killed or stopped, and return when it serves. `options` are added for this run only."""
        if options:
            self._with_options.add(role)
        self._server(role).start(*options)  # not in the thread below, with which it would end
        await asyncio.to_thread(until_ready, self._server(role))

    async def restart(self, role: str) -> None:
        """Stop it in order and start it with its usual options; returns when it serves."""
        await asyncio.to_thread(self._server(role).stop)
        self._with_options.discard(role)
        await self.start(role)

    @contextmanager
    def paused(self, role: str) -> Iterator[None]:
        """The server stands still (SIGSTOP) for the length of the block."""
        self._server(role).signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server(role).signal(signal.SIGCONT)

    async def mend(self) -> None:
        """Start what does not run, and restart what runs with options of its own."""
        for role in tuple(self._with_options):
            await self.restart(role)
        for role in ("prefill", "decode"):
            if not self._server(role).started:
                await self.start(role)

    def _server(self, role: str) -> EngineServer:
        return {"prefill": self._servers.prefill, "decode": self._servers.decode}[role]


@contextmanager
def embedded_servers(model: Path, folder: Path, *options: str) -> Iterator[CpuPair]:
    """An embedded pair that serves, of two processes that are started like SGLang's; `folder` takes their logs."""
    prefill, decode, bootstrap = free_ports(3)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shared = ("--model-path", str(model), "--disaggregation-bootstrap-port", str(bootstrap), *options)

    def server(role: str, port: int) -> EngineServer:
        command = (sys.executable, "-m", "shell_router.engines.embedded", "--mode", role, "--port", str(port), *shared)
        return EngineServer(role, command, port, folder / f"{role}.log", variables)

    pair = CpuPair(server("prefill", prefill), server("decode", decode), bootstrap, HOST)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()
