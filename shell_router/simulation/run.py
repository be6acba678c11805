"""Runs a workload through the unchanged executor, on simulated engines, in virtual time."""

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from agent_cache import MemoryAgentPromptCache
from shell_router.core.garbage import uncollected
from shell_router.core.generation import UNSEEN_TOKENS, Generation
from shell_router.core.model import ServedModel
from shell_router.engines.simulated import (
    PairCosts,
    Processor,
    SimulatedEmbedder,
    SimulatedPair,
    SimulatedTokenizer,
    Written,
)
from shell_router.errors import ConfigError, ShellRouterError
from shell_router.execution.executor import Executor
from shell_router.execution.requests import MoaRequest
from shell_router.simulation.fleet import Fleet
from shell_router.simulation.outputs import Outputs
from shell_router.simulation.settings import SimulatedModel, Simulation, Workload
from shell_router.simulation.virtual_time import run_virtual
from shell_router.telemetry.trace import Trace
from shell_router.topology import Topology


@dataclass(frozen=True, slots=True)
class Run:
    """One request: its trace as JSON, and the error that it ended with, if any."""

    trace: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """One engine pair over a whole simulation of `elapsed_s`.

    Busy shares count the time that its work takes undivided; `batch` is the mean number of sequences while it decoded,
    `taken_back` how often one of them lost its room to others.
    """

    model: str
    prefill_busy: float
    decode_busy: float
    batch: float
    prefilled_tokens: int
    decoded_tokens: int
    taken_back: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of a simulation: a run per request, in the order of asking, and what the engines did meanwhile."""

    topology: Topology
    elapsed_s: float
    runs: tuple[Run, ...]
    engines: tuple[EngineUse, ...]

    @property
    def answered(self) -> bool:
        """Whether any request was."""
        return any(not run.error for run in self.runs)


def simulate(simulation: Simulation, topology: Topology, costs: Mapping[str, PairCosts], seed: int = 0) -> Simulated:
    """Simulate it from the first request to the last answer. `costs` are those of the models' pairs.

    Equal arguments give equal results, to the last bit. Meanwhile Python's garbage collector rests. Raises ConfigError
    where the topology or the workload names a model that the simulation lacks.
    """
    _require_models(simulation, topology)
    with uncollected():
        return run_virtual(_simulated(simulation, topology, costs, seed))


def _require_models(simulation: Simulation, topology: Topology) -> None:
    wanted = {agent.model for agent in topology.agents.values()}
    for name, known in (("models", simulation.models), ("workload.outputs", simulation.workload.outputs)):
        if missing := sorted(wanted - known.keys()):
            raise ConfigError(f"{topology.name!r} needs {', '.join(missing)}.", remedy=f"Add them to {name}.")


async def _simulated(
    simulation: Simulation, topology: Topology, costs: Mapping[str, PairCosts], seed: int
) -> Simulated:
    loop = asyncio.get_running_loop()
    outputs = Outputs(simulation.workload, seed)
    shared = None if simulation.cores is None else Processor(simulation.cores)
    fleets = {
        alias: Fleet(alias, _pairs(model, costs[alias], outputs.by(alias), shared), simulation.scheduling)
        for alias, model in simulation.models.items()
        if alias in simulation.workload.outputs
    }
    tokenizer, length = SimulatedTokenizer(), simulation.context_length
    models = {alias: ServedModel(alias, fleet, tokenizer, length) for alias, fleet in fleets.items()}
    settings = simulation.embedder
    embedder = SimulatedEmbedder(settings.same, settings.different, settings.request_s, settings.token_s, shared)
    async with AsyncExitStack() as stack:
        cache = await stack.enter_async_context(MemoryAgentPromptCache(clock=loop.time, ttl_s=math.inf))
        for fleet in fleets.values():
            await stack.enter_async_context(fleet.followed())
        client = _Client(simulation, topology, outputs, Executor(models, cache, embedder, clock=loop.time), seed)
        await client.ask_all()
    elapsed_s = loop.time()
    uses = tuple(use for fleet in fleets.values() for use in _uses(fleet, elapsed_s))
    return Simulated(topology, elapsed_s, tuple(client.runs[number] for number in sorted(client.runs)), uses)


def _pairs(
    model: SimulatedModel, costs: PairCosts, write: Callable[[Generation], Written], shared: Processor | None
) -> list[SimulatedPair]:
    """The pairs of a model, or an engine of both kinds for each of their GPUs."""
    if model.engines == "disaggregated":
        return [
            SimulatedPair(costs, write, prefill_processor=shared, decode_processor=shared, beside=shared)
            for _ in range(model.pairs)
        ]
    stays = replace(costs, transfer=replace(costs.transfer, token_s=0.0))
    engines = []
    for _ in range(2 * model.pairs):
        gpu = Processor()
        first = model.engines == "data_parallel"
        prefills = None if first else gpu
        engines.append(
            SimulatedPair(
                stays, write, prefill_processor=prefills, decode_processor=gpu, prefill_first=first, one_engine=True
            )
        )
    return engines


def _uses(fleet: Fleet, elapsed_s: float) -> list[EngineUse]:
    return [
        EngineUse(
            fleet.alias,
            pair.prefilling.busy_s / elapsed_s if elapsed_s else 0.0,
            pair.decoding.busy_s / elapsed_s if elapsed_s else 0.0,
            pair.decoding.batch_s / pair.decoding.busy_s if pair.decoding.busy_s else 0.0,
            pair.prefilling.computed,
            pair.decoding.written,
            pair.decoding.taken_back,
        )
        for pair in fleet.pairs
    ]


@dataclass(slots=True)
class _Client:
    """Asks the workload's questions as they arrive."""

    simulation: Simulation
    topology: Topology
    outputs: Outputs
    executor: Executor
    seed: int
    runs: dict[int, Run] = field(default_factory=dict)

    async def ask_all(self) -> None:
        workload = self.simulation.workload
        if workload.arrivals in ("one_by_one", "closed"):
            await self._closed(1 if workload.arrivals == "one_by_one" else workload.clients)
        else:
            await self._open(workload)

    async def _closed(self, clients: int) -> None:
        numbers = iter(range(self.simulation.workload.requests))

        async def client() -> None:
            for number in numbers:
                await self._ask(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    async def _open(self, workload: Workload) -> None:
        size = workload.burst if workload.arrivals == "bursty" else 1
        draws = random.Random(f"{self.seed}/arrivals")
        async with asyncio.TaskGroup() as group:
            for first in range(0, workload.requests, size):
                if first:
                    await asyncio.sleep(draws.expovariate(workload.per_s / size))
                for number in range(first, min(first + size, workload.requests)):
                    group.create_task(self._ask(number))

    async def _ask(self, number: int) -> None:
        loop, topology, name = asyncio.get_running_loop(), self.topology, f"q{number}"
        trace = Trace(
            name,
            tenant="simulation",
            target=topology.name,
            root=topology.root.id,
            started_s=loop.time(),
            wall_s=loop.time(),
            precursors={agent.id: agent.precursors for agent in topology.agents.values()},
        )
        asked = ({"role": "user", "content": self.outputs.question(name)},)
        pieces = {"stream_interval": topology.root.sampling.get("stream_interval", UNSEEN_TOKENS)}
        timeout_s = self.simulation.timeout_s
        request = MoaRequest(name, "simulation", asked, sampling=pieces, seed=number, timeout_s=timeout_s)
        error = ""
        try:
            await self.executor.run(topology, request, trace.add)
        except ShellRouterError as failed:
            error = str(failed)
        trace.ended(loop.time(), "failed" if error else "finished", error)
        self.runs[number] = Run(trace.as_json(), error)
