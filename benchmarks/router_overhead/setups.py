"""Processes on cores of their own, what they spend, and routers in front of scripted engines."""

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import orjson

from benchmarks.neutral.environments import Program, UnavailableError, install
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.router_overhead.load import AnswerError, Connection, connect

SMALL_BODY = orjson.dumps(
    {"input_ids": list(range(1, 17)), "sampling_params": {"max_new_tokens": 4}}
)


STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Which core each part runs on. On two cores engine and client share one and the router has the
    other.
    """

    router: int
    engine: int
    client: int

    def __str__(self) -> str:
        if self.router == self.client:
            return "one core for everything, so the figures say little"
        if self.engine == self.client:
            return "router alone on one core, scripted engine and load client together on the other"
        return "router, scripted engine and load client on one core each"


def spread() -> Cores:
    """Cores as far as this process may use them."""
    cores = sorted(os.sched_getaffinity(0))
    return Cores(
        router=cores[0], engine=cores[min(1, len(cores) - 1)], client=cores[min(2, len(cores) - 1)]
    )


@dataclass(frozen=True, slots=True)
class Process:
    """A process started here. What it prints is in `log`."""

    child: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        return _cpu_s(self.child.pid)

    def children_cpu_s(self) -> float:
        """CPU seconds of the processes that it started and that run."""
        return sum(_cpu_s(pid) for pid in self.children())

    def children(self) -> list[int]:
        """The processes that it started and that run."""
        children = Path(f"/proc/{self.child.pid}/task").glob("*/children")
        return [int(pid) for file in children for pid in file.read_text(encoding="utf-8").split()]

    def require_running(self) -> None:
        """RuntimeError with its last words if it has ended."""
        if self.child.poll() is not None:
            raise RuntimeError(
                f"{self.log.stem} ended: {self.log.read_text(errors='replace')[-2000:]}"
            )


def _cpu_s(pid: int) -> float:
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # clock_getcpuclockid(3): in nanoseconds, where /proc counts ticks of 10 ms


@contextmanager
def running(name: str, command: Sequence[str], core: int | None, folder: Path) -> Iterator[Process]:
    """`command` on `core`, or on any, while the context is open; its output goes to a file in
    `folder`.
    """
    log = folder / f"{name}.log"
    cores = os.sched_getaffinity(0) if core is None else {core}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - no threads run here yet
        )
    try:
        yield Process(child, log)
    finally:
        _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@dataclass(frozen=True, slots=True)
class Spent:
    """Wall-clock and CPU seconds while something ran. `router_s` is None where there is none.

    `children_s` are those of the router's own child processes.
    """

    wall_s: float
    router_s: float | None
    engine_s: float
    client_s: float
    children_s: float


@dataclass(frozen=True, slots=True)
class Watched:
    """The processes whose CPU time is read."""

    router: Process | None
    engine: Process

    async def spent(self, load: Callable[[], Awaitable[None]]) -> Spent:
        """What was spent while `load` ran."""
        before, started_s = self._cpu_s(), time.monotonic()
        await load()
        wall_s, after = time.monotonic() - started_s, self._cpu_s()
        router_s, engine_s, client_s, children_s = (
            one - other for one, other in zip(after, before, strict=True)
        )
        return Spent(wall_s, router_s if self.router else None, engine_s, client_s, children_s)

    def _cpu_s(self) -> tuple[float, float, float, float]:
        router_s, children_s = (
            (self.router.cpu_s(), self.router.children_cpu_s()) if self.router else (0.0, 0.0)
        )
        return router_s, self.engine.cpu_s(), time.process_time(), children_s


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a set of times, in milliseconds."""

    p50_ms: float
    p99_ms: float


def percentiles(times_s: Sequence[float]) -> Percentiles:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    return Percentiles(1e3 * cuts[49], 1e3 * cuts[98])


Arrived = Callable[[bytes], None]
BOOTSTRAP_PORT = 8998


class Poster(Protocol):
    """One request at a time."""

    async def post(self, body: bytes, arrived: Arrived | None = None) -> bytes:
        """The answer to a native body, as it came; `arrived` gets each piece when it comes."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class Target(Protocol):
    """Something that answers /generate."""

    async def open(self) -> Poster:
        """A fresh connection to it."""
        ...


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """A router at `url`."""

    url: str
    quick_acks: bool = False

    async def open(self) -> "RouterPoster":
        """A fresh connection to it."""
        return RouterPoster(await connect(self.url, quick_acks=self.quick_acks))


class RouterPoster:
    """Posts to /generate of a router."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def post(self, body: bytes, arrived: Arrived | None = None) -> bytes:
        """The router's answer."""
        return await self._connection.post("/generate", body, arrived)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class DirectTarget:
    """The pair itself: the load client sends both legs, as a router would."""

    prefill_url: str
    decode_url: str
    bootstrap_port: int = BOOTSTRAP_PORT

    async def open(self) -> "DirectPoster":
        """A fresh connection to each server."""
        prefill, decode = await asyncio.gather(connect(self.prefill_url), connect(self.decode_url))
        return DirectPoster(prefill, decode, self.bootstrap_port)


class DirectPoster:
    """Posts to both servers of a pair and answers with decode's answer."""

    def __init__(self, prefill: Connection, decode: Connection, bootstrap_port: int) -> None:
        self._prefill = prefill
        self._decode = decode
        self._bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port}

    async def post(self, body: bytes, arrived: Arrived | None = None) -> bytes:
        """Decode's answer, once prefill's is there too."""
        fields = {**self._bootstrap, "bootstrap_room": random.getrandbits(62)}
        sent = body[:-1] + b"," + orjson.dumps(fields)[1:]
        prefill = asyncio.ensure_future(self._prefill.post("/generate", sent))
        answer = await self._decode.post("/generate", sent, arrived)
        await prefill
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._prefill.close()
        self._decode.close()


START_S = 60.0
TREE = """
name: {name}
tree: {{shape: [9, 3, 1], models: [small, medium, large]}}
defaults: {{sampling: {{temperature: 0, max_new_tokens: {new_tokens}}}}}
early_exit: off
prefill: {{incremental: {incremental}}}
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """One thing that is measured."""

    name: str
    target: Target
    watched: Watched


@dataclass(frozen=True, slots=True)
class Peer:
    """Another router, by its base URL."""

    url: str
    watched: Watched


@dataclass(frozen=True, slots=True)
class Setups:
    """Everything that runs. `ours` is a base URL, `peers` are others' routers by name."""

    all: tuple[Setup, ...]
    engine_urls: tuple[str, str]
    ours: str
    watched_ours: Watched
    peers: Mapping[str, Peer]

    async def script(self, **settings: float) -> None:
        """Change how the scripted engine behaves from now on."""
        for url in self.engine_urls:
            connection = await connect(url)
            await connection.post("/script", json.dumps(settings).encode())
            connection.close()


@asynccontextmanager
async def running_setups(cores: Cores, folder: Path, new_tokens: int) -> AsyncIterator[Setups]:
    """All processes, ready, while the context is open. Their files and logs go to `folder`."""
    programs = list_peers()
    prefill_port, decode_port, ours_port, *ports = free_ports(3 + 2 * len(programs))
    prefill, decode, ours = (
        f"http://127.0.0.1:{port}" for port in (prefill_port, decode_port, ours_port)
    )
    config = _write_deployment(folder, prefill, decode, new_tokens)
    commands = {
        "engine": _engine_command(prefill_port, decode_port),
        "shell-router": ours_command(config, ours_port),
    }
    urls = {}
    for name, program in programs.items():
        port, metrics_port = ports.pop(), ports.pop()
        urls[name] = f"http://127.0.0.1:{port}"
        commands[name] = peer_command(program, prefill, decode, port, metrics_port)
    async with AsyncExitStack() as stack:
        found = {
            name: stack.enter_context(
                running(name, command, cores.engine if name == "engine" else cores.router, folder)
            )
            for name, command in commands.items()
        }
        await answering(DirectTarget(prefill, decode), found["engine"])
        await answering(RouterTarget(ours), found["shell-router"])
        watched_ours = Watched(found["shell-router"], found["engine"])
        setups = [
            Setup("direct", DirectTarget(prefill, decode), Watched(None, found["engine"])),
            Setup("shell-router", RouterTarget(ours), watched_ours),
        ]
        peers = {}
        for name, url in urls.items():
            await answering(RouterTarget(url), found[name])
            peers[name] = Peer(url, Watched(found[name], found["engine"]))
            for how, quick_acks in ((" as shipped", False), (", quick ACKs", True)):
                target = RouterTarget(url, quick_acks=quick_acks)
                setups.append(Setup(name + how, target, peers[name].watched))
        yield Setups(tuple(setups), (prefill, decode), ours, watched_ours, peers)


def list_peers() -> dict[str, list[str]]:
    """The commands of others' routers by name; one that cannot be had is named on stderr."""
    peers = {"sglang-router": [sys.executable, "-m", "sglang_router.launch_router"]}
    try:
        smg = install(Program("smg"))
    except UnavailableError as error:
        print(f"not measured: smg: {error}", file=sys.stderr)
    else:
        peers[f"smg {smg.version}"] = [str(smg.executable), "launch"]
    return peers


@asynccontextmanager
async def running_engine(
    cores: Cores, folder: Path, *, token_s: float
) -> AsyncIterator[tuple[DirectTarget, Process]]:
    """A scripted pair alone, which writes a token every `token_s` seconds."""
    prefill_port, decode_port = free_ports(2)
    target = DirectTarget(f"http://127.0.0.1:{prefill_port}", f"http://127.0.0.1:{decode_port}")
    with running(
        "engine", _engine_command(prefill_port, decode_port, token_s=token_s), cores.engine, folder
    ) as engine:
        await answering(target, engine)
        yield target, engine


@asynccontextmanager
async def running_ours(
    cores: Cores, folder: Path, pair: DirectTarget, engine: Process, new_tokens: int, more: str
) -> AsyncIterator[Setup]:
    """This router in front of `pair`; `more` is added to its deployment's file."""
    (port,) = free_ports(1)
    name = f"shell-router-{port}"
    (folder / name).mkdir()
    config = _write_deployment(folder / name, pair.prefill_url, pair.decode_url, new_tokens, more)
    with running(name, ours_command(config, port), cores.router, folder) as router:
        target = RouterTarget(f"http://127.0.0.1:{port}")
        await answering(target, router)
        yield Setup(name, target, Watched(router, engine))


def _write_deployment(
    folder: Path, prefill: str, decode: str, new_tokens: int, more: str = ""
) -> Path:
    """A config with three models of one tokenizer, all served by the one pair, and two trees."""
    model = make_checkpoint(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)
    for name, incremental in (("plain", "false"), ("incremental", "true")):
        tree = TREE.format(name=name, new_tokens=new_tokens, incremental=incremental)
        (folder / f"{name}.yaml").write_text(tree, encoding="utf-8")
    pair = (
        f"{{path: {model}, context_length: 32768, pairs: [{{prefill: '{prefill}', decode: "
        f"'{decode}'}}]}}"
    )
    models = "".join(f"  {alias}: {pair}\n" for alias in ("small", "medium", "large"))
    config = folder / "router.yaml"
    text = (
        f"models:\n{models}topologies: [plain.yaml, incremental.yaml]\nembedder: {{model: "
        f"none}}\n{more}"
    )
    config.write_text(text, encoding="utf-8")
    return config


def _engine_command(prefill_port: int, decode_port: int, *, token_s: float = 0.0) -> list[str]:
    module = "benchmarks.scripted.server"
    ports = ["--prefill-port", str(prefill_port), "--decode-port", str(decode_port)]
    script = json.dumps({"stamped": True, "cache_tokens": 65536, "token_s": token_s})
    return [sys.executable, "-m", module, *ports, "--script", script]


def ours_command(config: Path, port: int) -> list[str]:
    """This router, serving the deployment `config`."""
    start = "import sys; from shell_router.cli import main; sys.exit(main())"
    return [sys.executable, "-c", start, "serve", "--config", str(config), "--port", str(port)]


def peer_command(
    program: Sequence[str],
    prefill: str,
    decode: str,
    port: int,
    metrics_port: int,
    *,
    bootstrap_port: int = BOOTSTRAP_PORT,
) -> list[str]:
    """As shipped, but for two waits of its start and its log of every request."""
    legs = ["--pd-disaggregation", "--prefill", prefill, str(bootstrap_port), "--decode", decode]
    legs += ["--policy", "round_robin"]
    at = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    quiet = [
        "--prometheus-port",
        str(metrics_port),
        "--log-level",
        "error",
        "--worker-startup-check-interval",
        "1",
    ]
    return [*program, *legs, *at, *quiet]


async def answering(target: Target, process: Process) -> None:
    """Return once a request is answered; raises RuntimeError with the process's last words."""
    async with asyncio.timeout(START_S):
        while not await _answers(target):
            process.require_running()
            await asyncio.sleep(0.1)


async def _answers(target: Target) -> bool:
    try:
        poster = await target.open()
    except OSError:
        return False
    try:
        await poster.post(SMALL_BODY)
    except AnswerError:
        return False
    finally:
        poster.close()
    return True
