import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from time import monotonic

import pytest

from agent_cache import Chunk, End, LogKey, LogWriter, MemoryAgentPromptCache
from shell_router.core.events import AgentStarted, AgentTokens, ExitScored
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import (
    AgentFailed,
    DeadlineExceeded,
    DuplicateAgent,
    EngineUnreachable,
    InvalidRequest,
    Overloaded,
    PrecursorTimeout,
    UnknownModel,
    UnknownProgram,
)
from shell_router.moa.registry import ProgramLimits
from shell_router.moa.requests import AgentRequest, OutputOf, Segment
from tests.fakes.moa import Recorder, ScriptedMoa, open_programs
from tests.fakes.scripted_engine import Hold, Script


def send(
    agent: str, *prompt: Segment, program: str = "p", model: str = "small", **fields: object
) -> AgentRequest:
    return AgentRequest("tenant", program, agent, model, prompt, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["large", "other"])
async def test_an_output_goes_where_output_of_stands(model: str) -> None:
    moa = ScriptedMoa()
    first = await moa.programs.run(send("first", "Say something."), print)
    await moa.programs.run(
        send("second", "They said: ", OutputOf("first"), ". Right?", model=model), print
    )
    assert moa.prompts(model)[-1] == f"They said: {first.text}. Right?"


async def test_a_precursor_may_be_sent_later() -> None:
    moa, events = ScriptedMoa(), Recorder()
    later = asyncio.create_task(
        moa.programs.run(send("second", OutputOf("first"), model="large"), events.emit)
    )
    await events.until(lambda r: bool(r.of(AgentStarted)))
    first = await moa.programs.run(send("first", "Say something."), print)
    await later
    assert moa.prompts("large") == [first.text]


async def test_a_precursor_that_never_comes_is_given_up_after_wait_s() -> None:
    moa = ScriptedMoa()
    with pytest.raises(PrecursorTimeout, match="first"):
        await moa.programs.run(send("second", OutputOf("first"), wait_s=0.02), print)
    assert moa.programs.state("tenant", "p").agents == {"second": "failed"}


async def test_a_gate_in_flight_judges_complete_outputs_with_all_that_still_run() -> None:
    hold = Hold()

    async def pace(rid: str, piece: int) -> None:
        if rid.startswith("c."):
            await hold.pace(rid, piece)
        await asyncio.sleep(0)

    moa, events = ScriptedMoa(pace=pace), Recorder()
    sure, unsure = Script("Answer: 7", logprob=-0.01), Script("Answer: 5", logprob=-0.3)
    moa.engines["small"].answer = lambda asked: sure if asked.rid.startswith("a.") else unsure
    c = asyncio.create_task(moa.programs.run(send("c", "Why?", confidence=True), print))
    await hold.until_waiting()
    gate = EarlyExit("in_flight", threshold=0.4, min_completed=1)
    outputs = [OutputOf(name) for name in "abc"]
    reader = send("reader", *outputs, model="large", early_exit=gate)
    reading = asyncio.create_task(moa.programs.run(reader, events.emit))
    for name in "ab":
        await moa.programs.run(send(name, "Why?", confidence=True), print)
    await events.until(lambda r: len(r.of(ExitScored)) == 2)
    hold.release()
    assert (await c).reason == "stop"
    await reading
    assert not any(score.exited for score in events.of(ExitScored))


async def test_a_defect_of_the_judge_fails_the_reader() -> None:
    class Broken:
        async def embed(self, text: str) -> None:
            raise RuntimeError("a defect")

    hold = Hold()

    async def pace(rid: str, piece: int) -> None:
        if rid.startswith("late."):
            await hold.pace(rid, piece)

    moa = ScriptedMoa(pace=pace)
    moa.executor.embedder = Broken()  # type: ignore[assignment]
    late = asyncio.create_task(moa.programs.run(send("late", "Why?", confidence=True), print))
    await hold.until_waiting()
    await moa.programs.run(send("a", "Why?", confidence=True), print)
    gate = EarlyExit("monotone", min_completed=1)
    outputs = [OutputOf("a"), OutputOf("late")]
    reader = send("reader", *outputs, model="large", early_exit=gate)
    reading = asyncio.create_task(moa.programs.run(reader, print))
    await asyncio.wait([reading], timeout=0)
    hold.release()
    await late
    with pytest.raises(ExceptionGroup) as failed:
        await reading
    assert failed.group_contains(RuntimeError, match="a defect")


async def test_a_cancelled_reader_judges_no_more() -> None:
    hold = Hold(0)
    moa = ScriptedMoa(pace=hold.pace)
    late = asyncio.create_task(moa.programs.run(send("late", "Why?"), print))
    await hold.until_waiting()
    before = asyncio.all_tasks()
    gate = EarlyExit("quorum", min_completed=1)
    reader = send("reader", OutputOf("late"), model="large", early_exit=gate)
    events = Recorder()
    reading = asyncio.create_task(moa.programs.run(reader, events.emit))
    await events.until(lambda r: bool(r.of(AgentStarted)))
    reading.cancel()
    await asyncio.wait([reading])
    assert asyncio.all_tasks() == before
    hold.release()
    await late


async def test_an_agent_whose_log_is_being_created_can_be_cut() -> None:
    creating, created = asyncio.Event(), asyncio.Event()

    class Slow(MemoryAgentPromptCache):
        async def create(self, key: LogKey) -> LogWriter:
            if key.agent == "late":
                creating.set()
                await created.wait()
            return await super().create(key)

    moa = ScriptedMoa()
    programs = open_programs(moa.models, Slow(clock=monotonic), clock=monotonic)
    late = asyncio.create_task(programs.run(send("late", "Why?"), print))
    await creating.wait()
    gate = EarlyExit("quorum", min_completed=1)
    await programs.run(send("a", "Why?"), print)
    outputs = [OutputOf("a"), OutputOf("late")]
    reader = send("reader", *outputs, model="large", early_exit=gate)
    reading = asyncio.create_task(programs.run(reader, print))
    for _ in range(20):  # until the exit has been decided
        await asyncio.sleep(0)
    created.set()
    assert (await late).reason == "abort"
    await reading
    assert moa.prompts("small") == ["Why?"]


async def test_messages_go_through_the_chat_template() -> None:
    moa = ScriptedMoa()
    first = await moa.programs.run(send("first", "Hi"), print)
    request = AgentRequest(
        "tenant", "p", "second", "large", messages=(("user", ("Judge: ", OutputOf("first"))),)
    )
    await moa.programs.run(request, print)
    assert moa.prompts("large") == [f"<user>Judge: {first.text}<assistant>"]


async def test_the_same_request_again_waits_for_the_agent_or_gets_its_answer_and_another_is_refused() -> (
    None
):
    hold = Hold(0)
    moa = ScriptedMoa(pace=hold.pace)
    first, again = (
        asyncio.create_task(moa.programs.run(send("first", "Hi"), print)) for _ in range(2)
    )
    await hold.until_waiting()
    first.cancel()
    await asyncio.wait([first])
    hold.release()
    assert await again == await moa.programs.run(send("first", "Hi"), print)
    for other in (
        send("first", "Ho"),
        send("first", "Hi", model="large"),
        send("first", "Hi", timeout_s=1.0),
    ):
        with pytest.raises(DuplicateAgent, match="first"):
            await moa.programs.run(other, print)
    assert len(moa.engines["small"].generated) == 1


async def test_an_agent_that_failed_or_whose_callers_have_all_left_runs_again() -> None:
    hold, moa = Hold(0), ScriptedMoa()
    moa.engines["small"].answer = lambda _: Script(
        "x", error=EngineUnreachable("The engine is gone.")
    )
    with pytest.raises(EngineUnreachable):
        await moa.programs.run(send("first", "Hi"), print)
    moa.engines["small"].answer = lambda _: Script("now it works")
    moa.engines["small"].pace = hold.pace
    leaves = asyncio.create_task(moa.programs.run(send("first", "Hi"), print))
    await hold.until_waiting()
    leaves.cancel()
    await asyncio.wait([leaves])
    assert not moa.running
    hold.release()
    await moa.programs.run(send("first", "Hi"), print)
    await moa.programs.run(send("second", OutputOf("first"), model="large"), print)
    assert moa.prompts("large") == ["now it works"]


async def test_a_program_has_a_limit_of_agents() -> None:
    moa = ScriptedMoa()
    programs = open_programs(
        moa.models,
        moa.cache,
        clock=asyncio.get_running_loop().time,
        limits=ProgramLimits(max_agents=1),
    )
    await programs.run(send("first", "Hi"), print)
    with pytest.raises(Overloaded, match="new program"):
        await programs.run(send("second", "Hi"), print)


async def test_an_agent_that_another_router_began_is_refused() -> None:
    moa = ScriptedMoa()
    elsewhere = open_programs(moa.models, moa.cache, clock=asyncio.get_running_loop().time)
    await elsewhere.run(send("first", "Hi"), print)
    with pytest.raises(DuplicateAgent, match="first"):
        await moa.programs.run(send("first", "Hi"), print)


async def test_an_agent_of_another_router_is_read_from_the_cache() -> None:
    moa = ScriptedMoa()
    elsewhere = open_programs(moa.models, moa.cache, clock=asyncio.get_running_loop().time)
    first = await elsewhere.run(send("first", "Hi"), print)
    await moa.programs.run(send("second", OutputOf("first"), model="large"), print)
    assert moa.prompts("large") == [first.text]


@pytest.mark.parametrize(("model", "spelled"), [("large", ["a", "b"]), ("other", ["ab"])])
async def test_another_routers_ids_are_read_where_the_tokenizers_match(
    model: str, spelled: list[str]
) -> None:
    moa = ScriptedMoa()
    small, reader = moa.tokenizers["small"], moa.tokenizers[model]
    elsewhere = await moa.cache.create(LogKey("tenant", "p", "first"))
    # a model may spell its text with other ids than an encoder does
    elsewhere.append(Chunk("ab", (*small.encode("a"), *small.encode("b")), small.fingerprint))
    elsewhere.end(End.FINISHED)
    await moa.programs.run(send("second", OutputOf("first"), model=model), print)
    (asked,) = moa.engines[model].generated
    assert [reader.decode([id]) for id in asked.input_ids] == spelled


@pytest.mark.parametrize(("sampling", "named"), [({}, "words"), ({"stop": ["."]}, "")])
async def test_a_log_names_its_vocabulary_where_ids_spell_the_text(
    sampling: dict[str, object], named: str
) -> None:
    moa = ScriptedMoa()
    await moa.programs.run(send("first", "Hi", sampling=sampling), print)
    read = await moa.cache.read(LogKey("tenant", "p", "first"), wait_s=0)
    assert read.ids
    assert read.vocabulary == named


@pytest.mark.parametrize("again_at", ["the same router", "another"])
async def test_an_agent_that_failed_and_runs_again_is_read_at_every_router(again_at: str) -> None:
    moa = ScriptedMoa()
    elsewhere = open_programs(moa.models, moa.cache, clock=asyncio.get_running_loop().time)
    for _ in range(2):
        moa.engines["small"].answer = lambda _: Script("half", error=EngineUnreachable("gone"))
        with pytest.raises(EngineUnreachable):
            await elsewhere.run(send("first", "Hi"), print)
        with pytest.raises(AgentFailed, match="Send the precursor again"):
            await moa.programs.run(send("second", OutputOf("first"), model="large"), print)
    moa.engines["small"].answer = lambda _: Script("now it works")
    runner = elsewhere if again_at == "the same router" else moa.programs
    await runner.run(send("first", "Hi"), print)
    for reader in (moa.programs, elsewhere):
        asked = send(f"third-{id(reader)}", OutputOf("first"), model="large")
        await reader.run(asked, print)
    assert moa.prompts("large") == ["now it works", "now it works"]


async def test_a_reader_that_comes_with_the_new_attempt_of_an_agent_reads_that() -> None:
    class SlowCache(MemoryAgentPromptCache):
        is_asked, goes_on = asyncio.Event(), asyncio.Event()

        async def create(self, key: LogKey) -> LogWriter:
            self.is_asked.set()
            await self.goes_on.wait()
            return await super().create(key)

    moa, clock = ScriptedMoa(), asyncio.get_running_loop().time
    async with SlowCache(clock=clock) as cache:
        here, elsewhere = (open_programs(moa.models, cache, clock=clock) for _ in range(2))
        cache.goes_on.set()
        moa.engines["small"].answer = lambda _: Script("half", error=EngineUnreachable("gone"))
        with pytest.raises(EngineUnreachable):
            await elsewhere.run(send("first", "Hi"), print)
        moa.engines["small"].answer = lambda _: Script("now it works")
        cache.goes_on.clear()
        cache.is_asked.clear()
        again = asyncio.create_task(here.run(send("first", "Hi"), print))
        await cache.is_asked.wait()
        cache.is_asked.clear()
        reader = here.run(send("second", OutputOf("first"), model="large"), print)
        reading = asyncio.create_task(reader)
        await cache.is_asked.wait()
        cache.goes_on.set()
        await asyncio.gather(again, reading)
    assert moa.prompts("large") == ["now it works"]


async def test_a_precursor_that_fails_is_left_out_where_the_reader_says_so() -> None:
    moa = ScriptedMoa()
    moa.engines["small"].answer = lambda _: Script("half", error=EngineUnreachable("gone"))
    with pytest.raises(EngineUnreachable):
        await moa.programs.run(send("first", "Hi"), print)
    moa.engines["small"].answer = lambda _: Script("whole")
    await moa.programs.run(send("second", "Hi"), print)
    both = (OutputOf("first"), OutputOf("second"))
    await moa.programs.run(send("reader", *both, model="large", drops_failed=True), print)
    assert moa.prompts("large") == ["whole"]
    with pytest.raises(AgentFailed, match="no precursor left"):
        await moa.programs.run(
            send("alone", OutputOf("first"), model="large", drops_failed=True), print
        )


async def test_agents_that_would_wait_for_each_other_are_refused() -> None:
    moa, events = ScriptedMoa(), Recorder()
    waiting = asyncio.create_task(moa.programs.run(send("a", OutputOf("b")), events.emit))
    await events.until(lambda r: bool(r.of(AgentStarted)))
    with pytest.raises(InvalidRequest, match="wait for itself: b <- a <- b"):
        await moa.programs.run(send("b", OutputOf("a")), print)
    with pytest.raises(InvalidRequest, match="wait for itself"):
        await moa.programs.run(send("c", OutputOf("c")), print)
    await moa.programs.cancel("tenant", "p")
    with pytest.raises(AgentFailed):
        await waiting


async def test_the_refused_agents_model_is_not_taken_for_that_of_another_routers_agent() -> None:
    moa = ScriptedMoa()
    elsewhere = open_programs(moa.models, moa.cache, clock=asyncio.get_running_loop().time)
    first = await elsewhere.run(send("first", "Hi", model="other"), print)
    with pytest.raises(DuplicateAgent):
        await moa.programs.run(send("first", "Hi", model="large"), print)
    await moa.programs.run(send("second", OutputOf("first"), model="large"), print)
    assert moa.prompts("large") == [first.text]


async def test_a_precursor_that_has_begun_may_be_silent_for_longer_than_wait_s() -> None:
    hold, events = Hold(0), Recorder()
    moa = ScriptedMoa(pace=hold.pace)
    first = asyncio.create_task(moa.programs.run(send("first", "Hi"), events.emit))
    second = asyncio.create_task(
        moa.programs.run(send("second", OutputOf("first"), model="large", wait_s=0.1), events.emit)
    )
    third = asyncio.create_task(
        moa.programs.run(send("third", OutputOf("missing"), wait_s=0.3), events.emit)
    )
    with pytest.raises(PrecursorTimeout):  # by then the second has waited longer than its wait_s
        await third
    hold.release()
    assert (await second).text
    await first


@pytest.mark.parametrize("wanted", ["many", 1.5, True, -1])
async def test_a_max_new_tokens_that_is_no_number_of_tokens_is_refused(wanted: object) -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        await ScriptedMoa().programs.run(
            send("first", "Hi", sampling={"max_new_tokens": wanted}), print
        )


async def test_an_ended_program_is_forgotten_after_its_time_and_its_name_is_free() -> None:
    now_s = 0.0
    moa = ScriptedMoa()
    programs = open_programs(
        moa.models, moa.cache, clock=lambda: now_s, limits=ProgramLimits(ttl_s=10.0)
    )
    await programs.run(send("first", "Hi"), print)
    now_s = 10.0
    await programs.run(send("other", "Hi", program="q"), print)
    with pytest.raises(UnknownProgram):
        programs.state("tenant", "p")
    await programs.run(send("first", "Hi"), print)


async def test_the_output_of_an_ended_agent_can_still_be_asked_for() -> None:
    moa = ScriptedMoa()
    first = await moa.programs.run(send("first", "Hi"), print)
    assert moa.programs.state("tenant", "p").outputs == {"first": first.text}


async def test_a_failed_agent_fails_those_that_need_it_with_its_reason() -> None:
    moa = ScriptedMoa()
    moa.engines["small"].answer = lambda _request: Script(
        "x", error=EngineUnreachable("The engine is gone.")
    )
    with pytest.raises(EngineUnreachable):
        await moa.programs.run(send("first", "Hi"), print)
    with pytest.raises(AgentFailed, match="engine is gone"):
        await moa.programs.run(send("second", OutputOf("first"), model="large"), print)


async def test_cancelling_a_program_ends_its_agents_and_frees_its_name() -> None:
    hold = Hold(2)
    moa, events = ScriptedMoa(pace=hold.pace), Recorder()
    before = asyncio.all_tasks()
    running = asyncio.create_task(moa.programs.run(send("first", "Hi"), events.emit))
    reading = asyncio.create_task(
        moa.programs.run(send("second", OutputOf("first"), model="large"), events.emit)
    )
    await events.until(lambda r: len(r.of(AgentTokens)) >= 2)
    assert moa.programs.state("tenant", "p").agents == {"first": "running", "second": "waiting"}
    await moa.programs.cancel("tenant", "p")
    for task in (running, reading):
        with pytest.raises(AgentFailed):
            await task
    assert not moa.running
    assert len(moa.cache) == 0
    with pytest.raises(UnknownProgram):
        moa.programs.state("tenant", "p")
    hold.release()
    await moa.programs.run(send("first", "Hi"), print)
    assert asyncio.all_tasks() == before


async def test_a_client_that_leaves_cancels_its_agent() -> None:
    hold = Hold()
    moa = ScriptedMoa(pace=hold.pace)
    task = asyncio.create_task(moa.programs.run(send("first", "Hi"), print))
    await hold.until_waiting()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not moa.running
    assert moa.programs.state("tenant", "p").agents == {"first": "cancelled"}


async def test_an_agent_past_its_time_limit_ends() -> None:
    moa = ScriptedMoa(pace=Hold().pace)
    with pytest.raises(DeadlineExceeded, match="did not end within"):
        await moa.programs.run(send("first", "Hi", timeout_s=0.05), print)
    assert not moa.running


async def test_unknown_models_and_programs_are_named() -> None:
    moa = ScriptedMoa()
    with pytest.raises(UnknownModel, match="huge"):
        await moa.programs.run(send("first", "Hi", model="huge"), print)
    with pytest.raises(UnknownProgram, match="nothing"):
        moa.programs.state("tenant", "nothing")


async def test_tenants_do_not_see_each_others_programs() -> None:
    moa = ScriptedMoa()
    await moa.programs.run(send("first", "Hi"), print)
    with pytest.raises(UnknownProgram):
        moa.programs.state("another tenant", "p")


async def test_the_oldest_ended_program_makes_room_and_running_ones_do_not() -> None:
    hold, moa = Hold(), ScriptedMoa()
    programs = open_programs(
        moa.models,
        moa.cache,
        clock=asyncio.get_running_loop().time,
        limits=ProgramLimits(max_programs=1),
    )
    await programs.run(send("first", "Hi", program="old"), print)
    moa.engines["small"].pace = hold.pace
    running = asyncio.create_task(programs.run(send("first", "Hi", program="new"), print))
    await hold.until_waiting()
    with pytest.raises(UnknownProgram):
        programs.state("tenant", "old")
    with pytest.raises(Overloaded):
        await programs.run(send("first", "Hi", program="newest"), print)
    hold.release()
    await running


class SlowCache(MemoryAgentPromptCache):
    """Forgets the program "0" once `may_forget` is set."""

    def __init__(self) -> None:
        super().__init__(clock=monotonic)
        self.asked, self.may_forget = asyncio.Event(), asyncio.Event()

    async def forget(self, tenant: str, program: str) -> None:
        if program == "0":
            self.asked.set()
            await self.may_forget.wait()
        await super().forget(tenant, program)


@pytest.mark.parametrize("limits", [ProgramLimits(ttl_s=10.0), ProgramLimits(max_programs=200)])
async def test_a_program_that_runs_again_while_others_are_forgotten_is_kept(
    limits: ProgramLimits,
) -> None:
    async def texts() -> AsyncIterator[str]:
        yield "x"

    now_s, hold, moa, cache = 0.0, Hold(), ScriptedMoa(), SlowCache()
    programs = open_programs(moa.models, cache, clock=lambda: now_s, limits=limits)
    for number in range(200):
        await programs.write(AgentRequest("tenant", f"{number}", "a", ""), texts())
    now_s, moa.engines["small"].pace = 10.0, hold.pace
    begins = asyncio.create_task(programs.write(AgentRequest("tenant", "new", "a", ""), texts()))
    await cache.asked.wait()
    runs = asyncio.create_task(programs.run(send("b", "Hi", program="1"), print))
    await hold.until_waiting()
    cache.may_forget.set()
    await begins
    assert programs.state("tenant", "1").agents["b"] == "running"
    hold.release()
    await programs.run(send("c", OutputOf("b"), program="1", model="large"), print)
    assert moa.prompts("large") == [(await runs).text]


async def test_a_tenant_with_many_programs_pushes_out_its_own() -> None:
    moa = ScriptedMoa()
    programs = open_programs(
        moa.models,
        moa.cache,
        clock=asyncio.get_running_loop().time,
        limits=ProgramLimits(max_programs=4),
    )
    await programs.run(replace(send("a", "Hi", program="only"), tenant="bob"), print)
    for number in range(10):
        await programs.run(send("a", "Hi", program=f"p{number}"), print)
    assert programs.state("bob", "only").agents == {"a": "finished"}
    assert programs.state("tenant", "p7")
    with pytest.raises(UnknownProgram):
        programs.state("tenant", "p6")


async def test_what_a_tenant_writes_elsewhere_is_bounded_in_all_its_programs() -> None:
    moa = ScriptedMoa()
    programs = open_programs(
        moa.models, moa.cache, clock=monotonic, limits=ProgramLimits(max_written_bytes=10)
    )

    async def write(program: str, agent: str, tenant: str = "alice") -> None:
        async def texts() -> AsyncIterator[str]:
            await programs.count_written(tenant, program, 8)
            yield "8 bytes."

        await programs.write(AgentRequest(tenant, program, agent, ""), texts())

    await write("first", "a")
    with pytest.raises(Overloaded, match=r"'alice' has written .* 10 bytes"):
        await write("first", "b")
    await write("of another", "a", "bob")
    await write("second", "a")
    assert set(programs.state("alice", "second").agents) == {"a"}
    with pytest.raises(UnknownProgram):
        programs.state("alice", "first")
    with pytest.raises(Overloaded):
        await write("second", "b")
    await programs.run(
        replace(send("reads", "Hi", program="second"), tenant="alice"), print
    )  # no text of a client's
    await programs.cancel("alice", "second")
    await write("second", "a")
