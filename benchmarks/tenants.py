"""One tenant's latency while another misbehaves in each of the ways that the router is to bear.

    python benchmarks/tenants.py [--rounds N] [--seconds S] [--only WAY,WAY] [--json]

The router serves `small` on an embedded pair with the fair queue order (`least_attained`). Bob asks one short question
after the other. For --seconds alice misbehaves meanwhile, in each way once a round, in changing order; in the way
`none` she does nothing. Each runs in a process of its own. Seconds per answer of bob's; `vs_none` is the ratio of the
medians. `refused` counts bob's requests that were not answered 200, `hers` alice's requests, `hers_refused` those that
were not. `stall_ms` is the longest stall of the router's event loop so far.
"""
# ruff: noqa: PLC0415 - --help answers at once

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp
    from report import Row

    from shell_router.config import Config

ROOT = Path(__file__).parents[1]
TITLE = "Latency of one tenant while another misbehaves"
CHAT, AGENT = "/v1/chat/completions", "/v1/agent/requests"
FAR = 2**31 - 1
MARKS = "".join(f"\ue000{number}\ue001" for number in range(50_000))


def main() -> int:
    """Measure and print."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=5, help="of all ways (default 5)")
    found.add_argument("--seconds", type=float, default=10.0, help="of each way in a round (default 10)")
    found.add_argument("--only", default=",".join(WAYS), help=f"ways, by commas: {', '.join(WAYS)}")
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    options = found.parse_args()
    ways = options.only.split(",")
    if unknown := set(ways) - WAYS.keys():
        found.error(f"no such way: {', '.join(sorted(unknown))}")
    sys.path.insert(0, str(ROOT))
    import uvloop
    from report import report

    rows = uvloop.run(measured(options.rounds, options.seconds, ["none", *(way for way in ways if way != "none")]))
    report(TITLE, rows, engine="an embedded pair", simulated=False, as_json=options.json)
    return 0


async def measured(rounds: int, seconds: float, ways: Sequence[str]) -> "list[Row]":
    """A row per way."""
    from shell_router.app import running_server

    bobs, alices = defaultdict[str, list[Asked]](list), defaultdict[str, list[Asked]](list)
    stalls = dict[str, float]()
    with ProcessPoolExecutor(2, get_context("spawn")) as clients:
        async with running_server(deployment()) as url:
            in_process = partial(asyncio.get_running_loop().run_in_executor, clients)
            await in_process(run, "bob", url, 1.0)  # warms up
            for number in range(rounds):
                turn = number % len(ways)
                for way in [*ways[turn:], *ways[:turn]]:
                    hers = in_process(run, way, url, seconds)
                    bobs[way].append(await in_process(run, "bob", url, seconds))
                    alices[way].append(await hers)
                    stalls[way] = max(stalls.get(way, 0.0), await longest_stall(url))
    return [row_of(way, bobs[way], alices[way], bobs["none"], stalls[way]) for way in ways]


def deployment() -> "Config":
    """One model, three keys, and the fair order."""
    from shell_router.app import load_config
    from shell_router.config import ApiKey, EmbedderSettings, Limits, Listen
    from shell_router.routing.dispatcher import SchedulingSettings
    from shell_router.routing.queue import QueueSettings

    config = load_config(ROOT / "configs" / "embedded.yaml", os.environ, with_keys=False)
    keys = {name: ApiKey(key=f"sk-{name}", operator=name == "ops") for name in ("alice", "bob", "ops")}
    return replace(
        config,
        models={"small": config.models["small"]},
        topologies=(),
        listen=Listen(port=0),
        api_keys=keys,
        embedder=EmbedderSettings("none"),
        limits=Limits(max_agents_per_tenant=64, max_connections=256),
        scheduling=SchedulingSettings(queue=QueueSettings("least_attained", max_running=8)),
    )


def row_of(
    way: str, bobs: "Sequence[Asked]", alices: "Sequence[Asked]", alone: "Sequence[Asked]", stall_s: float
) -> "Row":
    """The figures of all rounds."""
    took = [one for each in bobs for one in each.took_s] or [float("nan")]
    none = [one for each in alone for one in each.took_s]
    return {
        "way": way,
        "median_s": statistics.median(took),
        "p95_s": sorted(took)[int(0.95 * (len(took) - 1))],
        "vs_none": statistics.median(took) / statistics.median(none),
        "answers": sum(len(each.took_s) for each in bobs),
        "refused": sum(each.refused for each in bobs),
        "hers": sum(len(each.took_s) + each.refused for each in alices),
        "hers_refused": sum(each.refused for each in alices),
        "stall_ms": 1e3 * stall_s,
    }


async def longest_stall(url: str) -> float:
    """What the router says of its event loop's last minute or two, in seconds."""
    import aiohttp

    name = "shell_router_event_loop_longest_stall_seconds "
    async with aiohttp.ClientSession(headers=bearing("ops")) as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


# --- the clients' processes


@dataclass
class Asked:
    """Seconds of each request that was answered 200, and how many were not."""

    took_s: list[float]
    refused: int = 0


def bearing(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}"}


def run(way: str, url: str, seconds: float) -> Asked:
    """What `bob` does, or alice in one of WAYS, for that long."""
    return asyncio.run(_run(way, url, seconds))


async def _run(way: str, url: str, seconds: float) -> Asked:
    import aiohttp

    found = Asked([])
    tenant = "bob" if way == "bob" else "alice"
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=bearing(tenant), connector=connector, timeout=limit) as session:
        asking = Asking(session, url, found)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (asking.bob() if way == "bob" else WAYS[way](asking))
    return found


def chat(content: str = "How many pens does Tom have now?", **more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": content}], "max_tokens": 32, **more}


def agent(number: int, **more: Any) -> dict[str, Any]:
    body = {"program": f"p{time.monotonic_ns()}", "agent": f"a{number}", "model": "small", "prompt": "Hi"}
    return {**body, "max_tokens": 8, **more}


@dataclass
class Asking:
    """One tenant's requests."""

    session: "aiohttp.ClientSession"
    url: str
    found: Asked

    async def one(self, path: str, body: object, **headers: str) -> None:
        """Ask once, and count it."""
        import aiohttp

        began_s = time.perf_counter()
        data = body if isinstance(body, bytes) else json.dumps(body)
        sent = {"Content-Type": "application/json", **headers}
        try:
            async with self.session.post(self.url + path, data=data, headers=sent) as answer:
                await answer.read()
                good = answer.status == 200
        except aiohttp.ClientError:
            good = False
        if good:
            self.found.took_s.append(time.perf_counter() - began_s)
        else:
            self.found.refused += 1

    async def bob(self) -> None:
        """One question after the other."""
        while True:
            await self.one(CHAT, chat())

    async def again(self, clients: int, ask: Callable[[int], Awaitable[None]]) -> None:
        """Each client asks again and again."""

        async def client(number: int) -> None:
            while True:
                await ask(number)

        await asyncio.gather(*map(client, range(clients)))

    async def none(self) -> None:
        await asyncio.Event().wait()

    async def flood(self) -> None:
        await self.again(64, lambda _: self.one(CHAT, chat(max_tokens=64)))

    async def stop_ids(self) -> None:
        await self.again(4, lambda _: self.one(CHAT, chat(stop_token_ids=[FAR], min_tokens=2)))

    async def stops(self) -> None:
        await self.again(2, lambda _: self.one(CHAT, chat(stop=[f"stop {number}" for number in range(20_000)])))

    async def long_texts(self) -> None:
        text = "word " * 1_500_000
        await self.again(2, lambda _: self.one(CHAT, chat(text)))

    async def marks(self) -> None:
        messages = [{"role": "user", "content": MARKS}]
        await self.again(2, lambda number: self.one(AGENT, agent(number, prompt=None, messages=messages)))

    async def samples(self) -> None:
        await self.again(4, lambda number: self.one(AGENT, agent(number, max_tokens=None, sampling_params={"n": 2})))

    async def waiting_agents(self) -> None:
        waits = {"prompt": [{"output_of": "never"}], "wait_s": 600}
        await self.again(1024, lambda number: self.one(AGENT, agent(number, **waits)))

    async def programs(self) -> None:
        waits = {"prompt": [{"output_of": "never"}], "wait_s": 0}
        await self.again(32, lambda number: self.one(AGENT, agent(number, **waits)))

    async def wrong_keys(self) -> None:
        await self.again(32, lambda _: self.one(CHAT, chat(), Authorization="Bearer guess"))

    async def forms(self) -> None:
        body = b"".join(b'--B\r\nContent-Disposition: form-data; name="f%d"\r\n\r\nx\r\n' % n for n in range(60_000))
        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        await self.again(4, lambda _: self.one("/v1/files", body, **kind))

    async def idle_connections(self) -> None:
        """400 that say nothing, or a byte a second."""
        host, port = self.url.removeprefix("http://").split(":")

        async def idle(number: int) -> None:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nx: ")
                while number % 2:
                    writer.write(b"y")
                    await writer.drain()
                    await asyncio.sleep(1)
                await asyncio.sleep(1)
            except OSError:
                self.found.refused += 1

        await self.again(400, idle)

    async def unread_streams(self) -> None:
        """Streams of which nothing is read."""

        async def unread(_: int) -> None:
            async with self.session.post(self.url + CHAT, json=chat(stream=True, max_tokens=512)):
                await asyncio.sleep(2)

        await self.again(32, unread)


WAYS: dict[str, Callable[[Asking], Awaitable[None]]] = {
    "none": Asking.none,
    "flood of chats": Asking.flood,
    "stop ids": Asking.stop_ids,
    "endless stops": Asking.stops,
    "long texts": Asking.long_texts,
    "marks": Asking.marks,
    "samples": Asking.samples,
    "waiting agents": Asking.waiting_agents,
    "programs": Asking.programs,
    "wrong keys": Asking.wrong_keys,
    "form fields": Asking.forms,
    "idle connections": Asking.idle_connections,
    "unread streams": Asking.unread_streams,
}

if __name__ == "__main__":
    sys.exit(main())
