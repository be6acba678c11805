"""Fleets and policies, and tasks served by them in virtual time."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent_cache import MemoryAgentPromptCache
from benchmarks.chimera.baselines import enter_baselines
from benchmarks.chimera.tasks import APPS, MATH, MOST_TOKENS, Ability, Blur, Foreseen, Task
from shell_router.core.engine import Generation, ServedModel
from shell_router.core.events import Event, ModelChosen
from shell_router.lab.simulation.run import SimulatedFleet
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.choosing import Auto, ModelChooser, ModelFigures
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.model_choice import ModelChoiceSettings
from shell_router.routing.queue import QueueSettings
from shell_router.standins.simulated.costs import PairCosts
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import SimulatedTokenizer, Written, filler
from shell_router.topology import AUTO, Agent, Prefill, Prompt, Topology

QUESTION_TOKENS = 160
"""Assumed: a question, with its system prompt."""
NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Policy:
    """Who is chosen, whose turn it is, and what is known beforehand."""

    choice: ModelChoiceSettings
    order: str = "fcfs"
    blur: Blur = field(default_factory=Blur)
    by_program: bool = False
    """Programs count as users, so that what each has been served is known."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How many workflows come in a second, and how many sequences an engine decodes at once.

    All others wait in the router, in the policy's order.
    """

    per_s: float
    at_once: int


@dataclass
class Outcome:
    """What came of a policy: per workflow its seconds, its tokens, and whether its answer was
    right.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    models: Counter[str] = field(default_factory=Counter)
    choice_s: list[float] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        """The mean over workflows, in milliseconds: the paper's end-to-end latency per token."""
        return (
            1000
            * sum(s / t for s, t in zip(self.seconds, self.tokens, strict=True))
            / len(self.seconds)
        )


def run(
    policy: Policy,
    tasks: Sequence[Task],
    costs: Mapping[str, PairCosts],
    arrivals: Arrivals,
    seed: int,
) -> Outcome:
    """All tasks to their ends; equal arguments give equal outcomes."""
    return run_virtual(_run(policy, tasks, costs, arrivals, seed))


async def _run(
    policy: Policy,
    tasks: Sequence[Task],
    costs: Mapping[str, PairCosts],
    arrivals: Arrivals,
    seed: int,
) -> Outcome:
    loop = asyncio.get_running_loop()
    queue = QueueSettings(policy.order, max_running=arrivals.at_once, wait_s=NEVER_S, age_s=NEVER_S)
    tokenizer = SimulatedTokenizer()
    served = {
        name: ServedModel(
            name,
            SimulatedFleet(
                name, [_engine(costs[name], _writes(tasks, name))], SchedulingSettings(queue=queue)
            ),
            tokenizer,
            131_072,
        )
        for name in costs
    }
    chooser = ModelChooser(
        served,
        _auto(policy, costs, arrivals.at_once),
        Foreseen(tasks, policy.blur, seed),
        clock=loop.time,
    )
    outcome = Outcome()
    async with MemoryAgentPromptCache(clock=loop.time, ttl_s=math.inf) as cache:
        executor = Executor(served, cache, None, clock=loop.time, chooser=chooser)
        await _ask_all(executor, policy, tasks, arrivals.per_s, seed, outcome)
    return outcome


def _auto(policy: Policy, costs: Mapping[str, PairCosts], at_once: int) -> Auto:
    """Pi of Algorithm 1: a token's time with a full batch. Where agents count as one, models count
    as equally fast.
    """
    figures = {
        name: ModelFigures(
            at_once,
            1.0 if policy.blur.flat else one.decode.step_s + at_once * one.decode.sequence_s,
        )
        for name, one in costs.items()
    }
    return Auto(tuple(costs), policy.choice, figures)


def _engine(costs: PairCosts, write: Callable[[Generation], Written]) -> SimulatedPair:
    """Prefill and decode on one GPU, which they share, as chunked prefill has it."""
    gpu, stays = Processor(), replace(costs, transfer=replace(costs.transfer, token_s=0.0))
    return SimulatedPair(stays, write, prefill_processor=gpu, decode_processor=gpu, one_engine=True)


def _writes(tasks: Sequence[Task], model: str) -> Callable[[Generation], Written]:
    """The router calls requests `task.number.stage-N`."""

    def write(request: Generation) -> Written:
        task, _, stage = request.rid.split(".", 2)
        tokens = tasks[int(task)].tokens[model][int(stage.removeprefix("stage-")) - 1]
        return Written.after_filler(tokens, f"{task}/{stage}", "", 0.0)

    return write


def workflow(stages: int) -> Topology:
    """A chain: every stage reads all before it."""
    sampling = {"max_new_tokens": MOST_TOKENS, "stream_interval": 256}
    names = [f"stage-{number}" for number in range(1, stages + 1)]
    agents = {
        name: Agent(name, AUTO, tuple(names[:place]), Prompt(slot="\n{output}"), sampling)
        for place, name in enumerate(names)
    }
    return Topology(f"{stages} stages", agents, prefill=Prefill(incremental=False))


async def _ask_all(
    executor: Executor,
    policy: Policy,
    tasks: Sequence[Task],
    per_s: float,
    seed: int,
    outcome: Outcome,
) -> None:
    draws = random.Random(f"{seed}/arrivals")
    graphs = {stages: workflow(stages) for stages in {task.stages for task in tasks}}
    async with asyncio.TaskGroup() as group:
        for number, task in enumerate(tasks):
            await asyncio.sleep(draws.expovariate(per_s))
            group.create_task(_ask(executor, policy, graphs[task.stages], number, task, outcome))


async def _ask(
    executor: Executor, policy: Policy, graph: Topology, number: int, task: Task, outcome: Outcome
) -> None:
    loop = asyncio.get_running_loop()
    question = f"{number} {filler(QUESTION_TOKENS, str(number))}"
    chat = ({"role": "user", "content": question},)
    tenant = f"p{number}" if policy.by_program else "user"

    def hear(event: Event) -> None:
        if isinstance(event, ModelChosen):
            outcome.choice_s.append(event.at_s - event.started_s)

    began_s = loop.time()
    answer = await executor.run(
        graph, MoaRequest(str(number), tenant, chat, timeout_s=NEVER_S), hear
    )
    model = answer.agents[graph.root.id].model
    outcome.seconds.append(loop.time() - began_s)
    outcome.tokens.append(sum(spent.completion_tokens for spent in answer.agents.values()))
    outcome.right.append(task.right[model])
    outcome.models[model] += 1


FLEETS = {
    "Qwen1.5+7B": ("qwen2.5-1.5b", "qwen2.5-7b"),
    "Qwen1.5+14B": ("qwen2.5-1.5b", "qwen2.5-14b"),
    "Qwen1.5+3+14B": ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-14b"),
}
COUNTED = Blur(scores=None, flat=True)
SLACKS = (0.0, 1.0, 2.0, 4.0)
WORTHS = (10.0, 40.0, 160.0)


@dataclass(frozen=True, slots=True)
class DataSet:
    """Its tasks, predictors as good as the paper's and as slow as this router's on a busy CPU, and
    its figures.

    `paper` has Chimera over vLLM by fleet (section 4.3): speed-up, and points of score. `distance`
    has Kendall's by model (table 3), `precision` is the macro average precision (table 2).
    """

    abilities: Mapping[str, Ability]
    blur: Blur
    paper: Mapping[str, str]
    distance: Mapping[str, float]
    precision: float


DATA = {
    "MATH": DataSet(
        MATH,
        Blur(scores=2.0, lengths=0.6, cost_s=0.02),
        {"Qwen1.5+7B": "2.5x, +2.2", "Qwen1.5+14B": "2.1x, +5.0", "Qwen1.5+3+14B": "2.1x, +1.6"},
        {"qwen2.5-1.5b": 0.146, "qwen2.5-3b": 0.195, "qwen2.5-7b": 0.185, "qwen2.5-14b": 0.222},
        0.740,
    ),
    "APPS": DataSet(
        APPS,
        Blur(scores=2.0, lengths=0.55, cost_s=0.02),
        {"Qwen1.5+7B": "3.4x, +16.0", "Qwen1.5+14B": "2.9x, +10.5", "Qwen1.5+3+14B": "2.7x, +8.2"},
        {"qwen2.5-1.5b": 0.207, "qwen2.5-3b": 0.139, "qwen2.5-7b": 0.124, "qwen2.5-14b": 0.129},
        0.521,
    ),
}


def policies(predicted: Blur) -> Mapping[str, Policy]:
    """By name, with predictors that are off by so much."""
    chimera = {s: ModelChoiceSettings("chimera", s) for s in SLACKS}
    worth = {s: ModelChoiceSettings("worth", answer_worth_s=s) for s in WORTHS}
    enter_baselines()
    fewest = ModelChoiceSettings("least_loaded")
    return {
        "vLLM": Policy(fewest, "fcfs", COUNTED),
        "MLFQ": Policy(fewest, "least_attained", COUNTED, by_program=True),
        "LTR": Policy(fewest, "shortest_total", replace(predicted, scores=None, whole=False)),
        "vLLM (STJF)": Policy(fewest, "shortest_total", Blur(scores=None)),
        **{
            f"Chimera, slack {s:g}": Policy(choice, "shortest_total", predicted)
            for s, choice in chimera.items()
        },
        **{
            f"worth, {s:g} s": Policy(choice, "shortest_total", predicted)
            for s, choice in worth.items()
        },
        "best score": Policy(ModelChoiceSettings("best_score"), "shortest_total", predicted),
    }


def oracles(predicted: Blur) -> Mapping[str, Policy]:
    """Chimera, with true lengths, true outcomes, and both."""
    blurs = {
        "Chimera, slack 1": predicted,
        "oracle lengths": replace(predicted, lengths=0.0),
        "oracle router": replace(predicted, oracle_scores=True),
        "oracle both": replace(predicted, lengths=0.0, oracle_scores=True),
    }
    return {
        name: Policy(ModelChoiceSettings("chimera"), "shortest_total", blur)
        for name, blur in blurs.items()
    }
