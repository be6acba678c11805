"""Runs a workload through the router's own code, on simulated engines, in virtual time."""

import asyncio
import gc
import math
import random
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from agent_cache import MemoryAgentPromptCache
from shell_router.core.budget import FREE
from shell_router.core.engine import (
    UNSTREAMED_INTERVAL,
    Finish,
    Generation,
    PrefillCost,
    Prefilled,
    ServedModel,
    Session,
    Tokens,
)
from shell_router.core.exact_json import Values, parse_json
from shell_router.engines.server_client import Monitor, take_slot
from shell_router.errors import ConfigError, ShellRouterError
from shell_router.lab.simulation.replay import Replayed
from shell_router.lab.simulation.settings import (
    Length,
    SimulatedModel,
    Simulation,
    Step,
    Workload,
)
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.calls import ToolOffer
from shell_router.moa.comparison import find_role
from shell_router.moa.executor import Executor
from shell_router.moa.requests import AgentUsage, Answer, MoaRequest
from shell_router.routing.dispatcher import Dispatcher, SchedulingSettings
from shell_router.routing.failures import Breaker
from shell_router.routing.placement import EngineReport, PlacementRequest
from shell_router.standins.simulated.costs import PairCosts, PrefillCosts, attended_pairs
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import (
    CALL,
    CALL_MARK,
    TOOL,
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

    def __init__(
        self, workload: Workload, topology: Topology, seed: int, graphs: Sequence[Replayed]
    ) -> None:
        self._workload = workload
        self._seed = seed
        self._root = topology.root.id
        self._root_lengths: dict[str, tuple[int, str]] = {}
        self._recorded = {f"q{number}": graph.output_tokens for number, graph in enumerate(graphs)}
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

    def write_result(self, request: str, step: Step) -> str:
        """Return what the tool gives for the call that answered `request`."""
        return filler(step.result_tokens, f"{self._seed}/{request}/result")

    def plan_answer(self, request: str, step: Step | None, answer_tokens: int | None) -> None:
        """Have the root answer `request` with the step's call, or with these tokens if given."""
        if step is not None:
            self._root_lengths[request] = (step.call_tokens, CALL)
        elif answer_tokens is not None:
            self._root_lengths[request] = (answer_tokens, "")

    def make_writer(self, model: str) -> Callable[[Generation], Written]:
        """Return the output of an agent; the router calls requests `question.number.agent`."""

        def write(request: Generation) -> Written:
            question, _, agent = request.rid.split(".", 2)
            length = self._find_length(question, agent, model)
            draws = self._seed_draws(f"{question}/{agent}")
            tokens = length.at(draws.random(), draws.gauss())
            answer = RIGHT if draws.random() < self._workload.right else f"{agent}'s own"
            end = write_closing(question, answer)
            if agent == self._root and question in self._root_lengths:
                tokens, call = self._root_lengths.pop(question)
                end = call or end
            written = Written.after_filler(
                tokens, f"{self._seed}/{question}/{agent}", end, math.log(self._workload.confidence)
            )
            if drafted := self._drafts.get(agent):
                return replace(written, per_pass=drafted.at(draws.gauss()), width=drafted.width)
            return written

        return write

    def _find_length(self, question: str, agent: str, model: str) -> Length:
        if recorded := self._recorded.get(question):
            return Length(tokens=recorded[agent])
        outputs = self._workload.outputs
        return outputs.get(agent) or outputs[model]

    def _seed_draws(self, name: str) -> Random:
        return Random(f"{self._seed}/{name}")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A request: its trace as JSON, and the error that it ended with, if any.

    Attributes:
        program: The number of the question that it belongs to.
        waited_s: Seconds from the end of the program's request before it.
        usage: What each agent took, as the router counts it.
    """

    trace: Mapping[str, Any]
    error: str = ""
    program: int = 0
    waited_s: float = 0.0
    usage: Mapping[str, AgentUsage] = field(default_factory=dict)


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
    def answered(self) -> list[SimulatedRun]:
        """The requests of all questions of which no request failed."""
        failed = {run.program for run in self.runs if run.error}
        return [run for run in self.runs if run.program not in failed]

    @property
    def error(self) -> str:
        """The first error, empty without one."""
        return next((run.error for run in self.runs if run.error), "")


def replay(
    simulation: Simulation,
    graphs: Sequence[Replayed],
    costs: Mapping[str, PairCosts],
    seed: int = 0,
) -> dict[str, Simulated]:
    """Simulate recorded graphs on the same engines, in place of the workload.

    Returns:
        The runs of equal graphs, by the name of the first one.
    """
    lengths = dict.fromkeys(simulation.models, Length(tokens=1))  # calls have their own
    workload = replace(simulation.workload, outputs=lengths, programs=())
    simulation = replace(simulation, workload=workload)
    done = simulate(simulation, graphs[0].topology, costs, seed, graphs)
    simulated = {}
    for numbers in _group_alike(graphs):
        topology = graphs[numbers[0]].topology
        runs = tuple(run for run in done.runs if run.program in numbers)
        simulated[topology.name] = replace(done, topology=topology, runs=runs)
    return simulated


def _group_alike(graphs: Sequence[Replayed]) -> list[list[int]]:
    """Return the numbers of equal graphs together."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, graph in enumerate(graphs):
        agents = graph.topology.agents.values()
        alike[tuple((agent.id, agent.model, agent.precursors) for agent in agents)].append(number)
    return list(alike.values())


def simulate(
    simulation: Simulation,
    topology: Topology,
    costs: Mapping[str, PairCosts],
    seed: int = 0,
    graphs: Sequence[Replayed] = (),
) -> Simulated:
    """Simulate from the first request to the last answer; `costs` are those of the models' pairs.

    With `graphs`, these are the requests, not the workload's. Equal arguments give equal results,
    to the last bit. Python's garbage collector rests meanwhile.
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
        return run_virtual(_simulate_pairs(simulation, topology, costs, seed, graphs))
    finally:
        gc.enable()


def _probe_capacity(prefill: PrefillCosts) -> PrefillCost:
    """Return what the router would measure of the pair at its start. A fitted term may be 0."""
    short_s, long_s = (prefill.pass_s(tokens, attended_pairs(tokens, 0)) for tokens in (1, 256))
    return PrefillCost.through(1, short_s, 256, long_s)


async def _simulate_pairs(
    simulation: Simulation,
    topology: Topology,
    costs: Mapping[str, PairCosts],
    seed: int,
    graphs: Sequence[Replayed],
) -> Simulated:
    loop = asyncio.get_running_loop()
    outputs = Outputs(simulation.workload, topology, seed, graphs)
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
            call_mark=CALL_MARK,
            price=simulation.models[alias].price or FREE,
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
        client = _Client(simulation, topology, outputs, executor, graphs)
        await client.ask_all(seed)
        runs = tuple(run for _, runs in sorted(client.runs.items()) for run in runs)
    elapsed_s = loop.time()
    uses = _list_uses(fleets.values(), elapsed_s or 1.0)
    return Simulated(topology, elapsed_s, runs, uses)


def _list_uses(fleets: Iterable[SimulatedFleet], elapsed_s: float) -> tuple[EngineUse, ...]:
    return tuple(
        EngineUse(
            fleet.alias,
            pair.prefilling.busy_s / elapsed_s,
            pair.decoding.busy_s / elapsed_s,
            pair.decoding.batch_s / (pair.decoding.busy_s or 1.0),
            pair.prefilling.computed,
            pair.decoding.written,
            pair.decoding.preemptions,
        )
        for fleet in fleets
        for pair in fleet.pairs
    )


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


NO_CALL = "The root made no call: its output ended at its limit. Raise max_new_tokens."


class _Client:
    """Asks all questions, and sends the results of calls until each is answered.

    Attributes:
        runs: The requests of each question, by its number.
    """

    def __init__(
        self,
        simulation: Simulation,
        topology: Topology,
        outputs: Outputs,
        executor: Executor,
        graphs: Sequence[Replayed],
    ) -> None:
        self.runs: dict[int, list[SimulatedRun]] = {}
        self._simulation = simulation
        self._topology = topology
        self._graphs = graphs
        self._outputs = outputs
        self._executor = executor
        self._clock = asyncio.get_running_loop().time

    async def ask_all(self, seed: int) -> None:
        """Ask one by one, by several clients, at random or recorded times, to the last answer."""
        workload = self._simulation.workload
        async with asyncio.TaskGroup() as group:
            if self._graphs:
                for number in range(len(self._graphs)):
                    group.create_task(self._replay(number))
            elif workload.arrivals == "poisson":
                draws = random.Random(f"{seed}/arrivals")
                for number in range(workload.requests):
                    if number:
                        await asyncio.sleep(draws.expovariate(workload.per_s))
                    group.create_task(self._run_program(number))
            else:
                numbers = iter(range(workload.requests))
                for _ in range(1 if workload.arrivals == "one_by_one" else workload.clients):
                    group.create_task(self._run_each(numbers))

    async def _replay(self, number: int) -> None:
        await asyncio.sleep(self._graphs[number].arrival_s)
        await self._run_program(number)

    async def _run_each(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._run_program(number)

    async def _run_program(self, number: int) -> None:
        """Ask a question, and send the chat with each call's result once the tool has given it."""
        program = self._simulation.workload.choose_program(number)
        name = f"q{number}"
        chat: list[Values] = [{"role": "user", "content": self._outputs.write_question(name)}]
        request = name
        waited_s = 0.0
        self.runs[number] = []
        for index, step in enumerate((*program.steps, None), 1):
            self._outputs.plan_answer(request, step, program.answer_tokens)
            answer = await self._ask(number, request, chat, waited_s, step)
            if answer is None or step is None:
                return
            chat += _write_messages(answer, self._outputs.write_result(request, step))
            request = f"{name}-{index}"
            waited_s = step.tool_s
            await asyncio.sleep(waited_s)

    async def _ask(
        self,
        number: int,
        name: str,
        chat: Sequence[Values],
        waited_s: float,
        step: Step | None,
    ) -> Answer | None:
        """Send a request and note its run; return the answer, None if it is not as planned."""
        topology = self._graphs[number].topology if self._graphs else self._topology
        workload = self._simulation.workload
        interval = topology.root.sampling.get("stream_interval", UNSTREAMED_INTERVAL)
        trace = Trace(
            name,
            tenant="simulation",
            target=topology.name,
            root=topology.root.id,
            started_s=self._clock(),
            wall_s=self._clock(),
            precursors={agent.id: agent.precursors for agent in topology.agents.values()},
        )
        request = MoaRequest(
            name,
            "simulation",
            tuple(chat),
            sampling={"stream_interval": interval},
            seed=number,
            timeout_s=self._simulation.timeout_s,
        )
        if workload.choose_program(number).steps:
            request = replace(request, offer=ToolOffer((TOOL,)), session=Session(f"q{number}"))
        answer = None
        error = ""
        try:
            answer = await self._executor.run(topology, request, trace.add)
            usage = answer.agents
            if step is not None and not answer.calls:
                answer = None
                error = NO_CALL
        except ShellRouterError as failed:
            usage = failed.spent
            error = str(failed)
        trace.close(self._clock(), "failed" if error else "finished", error)
        self.runs[number].append(SimulatedRun(trace.as_json(), error, number, waited_s, usage))
        return answer


def _write_messages(answer: Answer, result: str) -> Iterator[Values]:
    """Yield what a client adds to the chat: the answer with its calls, and their results."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": parse_json(call.arguments)},
        }
        for call in answer.calls
    ]
    yield {"role": "assistant", "content": answer.text, "tool_calls": calls}
    for call in answer.calls:
        yield {"role": "tool", "tool_call_id": call.id, "content": result}
