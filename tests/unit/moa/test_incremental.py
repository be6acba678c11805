import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import pytest

from agent_cache import Chunk, End, LogKey, LogRead, LogWriter
from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.engine import Generation, PrefillCost, Prefilled, ServedModel
from shell_router.core.events import Degraded, PrefillIncrement
from shell_router.errors import (
    AgentFailed,
    EngineUnreachable,
    PrecursorTimeout,
    PromptTooLong,
    ShellRouterError,
)
from shell_router.moa.agent import AgentTask, RunContext, Source
from shell_router.moa.expectations import LatencyEstimates
from shell_router.moa.incremental import complete_prompt
from shell_router.moa.prompt import CUT_MARK, Part, Slot
from shell_router.routing.increments import ChunkTokens, Remainder
from shell_router.topology import Prefill
from tests.fakes.moa import Recorder, WordTokenizer
from tests.fakes.scripted_engine import Hold, Script, ScriptedEngine


class Scene:
    """One agent whose precursors' logs the test writes by hand."""

    def __init__(
        self,
        *parts: Part,
        chunk_tokens: ChunkTokens = 4,
        shares_ids: bool = True,
        context_length: int = 4096,
    ) -> None:
        self.tokenizer = WordTokenizer()
        self.engine = ScriptedEngine(self.tokenizer, lambda _request: Script(""))
        self.cache = MemoryAgentPromptCache(clock=monotonic)
        self.events = Recorder()
        cost = PrefillCost(fixed_s=0.01, token_s=0.001)
        model = ServedModel("model", self.engine, self.tokenizer, context_length, prefill_cost=cost)
        self.estimates = LatencyEstimates()
        self.load = self.estimates.get_load(model)
        self.remainder = Remainder(tokens=1.0)
        self.clock: Callable[[], float] = monotonic
        agents = [part.agent for part in parts if isinstance(part, Slot)]
        self.task = AgentTask(
            "agent",
            "rid",
            model,
            parts,
            {},
            sources={
                agent: Source(LogKey("t", "p", agent), "words" if shares_ids else "")
                for agent in agents
            },
            prefill=Prefill(chunk_tokens=chunk_tokens),
            begin_s=5.0,
            silence_s=5.0,
        )

    async def log(self, agent: str) -> LogWriter:
        return await self.cache.create(LogKey("t", "p", agent))

    def write(self, writer: LogWriter, text: str) -> None:
        writer.append(Chunk(text, tuple(self.tokenizer.encode(text)), "words"))

    def start(self) -> asyncio.Task[list[int]]:
        return asyncio.create_task(self.ids())

    async def ids(self) -> list[int]:
        context = RunContext(self.estimates, self.cache, self.events.emit, self.clock)
        prompt = await complete_prompt(self.task, context, lambda _read: self.remainder)
        return prompt.ids

    async def until_sent(self, increments: int) -> PrefillIncrement:
        await self.events.until(lambda r: len(r.of(PrefillIncrement)) >= increments)
        return self.events.of(PrefillIncrement)[increments - 1]

    def sent(self) -> list[str]:
        return [self.tokenizer.decode(request.input_ids) for request in self.engine.prefilled]


def is_prefix(short: Sequence[int], whole: Sequence[int]) -> bool:
    return list(whole[: len(short)]) == list(short)


async def test_nothing_is_sent_before_the_first_precursor_begins() -> None:
    """Until then the engine may be busy with the precursors' own prompts."""
    scene = Scene("The question is this, and it is longer than a chunk.", Slot("a"))
    writer = await scene.log("a")
    task = scene.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.sent() == []
    scene.write(writer, " yes")
    first = await scene.until_sent(1)
    assert first.slot == "a"
    assert scene.sent() == ["The question is this, and it is longer than a chunk. yes"]
    writer.end(End.FINISHED)
    await task


async def test_a_fixed_chunk_waits_for_that_many_new_tokens() -> None:
    scene = Scene("Q.", Slot("a"), chunk_tokens=3)
    writer = await scene.log("a")
    task = scene.start()
    for word in (" one", " two", " three", " four", " five", " six"):
        scene.write(writer, word)
        for _ in range(8):
            await asyncio.sleep(0)
    second = await scene.until_sent(2)
    assert scene.sent() == ["Q. one two three", "Q. one two three four five six"]
    assert second.resident_tokens == 5
    writer.end(End.FINISHED)
    await task


async def test_an_adaptive_update_waits_until_it_is_worth_three_fixed_parts_and_the_end_is_near() -> (
    None
):
    scene = Scene("Q.", Slot("a"), chunk_tokens="adaptive")
    scene.remainder = Remainder(tokens=10_000.0)
    writer = await scene.log("a")
    task = scene.start()
    for _ in range(60):
        scene.write(writer, " word")
        for _ in range(4):
            await asyncio.sleep(0)
    assert scene.sent() == []
    scene.remainder = Remainder(tokens=5.0)
    for _ in range(60):
        scene.write(writer, " word")
        for _ in range(4):
            await asyncio.sleep(0)
    await scene.until_sent(1)
    assert scene.sent()[0].count("word") > 60
    writer.end(End.FINISHED)
    await task


async def test_a_precursors_end_does_not_wait_for_an_update_under_way_which_is_aborted() -> None:
    scene, hold = Scene("Q.", Slot("a")), Hold()
    engine = ScriptedEngine(scene.tokenizer, lambda _request: Script(""), pace=hold.pace)
    scene.task = replace(scene.task, model=replace(scene.task.model, engine=engine))
    writer = await scene.log("a")
    scene.write(writer, " yes" * 9)
    task = scene.start()
    await hold.until_waiting()
    scene.write(writer, " indeed")
    writer.end(End.FINISHED)
    assert scene.tokenizer.decode(await task) == "Q." + " yes" * 9 + " indeed"
    assert list(engine.aborted) == ["rid.p0"]
    assert not engine.running
    assert scene.load.outstanding_s == 0


async def test_reading_goes_on_while_an_update_is_under_way_and_the_next_holds_all_that_came() -> (
    None
):
    scene, hold = Scene("Q.", Slot("a")), Hold()
    engine = ScriptedEngine(scene.tokenizer, lambda _request: Script(""), pace=hold.pace)
    scene.engine = engine
    scene.task = replace(scene.task, model=replace(scene.task.model, engine=engine))
    writer = await scene.log("a")
    scene.write(writer, " one" * 4)
    task = scene.start()
    await hold.until_waiting()
    scene.write(writer, " two" * 40)
    for _ in range(8):
        await asyncio.sleep(0)
    assert len(scene.sent()) == 1
    hold.release()
    await scene.until_sent(1)
    scene.write(writer, " three" * 40)
    await scene.until_sent(2)
    assert scene.sent()[1] == "Q." + " one" * 4 + " two" * 40 + " three" * 40
    writer.end(End.FINISHED)
    await task


async def test_without_incremental_prefill_an_output_is_read_in_two_goes() -> None:
    class Counting(MemoryAgentPromptCache):
        reads = 0

        async def read(
            self, key: LogKey, position: int = 0, *, at_least: int = 1, wait_s: float
        ) -> LogRead:
            self.reads += 1
            return await super().read(key, position, at_least=at_least, wait_s=wait_s)

    scene = Scene("Q.", Slot("a"))
    scene.cache = cache = Counting(clock=monotonic)
    scene.task = replace(scene.task, prefill=Prefill(incremental=False))
    writer = await scene.log("a")
    task = scene.start()
    for _ in range(50):
        scene.write(writer, " word")
        await asyncio.sleep(0)
    writer.end(End.FINISHED)
    assert scene.tokenizer.decode(await task) == "Q." + " word" * 50
    assert cache.reads == 2


async def test_what_the_next_precursor_has_written_already_goes_along_with_the_last_ones_rest() -> (
    None
):
    scene = Scene("Q.", Slot("a"), Slot("b"), chunk_tokens=50)
    first, second = await scene.log("a"), await scene.log("b")
    task = scene.start()
    scene.write(first, " one")
    scene.write(second, " two" * 100)
    first.end(End.FINISHED)
    await scene.until_sent(1)
    assert scene.sent() == ["Q. one" + " two" * 100]
    second.end(End.FINISHED)
    await task


async def test_a_slot_that_ended_is_sent_without_waiting_for_the_next() -> None:
    scene = Scene("Q.", Slot("a", " ["), Slot("b", " ["), chunk_tokens=50)
    first, second = await scene.log("a"), await scene.log("b")
    task = scene.start()
    scene.write(first, " yes" * 49)
    for _ in range(8):
        await asyncio.sleep(0)
    scene.write(first, " indeed")
    first.end(End.FINISHED)
    await scene.until_sent(1)
    assert " indeed" in scene.sent()[0]
    second.end(End.FINISHED)
    await task


@pytest.mark.parametrize(
    ("written", "taken"),
    [(" yes" * 5, " yes" * 5), (" yes" * 6, " yes" * 5 + CUT_MARK), ("", "")],
    ids=("full", "over", "empty"),
)
@pytest.mark.parametrize("piece_words", [1, 4])
async def test_a_slot_takes_no_more_of_an_output_than_it_may(
    written: str, taken: str, piece_words: int
) -> None:
    scene = Scene("Q.", Slot("a", " [", "]", most_tokens=5), " So?", chunk_tokens=2)
    writer = await scene.log("a")
    task = scene.start()
    words = written.split()
    for at in range(0, len(words), piece_words):
        scene.write(writer, "".join(f" {word}" for word in words[at : at + piece_words]))
        for _ in range(8):
            await asyncio.sleep(0)
    writer.end(End.FINISHED)
    assert scene.tokenizer.decode(await task) == f"Q. [{taken}] So?"
    assert all(f"Q. [{taken}] So?".startswith(sent) for sent in scene.sent())


async def test_a_complete_prompt_is_never_sent_as_an_update() -> None:
    scene = Scene("Q.", Slot("a"), " So?", chunk_tokens=1)
    writer = await scene.log("a")
    task = scene.start()
    scene.write(writer, " word" * 100)
    await scene.until_sent(1)
    scene.write(writer, " last" * 100)
    writer.end(End.FINISHED)
    ids = await task
    assert all(len(request.input_ids) < len(ids) for request in scene.engine.prefilled)


@pytest.mark.parametrize("shares_ids", [True, False])
async def test_increments_are_true_prefixes_of_the_complete_prompt(shares_ids: bool) -> None:
    scene = Scene(
        "Question",
        Slot("a", " A:", ";"),
        Slot("b", " B:", ";"),
        " end",
        chunk_tokens=1,
        shares_ids=shares_ids,
    )
    task = scene.start()
    for agent in ("a", "b"):
        writer = await scene.log(agent)
        for piece in ("wo", "rd by", " wo", "rd", " it ", " grows"):
            scene.write(writer, piece)
            for _ in range(8):
                await asyncio.sleep(0)
        writer.end(End.FINISHED)
    ids = await task
    assert len(scene.engine.prefilled) > 4
    assert all(is_prefix(request.input_ids, ids) for request in scene.engine.prefilled)
    assert (
        scene.tokenizer.decode(ids)
        == "Question A:word by word it  grows; B:word by word it  grows; end"
    )


async def test_a_needed_precursor_that_failed_fails_the_agent_with_its_reason() -> None:
    scene = Scene("Q.", Slot("a"))
    scene.task = replace(scene.task, all_needed=True)
    (await scene.log("a")).end(End.FAILED, "out of memory")
    with pytest.raises(AgentFailed, match="out of memory"):
        await scene.start()


async def test_a_precursor_that_never_begins_is_given_up_after_its_limit() -> None:
    scene = Scene("Q.", Slot("a"))
    scene.task = replace(scene.task, begin_s=0.02)
    with pytest.raises(PrecursorTimeout, match="'a'"):
        await scene.start()


@pytest.mark.parametrize(
    "refusal", [EngineUnreachable("No prefill today."), PromptTooLong("Over the context length.")]
)
async def test_an_engine_that_refuses_an_increment_costs_only_the_overlap(
    refusal: ShellRouterError,
) -> None:
    class Refusing(ScriptedEngine):
        async def prefill(self, request: Generation) -> Prefilled:
            raise refusal

    scene = Scene("Q.", Slot("a"), chunk_tokens=1)
    engine = Refusing(scene.tokenizer, lambda _request: Script(""))
    scene.task = replace(scene.task, model=replace(scene.task.model, engine=engine))
    task = scene.start()
    writer = await scene.log("a")
    scene.write(writer, " fine")
    await scene.events.until(lambda r: bool(r.of(Degraded)))
    writer.end(End.FINISHED)
    assert scene.tokenizer.decode(await task) == "Q. fine"
    assert len(scene.events.of(Degraded)) == 1


async def test_a_prompt_that_reaches_the_context_length_is_sent_no_further() -> None:
    scene = Scene("Q.", Slot("a"), chunk_tokens=1, context_length=5)
    writer = await scene.log("a")
    scene.write(writer, " word" * 9)
    task = scene.start()
    writer.end(End.FINISHED)
    assert len(await task) == 11
    assert all(len(request.input_ids) < 5 for request in scene.engine.prefilled)


async def test_cancelling_the_agent_aborts_the_increment_under_way() -> None:
    scene = Scene("Q. A question", Slot("a"))
    hold = Hold()
    engine = ScriptedEngine(scene.tokenizer, lambda _request: Script(""), pace=hold.pace)
    scene.task = replace(scene.task, model=replace(scene.task.model, engine=engine))
    scene.write(await scene.log("a"), " yes")
    before = asyncio.all_tasks()
    task = scene.start()
    await hold.until_waiting()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(engine.aborted) == ["rid.p0"]
    assert asyncio.all_tasks() == before


async def test_a_last_piece_of_text_alone_changes_nothing_in_token_mode_however_it_is_read() -> (
    None
):
    async def prompt(*, read_apart: bool) -> str:
        scene = Scene("Q.", Slot("a"), chunk_tokens=1)
        writer = await scene.log("a")
        task = scene.start()
        scene.write(writer, " yes")
        if read_apart:
            await scene.until_sent(1)
        # a stop token is not among the ids, and it let go of held-back text
        writer.append(Chunk("\n", vocabulary="words"))
        writer.end(End.FINISHED)
        return scene.tokenizer.decode(await task)

    assert await prompt(read_apart=True) == await prompt(read_apart=False) == "Q. yes"
