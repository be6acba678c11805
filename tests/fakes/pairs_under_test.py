"""The prefill-decode pairs that conformance suites meet: scripted, embedded, and real SGLang."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import aiohttp
import pytest

from benchmarks.scripted.server import ScriptedPair, ScriptedServer, ScriptedSettings
from launch.sglang_cpu.engine import HOST, EngineServer
from launch.sglang_cpu.pair import CpuPair, free_ports, until_ready
from shell_router.engines.address import PairAddress, ServerAddress
from shell_router.standins.embedded.settings import EmbeddedSettings
from tests.fakes import embedded_as_sglang
from tests.fakes.shared_engines import SharedEngines

CONTEXT_LENGTH = 2048
SGLANG_VARIABLES = (
    "SHELL_ROUTER_SGLANG_PREFILL_URL",
    "SHELL_ROUTER_SGLANG_DECODE_URL",
    "SHELL_ROUTER_SGLANG_BOOTSTRAP_PORT",
    "SHELL_ROUTER_SGLANG_MODEL",
)


ON_A_PAIR_AND_ON_A_SERVER = pytest.mark.parametrize(
    "real_sglang", ["pair", "server"], indirect=True
)
"""The test runs on a pair of real SGLang, and on an undivided server of it."""


@dataclass(frozen=True)
class PairUnderTest:
    """A running pair, or an undivided server.

    `model` is its folder; it is None if there is no model, so that texts have no meaning.
    """

    address: PairAddress | ServerAddress
    model: Path | None
    context_length: int
    vocabulary: int

    @property
    def urls(self) -> list[str]:
        """The prefill server's, then the decode server's; one of an undivided server."""
        return [str(server.url).rstrip("/") for server in self.address.servers]

    def needs_model(self) -> Path:
        """The model's folder; skips the test where there is none."""
        if self.model is None:
            pytest.skip(
                "a scripted pair has no model: it neither reads text nor finds stop strings"
            )
        return self.model


@asynccontextmanager
async def scripted(*, incremental: bool) -> AsyncIterator[PairUnderTest]:
    """A scripted pair that takes 2 ms a token, so that a stream can be aborted."""
    settings = ScriptedSettings(
        incremental=incremental, token_s=0.002, context_length=CONTEXT_LENGTH
    )
    async with ScriptedPair(settings) as pair:
        address = PairAddress(pair.prefill.url, pair.decode.url, "127.0.0.1", 8998)
        yield PairUnderTest(address, None, CONTEXT_LENGTH, settings.vocabulary)


@asynccontextmanager
async def undivided() -> AsyncIterator[PairUnderTest]:
    """A scripted server that prefills and decodes."""
    settings = ScriptedSettings("null", token_s=0.002, context_length=CONTEXT_LENGTH)
    async with ScriptedServer(settings) as server:
        yield PairUnderTest(ServerAddress(server.url), None, CONTEXT_LENGTH, settings.vocabulary)


def embedded(engines: SharedEngines, *, incremental: bool) -> PairUnderTest:
    """An embedded pair with a tiny model of random weights, which other tests ask, too."""
    model = engines.model(context_length=CONTEXT_LENGTH)
    settings = EmbeddedSettings(
        str(model), dtype="float64", incremental_streaming_output=incremental
    )
    return of_model(engines.pair(settings).address, model)


@asynccontextmanager
async def running(pair: PairUnderTest) -> AsyncIterator[PairUnderTest]:
    """A pair that runs already."""
    yield pair


def of_model(address: PairAddress | ServerAddress, model: Path) -> PairUnderTest:
    """A pair that serves the model of that folder, with the limits in its configuration."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return PairUnderTest(address, model, config["max_position_embeddings"], config["vocab_size"])


def address_of(servers: CpuPair) -> PairAddress:
    """The address that a router has of the servers."""
    return PairAddress(
        servers.prefill.url, servers.decode.url, servers.bootstrap_host, servers.bootstrap_port
    )


class BreakablePair:
    """The processes of a running pair, of whichever kind. Roles are `prefill` and `decode`."""

    def __init__(self, servers: CpuPair) -> None:
        self._servers = servers
        self._with_options: set[str] = set()

    @property
    def address(self) -> PairAddress:
        return address_of(self._servers)

    def url(self, role: str) -> str:
        """Where the server of that role is, now and after every restart."""
        return self._server(role).url

    def kill(self, role: str) -> None:
        """SIGKILL; returns when it is gone."""
        self._server(role).kill()

    async def start(self, role: str, *options: str) -> None:
        """Start what was killed or stopped, and return when it serves. `options` are added for this
        run only.
        """
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
    """An embedded pair that serves, of two processes that are started like SGLang's; `folder` takes
    their logs.
    """
    prefill, decode, bootstrap = free_ports(3)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shared = (
        "--model-path",
        str(model),
        "--disaggregation-bootstrap-port",
        str(bootstrap),
        *options,
    )

    def server(role: str, port: int) -> EngineServer:
        command = (
            sys.executable,
            embedded_as_sglang.__file__,
            "--disaggregation-mode",
            role,
            "--port",
            str(port),
            *shared,
        )
        return EngineServer(role, command, port, folder / f"{role}.log", variables)

    pair = CpuPair(server("prefill", prefill), server("decode", decode), bootstrap, HOST)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots in use on some servers: the number of requests, in any queue, and their KV tokens."""

    requests: int
    tokens: int


async def idle(
    session: aiohttp.ClientSession, *urls: str, limit_s: float, but_kv: bool = False
) -> float:
    """When (monotonic seconds) these servers were first seen without requests; TimeoutError if they
    never are.

    With `but_kv` they may still hold KV of requests that have ended.
    """
    async with asyncio.timeout(limit_s):
        while True:
            if await _taken(session, urls, but_kv):
                continue
            seen_s = monotonic()
            if not await _taken(session, urls, but_kv):
                return seen_s


async def _taken(session: aiohttp.ClientSession, urls: tuple[str, ...], but_kv: bool) -> bool:
    found = await slots(session, *urls)
    return found.requests > 0 or (found.tokens > 0 and not but_kv)


async def held(session: aiohttp.ClientSession, *urls: str) -> int:
    """Requests on these servers."""
    return (await slots(session, *urls)).requests


async def slots(session: aiohttp.ClientSession, *urls: str) -> Slots:
    """Return the slots in use on these servers together."""
    found = await asyncio.gather(*(_slots_of(session, url) for url in urls))
    return Slots(sum(one.requests for one in found), sum(one.tokens for one in found))


async def _slots_of(session: aiohttp.ClientSession, url: str) -> Slots:
    """Waiting requests are also those in decode's queues before and during the transfer, and before
    the bootstrap.
    """
    async with session.get(f"{url}/v1/loads") as answer:
        ranks = (await answer.json())["loads"]
    stages = [rank.get("disaggregation") or {} for rank in ranks]  # an undivided server has none
    handed_over = sum(stage.get("prefill_inflight_queue_reqs", 0) for stage in stages)
    requests = sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ranks)
    return Slots(requests + handed_over, sum(rank["num_used_tokens"] for rank in ranks))
