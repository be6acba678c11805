"""Runs a workload through the router's own code, on simulated engines, in virtual time."""

import asyncio
import gc
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from agent_cache import MemoryAgentPromptCache
from shell_router.core.engine import (
    UNSTREAMED_INTERVAL,
    Finish,
    Generation,
    PrefillCost,
    Prefilled,
    ServedModel,
    Tokens,
)
from shell_router.engines.server_client import Monitor, take_slot
from shell_router.errors import ConfigError, ShellRouterError
from shell_router.lab.simulation.settings import SimulatedModel, Simulation, Workload
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.comparison import find_role
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.routing.dispatcher import Dispatcher, SchedulingSettings
from shell_router.routing.failures import Breaker
from shell_router.routing.placement import EngineReport, PlacementRequest
from shell_router.standins.simulated.costs import PairCosts, PrefillCosts, attended_pairs
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import (
    SimulatedEmbedder,
    SimulatedTokenizer,
    Written,
    filler,
    write_closing,
)
from shell_router.telemetry.trace import Trace
from shell_router.topology import Topology


class SimulatedFleet:
    """An `Engine` whose pair the router's dispatcher chooses by the loop's clock; none fails."""

    def __init__(
        self, alias: str, pairs: Sequence[SimulatedPair], scheduling: SchedulingSettings
    ) -> None:
        self.alias = alias
        self.pairs = pairs
        members = [(pair, f"pair-{index}", Breaker()) for index, pair in enumerate(pairs)]
        self.dispatcher = Dispatcher(members, scheduling, asyncio.get_running_loop().time)

    @asynccontextmanager
    async def poll_pairs(self) -> AsyncIterator[None]:
        """Have the dispatcher poll the pairs while the context is open, if there are several."""
        several = len(self.pairs) > 1
        async with Monitor(self.dispatcher, _report_metrics) if several else nullcontext():
            yield

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        slot = await take_slot(self.dispatcher, PlacementRequest.of(request, update=True))
        request.on_placed(slot.placement())
        try:
            return await slot.engine.prefill(request)
        finally:
            slot.close()

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        slot = await take_slot(self.dispatcher, PlacementRequest.of(request))
        request.on_placed(slot.placement())
        try:
            async with aclosing(slot.engine.generate(request)) as stream:
                async for item in stream:
                    if isinstance(item, Tokens):
                        slot.note_tokens(len(item.ids))
                    else:
                        slot.note_completion()
                    yield item
        finally:
            slot.close()


async def _report_metrics(pair: SimulatedPair) -> EngineReport:
    return pair.report_load()


RIGHT = "1"


class Outputs:
    """The agents' outputs, equal for equal seeds, questions and agents."""

    def __init__(self, workload: Workload, topology: Topology, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._drafts = {
            agent.id: workload.drafts.get(agent.id)
            or workload.drafts.get(find_role(topology, agent))
            for agent in topology.agents.values()
        }

    def write_question(self, question: str) -> str:
        """Return the text that the client asks."""
        draws = self._seed_draws(question)
        return filler(
            self._workload.question.at(draws.random(), draws.gauss()), f"{self._seed}/{question}"
        )

    def make_writer(self, model: str) -> Callable[[Generation], Written]:
        """Return the output of an agent; the router calls requests `question.number.agent`."""
        outputs = self._workload.outputs

        def write(request: Generation) -> Written:
            question, _, agent = request.rid.split(".", 2)
            length = outputs.get(agent) or outputs[model]
            draws = self._seed_draws(f"{question}/{agent}")
            tokens = length.at(draws.random(), draws.gauss())
            answer = RIGHT if draws.random() < self._workload.right else f"{agent}'s own"
            end = write_closing(question, answer)
            written = Written.after_filler(
                tokens, f"{self._seed}/{question}/{agent}", end, math.log(self._workload.confidence)
            )
            drafted = self._drafts[agent]
            if drafted:
                return replace(written, per_pass=drafted.at(draws.gauss()), width=drafted.width)
            return written

        return write

    def _seed_draws(self, name: str) -> Random:
        return Random(f"{self._seed}/{name}")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A request: its trace as JSON, and the error that it ended with, if any."""

    trace: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The use of an engine pair over a whole simulation of `elapsed_s`.

    Busy shares count the time that its work takes undivided; `batch` is the mean number of
    sequences while it decoded, `preemptions` how often one of them was preempted.
    """

    model: str
    prefill_busy: float
    decode_busy: float
    batch: float
    prefilled_tokens: int
    decoded_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """The runs of a simulation in order, and the use of each engine."""

    topology: Topology
    elapsed_s: float
    runs: tuple[SimulatedRun, ...]
    engines: tuple[EngineUse, ...]

    @property
    def answered(self) -> bool:
        """Whether any request was."""
        return any(not run.error for run in self.runs)


def simulate(
    simulation: Simulation, topology: Topology, costs: Mapping[str, PairCosts], seed: int = 0
) -> Simulated:
    """Simulate from the first request to the last answer; `costs` are those of the models' pairs.

    Equal arguments give equal results, to the last bit. Python's garbage collector rests meanwhile.
    Raises ConfigError if the topology or the workload names a model that the simulation lacks.
    """
    models = topology.models
    for name, available in (
        ("models", simulation.models),
        ("workload.outputs", simulation.workload.outputs),
    ):
        if missing := sorted(models - available.keys()):
            raise ConfigError(
                f"{topology.name!r} needs {', '.join(missing)}.", remedy=f"Add them to {name}."
            )
    gc.disable()  # thousands of requests at a time live long, and leave no cycles
    try:
        return run_virtual(_simulate_pairs(simulation, topology, costs, seed))
    finally:
        gc.enable()


def _probe_capacity(prefill: PrefillCosts) -> PrefillCost:
    """Return what the router would measure of the pair at its start. A fitted term may be 0."""
    short_s, long_s = (prefill.pass_s(tokens, attended_pairs(tokens, 0)) for tokens in (1, 256))
    return PrefillCost.through(1, short_s, 256, long_s)


async def _simulate_pairs(
    simulation: Simulation, topology: Topology, costs: Mapping[str, PairCosts], seed: int
) -> Simulated:
    loop = asyncio.get_running_loop()
    outputs = Outputs(simulation.workload, topology, seed)
    shared = None if simulation.cores is None else Processor(simulation.cores)
    fleets = {
        alias: SimulatedFleet(
            alias,
            _list_pairs(model, costs[alias], outputs.make_writer(alias), shared),
            simulation.scheduling,
        )
        for alias, model in simulation.models.items()
        if alias in simulation.workload.outputs
    }
    tokenizer = SimulatedTokenizer()
    length = simulation.context_length
    models = {
        alias: ServedModel(
            alias,
            fleet,
            tokenizer,
            length,
            prefill_cost=_probe_capacity(costs[alias].prefill),
            prefill_servers=len(fleet.pairs),
        )
        for alias, fleet in fleets.items()
    }
    settings = simulation.embedder
    embedder = SimulatedEmbedder(
        settings.same, settings.different, settings.request_s, settings.token_s, shared
    )
    async with AsyncExitStack() as stack:
        cache = await stack.enter_async_context(
            MemoryAgentPromptCache(clock=loop.time, ttl_s=math.inf)
        )
        for fleet in fleets.values():
            await stack.enter_async_context(fleet.poll_pairs())
        executor = Executor(models, cache, embedder, clock=loop.time)
        runs = await _ask_all(simulation, topology, outputs, executor, seed)
    elapsed_s = loop.time()
    uses = tuple(
        EngineUse(
            fleet.alias,
            pair.prefilling.busy_s / (elapsed_s or 1.0),
            pair.decoding.busy_s / (elapsed_s or 1.0),
            pair.decoding.batch_s / (pair.decoding.busy_s or 1.0),
            pair.prefilling.computed,
            pair.decoding.written,
            pair.decoding.preemptions,
        )
        for fleet in fleets.values()
        for pair in fleet.pairs
    )
    return Simulated(topology, elapsed_s, runs, uses)


def _list_pairs(
    model: SimulatedModel,
    costs: PairCosts,
    write: Callable[[Generation], Written],
    shared: Processor | None,
) -> list[SimulatedPair]:
    """Return the pairs of a model, or an engine of both kinds for each of their GPUs."""
    if model.engines == "disaggregated":
        return [
            SimulatedPair(
                costs, write, prefill_processor=shared, decode_processor=shared, host=shared
            )
            for _ in range(model.pairs)
        ]
    stays = replace(costs, transfer=replace(costs.transfer, token_s=0.0))
    first = model.engines == "data_parallel"
    gpus = [Processor() for _ in range(2 * model.pairs)]
    return [
        SimulatedPair(
            stays,
            write,
            prefill_processor=None if first else gpu,
            decode_processor=gpu,
            prefill_first=first,
            one_engine=True,
        )
        for gpu in gpus
    ]


async def _ask_all(
    simulation: Simulation, topology: Topology, outputs: Outputs, executor: Executor, seed: int
) -> tuple[SimulatedRun, ...]:
    """Ask all questions one by one, by several clients, or at random times, to the last answer."""
    workload = simulation.workload
    clock = asyncio.get_running_loop().time
    runs: dict[int, SimulatedRun] = {}
    pieces = {"stream_interval": topology.root.sampling.get("stream_interval", UNSTREAMED_INTERVAL)}

    async def ask(number: int) -> None:
        name = f"q{number}"
        trace = Trace(
            name,
            tenant="simulation",
            target=topology.name,
            root=topology.root.id,
            started_s=clock(),
            wall_s=clock(),
            precursors={agent.id: agent.precursors for agent in topology.agents.values()},
        )
        request = MoaRequest(
            name,
            "simulation",
            ({"role": "user", "content": outputs.write_question(name)},),
            sampling=pieces,
            seed=number,
            timeout_s=simulation.timeout_s,
        )
        error = ""
        try:
            await executor.run(topology, request, trace.add)
        except ShellRouterError as failed:
            error = str(failed)
        trace.close(clock(), "failed" if error else "finished", error)
        runs[number] = SimulatedRun(trace.as_json(), error)

    async def ask_each(numbers: Iterator[int]) -> None:
        for number in numbers:
            await ask(number)

    async with asyncio.TaskGroup() as group:
        if workload.arrivals == "poisson":
            draws = random.Random(f"{seed}/arrivals")
            for number in range(workload.requests):
                if number:
                    await asyncio.sleep(draws.expovariate(workload.per_s))
                group.create_task(ask(number))
        else:
            numbers = iter(range(workload.requests))
            for _ in range(1 if workload.arrivals == "one_by_one" else workload.clients):
                group.create_task(ask_each(numbers))
    return tuple(runs[number] for number in sorted(runs))
