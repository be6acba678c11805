"""Router processes that share a Redis and engines: they are killed, frozen and replaced, and no
client loses its answer or reads two.
"""

import asyncio
import contextlib
import io
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple, dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml

from shell_router.standins.embedded.settings import EmbeddedSettings
from tests.fakes.command import RunningCommand, running_command
from tests.fakes.counting_proxy import CountingProxy, counting_proxy
from tests.fakes.hostile_inputs import FAMILIES, Hostile
from tests.fakes.pairs_under_test import BreakablePair, embedded_servers, idle
from tests.fakes.redis_server import RedisServer, own_redis
from tests.fakes.shared_engines import SharedEngines

pytestmark = pytest.mark.slow

STREAMS = 64
TOKENS = 40
MODEL = Path(__file__).parents[2] / "models" / "small"
TREE = {
    "name": "tree",
    "tree": {"shape": [9, 3, 1], "models": ["small"]},
    "defaults": {"sampling": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}},
    "prefill": {"incremental": True, "chunk_tokens": 8},
}
QUESTION = "Tom has 24 pens. Tom buys 13 more pens. How many pens does Tom have now?"
LIMIT_S = 120.0


@dataclass(frozen=True)
class Router:
    """A process of `shell-router serve`."""

    url: str
    command: RunningCommand


@dataclass
class Seen:
    """What a client has read of a stream."""

    text: str = ""
    finished: set[str] = field(default_factory=set)
    is_done: bool = False
    error: str = ""

    def add(self, frame: bytes) -> None:
        data = frame.rpartition(b"data: ")[2].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        body: dict[str, Any] = orjson.loads(data)
        if "error" in body:
            self.error = body["error"]["code"]
            return
        event = body.get("agent_event", {})
        if event.get("type") == "agent.finished":
            self.finished.add(event["agent"])
        for choice in body["choices"]:
            self.text += choice["delta"].get("content", "")


TENANTS = ("ann", "bob", "cem")


def bearing(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}"}


@dataclass(frozen=True)
class Deployment:
    """One pair, which outlives its routers, and a Redis."""

    config: Path
    engine: CountingProxy
    client: aiohttp.ClientSession
    stack: AsyncExitStack

    async def router(self) -> Router:
        """A new process that serves."""
        arguments = ("serve", "--config", self.config, "--port", "0", "--log-level", "warning")
        command = await self.stack.enter_async_context(running_command(*arguments))
        line = await command.line_with("Serving on", limit_s=60)
        return Router(line.split()[-1], command)

    async def read(
        self, router: Router, key: str, seen: Seen, tenant: str = "ann", **fields: object
    ) -> Seen:
        """All of a stream, frame by frame into `seen`; AssertionError where it is refused, fails or
        breaks off.
        """
        body = {
            "model": "tree",
            "messages": [{"role": "user", "content": QUESTION}],
            "seed": 7,
            "stream": True,
            "include_agents": True,
            **fields,
        }
        headers = {"Idempotency-Key": key} if key else {}
        headers |= bearing(tenant)
        async with self.client.post(
            f"{router.url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
            while frame := await response.content.readuntil(b"\n\n"):
                if not frame.startswith(b":"):
                    seen.add(frame)
        assert seen.is_done and not seen.error, seen.error
        return seen

    async def is_ready(self, router: Router) -> bool:
        """What a load balancer asks."""
        try:
            async with self.client.get(f"{router.url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


redis = pytest.fixture(own_redis)


@pytest.fixture
async def served(
    engines: SharedEngines, redis: RedisServer, tmp_path: Path
) -> AsyncIterator[Deployment]:
    address = engines.pair(
        EmbeddedSettings(str(MODEL), dtype="float64", incremental_streaming_output=True)
    ).address
    async with (
        counting_proxy(address.decode_url) as engine,
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=LIMIT_S), headers=bearing("ann")
        ) as client,
        AsyncExitStack() as stack,
    ):
        pair = {
            "prefill": address.prefill_url,
            "decode": engine.url,
            "bootstrap_port": address.bootstrap_port,
        }
        settings = {
            "models": {"small": {"path": str(MODEL), "pairs": [pair]}},
            "topologies": ["tree.yaml"],
            "embedder": {"model": "none"},
            "limits": {"lame_duck_s": 10},
            "cache": {"backend": "redis", "url": redis.url, "lease_s": 1},
            "api_keys": {
                name: {"key": f"sk-{name}", "operator": name == "ann"} for name in TENANTS
            },
        }
        (tmp_path / "tree.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
        (tmp_path / "router.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        yield Deployment(tmp_path / "router.yaml", engine, client, stack)


@pytest.mark.parametrize("successor", ["restarted", "another"])
async def test_a_tree_survives_its_router_at_whichever_moment_it_dies(
    served: Deployment, successor: str
) -> None:
    engine, (router, other) = served.engine, [await served.router() for _ in range(2)]
    expected = await served.read(router, "", Seen())
    assert engine.passed == 13 * TOKENS
    moments = random.Random(successor).sample(range(1, engine.passed), 10)
    asked_again = 0
    for moment in moments:
        engine.stop_after(moment)
        before = Seen()
        reading = asyncio.create_task(served.read(router, f"at-{moment}", before))
        async with asyncio.timeout(LIMIT_S):
            await engine.stopped.wait()
        router.command.kill()
        with pytest.raises(aiohttp.ClientError):
            await reading
        engine.release()
        if successor == "restarted":
            router = await served.router()
        else:
            router, other = other, await served.router()
        after = await served.read(router, f"at-{moment}", Seen())
        assert after.text == expected.text and len(after.finished) == 13
        assert {one: engine.asked[one] for one in before.finished} == dict.fromkeys(
            before.finished, 1
        )
        assert len(engine.asked) == 13 and max(engine.asked.values()) <= 2
        asked_again += engine.asked.total() - 13
    assert asked_again, "no agent was running at any of the moments"


@dataclass
class Load:
    """Clients that ask again and again, each time the next of the routers that `serving` names.

    That is what a load balancer knows: it learns late that a router leaves.
    """

    serving: list[Router]
    begun: Counter[str] = field(default_factory=Counter)
    done: int = 0
    stopped: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    numbers: Iterator[int] = field(default_factory=count)

    @asynccontextmanager
    async def clients(
        self, number: int, ask: Callable[[Router], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """`number` of them, of whom none fails; on leaving, each ends the stream that it reads."""
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                group.create_task(self._client(ask))
            yield
            self.stopped = True

    async def more(self, router: Router, number: int) -> None:
        """Return once `number` more requests have begun at the router."""
        wanted = self.begun[router.url] + number
        async with asyncio.timeout(LIMIT_S), self.changed:
            await self.changed.wait_for(lambda: self.begun[router.url] >= wanted)

    async def _client(self, ask: Callable[[Router], Awaitable[object]]) -> None:
        while not self.stopped:
            router = self.serving[next(self.numbers) % len(self.serving)]
            async with self.changed:
                self.begun[router.url] += 1
                self.changed.notify_all()
            await ask(router)
            self.done += 1


async def test_a_rolling_restart_under_64_streams_fails_none(served: Deployment) -> None:
    first, second = [await served.router() for _ in range(2)]
    load = Load([first, second])
    limits: dict[str, Any] = {"model": "small", "max_tokens": 16, "ignore_eos": True}
    async with load.clients(STREAMS, lambda router: served.read(router, "", Seen(), **limits)):
        for leaving in (first, second):
            await load.more(leaving, STREAMS // 2)
            leaving.command.signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT_S):
                while await served.is_ready(leaving):
                    pass
            await load.more(leaving, 4)  # the load balancer has not asked yet
            load.serving.remove(leaving)
            code, said = await leaving.command.ended(limit_s=LIMIT_S)
            assert code == 0, said
            load.serving.append(await served.router())
        await load.more(load.serving[-1], 1)
    assert load.done >= STREAMS


async def test_clients_of_a_killed_router_go_on_at_the_other(served: Deployment) -> None:
    engine, (router, other) = served.engine, [await served.router() for _ in range(2)]
    expected, tokens = await served.read(router, "", Seen()), 13 * TOKENS
    clients, left = 4, set[str]()

    async def ask(place: int) -> str:
        key = f"client-{place}"
        try:
            seen = await served.read((router, other)[place % 2], key, Seen())
        except aiohttp.ClientError:
            left.add(key)
            seen = await served.read(other, key, Seen())
        return seen.text

    engine.stop_after(clients * tokens // 2)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(place)) for place in range(clients)]
        async with asyncio.timeout(LIMIT_S):
            await engine.stopped.wait()
        router.command.kill()
        engine.release()
    assert {one.result() for one in asking} == {expected.text}
    assert left == {"client-0", "client-2"}


async def test_a_frozen_router_writes_nothing_once_another_has_its_run(
    served: Deployment,
) -> None:
    engine, (frozen, other) = served.engine, [await served.router() for _ in range(2)]
    expected = await served.read(other, "", Seen())
    engine.stop_after(12 * TOKENS + TOKENS // 2)  # in the root's output
    before = Seen()
    reading = asyncio.create_task(served.read(frozen, "kept", before))
    async with asyncio.timeout(LIMIT_S):
        await engine.stopped.wait()
        while not before.text:  # noqa: ASYNC110 - the client is behind a socket
            await asyncio.sleep(0)
    frozen.command.signal(signal.SIGSTOP)
    engine.release()
    assert (await served.read(other, "kept", Seen())).text == expected.text
    had = before.text
    frozen.command.signal(signal.SIGCONT)
    with pytest.raises(AssertionError, match="response_cancelled"):
        await reading
    assert before.text == had != expected.text
    assert (await served.read(frozen, "kept", Seen())).text == expected.text


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": [1, 2]}},
            "required": ["at"],
        },
    },
}


@pytest.mark.parametrize("killed_after", [1, 3])
async def test_a_loop_of_tool_calls_runs_nothing_again_when_a_router_is_killed(
    served: Deployment, killed_after: int
) -> None:
    leaving, staying = [await served.router() for _ in range(2)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    kept = []
    for step in range(5):
        if step == killed_after:
            leaving.command.kill()
        router = leaving if step < killed_after and step % 2 == 0 else staying
        body = {"model": "tree", "messages": messages, "tools": [LOOK], "max_tokens": 200}
        body["tool_choice"] = "auto" if step == 4 else "required"
        async with served.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            kept.append(response.headers.get("x-fan-out"))
        message = answer["choices"][0]["message"]
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "5 pens"}
            for call in message.get("tool_calls", ())
        ]
    assert messages[-1]["content"], "the loop ends with an answer"
    assert kept == [None, *4 * ["kept"]]
    assert served.engine.asked.pop("root") == 5
    assert served.engine.asked.total() == 12 and max(served.engine.asked.values()) == 1


async def test_redis_killed_and_back_fails_no_request(
    served: Deployment, redis: RedisServer
) -> None:
    router, engine = await served.router(), served.engine
    expected, tokens = await served.read(router, "", Seen()), 13 * TOKENS
    for change in (redis.kill, redis.start):
        engine.stop_after(tokens)
        async with asyncio.TaskGroup() as group:
            keys = ("", f"{change.__name__}-here")
            asking = [group.create_task(served.read(router, key, Seen())) for key in keys]
            async with asyncio.timeout(LIMIT_S):
                await engine.stopped.wait()
            change()
            engine.release()
        assert {one.result().text for one in asking} == {expected.text}
    assert (await served.read(router, "afterwards", Seen())).text == expected.text


SOAK_S = float(os.environ.get("SHELL_ROUTER_SOAK_S", "24"))
"""Of real time with faults; an hour at night."""
HOSTILE = [one for family in FAMILIES.values() for one in family]
CLIENTS = 8


@dataclass(frozen=True)
class Held:
    """What a router's process holds."""

    files: int
    threads: int
    megabytes: int
    tasks: int

    @classmethod
    def by(cls, pid: int, metrics: str) -> "Held":
        """What the system and the router's own metrics say."""
        folder = Path("/proc") / str(pid)
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        megabytes = int(status["VmRSS"].split()[0]) // 1024
        tasks = float(metrics.partition("\nshell_router_asyncio_tasks ")[2].split()[0])
        return cls(
            len(list((folder / "fd").iterdir())), int(status["Threads"]), megabytes, int(tasks)
        )

    def is_within(self, most: "Held") -> bool:
        return all(one <= limit for one, limit in zip(astuple(self), astuple(most), strict=True))


async def be_hostile(served: Deployment, router: Router, one: Hostile) -> None:
    """Send what no server should be sent; it is refused, or answered."""
    url, headers = router.url + one.path, {"Content-Type": "application/json", **one.headers}
    body = None if one.body is None else io.BytesIO(one.body)
    with contextlib.suppress(
        aiohttp.ClientConnectionError
    ):  # the router may hang up on a body that it refuses
        async with served.client.request(one.method, url, data=body, headers=headers) as response:
            await response.read()
            assert response.status < 500 or response.status == 501, (
                one.path,
                (one.body or b"")[:200],
            )


async def warm_up(served: Deployment, router: Router, draws: random.Random, seconds: float) -> None:
    """Let the router take as much memory as its largest requests need."""
    hostile = iter(HOSTILE)

    async def client() -> None:
        for one in hostile:
            await be_hostile(served, router, one)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    await soaked(served, router, draws, seconds)


async def soaked(
    served: Deployment, router: Router, draws: random.Random, seconds: float
) -> Counter[str]:
    """Clients ask chats and trees, leave early, and send what no server should be sent; what they
    asked.
    """
    asked, end_s = Counter[str](), asyncio.get_running_loop().time() + seconds

    async def leave_early() -> None:
        body = {
            "model": "tree",
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True,
        }
        async with served.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
            for _ in range(draws.randrange(20)):
                await response.content.readuntil(b"\n\n")
            response.close()

    async def client(place: int) -> None:
        while asyncio.get_running_loop().time() < end_s:
            what = draws.choices(("chat", "tree", "leave", "hostile"), (10, 1, 2, 20))[0]
            asked[what] += 1
            if what == "leave":
                await leave_early()
            elif what == "hostile":
                await be_hostile(served, router, draws.choice(HOSTILE))
            else:
                key = f"{place}-{asked.total()}-{seconds}-{end_s}" if what == "tree" else ""
                limits: dict[str, Any] = (
                    {}
                    if what == "tree"
                    else {"model": "small", "max_tokens": 16, "seed": draws.randrange(99)}
                )
                await served.read(router, key, Seen(), **limits)

    async with asyncio.TaskGroup() as group:
        for place in range(CLIENTS):
            group.create_task(client(place))
    return asked


async def test_a_router_that_is_asked_much_and_badly_for_long_holds_no_more_afterwards(
    served: Deployment, redis: RedisServer
) -> None:
    router, draws = await served.router(), random.Random(24)
    await warm_up(served, router, draws, SOAK_S / 3)
    before = await at_rest(served, router)
    for change in (redis.kill, redis.start):
        asked = await soaked(served, router, draws, SOAK_S / 3)
        assert asked.keys() == {"chat", "tree", "leave", "hostile"}
        change()
    most = Held(before.files + 8, before.threads + 2, before.megabytes + 32, before.tasks + 8)
    await at_rest(served, router, most)


async def at_rest(served: Deployment, router: Router, most: Held | None = None) -> Held:
    """Once nothing runs and at most this is held. Idle connections close after a while; what leaks
    stays.
    """
    held = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                async with served.client.get(f"{router.url}/metrics") as response:
                    metrics = await response.text()
                if "\nshell_router_running_requests 0.0\n" in metrics:
                    held = Held.by(router.command.pid, metrics)
                    if most is None or held.is_within(most):
                        return held
    except TimeoutError:
        pytest.fail(f"the router holds {held}, at most {most} was expected")


QUESTIONS = tuple(
    f"{name} has {number} pens. {name} buys 13 more pens. How many pens does {name} have now?"
    for name, number in (("Tom", 24), ("Ann", 7), ("Sam", 31))
)
FAULT_S = min(10.0, SOAK_S / 12)
"""From the beginning of a fault to the next one."""
Fault = Callable[[], Awaitable[None]]


@dataclass
class Faults:
    """What breaks under two routers and a pair of their own.

    The first router is frozen, but never ended, so that what it holds can be compared.
    """

    served: Deployment
    redis: RedisServer
    pair: BreakablePair
    routers: list[Router]
    broken: Counter[str] = field(default_factory=Counter)

    async def go_on_for(self, seconds: float) -> None:
        """All kinds of faults, one every `FAULT_S`; the last ones are over.

        Routers, engines and Redis break in turn, so that a slow start delays no other's fault.
        """
        parts = (
            (self.kill_router, self.freeze_router, self.stop_router),
            (self.kill_engine, self.stall_engine),
            (self.lose_redis,),
        )
        async with asyncio.TaskGroup() as group:
            for place, faults in enumerate(parts):
                at_s = [
                    start * FAULT_S for start in range(place, int(seconds / FAULT_S), len(parts))
                ]
                group.create_task(self._break(faults, at_s))

    async def _break(self, faults: Sequence[Fault], at_s: Sequence[float]) -> None:
        """Each fault in turn, at these seconds from now on, or as soon as the last one is over."""
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        for start_s, fault in zip(at_s, cycle(faults), strict=False):
            await asyncio.sleep(begin_s + start_s - clock())
            await fault()
            self.broken[fault.__name__] += 1

    async def kill_router(self) -> None:
        self.routers[1].command.kill()
        await self._replace_router()

    async def stop_router(self) -> None:
        self.routers[1].command.signal(signal.SIGTERM)
        code, said = await self.routers[1].command.ended(limit_s=LIMIT_S)
        assert code == 0, said
        await self._replace_router()

    async def _replace_router(self) -> None:
        """Start one again, as a supervisor does, if an engine breaks while it asks that."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(AssertionError):
                    self.routers[1] = await self.served.router()
                    return

    async def freeze_router(self) -> None:
        """For longer than its lease of a second."""
        frozen = self.routers[self.broken["freeze_router"] % 2]
        frozen.command.signal(signal.SIGSTOP)
        await asyncio.sleep(3)
        frozen.command.signal(signal.SIGCONT)

    async def kill_engine(self) -> None:
        role = ("prefill", "decode")[self.broken["kill_engine"] % 2]
        self.pair.kill(role)
        await self.pair.start(role)

    async def stall_engine(self) -> None:
        with self.pair.paused("decode"):
            await asyncio.sleep(FAULT_S / 2)

    async def lose_redis(self) -> None:
        self.redis.kill()
        await asyncio.sleep(FAULT_S / 2)
        self.redis.start()


@dataclass
class Readers:
    """Clients of three tenants, who ask again, at the next router, until they have an answer."""

    served: Deployment
    routers: list[Router]
    expected: dict[tuple[str, str], str]
    draws: random.Random
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken_off: int = 0

    async def go_on_during(self, other: Awaitable[None]) -> None:
        """All clients, until the other has ended; each ends with an answer."""
        async with asyncio.TaskGroup() as group:
            watched = asyncio.ensure_future(other)
            for place in range(CLIENTS):
                group.create_task(self._client(place, watched))
            await watched

    async def _client(self, place: int, other: asyncio.Future[None]) -> None:
        tenant = TENANTS[place % len(TENANTS)]
        while not other.done():
            model, question = self.draws.choice(tuple(self.expected))
            key = f"{place}-{self.answers.total()}-{self.draws.random()}"
            async with asyncio.timeout(LIMIT_S):
                await self._answer(place, key, tenant, model, question)
            self.answers[tenant, model] += 1

    async def _answer(self, place: int, key: str, tenant: str, model: str, question: str) -> None:
        expected = self.expected[model, question]
        fields = fields_of(model, question)
        for turn in count(place):
            seen = Seen()
            with contextlib.suppress(
                AssertionError, aiohttp.ClientError, asyncio.IncompleteReadError
            ):
                await self.served.read(self.routers[turn % 2], key, seen, tenant, **fields)
            assert expected.startswith(seen.text), "what a client has seen is never contradicted"
            if seen.is_done and not seen.error:
                assert seen.text == expected
                return
            self.broken_off += 1
            await asyncio.sleep(0.1)  # as clients wait before they ask again


def fields_of(model: str, question: str) -> dict[str, Any]:
    limits: dict[str, Any] = (
        {} if model == "tree" else {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    )
    return {"model": model, "messages": [{"role": "user", "content": question}], **limits}


async def test_faults_for_long_change_no_text_and_leave_nothing(
    served: Deployment, redis: RedisServer, tmp_path: Path
) -> None:
    options = ("--dtype", "float64", "--incremental-streaming-output")
    with embedded_servers(MODEL, tmp_path, *options) as servers:
        pair = BreakablePair(servers)
        settings = yaml.safe_load(served.config.read_text(encoding="utf-8"))
        settings["models"]["small"]["pairs"].append(
            {
                "prefill": pair.url("prefill"),
                "decode": pair.url("decode"),
                "bootstrap_port": pair.address.bootstrap_port,
            }
        )
        served.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        routers = [await served.router() for _ in range(2)]
        expected = {
            (model, question): (
                await served.read(routers[0], "", Seen(), **fields_of(model, question))
            ).text
            for model in ("small", "tree")
            for question in QUESTIONS
        }
        readers = Readers(served, routers, expected, random.Random(40))
        await readers.go_on_during(asyncio.sleep(SOAK_S / 6))
        before = await at_rest(served, routers[0])
        faults = Faults(served, redis, pair, routers)
        await readers.go_on_during(faults.go_on_for(SOAK_S))
        assert len(readers.answers) == 6 and readers.broken_off
        most = Held(before.files + 8, before.threads + 2, before.megabytes + 32, before.tasks + 8)
        after = await at_rest(served, routers[0], most)
        await idle(served.client, pair.url("prefill"), pair.url("decode"), limit_s=LIMIT_S)
        print(f"{readers.answers} {readers.broken_off=} {faults.broken} {before} {after}")
