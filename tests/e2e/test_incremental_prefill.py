"""Incremental prefill on real engines: the same outputs with it and without, and a prefix cache
that is really hit.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import pytest
import pytest_asyncio

from agent_cache.memory import MemoryAgentPromptCache
from benchmarks.random_checkpoint import make_checkpoint
from shell_router.core.engine import Engine, Finish, Generation, Prefilled, ServedModel, Tokens
from shell_router.core.events import AgentFinished, AgentTokens, PrefillIncrement
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.standins.embedded.fleet import EmbeddedFleet
from shell_router.standins.embedded.settings import EmbeddedSettings
from shell_router.topology import Catalog, Prefill, Topology, files_in
from tests.fakes.moa import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOPOLOGIES = {
    name: one
    for name, one in Catalog(None).of_files(files_in(Path("topologies"))).graphs_without("").items()
    if isinstance(one, Topology) and not one.root.votes  # a vote prefills nothing
}
PROMPTS = 50
AT_ONCE = 8
SEEDS = random.Random(11)
WORDS = (
    "river",
    "seven",
    "why",
    "and",
    "Zürich",
    "3.14",
    "{x}",
    "\n\n",
    "if",
    "銀行",
    "don't",
    "  ",
    "answer:",
    "😀",
)
QUESTIONS = [" ".join(SEEDS.choices(WORDS, k=SEEDS.randrange(3, 60))) for _ in range(PROMPTS)]

# which tokenizer family serves each alias: one for all (token mode), or two that no agent shares
# with its precursors
FAMILIES = {"token": ("a", "a", "a"), "text": ("a", "b", "a")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def families(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mapping[str, ServedModel]]:
    """Two tiny models of different tokenizers on embedded pairs, in float64: outputs then depend on
    the ids alone.
    """
    folders = {
        "a": make_checkpoint(tmp_path_factory.mktemp("a"), seed=1),
        "b": make_checkpoint(
            tmp_path_factory.mktemp("b"), seed=2, tokenizer_variant=1, architecture="llama"
        ),
    }
    settings = {
        family: EmbeddedSettings(
            str(folder), dtype="float64", max_running_requests=128, max_total_tokens=500_000
        )
        for family, folder in folders.items()
    }
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(EmbeddedFleet(settings))
        models = {}
        for family in settings:
            pair = SglangPair(fleet[family].address)
            stack.push_async_callback(pair.aclose)
            models[family] = ServedModel(
                family, pair, HfTokenizer.from_folder(folders[family]), 8192
            )
        yield models


class Pace:
    """Lets outputs wait while prompts are updated, so that updates end however slow they are."""

    READERS_TURNS = 10
    """Turns of the event loop in which the readers of a piece can begin an update."""

    def __init__(self) -> None:
        self._updates = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Count an update as under way while the context is open."""
        self._updates += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._updates -= 1
            if not self._updates:
                self._idle.set()

    async def wait(self) -> None:
        """Return when the readers have had their turns and no update is under way."""
        for _ in range(self.READERS_TURNS):
            await asyncio.sleep(0)
        await self._idle.wait()


@dataclass(frozen=True)
class PacedEngine:
    """An engine whose outputs keep a pace."""

    engine: Engine
    pace: Pace

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine`."""
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                await self.pace.wait()
                yield event

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine`."""
        with self.pace.update():
            return await self.engine.prefill(request)


@dataclass(frozen=True)
class Outcome:
    """Every agent's output, and what the engine said of each increment and each final prompt."""

    outputs: Mapping[str, tuple[int, ...]]
    increments: tuple[PrefillIncrement, ...]
    finished: tuple[AgentFinished, ...]


async def run(executor: Executor, topology: Topology, number: int, run_id: str) -> Outcome:
    events = Recorder()
    chat = ({"role": "user", "content": QUESTIONS[number]},)
    await executor.run(topology, MoaRequest(f"{run_id}-{number}", "test", chat), events.emit)
    outputs: dict[str, tuple[int, ...]] = {}
    for tokens in events.of(AgentTokens):
        outputs[tokens.agent] = outputs.get(tokens.agent, ()) + tokens.ids
    return Outcome(outputs, tuple(events.of(PrefillIncrement)), tuple(events.of(AgentFinished)))


async def run_all(
    executor: Executor, topology: Topology, run_id: str, prompts: int = PROMPTS
) -> list[Outcome]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Outcome:
        async with room:
            return await run(executor, topology, number, run_id)

    return list(await asyncio.gather(*(one(number) for number in range(prompts))))


def greedy(topology: Topology, *, incremental: bool, new_tokens: int) -> Topology:
    """The topology without chance: temperature 0, no early exit, and updates of a fixed size."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    return replace(
        topology,
        agents={name: replace(agent, sampling=sampling) for name, agent in topology.agents.items()},
        clusters=tuple(replace(cluster, early_exit=None) for cluster in topology.clusters),
        prefill=Prefill(incremental, chunk_tokens=16),
    )


@pytest.mark.parametrize("mode", FAMILIES)
@pytest.mark.parametrize("name", TOPOLOGIES)
async def test_outputs_are_the_same_with_incremental_prefill_and_its_cache_is_hit(
    families: Mapping[str, ServedModel], mode: str, name: str
) -> None:
    aliases = zip(("small", "medium", "large"), FAMILIES[mode], strict=True)
    pace = Pace()
    models = {}
    for alias, family in aliases:
        engine = PacedEngine(families[family].engine, pace)
        models[alias] = replace(families[family], alias=alias, engine=engine)
    executor = Executor(models, MemoryAgentPromptCache(clock=monotonic), None, clock=monotonic)
    topology = greedy(TOPOLOGIES[name], incremental=True, new_tokens=48)
    plain = replace(topology, prefill=Prefill(incremental=False))

    with_it = await run_all(executor, topology, f"{mode}-{name}-on")
    without = await run_all(executor, plain, f"{mode}-{name}-off")

    assert [outcome.outputs for outcome in with_it] == [outcome.outputs for outcome in without]
    assert all(len(ids) for outcome in with_it for ids in outcome.outputs.values())
    assert_cache_is_hit(with_it)


def assert_cache_is_hit(outcomes: list[Outcome]) -> None:
    """Later increments, and final prompts, find 99 % of what increments prefilled before."""
    increments = [increment for outcome in outcomes for increment in outcome.increments]
    later = [increment for increment in increments if increment.resident_tokens]
    assert later
    assert [i for i in later if i.cached_tokens < 0.99 * i.resident_tokens] == []
    final = []
    for outcome in outcomes:
        sent = {increment.agent: increment.prompt_tokens for increment in outcome.increments}
        final += [(end, sent[end.agent]) for end in outcome.finished if end.agent in sent]
    assert final
    assert [
        (end, tokens)
        for end, tokens in final
        if end.cached_tokens < 0.99 * min(tokens, end.prompt_tokens - 1)
    ] == []
