import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import pytest

from agent_cache import Chunk, End, LogKey, LogRead, LogWriter
from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.events import Degraded, PrefillIncrement
from shell_router.core.generation import Generation, Prefilled
from shell_router.core.model import ServedModel
from shell_router.engines.scripted import Script, ScriptedEngine
from shell_router.errors import AgentFailed, EngineUnreachable, PrecursorTimeout, PromptTooLong, ShellRouterError
from shell_router.execution.incremental import Filling, SlotFiller, Source
from shell_router.execution.pace import Pace
from shell_router.execution.prompt import Part, Slot
from shell_router.scheduling import IncrementSettings
from shell_router.topology import Prefill
from tests.fakes.gates import Hold
from tests.fakes.recorder import Recorder
from tests.fakes.words import WordTokenizer


class Scene:
    """One agent whose precursors' logs the test writes by hand."""

    def __init__(
        self, *parts: Part, chunk_tokens: int = 4, shares_ids: bool = True, context_length: int = 4096
    ) -> None:
        self.tokenizer = WordTokenizer()
        self.engine = ScriptedEngine(self.tokenizer, lambda _request: Script(""))
        self.cache = MemoryAgentPromptCache(clock=monotonic)
        self.events = Recorder()
        self.pace = Pace()
        self.clock: Callable[[], float] = monotonic
        agents = [part.agent for part in parts if isinstance(part, Slot)]
        self.filling = Filling(
            "agent",
            "rid",
            ServedModel("model", self.engine, self.tokenizer, context_length),
            parts,
            {agent: Source(LogKey("t", "p", agent), lambda: shares_ids) for agent in agents},
            Prefill(increments=IncrementSettings(chunk_tokens)),
            all_needed=False,
            begin_s=5.0,
            silence_s=5.0,
        )

    async def log(self, agent: str) -> LogWriter:
        return await self.cache.create(LogKey("t", "p", agent))

    def write(self, writer: LogWriter, text: str) -> None:
        writer.append(Chunk(text, tuple(self.tokenizer.encode(text))))

    def start(self) -> asyncio.Task[list[int]]:
        filler = SlotFiller(self.filling, self.cache, self.pace, self.events.emit, clock=self.clock)
        return asyncio.create_task(filler.fill())

    async def until_sent(self, increments: int) -> PrefillIncrement:
        await self.events.until(lambda r: len(r.of(PrefillIncrement)) >= increments)
        return self.events.of(PrefillIncrement)[increments - 1]

    def sent(self) -> list[str]:
        return [self.tokenizer.decode(request.input_ids) for request in self.engine.prefilled]


def is_prefix(short: Sequence[int], whole: Sequence[int]) -> bool:
    return list(whole[: len(short)]) == list(short)


async def test_the_prefix_is_prefilled_when_the_first_precursor_begins_and_not_before_it() -> None:
    """Before, the engine may be busy with the precursors' own prompts."""
    scene = Scene("The question is this.", Slot("a"), chunk_tokens=100)
    writer = await scene.log("a")
    task = scene.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.sent() == []
    scene.write(writer, " yes")
    first = await scene.until_sent(1)
    assert first.slot == "a"
    assert scene.sent() == ["The question is this. yes"]
    scene.write(writer, " indeed")
    writer.end(End.FINISHED)
    assert scene.tokenizer.decode(await task) == "The question is this. yes indeed"


async def test_a_fixed_chunk_waits_for_that_many_new_tokens() -> None:
    scene = Scene("Q.", Slot("a"), chunk_tokens=3)
    writer = await scene.log("a")
    task = scene.start()
    scene.write(writer, " zero")
    await scene.until_sent(1)
    for word in (" one", " two", " three", " four"):
        scene.write(writer, word)
        await asyncio.sleep(0)
    second = await scene.until_sent(2)
    assert scene.sent() == ["Q. zero", "Q. zero one two three"]
    assert second.resident_tokens == 3
    writer.end(End.FINISHED)
    await task


async def test_a_burst_at_a_precursors_start_does_not_hold_its_later_tokens_back() -> None:
    """By the rate of the burst an update is worth hundreds of tokens, by that of all that follows it is worth eight."""
    scene, now_s = Scene("Q.", Slot("a")), 0.0
    scene.clock = lambda: now_s
    scene.filling = replace(scene.filling, prefill=Prefill(increments=IncrementSettings("adaptive")))
    scene.pace.observe_update("model", 100, 0.05)
    writer = await scene.log("a")
    task = scene.start()
    scene.write(writer, " first")
    await scene.until_sent(1)
    now_s = 1e-6
    scene.write(writer, " burst" * 15)
    for _ in range(20):
        for _ in range(5):
            await asyncio.sleep(0)
        now_s += 1.0
        scene.write(writer, " word")
    assert scene.sent() == ["Q. first", "Q. first" + " burst" * 15 + " word" * 16]
    writer.end(End.FINISHED)
    await task


async def test_what_was_there_already_does_not_count_as_having_come_fast() -> None:
    """By a rate that counts the 500 words, hundreds more would be worth an update; by that of the rest it is eight."""
    scene, now_s = Scene("Q.", Slot("a"), Slot("b")), 0.0
    scene.clock = lambda: now_s
    scene.filling = replace(scene.filling, prefill=Prefill(increments=IncrementSettings("adaptive")))
    scene.pace.observe_update("model", 100, 1.0)
    first, second = await scene.log("a"), await scene.log("b")
    task = scene.start()
    scene.write(first, " first")
    await scene.until_sent(1)
    scene.write(second, " early" * 500)
    first.end(End.FINISHED)
    await scene.until_sent(2)
    for _ in range(12):
        now_s += 1.0
        scene.write(second, " word")
        for _ in range(5):
            await asyncio.sleep(0)
    assert scene.sent()[2] == "Q. first" + " early" * 500 + " word" * 8
    second.end(End.FINISHED)
    await task


async def test_without_incremental_prefill_an_output_is_read_in_two_goes() -> None:
    class Counting(MemoryAgentPromptCache):
        reads = 0

        async def read(self, key: LogKey, position: int = 0, *, at_least: int = 1, wait_s: float) -> LogRead:
            self.reads += 1
            return await super().read(key, position, at_least=at_least, wait_s=wait_s)

    scene = Scene("Q.", Slot("a"))
    scene.cache = cache = Counting(clock=monotonic)
    scene.filling = replace(scene.filling, prefill=Prefill(incremental=False))
    writer = await scene.log("a")
    task = scene.start()
    for _ in range(50):
        scene.write(writer, " word")
        await asyncio.sleep(0)
    writer.end(End.FINISHED)
    assert scene.tokenizer.decode(await task) == "Q." + " word" * 50
    assert cache.reads == 2


async def test_what_the_next_precursor_has_written_already_goes_along_with_the_last_ones_rest() -> None:
    scene = Scene("Q.", Slot("a"), Slot("b"), chunk_tokens=100)
    first, second = await scene.log("a"), await scene.log("b")
    task = scene.start()
    scene.write(first, " one")
    await scene.until_sent(1)
    scene.write(first, " two")
    scene.write(second, " three")
    first.end(End.FINISHED)
    scene.write(second, " four" * 100)
    await scene.until_sent(2)
    assert scene.sent()[1] == "Q. one two three" + " four" * 100
    second.end(End.FINISHED)
    await task


async def test_a_slot_that_ended_is_sent_without_waiting_for_the_next() -> None:
    scene = Scene("Q.", Slot("a", " ["), Slot("b", " ["), chunk_tokens=100)
    writer = await scene.log("a")
    task = scene.start()
    scene.write(writer, " yes")
    await scene.until_sent(1)
    scene.write(writer, " indeed")
    writer.end(End.FINISHED)
    await scene.until_sent(2)
    assert scene.sent()[1].startswith("Q. [ yes indeed")
    other = await scene.log("b")
    other.end(End.FINISHED)
    await task


@pytest.mark.parametrize(("tail_share", "sent_complete"), [(0.05, True), (1.0, False)])
async def test_a_complete_prompt_is_sent_once_more_only_if_much_of_it_is_new(
    tail_share: float, sent_complete: bool
) -> None:
    scene = Scene("Q.", Slot("a"), " So?")
    increments = replace(scene.filling.prefill.increments, tail_share=tail_share)
    scene.filling = replace(scene.filling, prefill=Prefill(increments=increments))
    writer = await scene.log("a")
    scene.write(writer, " word" * 50)
    writer.end(End.FINISHED)
    ids = await scene.start()
    assert [list(request.input_ids) == ids for request in scene.engine.prefilled] == [True] * sent_complete


async def test_a_complete_prompt_with_a_short_tail_is_not_sent_once_more() -> None:
    scene = Scene("Q.", Slot("a"), " So?", chunk_tokens=1)
    writer = await scene.log("a")
    task = scene.start()
    scene.write(writer, " word" * 100)
    await scene.events.until(lambda r: any(e.prompt_tokens > 50 for e in r.of(PrefillIncrement)))
    writer.end(End.FINISHED)
    ids = await task
    assert all(len(request.input_ids) < len(ids) for request in scene.engine.prefilled)


@pytest.mark.parametrize("shares_ids", [True, False])
async def test_increments_are_true_prefixes_of_the_complete_prompt(shares_ids: bool) -> None:
    scene = Scene(
        "Question", Slot("a", " A:", ";"), Slot("b", " B:", ";"), " end", chunk_tokens=1, shares_ids=shares_ids
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
    assert scene.tokenizer.decode(ids) == "Question A:word by word it  grows; B:word by word it  grows; end"


async def test_a_needed_precursor_that_failed_fails_the_agent_with_its_reason() -> None:
    scene = Scene("Q.", Slot("a"))
    scene.filling = replace(scene.filling, all_needed=True)
    (await scene.log("a")).end(End.FAILED, "out of memory")
    with pytest.raises(AgentFailed, match="out of memory"):
        await scene.start()


async def test_a_precursor_that_never_begins_is_given_up_after_its_limit() -> None:
    scene = Scene("Q.", Slot("a"))
    scene.filling = replace(scene.filling, begin_s=0.02)
    with pytest.raises(PrecursorTimeout, match="'a'"):
        await scene.start()


@pytest.mark.parametrize("refusal", [EngineUnreachable("No prefill today."), PromptTooLong("Over the context length.")])
async def test_an_engine_that_refuses_an_increment_costs_only_the_overlap(refusal: ShellRouterError) -> None:
    class Refusing(ScriptedEngine):
        async def prefill(self, request: Generation) -> Prefilled:
            raise refusal

    scene = Scene("Q.", Slot("a"))
    engine = Refusing(scene.tokenizer, lambda _request: Script(""))
    scene.filling = replace(scene.filling, model=replace(scene.filling.model, engine=engine))
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
    scene.filling = replace(scene.filling, model=replace(scene.filling.model, engine=engine))
    scene.write(await scene.log("a"), " yes")
    before = asyncio.all_tasks()
    task = scene.start()
    await hold.until_waiting()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(engine.aborted) == ["rid.p0"]
    assert asyncio.all_tasks() == before


async def test_a_last_piece_of_text_alone_changes_nothing_in_token_mode_however_it_is_read() -> None:
    async def prompt(*, read_apart: bool) -> str:
        scene = Scene("Q.", Slot("a"))
        writer = await scene.log("a")
        task = scene.start()
        scene.write(writer, " yes")
        if read_apart:
            await scene.until_sent(1)
        writer.append(Chunk("\n"))  # a stop token is not among the ids, and it let go of held-back text
        writer.end(End.FINISHED)
        return scene.tokenizer.decode(await task)

    assert await prompt(read_apart=True) == await prompt(read_apart=False) == "Q. yes"


async def test_a_prompt_counts_as_growing_until_it_is_complete_or_given_up() -> None:
    scene = Scene("fixed ", Slot("a"))
    writer = await scene.log("a")
    complete, given_up = scene.start(), scene.start()
    scene.write(writer, "some words of the first agent")
    await scene.until_sent(2)
    assert scene.pace.growing_prompts("model") == 2
    given_up.cancel()
    await asyncio.wait([given_up])
    assert scene.pace.growing_prompts("model") == 1
    writer.end(End.FINISHED)
    await complete
    assert scene.pace.growing_prompts("model") == 0
