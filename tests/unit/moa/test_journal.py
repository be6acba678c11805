"""Runs that go on where another attempt broke off: what engines gave is repeated, and only the rest
is asked for.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

import orjson
import pytest

from agent_cache import CacheUnavailable
from shell_router.core.engine import Generation, Tokens
from shell_router.core.events import AgentFinished, AgentStopped, AgentTokens, Event, ExitScored
from shell_router.core.marks import REASONING_PARSERS
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import AgentFailed, EngineUnreachable, ResponseCancelled
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.choosing import ModelChooser
from shell_router.moa.journal import RecordedGeneration, RunJournal
from shell_router.moa.requests import AgentRequest, Answer, OutputOf
from shell_router.routing.holdout import Compared, Comparison, Holdouts
from shell_router.topology import AUTO, Agent, Cluster, Prefill, Prompt, Topology
from tests.fakes.journals import MemoryJournals
from tests.fakes.moa import Recorder, ScriptedMoa, agent_of, ask, open_programs
from tests.fakes.scripted_engine import Gates, Script

LEAF = Prompt(prefix="Q: {question}")
SUM = Prompt(prefix="Q: {question}", slot=" [{index}: {output}]", suffix=" So?")
TEXTS = {
    "a": "one two three four five six seven eight",
    "b": "red green blue red green blue",
    "sum": "all of it is that and no more",
    "root": "the answer is at the end of this text",
}
SMALL_PIECES = {name: Script(text, piece_words=2) for name, text in TEXTS.items()}


def tree(**root: Any) -> Topology:
    agents = (
        Agent("a", "small", (), LEAF),
        Agent("b", "medium", (), LEAF),
        Agent("sum", "large", ("a", "b"), SUM),
        Agent("root", "large", ("sum",), SUM, **root),
    )
    return Topology("tree", {one.id: one for one in agents}, prefill=Prefill(chunk_tokens=2))


def going_on(moa: ScriptedMoa, scripts: Mapping[str, Script]) -> None:
    """Let engines write what follows the part of their script that the prompt ends with."""

    def answer(request: Generation) -> Script:
        script = scripts[agent_of(request)]
        prompt = moa.tokenizers["small"].decode(request.input_ids)
        written = max(
            size for size in range(len(script.text) + 1) if prompt.endswith(script.text[:size])
        )
        return replace(script, text=script.text[written:])

    for engine in moa.engines.values():
        engine.answer = answer


def moa_of(scripts: Mapping[str, Script] = SMALL_PIECES, **fields: Any) -> ScriptedMoa:
    moa = ScriptedMoa(scripts, **fields)
    going_on(moa, scripts)
    return moa


async def attempt(
    moa: ScriptedMoa,
    store: MemoryJournals,
    run_id: str = "first",
    topology: Topology | None = None,
    events: Recorder | None = None,
    **fields: Any,
) -> Answer:
    records = await store.claim("tenant", "key", run_id, "head")
    assert records is not None
    journal, has_answer = RunJournal(store, "tenant", "key", run_id, records), False
    try:
        request = ask(run_id=run_id, journal=journal, **fields)
        answer = await moa.executor.run(topology or tree(), request, (events or Recorder()).emit)
        has_answer = True
        return answer
    finally:
        await journal.close(void=not has_answer)


def asked(moa: ScriptedMoa) -> list[str]:
    return sorted(
        agent_of(request) for engine in moa.engines.values() for request in engine.generated
    )


def kinds(records: list[bytes], kind: str) -> set[str]:
    return {
        name.rpartition(".")[2] for found, name, *_ in map(orjson.loads, records) if found == kind
    }


async def test_a_run_that_ended_is_repeated_without_an_engine() -> None:
    store, again = MemoryJournals(), moa_of()
    first, events = await attempt(moa_of(), store), Recorder()
    second = await attempt(again, store, "second", events=events)
    assert second.text == first.text == TEXTS["root"]
    assert {one: used.completion_tokens for one, used in second.agents.items()} == {
        one: used.completion_tokens for one, used in first.agents.items()
    }
    assert not asked(again) and not any(engine.prefilled for engine in again.engines.values())
    assert (
        "".join(event.text for event in events.of(AgentTokens) if event.agent == "root")
        == TEXTS["root"]
    )


async def test_only_the_prompt_that_was_recorded_counts_as_paid() -> None:
    store, moa = MemoryJournals(), moa_of()
    await attempt(moa, store)
    records = await store.claim("tenant", "key", "second", "head")
    assert records is not None
    journal = RunJournal(store, "tenant", "key", "second", records)
    for alias, engine in moa.engines.items():
        for request in engine.generated:
            rid = request.rid.replace("first", "second")
            assert journal.count_recorded(rid, alias, request.input_ids) == math.inf
            assert journal.count_recorded(rid, alias, [*request.input_ids, 1]) is None
    await journal.close(void=True)


class CountingHoldouts(Holdouts):
    """Compares every agent's drafts, and counts them."""

    compared = 0

    def __contains__(self, key: Compared) -> bool:
        return True

    def observe(
        self, key: Compared, *, held_out: bool, seconds: float, now_s: float
    ) -> Comparison | None:
        self.compared += 1
        return super().observe(key, held_out=held_out, seconds=seconds, now_s=now_s)


async def test_nothing_is_learned_from_an_agent_requests_repeated_output() -> None:
    async def learned(store: MemoryJournals, run_id: str) -> tuple[float | None, int]:
        """What is known of the model's outputs and of its drafts."""

        async def texts() -> AsyncIterator[str]:
            yield "Say something."

        moa, holdouts = ScriptedMoa(), CountingHoldouts()
        models = {name: replace(one, drafts="auto") for name, one in moa.models.items()}
        chooser = ModelChooser(models, clock=monotonic)
        programs = open_programs(
            models, moa.cache, clock=monotonic, chooser=chooser, holdouts=holdouts
        )
        records = await store.claim("tenant", "key", run_id, "head")
        assert records is not None
        journal = RunJournal(store, "tenant", "key", run_id, records)
        await programs.write(AgentRequest("tenant", "p", "first", ""), texts())
        await programs.run(
            AgentRequest("tenant", "p", "second", "large", (OutputOf("first"),), journal=journal),
            print,
        )
        await journal.close(void=False)
        return chooser.estimates.get_output_tokens("large", None, None), holdouts.compared

    store = MemoryJournals()
    tokens, compared = await learned(store, "first")
    assert tokens is not None and compared == 1
    assert await learned(store, "second") == (None, 0)


async def test_wherever_the_router_died_the_next_asks_only_for_what_was_not_finished() -> None:
    whole = MemoryJournals()
    first = await attempt(moa_of(), whole)
    for died in range(len(whole.records)):
        left, again = MemoryJournals(whole.records[:died]), moa_of()
        answer = await attempt(again, left, f"after-{died}")
        assert answer.text == first.text
        assert answer.agents.keys() == first.agents.keys()
        for name, used in answer.agents.items():
            before = first.agents[name]
            assert (used.prompt_tokens, used.completion_tokens) == (
                before.prompt_tokens,
                before.completion_tokens,
            )
        assert asked(again) == sorted(TEXTS.keys() - kinds(left.records[:died], "finish"))
        third = moa_of()
        assert (await attempt(third, left, "third")).text == first.text and not asked(third)


async def test_an_output_that_broke_off_is_continued_from_its_tokens() -> None:
    gates = Gates("b")
    store, moa = MemoryJournals(), moa_of(pace=lambda rid, piece: gates.pace(rid, piece - 2))
    running = asyncio.create_task(attempt(moa, store))
    await gates.until_waiting(1)
    while b"seven" not in b"".join(store.records):  # noqa: ASYNC110 - the store is written in the background
        await asyncio.sleep(0)
    left, again = MemoryJournals(store.records), moa_of()
    running.cancel()
    await asyncio.wait([running])
    await attempt(again, left, "second")
    (continued,) = again.engines["medium"].generated
    ids = again.tokenizers["medium"].encode("red green blue red")
    assert continued.input_ids[-len(ids) :] == ids
    assert continued.sampling["max_new_tokens"] == 4096 - len(continued.input_ids)


@pytest.mark.parametrize(
    "sampling", [{"json_schema": "{}"}, {"stop": ["end"]}, {"frequency_penalty": 0.5}]
)
async def test_an_output_whose_rules_count_from_its_beginning_is_asked_for_again(
    sampling: dict[str, Any],
) -> None:
    store, again = MemoryJournals(), moa_of()
    await attempt(moa_of(), store, sampling=sampling)
    at = next(place for place, one in enumerate(store.records) if b"of this" in one)
    answer = await attempt(
        again, MemoryJournals(store.records[: at + 1]), "second", sampling=sampling
    )
    (request,) = (one for one in again.engines["large"].generated if agent_of(one) == "root")
    assert request.sampling["max_new_tokens"] == 4096 - len(request.input_ids)
    assert answer.text == TEXTS["root"]


async def test_an_output_for_another_prompt_is_not_repeated() -> None:
    store, again = MemoryJournals(), moa_of()
    await attempt(moa_of(), store)
    changed = tree().agents | {
        "b": Agent("b", "medium", (), Prompt(prefix="Otherwise: {question}"))
    }
    await attempt(again, store, "second", replace(tree(), agents=changed))
    assert asked(again) == ["b"]


async def test_an_exit_falls_as_before_and_what_it_cut_off_is_not_asked_for() -> None:
    exits = EarlyExit("threshold", threshold=0.0, min_completed=2)
    leaves = {name: Agent(name, "small", (), LEAF) for name in ("x", "y", "z")}
    root = Agent("root", "large", ("x", "y", "z"), SUM)
    topology = Topology("exits", leaves | {"root": root}, (Cluster("c", ("x", "y", "z"), exits),))
    gates = Gates("x")  # the first in the graph is cut off
    scripts = {
        name: Script(f"{name} says seven words and then some", piece_words=1)
        for name in ("x", "y", "z", "root")
    }
    store, moa, events = (
        MemoryJournals(),
        moa_of(scripts, pace=lambda rid, piece: gates.pace(rid, piece - 3)),
        Recorder(),
    )
    first = await attempt(moa, store, topology=topology, events=events)
    again, repeated = moa_of(scripts), Recorder()
    second = await attempt(again, MemoryJournals(store.records), "second", topology, repeated)
    assert [event.agent for event in events.of(AgentStopped)] == ["x"]
    assert [event.agent for event in repeated.of(AgentStopped)] == ["x"]
    assert [event.completed for event in repeated.of(ExitScored)] == [
        one.completed for one in events.of(ExitScored)
    ]
    assert second.text == first.text and not asked(again)


async def test_a_fallback_that_answered_is_not_asked_again_nor_is_the_model_that_failed() -> None:
    refuses = Script("", error=EngineUnreachable("refused"))
    moa, store = ScriptedMoa(), MemoryJournals()
    moa.engines["small"].answer = lambda _: refuses
    topology = Topology("two", {"root": Agent("root", "small", (), LEAF, fallbacks=("medium",))})
    first = await attempt(moa, store, topology=topology)
    again = ScriptedMoa()
    second = await attempt(again, store, "second", topology)
    assert (second.text, second.agents["root"].model) == (first.text, "medium") and not asked(again)


async def test_a_run_that_failed_asks_again_for_what_failed_and_for_nothing_else() -> None:
    store, moa, again = MemoryJournals(), moa_of(), moa_of()
    moa.engines["large"].answer = lambda _: Script("", error=EngineUnreachable("refused"))
    with pytest.raises(AgentFailed):
        await attempt(moa, store)
    assert (await attempt(again, store, "second")).text == TEXTS["root"]
    assert asked(again) == ["root", "sum"]


async def test_agents_keep_the_model_that_was_chosen_for_them() -> None:
    store, topology = (
        MemoryJournals(),
        Topology("auto", {"root": Agent("root", AUTO, (), LEAF, candidates=("small", "medium"))}),
    )
    first = await attempt(ScriptedMoa(), store, topology=topology)
    chosen = first.agents["root"].model
    again = ScriptedMoa()
    moved = [one for one in ("small", "medium") if one != chosen]
    changed = replace(
        topology, agents={"root": Agent("root", AUTO, (), LEAF, candidates=(*moved, chosen))}
    )
    assert (await attempt(again, store, "second", changed)).agents["root"].model == chosen
    assert not asked(again)


async def test_thinking_is_repeated_as_thinking() -> None:
    scripts = {name: f"<think>\nmaybe {name}</think>\n\n{text}" for name, text in TEXTS.items()}
    marks, store = REASONING_PARSERS["qwen3"], MemoryJournals()
    first = await attempt(ScriptedMoa(scripts, reasoning=marks), store, max_thinking_tokens=3)
    again = ScriptedMoa(scripts, reasoning=marks)
    second = await attempt(again, store, "second", max_thinking_tokens=3)
    assert (second.text, second.reasoning) == (first.text, first.reasoning) and not asked(again)


def away(store: MemoryJournals) -> None:
    store.away = True


def lost(store: MemoryJournals) -> None:
    store.lost = True


@pytest.mark.parametrize("fault", [away, lost])
async def test_a_run_goes_on_without_its_store_and_warns_once(
    fault: Callable[[MemoryJournals], None], caplog: pytest.LogCaptureFixture
) -> None:
    gates, store = Gates("sum"), MemoryJournals()
    running = asyncio.create_task(attempt(moa_of(pace=gates.pace), store))
    await gates.until_waiting(1)
    fault(store)
    gates.open("sum")
    assert (await running).text == TEXTS["root"]
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1


async def test_a_lease_is_renewed_while_engines_are_silent() -> None:
    gates, store = Gates("sum"), MemoryJournals()
    running = asyncio.create_task(attempt(moa_of(pace=gates.pace), store))
    await gates.until_waiting(1)
    before = store.appends
    async with asyncio.timeout(10):
        while store.appends < before + 3:  # noqa: ASYNC110 - the store is written in the background
            await asyncio.sleep(0)
    gates.open("sum")
    await running
    assert store.owner is None


async def test_ends_come_in_their_order_so_that_an_exit_in_flight_falls_as_before() -> None:
    exits = EarlyExit("in_flight", threshold=0.5, min_completed=2)
    leaves = {name: Agent(name, "small", (), LEAF) for name in ("x", "y", "z")}
    root = Agent("root", "large", ("x", "y", "z"), SUM)
    topology = Topology("exits", leaves | {"root": root}, (Cluster("c", ("x", "y", "z"), exits),))
    answers = {"x": 7, "y": 7, "z": 9}
    scripts = {
        name: Script(f"It is \\boxed{{{said}}}.\n", piece_words=9) for name, said in answers.items()
    }
    scripts["root"] = Script("done now")
    gates, store, events, repeated = Gates("x", "y"), MemoryJournals(), Recorder(), Recorder()
    running = asyncio.create_task(
        attempt(moa_of(scripts, pace=gates.pace), store, topology=topology, events=events)
    )
    for ended, opened in (("z", "y"), ("y", "x")):  # the graph has them the other way round
        await events.until(
            lambda seen, ended=ended: any(one.agent == ended for one in seen.of(AgentFinished))
        )
        gates.open(opened)
    await running
    again = moa_of(scripts)
    await attempt(again, store, "second", topology, repeated)
    scored = [(one.completed, one.exited) for one in events.of(ExitScored)]
    assert scored == [(("z",), False), (("z", "y"), False), (("z", "y"), True)]
    assert [(one.completed, one.exited) for one in repeated.of(ExitScored)] == scored
    assert not asked(again)


async def test_an_output_is_kept_before_its_end_is_known() -> None:
    store, ended = MemoryJournals(), list[str]()

    class Watch(Recorder):
        def emit(self, event: Event) -> None:
            if isinstance(event, AgentFinished):
                assert event.agent in kinds(store.records, "finish")
                ended.append(event.agent)

    await attempt(moa_of(), store, events=Watch())
    assert sorted(ended) == sorted(TEXTS)


async def test_an_output_is_continued_where_its_text_was_whole() -> None:
    whole, again = MemoryJournals(), moa_of()
    first = await attempt(moa_of(), whole)
    at = next(place for place, one in enumerate(whole.records) if b"of this" in one)
    kind, name, ids, text, *rest = orjson.loads(whole.records[at])
    held_back = orjson.dumps(
        [kind, name, ids, text.removesuffix(" this"), *rest]
    )  # its last token's text is to come
    answer = await attempt(again, MemoryJournals([*whole.records[:at], held_back]), "second")
    assert answer.text == first.text and asked(again) == ["root"]
    assert answer.agents["root"].completion_tokens == first.agents["root"].completion_tokens


async def test_an_output_is_not_withheld_while_other_agents_write() -> None:
    class Busy(MemoryJournals):
        async def append(self, *args: Any) -> bool:
            await asyncio.sleep(0)
            if self.appends < 50:
                journal.add("tokens", "other", [1], "one", [])
            return await super().append(*args)

    store = Busy()
    journal = await begun(store)
    journal.add("begin", "mine", "digest")
    await journal.flush()
    assert kinds(store.records, "begin") == {"mine"} and store.appends < 5
    await journal.close(void=False)


async def begun(store: MemoryJournals) -> RunJournal:
    await store.claim("tenant", "key", "first", "head")
    return RunJournal(store, "tenant", "key", "first", [])


async def test_what_waits_when_a_short_outage_ends_is_kept_before_the_lease_is_given_up() -> None:
    store = MemoryJournals()
    store.lease_s = 600
    journal = await begun(store)
    store.away = True
    journal.add("begin", "mine", "digest")
    async with asyncio.timeout(30):
        while not store.refused:  # noqa: ASYNC110 - the store is written in the background
            await asyncio.sleep(0)
    store.away = False
    await journal.close(void=False)
    assert kinds(store.records, "begin") == {"mine"} and store.owner is None


async def test_a_lease_stays_where_its_last_records_could_not_be_sent() -> None:
    class Deaf(MemoryJournals):
        async def append(self, *args: Any) -> bool:
            raise CacheUnavailable("the store is away")

    store = Deaf()
    journal = await begun(store)
    journal.add("begin", "mine", "digest")
    await journal.close(void=False)
    assert store.owner == "first"


async def test_a_renewal_that_failed_is_sent_again_well_before_the_lease_ends() -> None:
    store = MemoryJournals()
    store.lease_s = 0.6
    journal = await begun(store)
    store.away = True
    async with asyncio.timeout(30):
        while not store.refused:  # noqa: ASYNC110
            await asyncio.sleep(0)
        store.away = False
        await asyncio.sleep(store.lease_s / 3)
    assert store.appends
    await journal.close(void=False)


def test_pieces_are_joined_without_copying_what_was_joined_before() -> None:
    class Ids(tuple[int, ...]):
        def __radd__(self, before: tuple[int, ...]) -> tuple[int, ...]:
            raise AssertionError(f"{len(before)} ids are copied")

    pieces = [(place // 2, Tokens(Ids((place,)), f"{place} ", (-0.5,))) for place in range(4)]
    joined = RecordedGeneration("digest", pieces).join_pieces().pieces
    assert joined == [
        (0, Tokens((0, 1), "0 1 ", (-0.5, -0.5))),
        (1, Tokens((2, 3), "2 3 ", (-0.5, -0.5))),
    ]


@pytest.mark.parametrize("held", ["b", "sum", "root"])
def test_what_the_deadline_cut_off_is_cut_off_again(held: str) -> None:
    topology, store, again = replace(tree(), root_reserve_s=5.0), MemoryJournals(), moa_of()

    async def attempt_twice() -> tuple[Answer, Answer]:
        moa = moa_of(pace=Gates(held).pace)
        first = await attempt(moa, store, topology=topology, timeout_s=60)
        repeated = MemoryJournals(store.records)
        return first, await attempt(again, repeated, "second", topology, timeout_s=60)

    first, second = run_virtual(attempt_twice())
    assert (second.text, second.reason) == (first.text, first.reason) and not asked(again)
    assert [used.state for used in second.agents.values()] == [
        used.state for used in first.agents.values()
    ]


def test_what_an_exit_cut_off_after_a_long_grace_is_cut_off_again() -> None:
    panel = Cluster("c", ("a", "b"), EarlyExit("quorum", min_completed=1, grace_s=60.0))
    topology, store, again = replace(tree(), clusters=(panel,)), MemoryJournals(), moa_of()

    async def attempt_twice() -> tuple[Answer, Answer]:
        first = await attempt(moa_of(pace=Gates("b").pace), store, topology=topology)
        return first, await attempt(again, MemoryJournals(store.records), "second", topology)

    first, second = run_virtual(attempt_twice())
    assert first.agents["b"].state == second.agents["b"].state == "early_exit"
    assert second.text == first.text and not asked(again)


async def test_a_repeated_run_exits_at_the_threshold_that_was_calibrated_before() -> None:
    gate = EarlyExit("in_flight", max_changed_percent=40, skip_aggregation=True)
    topology = replace(tree(), clusters=(Cluster("c", ("a", "b"), gate),))
    said = "Answer: 4\n"
    scripts = {name: Script(said) for name in ("a", "sum", "root")}
    scripts["b"] = Script(f"Answer: 4\n{'word ' * 40}", piece_words=1)
    store, moa, again = MemoryJournals(), moa_of(scripts), moa_of(scripts)
    for number in range(2):
        await moa.executor.run(topology, ask(run_id=f"complete{number}"), print)
    first = await attempt(moa, store, topology=topology)
    second = await attempt(again, MemoryJournals(store.records), "second", topology)
    assert first.agents["b"].state == second.agents["b"].state == "early_exit"
    assert first.agents["sum"].state == second.agents["sum"].state == "skipped"
    assert not asked(again)


async def test_a_run_that_another_router_has_since_writes_nothing_more() -> None:
    store = MemoryJournals()
    store.lease_s = 600
    journal = await begun(store)
    await journal.require_lease()
    assert store.appends == 1
    store.owner = store.claimed_by = "second"  # after a freeze of the first
    await journal.require_lease()
    assert store.appends == 1, "a lease that runs is not asked for"
    store.now_s = 600
    for _ in range(2):
        with pytest.raises(ResponseCancelled):
            await journal.require_lease()
    await journal.close(void=False)


@pytest.mark.parametrize("fault", [away, lost])
async def test_a_lease_that_ran_out_is_kept_where_no_other_router_has_the_run(
    fault: Callable[[MemoryJournals], None],
) -> None:
    store = MemoryJournals()
    store.lease_s = 600
    journal = await begun(store)
    await journal.require_lease()
    store.now_s = 600
    await journal.require_lease()
    store.now_s = 1200
    fault(store)
    await journal.require_lease()
    await journal.close(void=False)
