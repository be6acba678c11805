"""What runs of embedded pairs, as `EmbeddedFleet` shows it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from shell_router.engines.embedded.settings import EmbeddedSettings


@dataclass(slots=True)
class EmbeddedServer:
    """One process of a server. When it has ended, `dead` is set for good; `exit_code` with it, where it is known.

    A server that is started again is another `EmbeddedServer` at the same ports.
    """

    host: str
    pid: int
    port: int
    bootstrap_port: int
    exit_code: int | None = None
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return not self.dead.is_set()


@dataclass(frozen=True, slots=True)
class EmbeddedPair:
    """A running pair. `servers` are the fleet's latest processes by "alias/mode": restarts are seen here."""

    alias: str
    settings: EmbeddedSettings
    servers: Mapping[str, EmbeddedServer]

    @property
    def prefill(self) -> EmbeddedServer:
        return self.servers[f"{self.alias}/prefill"]

    @property
    def decode(self) -> EmbeddedServer:
        return self.servers[f"{self.alias}/decode"]

    @property
    def prefill_url(self) -> str:
        return self.prefill.url

    @property
    def decode_url(self) -> str:
        return self.decode.url

    @property
    def bootstrap_host(self) -> str:
        return self.settings.host

    @property
    def bootstrap_port(self) -> int:
        return self.prefill.bootstrap_port

    @property
    def alive(self) -> bool:
        return self.prefill.alive and self.decode.alive

    async def wait_dead(self) -> EmbeddedServer:
        """Wait until either process of now has ended, and return it, though it be replaced already."""
        servers = (self.prefill, self.decode)
        waits = {asyncio.create_task(server.dead.wait()) for server in servers}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return next(server for server in servers if not server.alive)
