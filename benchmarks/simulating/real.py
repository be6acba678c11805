"""Costs and answers measured on a running deployment, in turns, since a machine's speed drifts."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from overlapping.measure import drawn_question

from agent_cache import MemoryAgentPromptCache
from shell_router.config import Config
from shell_router.core.embedding import Embedder
from shell_router.core.model import Tokenizer
from shell_router.engines.simulated import PairCosts
from shell_router.execution import Executor, MoaRequest
from shell_router.simulation.profiling import Amount, Timings, embedding_costs
from shell_router.topology import Topology
from shell_router.wiring.embedding import running_embedder
from shell_router.wiring.profiled import ProfiledModel, profiled_models
from simulating.cpu import Usage
from simulating.settings import Trace, Workload, alone, trace_of

EMBEDDED_TOKENS = (16, 64, 256)
BESIDE_AT_ONCE = 3
Place = tuple[str, int]
"""A setting, and how many requests are asked at a time."""


@asynccontextmanager
async def running_deployment(config: Config) -> AsyncIterator["Deployment"]:
    """The models of `config` and an embedder, without a server. Raises ConfigError and EngineError."""
    async with (
        running_embedder(config.embedder) as embedding,
        MemoryAgentPromptCache(clock=time.monotonic) as cache,
        profiled_models(config, (), "benchmark", None, lambda _: None) as models,
    ):
        assert embedding.embedder is not None
        served = {alias: model.served for alias, model in models.items()}
        executor = Executor(served, cache, embedding.embedder, clock=time.monotonic)
        yield Deployment(models, embedding.embedder, executor)


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
                amount.within(model.served.context_length, model.limits),
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
    beside_s: list[float] = field(default_factory=list)
    rounds: int = -1

    async def round(self) -> None:
        """Profile every engine alone, and ask every setting."""
        for timings in self.timings.values():
            await timings.round()
        await self._embed()
        await self._beside()
        for name, topology in self.settings.items():
            for at_once in self.workload.at_once:
                await self._wave(name, topology, at_once)
        if self.rounds < 0:
            for measured in (self.traces, self.cores, self.embedded_s, self.beside_s):
                measured.clear()
        self.rounds += 1

    @property
    def costs(self) -> Mapping[str, PairCosts]:
        """Of every model's pair, from the rounds so far."""
        beside_s = statistics.mean(self.beside_s)
        found = {alias: timings.fitted().costs for alias, timings in self.timings.items()}
        return {alias: replace(one, decode=replace(one.decode, beside_s=beside_s)) for alias, one in found.items()}

    @property
    def embedding_s(self) -> tuple[float, float]:
        """Seconds per text and per token."""
        return embedding_costs({tokens: statistics.median(timed) for tokens, timed in self.embedded_s.items()})

    async def _wave(self, name: str, topology: Topology, at_once: int) -> None:
        """So many clients, each of which asks its next question when it has the answer to the one before."""
        before = Usage.now()

        async def client(number: int) -> list[Trace]:
            return [
                await self._ask(topology, f"{topology.name}-{at_once}-{self.rounds}-{number}-{turn}")
                for turn in range(self.workload.turns)
            ]

        found = await asyncio.gather(*map(client, range(at_once)))
        place = (name, at_once)
        self.traces.setdefault(place, []).extend(trace for traces in found for trace in traces)
        self.cores.setdefault(place, []).append((Usage.now() - before).cores_left)

    async def _beside(self) -> None:
        """What a token costs beside its engine: CPU time of all event loops, while every model writes a few outputs."""
        before = Usage.now()
        asked = [
            self._ask(alone(alias, self.workload.new_tokens), f"beside-{self.rounds}-{alias}-{number}")
            for alias in self.deployment.models
            for number in range(BESIDE_AT_ONCE)
        ]
        await asyncio.gather(*asked)
        self.beside_s.append((Usage.now() - before).loops_s / (len(asked) * self.workload.new_tokens))

    async def _ask(self, topology: Topology, name: str) -> Trace:
        trace = trace_of(topology, name, time.monotonic())
        asked = ({"role": "user", "content": self._drawn(self.workload.question_tokens)},)
        request = MoaRequest(name, "benchmark", asked, seed=sum(name.encode()))
        await self.deployment.executor.run(topology, request, trace.add)
        trace.ended(time.monotonic(), "finished")
        return trace.as_json()

    async def _embed(self) -> None:
        for tokens in EMBEDDED_TOKENS:
            text = await self._written(tokens)
            begun_s = time.perf_counter()
            await self.deployment.embedder.embed(text)
            self.embedded_s.setdefault(tokens, []).append(time.perf_counter() - begun_s)

    async def _written(self, tokens: int) -> str:
        """An output: what random weights write is more tokens to the embedder than a question is."""
        topology = alone(next(iter(self.deployment.models)), tokens)
        asked = ({"role": "user", "content": self._drawn(tokens)},)
        request = MoaRequest(f"write-{self.rounds}-{tokens}", "benchmark", asked)
        return (await self.deployment.executor.run(topology, request, lambda _: None)).text

    def _drawn(self, tokens: int) -> str:
        return drawn_question(random.Random(), tokens, self.deployment.tokenizer)
