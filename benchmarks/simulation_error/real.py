"""The same workload on real engines, with the share of the CPU that they have."""

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_cache import MemoryAgentPromptCache
from benchmarks.overlap.measure import drawn_question, fixed_length, four_settings, setting
from shell_router.api.live import make_single_agent
from shell_router.app.services import run_embedder
from shell_router.config import Config
from shell_router.core.engine import Tokenizer
from shell_router.core.predictors import Embedder
from shell_router.core.statistics import Timing, fit_costs
from shell_router.lab.simulation.profiling import Amount, ProfiledModel, Timings, start_models
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.standins.simulated.costs import PairCosts
from shell_router.telemetry import Trace as RunTrace
from shell_router.topology import Topology

SINGLE = "large"
Trace = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of every output and question, how many clients ask at a time, and how often each in a
    round.
    """

    new_tokens: int
    question_tokens: int
    at_once: Sequence[int]
    turns: int


def all_settings(models: Collection[str], new_tokens: int) -> Mapping[str, Topology]:
    """The settings by name; every agent writes `new_tokens`. Raises ConfigError where a model is
    missing.
    """
    lengths = dict.fromkeys(models, fixed_length(new_tokens))
    return {f"{SINGLE} alone": alone(SINGLE, new_tokens), **four_settings(lengths)}


def alone(alias: str, new_tokens: int) -> Topology:
    """One agent that answers the question itself."""
    return setting(
        make_single_agent(alias),
        {alias: fixed_length(new_tokens)},
        incremental=False,
        early_exit=False,
    )


def trace_of(topology: Topology, name: str, now_s: float) -> RunTrace:
    """The trace of a request that begins now."""
    return RunTrace(
        name,
        tenant="benchmark",
        target=topology.name,
        root=topology.root.id,
        started_s=now_s,
        wall_s=now_s,
        precursors={agent.id: agent.precursors for agent in topology.agents.values()},
    )


TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, interrupts of two kinds, and what the host took away.
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds. A process's main thread is its event loop, the others compute; `others` do not
    belong to us.
    """

    elapsed_s: float
    loops_s: float
    others_s: float

    @classmethod
    def now(cls) -> "Usage":
        """Since the machine's start."""
        busy_s = _machine_s()
        threads = {
            (pid, thread): _used_s(path)
            for pid in _own_processes()
            for thread, path in _threads(pid)
        }
        loops_s = sum(used_s for (pid, thread), used_s in threads.items() if pid == thread)
        return cls(time.monotonic(), loops_s, busy_s - sum(threads.values()))

    def __sub__(self, earlier: "Usage") -> "Usage":
        return Usage(
            self.elapsed_s - earlier.elapsed_s,
            self.loops_s - earlier.loops_s,
            self.others_s - earlier.others_s,
        )

    @property
    def cores_left(self) -> float:
        """Cores that others left us, in the mean."""
        return (os.cpu_count() or 1) - max(0.0, self.others_s) / self.elapsed_s


def _machine_s() -> float:
    columns = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    return sum(int(columns[at]) for at in BUSY) * TICK_S


def _threads(pid: int) -> Iterator[tuple[int, Path]]:
    for entry in Path(f"/proc/{pid}/task").iterdir():
        yield int(entry.name), entry


def _used_s(thread: Path) -> float:
    fields = _fields(thread)
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _own_processes() -> Iterator[int]:
    """This process and all that it started; none of them ends while the benchmark measures."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(_fields(entry)[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    frontier = {os.getpid()}
    while frontier:
        yield from frontier
        frontier = {pid for pid, parent in parents.items() if parent in frontier}


def _fields(place: Path) -> list[str]:
    """What follows the name in the line of a process or thread."""
    return (place / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


EMBEDDED_TOKENS = (16, 64, 256)
REQUESTS_PER_MODEL = 3
Place = tuple[str, int]
"""A setting, and how many requests are asked at a time."""


@asynccontextmanager
async def running_deployment(config: Config) -> AsyncIterator["Deployment"]:
    """The models of `config` and an embedder, without a server. Raises ConfigError and
    EngineError."""
    async with (
        run_embedder(config.embedder) as (embedder, _),
        MemoryAgentPromptCache(clock=time.monotonic) as cache,
        start_models(config, (), "benchmark", None, lambda _: None) as models,
    ):
        assert embedder is not None
        served = {alias: model.served for alias, model in models.items()}
        executor = Executor(served, cache, embedder, clock=time.monotonic)
        yield Deployment(models, embedder, executor)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs: its models, its embedder, and what asks them."""

    models: Mapping[str, ProfiledModel]
    embedder: Embedder
    executor: Executor

    @property
    def tokenizer(self) -> Tokenizer:
        """All models of the benchmark have the same."""
        return next(iter(self.models.values())).served.tokenizer

    def timings(self, amount: Amount) -> Mapping[str, Timings]:
        """A profile to be made of every model. Raises ConfigError."""
        return {
            alias: Timings(
                model.served.engine,
                amount.limit_to(model.served.context_length, model.limits),
                model.limits,
                model.vocabulary,
                random.Random(),
                time.perf_counter,
            )
            for alias, model in self.models.items()
        }


@dataclass(slots=True)
class Measured:
    """What is measured round by round; the first round warms up and is forgotten."""

    deployment: Deployment
    settings: Mapping[str, Topology]
    workload: Workload
    timings: Mapping[str, Timings]
    traces: dict[Place, list[Trace]] = field(default_factory=dict)
    cores: dict[Place, list[float]] = field(default_factory=dict)
    """What others left of the machine, in each round."""
    embedded_s: dict[int, list[float]] = field(default_factory=dict)
    host_s_per_token: list[float] = field(default_factory=list)
    rounds: int = -1

    async def round(self) -> None:
        """Profile every engine alone, and ask every setting."""
        for timings in self.timings.values():
            await timings.round()
        await self._embed()
        await self._host_costs()
        for name, topology in self.settings.items():
            for at_once in self.workload.at_once:
                await self._wave(name, topology, at_once)
        if self.rounds < 0:
            for measured in (self.traces, self.cores, self.embedded_s, self.host_s_per_token):
                measured.clear()
        self.rounds += 1

    @property
    def costs(self) -> Mapping[str, PairCosts]:
        """Of every model's pair, from the rounds so far."""
        host_s_per_token = statistics.mean(self.host_s_per_token)
        found = {alias: timings.fit().costs for alias, timings in self.timings.items()}
        return {
            alias: replace(one, decode=replace(one.decode, host_s_per_token=host_s_per_token))
            for alias, one in found.items()
        }

    @property
    def embedding_s(self) -> tuple[float, float]:
        """Seconds per text and per token."""
        timed = [
            Timing(tokens, (1, tokens), statistics.median(took_s))
            for tokens, took_s in self.embedded_s.items()
        ]
        text_s, token_s = fit_costs(timed)
        return text_s, token_s

    async def _wave(self, name: str, topology: Topology, at_once: int) -> None:
        """Clients, each of which asks its next question when it has the answer to the one
        before."""
        before = Usage.now()

        async def client(number: int) -> list[Trace]:
            return [
                await self._ask(
                    topology, f"{topology.name}-{at_once}-{self.rounds}-{number}-{turn}"
                )
                for turn in range(self.workload.turns)
            ]

        found = await asyncio.gather(*map(client, range(at_once)))
        place = (name, at_once)
        self.traces.setdefault(place, []).extend(trace for traces in found for trace in traces)
        self.cores.setdefault(place, []).append((Usage.now() - before).cores_left)

    async def _host_costs(self) -> None:
        """What a token costs outside its engine: CPU time of all event loops, while all models
        write.
        """
        before = Usage.now()
        asked = [
            self._ask(
                alone(alias, self.workload.new_tokens), f"host-{self.rounds}-{alias}-{number}"
            )
            for alias in self.deployment.models
            for number in range(REQUESTS_PER_MODEL)
        ]
        await asyncio.gather(*asked)
        self.host_s_per_token.append(
            (Usage.now() - before).loops_s / (len(asked) * self.workload.new_tokens)
        )

    async def _ask(self, topology: Topology, name: str) -> Trace:
        trace = trace_of(topology, name, time.monotonic())
        asked = ({"role": "user", "content": self._drawn(self.workload.question_tokens)},)
        request = MoaRequest(name, "benchmark", asked, seed=sum(name.encode()))
        await self.deployment.executor.run(topology, request, trace.add)
        trace.close(time.monotonic(), "finished")
        return trace.as_json()

    async def _embed(self) -> None:
        for tokens in EMBEDDED_TOKENS:
            text = await self._written(tokens)
            begun_s = time.perf_counter()
            await self.deployment.embedder.embed(text)
            self.embedded_s.setdefault(tokens, []).append(time.perf_counter() - begun_s)

    async def _written(self, tokens: int) -> str:
        """An output: what random weights write is more tokens to the embedder than a question
        is."""
        topology = alone(next(iter(self.deployment.models)), tokens)
        asked = ({"role": "user", "content": self._drawn(tokens)},)
        request = MoaRequest(f"write-{self.rounds}-{tokens}", "benchmark", asked)
        return (await self.deployment.executor.run(topology, request, lambda _: None)).text

    def _drawn(self, tokens: int) -> str:
        return drawn_question(random.Random(), tokens, self.deployment.tokenizer)
