"""One tenant's latency while another misbehaves in each of the ways that the router is to bear.

    python benchmarks/tenants.py [--engine ENGINE] [--rounds N] [--seconds S] [--per-s N] [--only
    WAY,WAY] [--json]

The router serves `small` with the fair queue order (`least_attained`), on an embedded pair, a
scripted pair (a token every 10 ms, however many requests it has) or a pair of real SGLang on this
machine's CPU. Bob asks one short question after the other. In each step he asks for --seconds while
alice does nothing, then for --seconds while she misbehaves in one of the ways, which come once a
round in changing order. Each of the two is a process of its own; hers has the lowest priority, as
it stands for another machine.

    alone_s       bob's median while alice does nothing, alone_p95_s his 95th percentile
    median_s      while she misbehaves; p95_s likewise
    ratio         of the two medians, the median over the rounds
    refused       requests of bob's that were not answered 200
    hers          requests of alice's, `hers_refused` those that were not answered 200
    stall_ms      the longest stall of the router's event loop in the last minute or two
    router_mb     resident memory of the router's process before the first step and after the last

At most --per-s requests of hers begin in a second, except for floods and connections; 0 is as many
as her process can.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp
    from report import Row

    from shell_router.config import Config, PairSettings

ROOT = Path(__file__).parents[1]
TITLE = "Latency of one tenant while another misbehaves"
CHAT, AGENT, GENERATE = "/v1/chat/completions", "/v1/agent/requests", "/generate"
FILES, BATCHES = "/v1/files", "/v1/batches"
FAR = 2**31 - 1
MARKS = "".join(f"\ue000{number}\ue001" for number in range(50_000))


def main() -> int:
    """Measure and print."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--engine", choices=ENGINES, default="embedded", help="what answers (default embedded)"
    )
    found.add_argument("--rounds", type=int, default=5, help="of all ways (default 5)")
    found.add_argument(
        "--seconds", type=float, default=5.0, help="of each half of a step (default 5)"
    )
    found.add_argument(
        "--per-s", type=float, default=20.0, help="alice's requests per second (default 20)"
    )
    found.add_argument("--only", default=",".join(WAYS), help=f"ways, by commas: {', '.join(WAYS)}")
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    options = found.parse_args()
    ways = options.only.split(",")
    if unknown := set(ways) - WAYS.keys():
        found.error(f"no such way: {', '.join(sorted(unknown))}")
    sys.path.insert(0, str(ROOT))
    import uvloop
    from report import report

    from shell_router.cli.options import give_back_freed_memory

    give_back_freed_memory()  # as `shell-router serve` does

    with tempfile.TemporaryDirectory(prefix="tenants-") as folder:
        rows = uvloop.run(measured(options, ways, Path(folder)))
    report(TITLE, rows, engine=ENGINES[options.engine], simulated=False, as_json=options.json)
    return 0


async def measured(options: argparse.Namespace, ways: Sequence[str], folder: Path) -> "list[Row]":
    """A row per way."""
    from shell_router.app import serve_deployment

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, task.cancel
    )  # or the clients' processes would stay
    steps = defaultdict[str, list[Step]](list)
    context, submit = get_context("spawn"), asyncio.get_running_loop().run_in_executor
    with (
        ProcessPoolExecutor(1, context) as bob,
        ProcessPoolExecutor(1, context, initializer=os.nice, initargs=(19,)) as alice,
    ):
        async with (
            running_engine(options.engine, folder) as pairs,
            serve_deployment(deployment(pairs, folder)) as url,
        ):
            await submit(bob, run, "bob", url, 1.0, 0.0)  # warms up
            for number in range(options.rounds):
                turn = number % len(ways)
                for way in [*ways[turn:], *ways[:turn]]:
                    began_mb = resident_mb()
                    alone = await submit(bob, run, "bob", url, options.seconds, 0.0)
                    hers = submit(alice, run, way, url, options.seconds, options.per_s)
                    beside = await submit(bob, run, "bob", url, options.seconds, 0.0)
                    asked = alone, beside, await hers
                    memory_mb = began_mb, resident_mb()
                    steps[way].append(Step(*asked, await longest_stall(url), *memory_mb))
    return [row_of(way, steps[way]) for way in ways]


ENGINES = {
    "embedded": "an embedded pair",
    "scripted": "a scripted pair, a token every 10 ms",
    "sglang": "a pair of real SGLang on the CPU",
}


@asynccontextmanager
async def running_engine(engine: str, folder: Path) -> "AsyncIterator[tuple[PairSettings, ...]]":
    """The pairs that serve while the context is open; none where the router starts an embedded
    one."""
    from benchmarks.router_overhead.setups import running_engine as running_scripted
    from benchmarks.router_overhead.setups import spread
    from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
    from launch.sglang_cpu.pair import cpu_pair
    from shell_router.config import PairSettings

    if engine == "embedded":
        yield ()
    elif engine == "scripted":
        async with running_scripted(spread(), folder, token_s=0.01) as (at, _):
            yield (
                PairSettings(
                    prefill=at.prefill_url, decode=at.decode_url, bootstrap_port=at.bootstrap_port
                ),
            )
    elif (venv := built_environment()) is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    else:
        with cpu_pair(ROOT / "models" / "small", venv, folder) as pair:
            urls = {"prefill": pair.prefill.url, "decode": pair.decode.url}
            yield (PairSettings(**urls, bootstrap_port=pair.bootstrap_port),)


def deployment(pairs: "tuple[PairSettings, ...]", folder: Path) -> "Config":
    """One model, three keys, and the fair order."""
    from shell_router.app import load_config
    from shell_router.config import ApiKey, BatchesSettings, EmbedderSettings, Limits, Listen
    from shell_router.routing.dispatcher import SchedulingSettings
    from shell_router.routing.queue import QueueSettings

    config = load_config(ROOT / "configs" / "embedded.yaml", os.environ, with_keys=False)
    keys = {
        name: ApiKey(key=f"sk-{name}", operator=name == "ops") for name in ("alice", "bob", "ops")
    }
    small = replace(config.models["small"], pairs=pairs)
    return replace(
        config,
        models={"small": small},
        topologies=(),
        listen=Listen(port=0),
        api_keys=keys,
        embedder=EmbedderSettings("none"),
        limits=Limits(max_agents_per_tenant=12, max_connections=256, write_timeout_s=5),
        batches=BatchesSettings(folder / "batches", max_tenant_bytes=2**26),
        scheduling=SchedulingSettings(queue=QueueSettings("least_attained", max_running=16)),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """What bob saw while alice did nothing, and `beside` her; what she saw; and the router's
    longest stall.
    """

    alone: "Asked"
    beside: "Asked"
    hers: "Asked"
    stall_s: float
    began_mb: float
    ended_mb: float


def row_of(way: str, steps: Sequence[Step]) -> "Row":
    """The figures of all rounds."""
    from shell_router.core.statistics import quantile

    alone = [one for step in steps for one in step.alone.took_s]
    beside = [one for step in steps for one in step.beside.took_s]
    ratios = [step.beside.median_s / step.alone.median_s for step in steps]
    return {
        "way": way,
        "alone_s": statistics.median(alone),
        "alone_p95_s": quantile(alone, 0.95),
        "median_s": statistics.median(beside) if beside else math.nan,
        "p95_s": quantile(beside, 0.95) if beside else math.nan,
        "ratio": statistics.median(ratios),
        "answers": len(beside),
        "refused": sum(step.beside.refused + step.alone.refused for step in steps),
        "hers": sum(len(step.hers.took_s) + step.hers.refused for step in steps),
        "hers_refused": sum(step.hers.refused for step in steps),
        "stall_ms": 1e3 * max(step.stall_s for step in steps),
        "router_mb": f"{steps[0].began_mb:.0f} to {steps[-1].ended_mb:.0f}",
    }


def resident_mb() -> float:
    """Return the resident memory of this process, which is the router's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def longest_stall(url: str) -> float:
    """What the router says of its event loop's last minute or two, in seconds."""
    import aiohttp

    name = "shell_router_event_loop_longest_stall_seconds "
    async with (
        aiohttp.ClientSession(headers=bearing("ops")) as session,
        session.get(f"{url}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


# --- the clients' processes


@dataclass
class Asked:
    """Seconds of each request that was answered 200, and how many were not."""

    took_s: list[float]
    refused: int = 0

    def add(self, good: bool, took_s: float = 0.0) -> None:
        """Count a request."""
        if good:
            self.took_s.append(took_s)
        else:
            self.refused += 1

    @property
    def median_s(self) -> float:
        return statistics.median(self.took_s) if self.took_s else math.inf


def bearing(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}"}


def run(way: str, url: str, seconds: float, per_s: float) -> Asked:
    """What `bob` does, or alice in one of WAYS, for that long."""
    return asyncio.run(_run(way, url, seconds, per_s))


async def _run(way: str, url: str, seconds: float, per_s: float) -> Asked:
    import aiohttp

    found = Asked([])
    tenant = "bob" if way == "bob" else "alice"
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        headers=bearing(tenant), connector=connector, timeout=limit
    ) as session:
        asking = Asking(session, url, found, per_s)
        if way == "bob":
            await asking.bob(seconds)
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await WAYS[way](asking)
    return found


def chat(content: str = "How many pens does Tom have now?", **more: Any) -> dict[str, Any]:
    return {
        "model": "small",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 32,
        **more,
    }


def agent(number: int, **more: Any) -> dict[str, Any]:
    body = {
        "program": f"p{time.monotonic_ns()}",
        "agent": f"a{number}",
        "model": "small",
        "prompt": "Hi",
    }
    return {**body, "max_tokens": 8, **more}


def form(*parts: tuple[str, bytes]) -> bytes:
    """A body of boundary B."""
    name = 'Content-Disposition: form-data; name="%s"\r\n\r\n'
    return (
        b"".join(b"--B\r\n%s%s\r\n" % ((name % one).encode(), content) for one, content in parts)
        + b"--B--\r\n"
    )


FORM = {"Content-Type": "multipart/form-data; boundary=B"}


def uploaded(content: bytes) -> bytes:
    """A form that uploads a file of requests."""
    return form(("purpose", b"batch"), ('file"; filename="x.jsonl', content))


@dataclass
class Asking:
    """One tenant's requests, of which `per_s` begin in a second at most; 0 is no limit."""

    session: "aiohttp.ClientSession"
    url: str
    found: Asked
    per_s: float
    next_s: float = 0.0

    async def one(self, path: str, body: object, **headers: str) -> Any:
        """Ask once, and count it; the answer, None where it is none."""
        import aiohttp

        await self.turn()
        began_s = time.perf_counter()
        data = body if isinstance(body, bytes) else json.dumps(body)
        sent = {"Content-Type": "application/json", **headers}
        try:
            async with self.session.post(self.url + path, data=data, headers=sent) as answer:
                text = await answer.read()
                good = answer.status == 200
        except aiohttp.ClientError:
            good = False
        self.found.add(good, time.perf_counter() - began_s)
        return json.loads(text) if good else None

    async def kept(self, content: bytes) -> Any:
        """The tenant's only file of its own, with this content."""
        async with self.session.get(f"{self.url}{FILES}?limit=100") as answer:
            for one in (await answer.json())["data"]:
                await (await self.session.delete(f"{self.url}{FILES}/{one['id']}")).read()
        return await self.one(FILES, uploaded(content), **FORM)

    async def turn(self) -> None:
        """Wait until another request may begin."""
        if self.per_s:
            now_s = time.monotonic()
            self.next_s = max(now_s, self.next_s) + 1 / self.per_s
            await asyncio.sleep(self.next_s - now_s)

    async def again(self, clients: int, ask: Callable[[int], Awaitable[object]]) -> None:
        """Each client asks again and again."""

        async def client(number: int) -> None:
            while True:
                await ask(number)

        await asyncio.gather(*map(client, range(clients)))

    async def same(self, path: str, body: object, **headers: str) -> None:
        """Four clients send this again and again."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.again(4, lambda _: self.one(path, data, **headers))

    async def bob(self, seconds: float) -> None:
        """One question after the other; the last one ends later."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await self.one(CHAT, chat())

    async def none(self) -> None:
        await asyncio.Event().wait()

    async def flood(self) -> None:
        self.per_s = 0
        await self.again(64, lambda _: self.one(CHAT, chat(max_tokens=64)))

    async def stop_ids(self) -> None:
        await self.same(CHAT, chat(stop_token_ids=[FAR], min_tokens=2))

    async def stops(self) -> None:
        await self.same(CHAT, chat(stop=[f"stop {number}" for number in range(100_000)]))

    async def long_texts(self) -> None:
        await self.same(CHAT, chat("word " * 1_500_000))

    async def crowds(self) -> None:
        await self.same(CHAT, b'{"odd":[%s]}' % b",".join([b"[]"] * 2_500_000))

    async def marks(self) -> None:
        messages = [{"role": "user", "content": MARKS}]
        await self.same(AGENT, agent(0, prompt=None, messages=messages))

    async def samples(self) -> None:
        await self.same(AGENT, agent(0, max_tokens=None, sampling_params={"n": 2}))

    async def deep_schemas(self) -> None:
        deep: object = {}
        for _ in range(200):
            deep = {"not": deep}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
        await self.same(CHAT, chat(response_format=schema))

    async def roles(self) -> None:
        await self.same(
            CHAT, {"model": "small", "messages": [{"role": "x" * 10**6, "content": "Hi"}]}
        )

    async def native_fields(self) -> None:
        await self.same(
            GENERATE, {"text": "x", "image_data": "http://10.0.0.1/", "rid": "0", "priority": 9}
        )

    async def hang_ups(self) -> None:
        """Native requests that are given up once they write."""
        body = {
            "input_ids": [5, 6, 7],
            "stream": True,
            "sampling_params": {"max_new_tokens": 256, "ignore_eos": True},
        }

        async def hang_up(_: int) -> None:
            await self.turn()
            async with self.session.post(self.url + GENERATE, json=body) as answer:
                await answer.content.readline()
                self.found.add(answer.status == 200)
                answer.close()

        await self.again(4, hang_up)

    async def waiting_agents(self) -> None:
        waits = {"prompt": [{"output_of": "never"}], "wait_s": 600}
        await self.again(1024, lambda number: self.one(AGENT, agent(number, **waits)))

    async def programs(self) -> None:
        waits = {"prompt": [{"output_of": "never"}], "wait_s": 0}
        await self.again(32, lambda number: self.one(AGENT, agent(number, **waits)))

    async def wide_graphs(self) -> None:
        agents = {f"a{number}": {"model": "small"} for number in range(9)}
        graph = {
            "name": "wide",
            "agents": {**agents, "root": {"model": "small", "precursors": list(agents)}},
        }
        body = {"messages": [{"role": "user", "content": "Hi"}], "topology": graph, "max_tokens": 8}
        await self.same(CHAT, body)

    async def wrong_keys(self) -> None:
        await self.same(CHAT, chat(), Authorization="Bearer \xff")

    async def forms(self) -> None:
        await self.same(FILES, form(*((f"f{number}", b"x") for number in range(60_000))), **FORM)

    async def uploads(self) -> None:
        await self.same(FILES, uploaded(b"x" * 2**20), **FORM)

    async def batches(self) -> None:
        """Each of 500 lines, cancelled in the end."""
        line = {"custom_id": "", "method": "POST", "url": CHAT, "body": chat(max_tokens=8)}
        lines = "\n".join(json.dumps({**line, "custom_id": str(number)}) for number in range(500))
        file = await self.kept(lines.encode())
        wanted = {
            "input_file_id": file and file["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        self.per_s, begun = min(self.per_s or 1, 1), list[Any]()

        async def begin(_: int) -> None:
            begun.append(await self.one(BATCHES, wanted))

        try:
            await self.again(1, begin)
        finally:  # or what is measured next runs next to them
            for batch in filter(None, begun):
                await (await self.session.post(f"{self.url}{BATCHES}/{batch['id']}/cancel")).read()

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
            await self.turn()
            async with self.session.post(
                self.url + CHAT, json=chat(stream=True, max_tokens=512)
            ) as answer:
                self.found.add(answer.status == 200)
                await asyncio.sleep(2)

        await self.again(32, unread)

    async def unread_files(self) -> None:
        """Downloads of which nothing is read."""
        file = await self.kept(b"x" * 2**24)

        async def unread(_: int) -> None:
            await self.turn()
            async with self.session.get(
                f"{self.url}{FILES}/{file and file['id']}/content"
            ) as answer:
                self.found.add(answer.status == 200)
                await asyncio.sleep(10)

        await self.again(32, unread)

    async def everything(self) -> None:
        """All other ways at once, each with requests of its own."""
        import aiohttp

        async def repeat(way: Callable[[Asking], Awaitable[None]]) -> None:
            while True:
                with contextlib.suppress(aiohttp.ClientError):  # the router cuts some off
                    await way(replace(self))
                await asyncio.sleep(0.1)

        ways = [way for way in WAYS.values() if way not in (Asking.none, Asking.everything)]
        await asyncio.gather(*map(repeat, ways))


WAYS: dict[str, Callable[[Asking], Awaitable[None]]] = {
    "none": Asking.none,
    "flood of chats": Asking.flood,
    "stop ids": Asking.stop_ids,
    "endless stops": Asking.stops,
    "long texts": Asking.long_texts,
    "crowds of values": Asking.crowds,
    "marks": Asking.marks,
    "samples": Asking.samples,
    "deep schemas": Asking.deep_schemas,
    "a megabyte for a role": Asking.roles,
    "native fields": Asking.native_fields,
    "hang-ups": Asking.hang_ups,
    "waiting agents": Asking.waiting_agents,
    "programs": Asking.programs,
    "wide graphs": Asking.wide_graphs,
    "wrong keys": Asking.wrong_keys,
    "form fields": Asking.forms,
    "uploads": Asking.uploads,
    "batches": Asking.batches,
    "idle connections": Asking.idle_connections,
    "unread streams": Asking.unread_streams,
    "unread files": Asking.unread_files,
    "everything at once": Asking.everything,
}

if __name__ == "__main__":
    sys.exit(main())
