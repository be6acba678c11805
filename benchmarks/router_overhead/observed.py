"""What the live page and OpenTelemetry spans cost: the same trees at a router without and at one with both.

The page is a client that does what an open `/ui` does: it reads what the page shows every 2 s. Where it asks, too, it
streams trees with all agents' texts, one after the other, in place of one of the other clients.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from benchmarks.router_overhead.rounds import Amount
from benchmarks.router_overhead.setups import (
    Cores,
    RouterTarget,
    Setup,
    running_engine,
    running_ours,
)
from benchmarks.router_overhead.trees import Ask, TreeFigures, measure_trees, routed_trees

Row = dict[str, Any]
OFF, OPEN, ASKING = "neither", "page open, OTLP on", "page open and asking, OTLP on"
SHOWN = ("requests", "breaker_open", "failures_total", "kv_usage", "cache_hit_rate")
METRICS = ("queue_requests", *(f"engine_{name}" for name in SHOWN))
READ = ("/v1/models", "/metrics?" + "&".join(f"name[]=shell_router_{name}" for name in METRICS), "/v1/traces?limit=20")
POLL_S = 2.0
MOST_ADDED = 0.05


async def observed_rows(cores: Cores, folder: Path, amount: Amount, rounds: int) -> list[Row]:
    """A row per setup. In every second round the observed router has its turn first."""
    found: dict[str, list[TreeFigures]] = {OFF: [], OPEN: [], ASKING: []}
    async with AsyncExitStack() as stack:
        otlp = await stack.enter_async_context(_receiver())
        target, engine = await stack.enter_async_context(running_engine(cores, folder, token_s=amount.tree_token_s))
        routers = {
            name: await stack.enter_async_context(running_ours(cores, folder, target, engine, amount.tree_tokens, more))
            for name, more in ((OFF, ""), (OPEN, f"listen: {{ui: true}}\ntraces: {{otlp: '{otlp}'}}\n"))
        }
        for number in range(rounds):
            for name in (OFF, OPEN, ASKING) if number % 2 == 0 else (ASKING, OPEN, OFF):
                router = routers[OFF if name == OFF else OPEN]
                found[name].append(await _measured(router, amount, is_open=name != OFF, asks=name == ASKING))
    return [_row(name, figures) for name, figures in found.items()]


async def _measured(router: Setup, amount: Amount, *, is_open: bool, asks: bool) -> TreeFigures:
    target = router.target
    assert isinstance(target, RouterTarget)
    others = amount.trees_at_a_time - asks
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(routed_trees(target.url, "incremental", others))
        page = await stack.enter_async_context(_open_page(target.url, "incremental")) if is_open else None
        if asks and page is not None:
            clients.append(page)
        return await measure_trees(clients, router.watched, amount.trees_each)


@asynccontextmanager
async def _open_page(url: str, topology: str) -> AsyncIterator[Ask]:
    """Reads what the page shows meanwhile; what it gives asks as the page does."""
    async with aiohttp.ClientSession(url, raise_for_status=True) as session, asyncio.TaskGroup() as tasks:
        polling = tasks.create_task(_poll(session))

        async def ask(question: str) -> str:
            body = {"model": topology, "messages": [{"role": "user", "content": question}], "stream": True}
            sent = {**body, "include_agents": True, "stream_options": {"include_usage": True}}
            async with session.post("/v1/chat/completions", json=sent) as response:
                answer = "".join([_content(line) async for line in response.content])
            async with session.get(f"/v1/traces/{response.headers['x-trace-id']}") as trace:
                await trace.read()
            return answer

        yield ask
        polling.cancel()


def _content(line: bytes) -> str:
    if not line.startswith(b"data: {"):
        return ""
    return "".join(choice["delta"].get("content") or "" for choice in orjson.loads(line[6:])["choices"])


async def _poll(session: aiohttp.ClientSession) -> None:
    while True:
        for path in READ:
            async with session.get(path) as response:
                await response.read()
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _receiver() -> AsyncIterator[str]:
    """The URL of an OTLP receiver that takes everything."""

    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(content_type="application/x-protobuf")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    finally:
        await runner.cleanup()


def _row(name: str, figures: Sequence[TreeFigures]) -> Row:
    spent = [(one.spent, one.trees) for one in figures]
    return {
        "router": name,
        "per_s": median(trees / one.wall_s for one, trees in spent),
        "router_us": median(1e6 * (one.router_s or 0.0) / trees for one, trees in spent),
        "spans_us": median(1e6 * one.children_s / trees for one, trees in spent),
        "p50_ms": median(one.latency.p50_ms for one in figures),
        "p99_ms": median(one.latency.p99_ms for one in figures),
        "rounds_us": [round(1e6 * (one.router_s or 0.0) / trees) for one, trees in spent],
    }


def observed_goals(rows: Sequence[Row]) -> Iterator[str]:
    """What watching adds to the router's CPU per tree, as the median over the rounds of each round's ratio."""
    rounds = {row["router"]: row["rounds_us"] for row in rows}
    for name in (OPEN, ASKING):
        added = median(one / other for one, other in zip(rounds[name], rounds[OFF], strict=True)) - 1
        verdict = "met   " if added < MOST_ADDED else "missed"
        yield f"{verdict}  {name}: {added:+.1%} of the router's CPU per tree (goal: under {MOST_ADDED:.0%})"
