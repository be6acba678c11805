"""Scripted prefill and decode servers with the router's own client in front."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from benchmarks.scripted.run import DEFAULT_SETTINGS
from benchmarks.scripted.server import (
    BootstrapRooms,
    Fault,
    ScriptedPair,
    ScriptedServer,
    ScriptedSettings,
)
from shell_router.core.engine import Finish, Generation, Tokens
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.sglang import SglangPair, random_rid
from shell_router.routing.failures import BreakerSettings, RetrySettings

LIMITS = PairLimits(stall_s=5, answer_s=5, connect_s=2, abort_s=2, settle_s=1)
ONCE = RetrySettings(attempts=1)
NEVER_OPEN = BreakerSettings(failures=10**9)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition` holds; fails after half a minute."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Served:
    """The client under test and the servers behind it."""

    pair: SglangPair
    servers: ScriptedPair

    def break_leg(self, leg: str, fault: Fault | None) -> None:
        """Let `fault` strike the server of that role from now on; None mends it."""
        server = self.servers.prefill if leg == "prefill" else self.servers.decode
        server.settings = replace(server.settings, fault=fault)

    async def idle(self) -> None:
        """Return once nothing runs on either server; fails after half a minute."""
        await until(lambda: not (self.servers.prefill.running or self.servers.decode.running))

    async def quiet(self) -> None:
        """Return once no task but the test's own is left; fails after half a minute."""
        await self.pair.aclose()
        await until(lambda: len(asyncio.all_tasks()) == 1)


@asynccontextmanager
async def served(
    settings: ScriptedSettings = DEFAULT_SETTINGS,
    limits: PairLimits = LIMITS,
    retries: RetrySettings = ONCE,
    rid: Callable[[], str] = random_rid,
) -> AsyncIterator[Served]:
    """A running scripted pair and its client, which makes each request once unless `retries` say
    otherwise.
    """
    async with ScriptedPair(settings) as servers:
        address = PairAddress(servers.prefill.url, servers.decode.url, "127.0.0.1", 8998)
        pair = SglangPair(address, limits=limits, retries=retries, breaker=NEVER_OPEN, rid=rid)
        yield Served(pair, servers)
        await pair.aclose()


@asynccontextmanager
async def apart(prefill: ScriptedSettings, decode: ScriptedSettings) -> AsyncIterator[Served]:
    """Servers that share no rooms: decode does not wait for its prefill, and knows nothing of
    it."""
    servers = ScriptedPair()
    servers.prefill = ScriptedServer(replace(prefill, role="prefill"))
    servers.decode = ScriptedServer(decode)
    async with servers:
        address = PairAddress(servers.prefill.url, servers.decode.url, "127.0.0.1", 8998)
        pair = SglangPair(address, limits=LIMITS, retries=ONCE, breaker=NEVER_OPEN)
        yield Served(pair, servers)
        await pair.aclose()


def generation(
    rid: str = "r", prompt_tokens: int = 40, new_tokens: int = 8, logprobs: bool = False
) -> Generation:
    """A request with a prompt of its own length."""
    ids = list(range(1, prompt_tokens + 1))
    return Generation(rid, ids, {"max_new_tokens": new_tokens, "temperature": 0}, logprobs)


async def collect(pair: SglangPair, request: Generation) -> tuple[list[Tokens], Finish]:
    """All tokens of a request, and its finish."""
    events = [event async for event in pair.generate(request)]
    assert isinstance(events[-1], Finish)
    return [event for event in events if isinstance(event, Tokens)], events[-1]


def joined(pieces: Iterable[Tokens]) -> Tokens:
    """The tokens of a request in one piece, however the network cut them."""
    ids, text, logprobs = tuple[int, ...](), "", tuple[float, ...]()
    for piece in pieces:
        ids, text, logprobs = ids + piece.ids, text + piece.text, logprobs + piece.logprobs
    return Tokens(ids, text, logprobs)


SOON = RetrySettings(attempts=3, delay_s=0.001)
BREAKER = BreakerSettings(failures=3, open_s=5.0)


@dataclass
class ScriptedPool:
    """The client under test, its servers, and its clock, which stands still unless a test moves it."""

    prefills: Sequence[ScriptedServer]
    decodes: Sequence[ScriptedServer]
    pool: SglangPair = field(init=False)
    now_s: float = 0.0

    def strike(self, fault: Fault | None, *servers: ScriptedServer) -> None:
        """Let `fault` strike these servers from now on; None mends them."""
        for server in servers:
            server.settings = replace(server.settings, fault=fault)

    def breakers(self) -> list[bool]:
        """Whose breaker is open: prefill servers, then decode servers."""
        return [server.breaker.open for server in self.pool.fleet.servers]

    async def idle(self) -> None:
        """Return once nothing runs on any server; fails after half a minute."""
        await until(lambda: not any(server.running for server in (*self.prefills, *self.decodes)))


@asynccontextmanager
async def scripted_pool(
    prefills: int = 1,
    decodes: int = 1,
    settings: ScriptedSettings = DEFAULT_SETTINGS,
    *,
    retries: RetrySettings = SOON,
    breaker: BreakerSettings = BREAKER,
    adapters: Sequence[str] = (),
) -> AsyncIterator[ScriptedPool]:
    """Servers of each role, any of which work together, and a client of them all."""
    rooms = BootstrapRooms()
    async with AsyncExitStack() as stack:

        async def started(role: str, count: int) -> list[ScriptedServer]:
            servers = [
                ScriptedServer(replace(settings, role=role), rooms=rooms) for _ in range(count)
            ]
            for server in servers:
                await stack.enter_async_context(server)
            return servers

        at = ScriptedPool(await started("prefill", prefills), await started("decode", decodes))
        urls = [(prefill.url, decode.url) for prefill in at.prefills for decode in at.decodes]
        addresses = [PairAddress(prefill, decode, "127.0.0.1", 8998) for prefill, decode in urls]
        at.pool = SglangPair(
            *addresses,
            limits=LIMITS,
            retries=retries,
            breaker=breaker,
            clock=lambda: at.now_s,
            adapters=adapters,
        )
        yield at
        await at.pool.aclose()
