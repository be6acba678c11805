"""What breaks on a pair, embedded or real SGLang: one error that names the server, the other freed,
the next served.

The end of the run prints how long that takes.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.scripted.server import Fault, ScriptedPair, ScriptedSettings
from shell_router.core.engine import Finish, Generation, Tokens, ask_for_drafts
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.sglang import SglangPair
from shell_router.errors import (
    EngineAborted,
    EngineRejected,
    EngineStalled,
    EngineUnreachable,
    PromptTooLong,
    ShellRouterError,
)
from tests.fakes.pairs_under_test import BreakablePair, Slots, embedded_servers, idle, slots

LIMITS = PairLimits(stall_s=20)
IMPATIENT = PairLimits(stall_s=2, abort_s=20)
ERROR_LIMIT_S = 15.0
FREED_LIMIT_S = 10.0
SERVED_LIMIT_S = 60.0
BOTH = ("prefill", "decode")
LONG, SHORT = 20_000, 6  # what is not ended at once goes on for longer than the limits
LONG_PROMPT, PROMPT = 8000, 60
LESS_CONTEXT, OVER_IT = ("--context-length", "256"), 400
# chunks so small that a long prompt leaves time to break something while it prefills
EMBEDDED_OPTIONS = ("--incremental-streaming-output", "--chunked-prefill-size", "64")

Measured = Callable[[str, float], None]
Stream = AsyncGenerator[Tokens | Finish, None]
_unique = count(1)


@dataclass(frozen=True)
class Served:
    """A pair that can be broken, with the router's client in front."""

    servers: BreakablePair
    client: SglangPair
    session: aiohttp.ClientSession
    measured: Measured

    async def until_prefilling(self) -> None:
        """Return once prefill computes a prompt for which decode waits."""
        async with asyncio.timeout(FREED_LIMIT_S):
            while (
                not (await self._slots("prefill")).tokens
                or not (await self._slots("decode")).requests
            ):
                pass

    async def _slots(self, role: str) -> Slots:
        return await slots(self.session, self.servers.url(role))

    @asynccontextmanager
    async def fails(
        self,
        what: str,
        error: type[ShellRouterError] | tuple[type[ShellRouterError], ...],
        *,
        names: str | None = None,
    ) -> AsyncIterator[None]:
        """The block ends in that error."""
        began_s = monotonic()
        with pytest.raises(error, match=names):
            async with asyncio.timeout(ERROR_LIMIT_S):
                yield
        self.measured(f"{what}: error after", monotonic() - began_s)

    async def frees(self, what: str, *roles: str) -> None:
        """The servers of these roles come to hold nothing."""
        began_s = monotonic()
        freed_s = await idle(self.session, *map(self.servers.url, roles), limit_s=FREED_LIMIT_S)
        self.measured(f"{what}: {' and '.join(roles)} free after", freed_s - began_s)

    async def drops(self, what: str, *roles: str) -> None:
        """The servers of these roles come to have no request; KV may be held."""
        began_s = monotonic()
        dropped_s = await idle(
            self.session, *map(self.servers.url, roles), limit_s=FREED_LIMIT_S, but_kv=True
        )
        self.measured(f"{what}: {' and '.join(roles)} without a request after", dropped_s - began_s)

    async def serves(self) -> None:
        """The next request is answered whole, and nothing is left of it or of what came before."""
        async with asyncio.timeout(SERVED_LIMIT_S):
            assert (await finish_of(self.client, request(SHORT))).completion_tokens == SHORT
            await idle(self.session, *map(self.servers.url, BOTH), limit_s=SERVED_LIMIT_S)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BreakablePair]:
    if request.param == "sglang":
        yield BreakablePair(request.getfixturevalue("own_sglang"))
        return
    model = request.getfixturevalue("sglang_model")
    with embedded_servers(model, tmp_path_factory.mktemp("embedded"), *EMBEDDED_OPTIONS) as pair:
        yield BreakablePair(pair)


@pytest.fixture
def timed(request: pytest.FixtureRequest, measured: Measured) -> Measured:
    """As `measured`, with the kind of the pair."""
    kind = request.node.callspec.params["servers"]
    return lambda what, seconds: measured(f"{kind}: {what}", seconds)


@pytest_asyncio.fixture
async def at(servers: BreakablePair, timed: Measured) -> AsyncIterator[Served]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        client_of(servers.address) as client,
    ):
        yield Served(servers, client, session, timed)
    await servers.mend()


@asynccontextmanager
async def client_of(address: PairAddress, limits: PairLimits = LIMITS) -> AsyncIterator[SglangPair]:
    client = SglangPair(address, limits=limits)
    try:
        yield client
    finally:
        await client.aclose()


def request(new_tokens: int, prompt_tokens: int = PROMPT) -> Generation:
    """A greedy request of a fixed length, with drafts, whose prompt shares no prefix with any
    other's.
    """
    salt = next(_unique)
    ids = [20 + salt, *(20 + (at * 7 + salt) % 200 for at in range(prompt_tokens - 1))]
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return Generation(f"fault-{salt:04}", ids, ask_for_drafts(sampling))


async def finish_of(client: SglangPair, asked: Generation) -> Finish:
    events = [event async for event in client.generate(asked)]
    assert isinstance(events[-1], Finish)
    return events[-1]


@asynccontextmanager
async def decoding(client: SglangPair) -> AsyncIterator[Stream]:
    """A long answer of which the first tokens have come."""
    async with aclosing(client.generate(request(LONG))) as stream:
        await anext(stream)
        yield stream


@asynccontextmanager
async def prefilling(at: Served, asked: Generation) -> AsyncIterator[asyncio.Task[Finish]]:
    """A request whose prompt is being computed."""
    task = asyncio.create_task(finish_of(at.client, asked))
    try:
        await at.until_prefilling()
        assert not task.done()
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def read_on(stream: Stream) -> None:
    async for _ in stream:
        pass


async def test_a_prefill_that_answers_400_ends_its_decode(at: Served) -> None:
    what = "prefill answers 400"
    async with (
        ScriptedPair(ScriptedSettings(fault=Fault("status", status=400))) as scripted,
        client_of(replace(at.servers.address, prefill_url=scripted.prefill.url)) as refused,
    ):
        async with at.fails(what, EngineRejected, names="prefill engine"):
            await finish_of(refused, request(SHORT))
        await at.frees(what, "decode")
    await at.serves()


async def test_the_requests_of_these_tests_are_drafted(at: Served) -> None:
    assert (await finish_of(at.client, request(200))).drafted_tokens > 0


async def test_a_caller_that_leaves_during_prefill_frees_both(at: Served) -> None:
    async with prefilling(at, request(LONG, LONG_PROMPT)) as task:
        task.cancel()
        await at.frees("caller leaves during prefill", *BOTH)
    await at.serves()


async def test_a_caller_that_leaves_during_decode_frees_both(at: Served) -> None:
    async with decoding(at.client):
        pass
    await at.frees("caller leaves during decode", *BOTH)
    await at.serves()


async def test_an_abort_by_another_caller_before_the_first_token_is_one_error_and_frees_both(
    at: Served,
) -> None:
    asked, what = request(LONG, LONG_PROMPT), "aborted by another caller before the first token"
    url = f"{at.servers.url('decode')}/abort_request"
    async with prefilling(at, asked) as task:
        async with at.fails(what, EngineAborted, names="engine"):
            async with at.session.post(url, json={"rid": asked.rid}) as answer:
                assert answer.status == 200
            await task
        await at.frees(what, *BOTH)
    await at.serves()


async def test_a_decode_that_stalls_in_mid_stream_is_freed_when_it_goes_on(at: Served) -> None:
    what = "decode stalls in mid-stream, limit 2 s"
    async with client_of(at.servers.address, IMPATIENT) as impatient, decoding(impatient) as stream:
        with at.servers.paused("decode"):
            async with at.fails(what, EngineStalled, names="decode engine"):
                await read_on(stream)
            await at.frees(what, "prefill")
        await at.frees(f"{what}, and goes on", *BOTH)
    await at.serves()


async def test_a_decode_that_stalls_before_the_first_token_is_freed_when_it_goes_on(
    at: Served,
) -> None:
    what = "decode stalls before the first token, limit 2 s"
    async with client_of(at.servers.address, IMPATIENT) as impatient:
        with at.servers.paused("decode"):
            async with at.fails(what, EngineStalled, names="engine"):
                await finish_of(impatient, request(LONG))
            await at.frees(what, "prefill")
    await at.serves()


async def test_a_decode_is_killed_in_mid_stream_comes_back_with_less_context_and_is_restarted(
    at: Served,
) -> None:
    what = "decode killed in mid-stream"
    async with decoding(at.client) as stream:
        at.servers.kill("decode")
        async with at.fails(what, EngineUnreachable, names="decode engine"):
            await read_on(stream)
    await at.frees(what, "prefill")
    await comes_back_with_less_context_and_is_restarted(at, "decode")


async def test_a_prefill_is_killed_during_prefill_comes_back_with_less_context_and_is_restarted(
    at: Served,
) -> None:
    """SGLang's decode keeps the request's KV for 30 s, as a dead prefill cannot say that it no
    longer writes there.
    """
    what = "prefill killed during prefill"
    async with prefilling(at, request(LONG, LONG_PROMPT)) as task:
        at.servers.kill("prefill")
        # whichever leg is the first to notice: the prefill's broken connection, or decode that
        # cannot fetch the KV
        noticed = (EngineUnreachable, EngineRejected)
        async with at.fails(what, noticed, names="prefill engine|transfer failed"):
            await task
    await at.drops(what, "decode")
    await comes_back_with_less_context_and_is_restarted(at, "prefill")


async def comes_back_with_less_context_and_is_restarted(at: Served, role: str) -> None:
    """Through all of it the router's client is the same, with the connections that it had
    before."""
    await at.servers.start(role, *LESS_CONTEXT)
    await at.serves()
    what = f"prompt too long for {role} alone"
    async with at.fails(what, PromptTooLong):
        await finish_of(at.client, request(SHORT, OVER_IT))
    await at.frees(what, *BOTH)
    await at.serves()
    await at.servers.restart(role)
    await at.serves()
    assert (await finish_of(at.client, request(SHORT, OVER_IT))).prompt_tokens == OVER_IT
