"""Several scripted prefill and decode servers of one model, with the router's client in front."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.address import PairAddress
from shell_router.engines.breaker import BreakerSettings
from shell_router.engines.pool import NO_ADAPTERS, PairPool
from shell_router.engines.retries import RetrySettings
from shell_router.engines.scripted_server import Fault, ScriptedServer, ScriptedSettings
from shell_router.engines.scripting.rooms import Rooms
from shell_router.engines.scripting.script import DEFAULT_SETTINGS
from tests.fakes.scripted_pair import LIMITS, until

SOON = RetrySettings(attempts=3, delay_s=0.001)
BREAKER = BreakerSettings(failures=3, open_s=5.0)


@dataclass
class ScriptedPool:
    """The client under test, its servers, and its clock, which stands still unless a test moves it."""

    prefills: Sequence[ScriptedServer]
    decodes: Sequence[ScriptedServer]
    pool: PairPool = field(init=False)
    now_s: float = 0.0

    def strike(self, fault: Fault | None, *servers: ScriptedServer) -> None:
        """Let `fault` strike these servers from now on; None mends them."""
        for server in servers:
            server.settings = replace(server.settings, fault=fault)

    def breakers(self) -> list[bool]:
        """Whose breaker is open: prefill servers, then decode servers."""
        return [server.breaker.open for server in self.pool.servers]

    async def idle(self) -> None:
        """Return once nothing runs on any server; fails after two seconds."""
        await until(lambda: not any(server.running for server in (*self.prefills, *self.decodes)))


@asynccontextmanager
async def scripted_pool(
    prefills: int = 1,
    decodes: int = 1,
    settings: ScriptedSettings = DEFAULT_SETTINGS,
    *,
    retries: RetrySettings = SOON,
    breaker: BreakerSettings = BREAKER,
    adapters: AdapterSettings = NO_ADAPTERS,
) -> AsyncIterator[ScriptedPool]:
    """So many servers of each role, any of which work together, and a client of them all."""
    rooms = Rooms()
    async with AsyncExitStack() as stack:

        async def started(role: str, count: int) -> list[ScriptedServer]:
            servers = [ScriptedServer(replace(settings, role=role), rooms=rooms) for _ in range(count)]
            for server in servers:
                await stack.enter_async_context(server)
            return servers

        at = ScriptedPool(await started("prefill", prefills), await started("decode", decodes))
        urls = [(prefill.url, decode.url) for prefill in at.prefills for decode in at.decodes]
        addresses = [PairAddress(prefill, decode, "127.0.0.1", 8998) for prefill, decode in urls]
        at.pool = PairPool(
            *addresses, limits=LIMITS, retries=retries, breaker=breaker, clock=lambda: at.now_s, adapters=adapters
        )
        yield at
        await at.pool.aclose()
