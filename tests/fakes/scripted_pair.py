"""A scripted prefill-decode pair with the router's own client in front, and ways to look at what is left of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from shell_router.core.generation import Finish, Generation, Tokens
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.breaker import BreakerSettings
from shell_router.engines.pool import PairPool
from shell_router.engines.retries import RetrySettings
from shell_router.engines.scripted_server import Fault, ScriptedPair, ScriptedServer, ScriptedSettings
from shell_router.engines.scripting.script import DEFAULT_SETTINGS

LIMITS = PairLimits(stall_s=5, answer_s=5, connect_s=2, abort_s=2, settle_s=1)
ONCE = RetrySettings(attempts=1)
NEVER_OPEN = BreakerSettings(failures=10**9)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition` holds; fails after two seconds."""
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Served:
    """The client under test and the servers behind it."""

    pair: PairPool
    servers: ScriptedPair

    def break_leg(self, leg: str, fault: Fault | None) -> None:
        """Let `fault` strike the server of that role from now on; None mends it."""
        server = self.servers.prefill if leg == "prefill" else self.servers.decode
        server.settings = replace(server.settings, fault=fault)

    async def idle(self) -> None:
        """Return once nothing runs on either server; fails after two seconds."""
        await until(lambda: not (self.servers.prefill.running or self.servers.decode.running))

    async def quiet(self) -> None:
        """Return once no task but the test's own is left; fails after two seconds."""
        await self.pair.aclose()
        await until(lambda: len(asyncio.all_tasks()) == 1)


@asynccontextmanager
async def served(
    settings: ScriptedSettings = DEFAULT_SETTINGS, limits: PairLimits = LIMITS, retries: RetrySettings = ONCE
) -> AsyncIterator[Served]:
    """A running scripted pair and its client, which makes each request once unless told otherwise."""
    async with ScriptedPair(settings) as servers:
        address = PairAddress(servers.prefill.url, servers.decode.url, "127.0.0.1", 8998)
        pair = PairPool(address, limits=limits, retries=retries, breaker=NEVER_OPEN)
        yield Served(pair, servers)
        await pair.aclose()


@asynccontextmanager
async def apart(prefill: ScriptedSettings, decode: ScriptedSettings) -> AsyncIterator[Served]:
    """Servers that share no rooms: decode does not wait for its prefill, and knows nothing of it."""
    servers = ScriptedPair()
    servers.prefill = ScriptedServer(replace(prefill, role="prefill"))
    servers.decode = ScriptedServer(decode)
    async with servers:
        address = PairAddress(servers.prefill.url, servers.decode.url, "127.0.0.1", 8998)
        pair = PairPool(address, limits=LIMITS, retries=ONCE, breaker=NEVER_OPEN)
        yield Served(pair, servers)
        await pair.aclose()


def generation(rid: str = "r", prompt_tokens: int = 40, new_tokens: int = 8, logprobs: bool = False) -> Generation:
    """A request with a prompt of its own length."""
    ids = list(range(1, prompt_tokens + 1))
    return Generation(rid, ids, {"max_new_tokens": new_tokens, "temperature": 0}, logprobs)


async def collect(pair: PairPool, request: Generation) -> tuple[list[Tokens], Finish]:
    """All tokens of a request, and its finish."""
    events = [event async for event in pair.generate(request)]
    assert isinstance(events[-1], Finish)
    return [event for event in events if isinstance(event, Tokens)], events[-1]
