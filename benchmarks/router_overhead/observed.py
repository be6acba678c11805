"""What the live page and OpenTelemetry spans cost: the same trees at a router without and at others
with both.

All routers work at the same time on one core, so that what else the machine does slows them alike,
and each round starts new ones: two processes of one program differ by some percent as long as they
live.

The page is a client that does what an open `/ui` does: it reads what the page shows every 2 s.
Where it asks, too, it streams trees with all agents' texts, one after the other, in place of one of
the other clients.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev
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
READ = (
    "/v1/models",
    "/metrics?" + "&".join(f"name[]=shell_router_{name}" for name in METRICS),
    "/v1/traces?limit=20",
)
POLL_S = 2.0
MOST_ADDED = 0.05
Round = dict[str, TreeFigures]


async def observed_rows(cores: Cores, folder: Path, amount: Amount, rounds: int) -> list[Row]:
    """A row per setup."""
    async with AsyncExitStack() as stack:
        otlp = await stack.enter_async_context(_receiver())
        target, engine = await stack.enter_async_context(
            running_engine(cores, folder, token_s=amount.tree_token_s)
        )
        watched = f"listen: {{ui: true}}\ntraces: {{otlp: '{otlp}'}}\n"

        def started(more: str) -> AbstractAsyncContextManager[Setup]:
            return running_ours(cores, folder, target, engine, amount.tree_tokens, more)

        found = []
        for number in range(rounds):
            names = [OFF, OPEN, ASKING]
            names = names[number % 3 :] + names[: number % 3]
            async with AsyncExitStack() as running:
                routers = {
                    one: await running.enter_async_context(started("" if one == OFF else watched))
                    for one in names
                }
                found.append(await _round(routers, cores, amount))
    return [_row(name, found) for name in (OFF, OPEN, ASKING)]


async def _round(routers: Mapping[str, Setup], cores: Cores, amount: Amount) -> Round:
    """The first trees start the processes that make the spans; those move to the client's core."""
    short = replace(amount, trees_each=1)
    await asyncio.gather(*(_measured(name, router, short) for name, router in routers.items()))
    for router in routers.values():
        assert router.watched.router is not None
        for pid in router.watched.router.children():
            os.sched_setaffinity(pid, {cores.client})
    long = replace(
        amount, trees_each=2 * amount.trees_each
    )  # many, for every 40th or so pays for a collection
    figures = await asyncio.gather(
        *(_measured(name, router, long) for name, router in routers.items())
    )
    return dict(zip(routers, figures, strict=True))


async def _measured(name: str, router: Setup, amount: Amount) -> TreeFigures:
    target = router.target
    assert isinstance(target, RouterTarget)
    others = amount.trees_at_a_time - (name == ASKING)
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(routed_trees(target.url, "incremental", others))
        page = (
            await stack.enter_async_context(_open_page(target.url, "incremental"))
            if name != OFF
            else None
        )
        if name == ASKING and page is not None:
            clients.append(page)
        return await measure_trees(clients, router.watched, amount.trees_each)


@asynccontextmanager
async def _open_page(url: str, topology: str) -> AsyncIterator[Ask]:
    """Reads what the page shows meanwhile; what it gives asks as the page does."""
    async with (
        aiohttp.ClientSession(url, raise_for_status=True) as session,
        asyncio.TaskGroup() as tasks,
    ):
        polling = tasks.create_task(_poll(session))

        async def ask(question: str) -> str:
            body = {
                "model": topology,
                "messages": [{"role": "user", "content": question}],
                "stream": True,
            }
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
    return "".join(
        choice["delta"].get("content") or "" for choice in orjson.loads(line[6:])["choices"]
    )


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


def _row(name: str, rounds: Sequence[Round]) -> Row:
    figures = [one[name] for one in rounds]
    return {
        "router": name,
        "per_s": median(one.trees / one.spent.wall_s for one in figures),
        "router_us": median(map(_router_us, figures)),
        "relative": [round(_router_us(one[name]) / _router_us(one[OFF]), 3) for one in rounds],
        "spans_us": median(1e6 * one.spent.children_s / one.trees for one in figures),
        "p50_ms": median(one.latency.p50_ms for one in figures),
        "p99_ms": median(one.latency.p99_ms for one in figures),
    }


def _router_us(figures: TreeFigures) -> float:
    return 1e6 * (figures.spent.router_s or 0.0) / figures.trees


def observed_goals(rows: Sequence[Row]) -> Iterator[str]:
    """What watching adds to the router's CPU per tree: the median over the rounds, and the mean
    with two standard errors on each side."""
    for row in rows:
        if row["router"] != OFF:
            added = [one - 1 for one in row["relative"]]
            error = 2 * stdev(added) / len(added) ** 0.5 if len(added) > 1 else float("nan")
            figures = (
                f"{median(added):+.1%}, mean {mean(added):+.1%} ± {error:.1%} over "
                f"{len(added)} rounds"
            )
            verdict = "met   " if median(added) < MOST_ADDED else "missed"
            yield (
                f"{verdict}  {row['router']}: {figures} of the router's CPU per tree (goal: "
                f"under {MOST_ADDED:.0%})"
            )
