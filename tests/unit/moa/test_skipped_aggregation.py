"""Agents that read what agrees and pass it on."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentStarted,
    AgentStopped,
    AggregationSkipped,
    Event,
    ExitScored,
)
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import EngineUnreachable
from shell_router.moa.requests import AgentUsage
from shell_router.topology import Agent, Cluster, Prefill, Prompt, Topology
from tests.fakes.moa import ControlWordTokenizer, Recorder, ScriptedMoa, agent_of, ask
from tests.fakes.scripted_engine import Gates, Script

SKIP_AGGREGATION = EarlyExit("in_flight", threshold=0.6, min_completed=2, skip_aggregation=True)
SAYS_4, SAYS_5 = "2 plus 2 is 4 Answer: 4", "no idea at all Answer: 5"


def agent(name: str, *precursors: str, model: str = "small", **fields: object) -> Agent:
    prompt = Prompt(prefix="Q: {question}", slot=" [{output}]") if precursors else Prompt()
    return Agent(name, model, precursors, prompt, **fields)  # type: ignore[arg-type]


def graph(
    *agents: Agent, clusters: tuple[tuple[str, ...], ...], gate: EarlyExit = SKIP_AGGREGATION
) -> Topology:
    judged = tuple(Cluster(f"cluster-{n}", names, gate) for n, names in enumerate(clusters))
    return Topology("graph", {one.id: one for one in agents}, judged, Prefill(chunk_tokens=8))


def one_cluster(gate: EarlyExit = SKIP_AGGREGATION) -> Topology:
    return graph(
        agent("a"),
        agent("b"),
        agent("c"),
        agent("root", "a", "b", "c"),
        clusters=(("a", "b", "c"),),
        gate=gate,
    )


def three_branches() -> Topology:
    leaves = [f"{branch}{n}" for branch in "abc" for n in (1, 2)]
    readers = [agent(branch, f"{branch}1", f"{branch}2", model="medium") for branch in "abc"]
    return graph(
        *map(agent, leaves),
        *readers,
        agent("root", "a", "b", "c", model="other"),
        clusters=(("a1", "a2"), ("b1", "b2"), ("c1", "c2"), ("a", "b", "c")),
    )


FIRST = EarlyExit("first_answer", threshold=0.8, ask_first=True, skip_aggregation=True)
SURE = Script(SAYS_4, logprob=-0.01)
UNSURE = Script(SAYS_4, logprob=-0.1)
AWAY = EngineUnreachable("It is away.")


def growing(gate: EarlyExit = FIRST) -> Topology:
    """A first answer, and a tree of the leaves `a1` and `a2`, their reader `a`, and the root."""
    return graph(
        agent("first", model="large", on_failure="drop"),
        agent("a1"),
        agent("a2"),
        agent("a", "a1", "a2", model="medium"),
        agent("root", "first", "a", model="other"),
        clusters=(("first", "a"),),
        gate=gate,
    )


def asked(moa: ScriptedMoa) -> set[str]:
    return {agent_of(request) for engine in moa.engines.values() for request in engine.generated}


async def test_an_agreed_answer_is_forwarded_and_its_reader_writes_nothing() -> None:
    moa, events = (
        ScriptedMoa({"a": SAYS_4, "b": SAYS_4, "c": SAYS_5}, pace=Gates("c").pace),
        Recorder(),
    )
    answer = await moa.executor.run(one_cluster(), ask(), events.emit)
    assert answer.text == SAYS_4
    assert answer.agents["root"] == AgentUsage("small", 0, 0, 0, "skipped")
    assert answer.agents["c"].state == "early_exit"
    assert "root" not in asked(moa)
    (passed,) = events.of(AggregationSkipped)
    assert (passed.agent, passed.text, passed.confidence) == ("root", SAYS_4, answer.confidence)
    assert passed.source in ("a", "b")
    assert not moa.running


async def test_it_is_forwarded_too_when_none_is_left_to_be_cut_off() -> None:
    gates = Gates("c")
    moa, events = ScriptedMoa({"a": SAYS_4, "b": SAYS_5, "c": SAYS_4}, pace=gates.pace), Recorder()
    run = asyncio.create_task(moa.executor.run(one_cluster(), ask(), events.emit))
    await events.until(lambda r: {e.agent for e in r.of(AgentFinished)} == {"a", "b"})
    gates.open("c")
    answer = await run
    assert answer.text == SAYS_4
    assert Counter(usage.state for usage in answer.agents.values()) == {"finished": 3, "skipped": 1}


async def test_without_agreement_the_reader_writes() -> None:
    moa, events = (
        ScriptedMoa({"a": SAYS_4, "b": SAYS_5, "c": "Answer: 6", "root": "I think 4"}),
        Recorder(),
    )
    answer = await moa.executor.run(one_cluster(), ask("Why?"), events.emit)
    assert answer.text == "I think 4"
    assert answer.agents["root"].state == "finished"
    assert moa.prompt_of("root").count("[") == 3
    assert not events.of(AggregationSkipped)


async def test_agreement_is_aggregated_where_aggregation_is_not_to_be_skipped() -> None:
    gate = EarlyExit("in_flight", threshold=0.6, min_completed=2)
    moa = ScriptedMoa({"a": SAYS_4, "b": SAYS_4, "c": SAYS_4, "root": "all say 4"})
    assert (await moa.executor.run(one_cluster(gate), ask(), print)).text == "all say 4"


async def test_the_surest_of_those_that_agree_is_heard() -> None:
    said = {
        "a": Script("It is so. Answer: 4", logprob=-0.3),
        "b": Script("I know. Answer: 4", logprob=-0.1),
    }
    moa = ScriptedMoa({**said, "c": Script("Answer: 5", logprob=0.0)})
    gate = EarlyExit("in_flight", threshold=0.5, min_completed=2, skip_aggregation=True)
    assert (await moa.executor.run(one_cluster(gate), ask(), print)).text == "I know. Answer: 4"


async def test_an_output_that_was_cut_at_its_limit_is_not_forwarded() -> None:
    cut = Script("I know. Answer: 4", logprob=-0.01, reason="length")
    moa = ScriptedMoa({"a": cut, "b": SAYS_4, "c": SAYS_5})
    gate = EarlyExit("in_flight", threshold=0.5, min_completed=2, skip_aggregation=True)
    assert (await moa.executor.run(one_cluster(gate), ask(), print)).text == SAYS_4
    moa = ScriptedMoa({"a": cut, "b": cut, "c": cut, "root": "my own"})
    assert (await moa.executor.run(one_cluster(gate), ask(), print)).text == "my own"


@pytest.mark.parametrize(
    ("asks", "said", "forwards"),
    [
        ({"suffix": "End with 'Answer: ' and the number."}, SAYS_4, True),
        ({"system": r"Put the answer into \boxed{{}}."}, SAYS_4, False),
        ({"system": r"Put the answer into \boxed{{}}."}, r"So it is \boxed{4}.", True),
        ({"suffix": "Write #### and the number."}, SAYS_4, False),
        ({"suffix": "Your answer:"}, r"So it is \boxed{4}.", True),
    ],
)
async def test_an_output_is_forwarded_only_in_the_form_that_its_readers_prompt_asks_for(
    asks: dict[str, str], said: str, forwards: bool
) -> None:
    root = replace(
        agent("root", "a", "b", "c"), prompt=replace(Prompt(prefix="Q: {question} "), **asks)
    )
    asked = graph(*map(agent, "abc"), root, clusters=(("a", "b", "c"),))
    answer = await ScriptedMoa(dict.fromkeys("abc", said) | {"root": "4"}).executor.run(
        asked, ask(), print
    )
    assert answer.text == (said if forwards else "4")


async def test_agreement_climbs_the_tree_and_ends_the_branch_that_is_not_needed() -> None:
    scripts = dict.fromkeys(("a1", "a2", "b1", "b2"), SAYS_4)
    moa, events = ScriptedMoa(scripts, pace=Gates("c1", "c2").pace), Recorder()
    answer = await moa.executor.run(three_branches(), ask(), events.emit)
    assert answer.text == SAYS_4
    assert {name: answer.agents[name].state for name in ("a", "b", "c", "c1", "c2", "root")} == {
        "a": "skipped",
        "b": "skipped",
        "c": "early_exit",
        "c1": "unneeded",
        "c2": "unneeded",
        "root": "skipped",
    }
    assert asked(moa) == {"a1", "a2", "b1", "b2", "c1", "c2"}
    assert not moa.running


@pytest.mark.parametrize("root", ["medium", "other"])
async def test_a_forwarded_output_is_read_like_one_that_was_written(root: str) -> None:
    scripts = {
        "a1": SAYS_4,
        "a2": SAYS_4,
        "b1": SAYS_4,
        "b2": SAYS_5,
        "b": "Answer: 5",
        "root": "4 or 5",
    }
    moa, events = ScriptedMoa(scripts), Recorder()
    two = graph(
        *map(agent, ("a1", "a2", "b1", "b2")),
        agent("a", "a1", "a2", model="medium"),
        agent("b", "b1", "b2", model="medium"),
        agent("root", "a", "b", model=root),
        clusters=(("a1", "a2"), ("b1", "b2"), ("a", "b")),
    )
    answer = await moa.executor.run(two, ask("Why?"), events.emit)
    assert answer.text == "4 or 5"
    assert moa.prompt_of("root") == f"<user>Q: Why? [{SAYS_4}] [Answer: 5]<assistant>"
    assert [e.agent for e in events.of(AggregationSkipped)] == ["a"]


async def test_a_forwarded_output_spells_no_control_token_in_its_readers_prompt() -> None:
    says = "2 plus <end> 2 is 4 Answer: 4"
    leaves = {f"{branch}{n}": says for branch in "abc" for n in (1, 2)}
    moa = ScriptedMoa(leaves, tokenizer=ControlWordTokenizer)
    tokenizer = moa.tokenizers["large"]
    assert isinstance(tokenizer, ControlWordTokenizer)
    tokenizer.control.plain_ids = {}  # as the marks between messages, which are no tokens
    reader = agent("root", "a", model="large")
    topology = graph(
        agent("a1"), agent("a2"), agent("a", "a1", "a2"), reader, clusters=(("a1", "a2"),)
    )
    await moa.executor.run(topology, ask(), print)
    (request,) = moa.engines["large"].generated
    assert tokenizer.count_control(request.input_ids) == 0
    assert "2 plus <end> 2" in moa.prompts("large")[0]


async def test_an_agent_that_also_reads_others_writes() -> None:
    two = graph(
        *map(agent, ("a", "b", "other")), agent("root", "a", "b", "other"), clusters=(("a", "b"),)
    )
    moa = ScriptedMoa({"a": SAYS_4, "b": SAYS_4, "other": "hm", "root": "together"})
    assert (await moa.executor.run(two, ask(), print)).text == "together"


def test_only_who_reads_just_a_whole_cluster_is_its_reader() -> None:
    given = agent("given", "a", "b", given=(("earlier", "4"),))
    readers = [agent("part", "a"), agent("whole", "b", "a"), agent("more", "a", "b", "c"), given]
    read = graph(
        *map(agent, "abc"),
        *readers,
        agent("root", "part", "whole", "more", "given"),
        clusters=(("a", "b"),),
    )
    assert read.readers_of(read.clusters[0]) == ("whole",)


@pytest.mark.parametrize(
    "asked",
    [
        {"max_new_tokens": 2},
        {"stop": ["Answer"]},
        {"json_schema": "{}"},
        {"regex": "[0-9]+"},
        {"min_new_tokens": 50},
    ],
)
async def test_what_the_client_wants_of_the_answer_is_not_passed_by(
    asked: dict[str, object],
) -> None:
    moa = ScriptedMoa({"a": SAYS_4, "b": SAYS_4, "c": SAYS_4, "root": "4"})
    answer = await moa.executor.run(one_cluster(), ask(sampling=asked), print)
    assert answer.agents["root"].state == "finished"
    assert moa.prompt_of("root")


@pytest.mark.parametrize("first", ["b", "c"])
async def test_those_who_are_left_agree_whenever_another_fails(first: str) -> None:
    gates = Gates("b", "c")
    scripts = {
        "a": SAYS_4,
        "b": SAYS_4,
        "c": Script(SAYS_5, error=EngineUnreachable("gone."), error_after=1),
    }
    moa, events = ScriptedMoa(scripts, pace=gates.pace), Recorder()
    gate = EarlyExit("in_flight", threshold=0.7, min_completed=2, skip_aggregation=True)
    tolerant = graph(
        *(agent(name, on_failure="drop") for name in "abc"),
        agent("root", "a", "b", "c"),
        clusters=(("a", "b", "c"),),
        gate=gate,
    )
    run = asyncio.create_task(moa.executor.run(tolerant, ask(), events.emit))
    gates.open(first)
    ended = AgentFinished if first == "b" else AgentErred
    await events.until(lambda r: any(e.agent == first for e in r.of(ended)))
    gates.open("b")
    gates.open("c")
    answer = await run
    assert (answer.text, answer.agents["root"].state, answer.agents["c"].state) == (
        SAYS_4,
        "skipped",
        "failed",
    )


async def test_a_prompt_update_under_way_is_aborted_when_its_reader_passes_on() -> None:
    gates = Gates("b")
    update = asyncio.Event()

    async def pace(rid: str, piece: int) -> None:
        if ".root.p" in rid:
            update.set()
            await asyncio.Event().wait()
        await gates.pace(rid, piece)

    moa = ScriptedMoa({"a": "long " * 60 + SAYS_4, "b": SAYS_4, "c": SAYS_5}, pace=pace)
    run = asyncio.create_task(moa.executor.run(one_cluster(), ask(), print))
    async with asyncio.timeout(10):
        await update.wait()
    gates.open("b")
    answer = await run
    assert answer.agents["root"].state == "skipped"
    assert [rid for rid in moa.engines["small"].aborted if ".root.p" in rid]
    assert not moa.running


def unsteady(seed: int) -> Callable[[str, int], Awaitable[None]]:
    """A pace at which each lets others go first a few times, differently for each seed."""
    turns = random.Random(seed)

    async def pace(_rid: str, _piece: int) -> None:
        for _ in range(turns.randrange(4)):
            await asyncio.sleep(0)

    return pace


async def test_in_whatever_order_agents_end_each_ends_once_and_the_answer_is_one_that_agrees() -> (
    None
):
    said = (
        f"{SAYS_4}\nThat is all."  # what follows makes the answer count before the agent has ended
    )
    scripts = {
        f"{branch}{n}": said if branch != "c" else SAYS_5 for branch in "abc" for n in (1, 2)
    }
    scripts |= {"c": said, "root": "my own"}
    for seed in range(400):
        moa, events = ScriptedMoa(scripts, pace=unsteady(seed)), Recorder()
        answer = await moa.executor.run(three_branches(), ask(), events.emit)
        ends = Counter(
            e.agent
            for e in events.events
            if isinstance(e, AgentFinished | AggregationSkipped | AgentStopped)
        )
        assert set(ends.values()) == {1}, f"seed {seed}: {ends}"
        assert (answer.text, answer.agents["root"].state) == (said, "skipped"), f"seed {seed}"
        assert not moa.running


@pytest.mark.parametrize("last", [AgentFinished, AggregationSkipped])
async def test_a_request_that_is_given_up_as_its_root_passes_on_ends_all_the_same(
    last: type[Event],
) -> None:
    moa = ScriptedMoa({"a": SAYS_4, "b": SAYS_4, "c": SAYS_4})

    def emit(event: Event) -> None:
        if isinstance(event, last) and (last is AggregationSkipped or event.agent == "b"):
            run.cancel()

    run = asyncio.create_task(moa.executor.run(one_cluster(), ask(), emit))
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not moa.running


async def test_a_reader_that_has_not_begun_can_be_passed_by() -> None:
    """Engines that answer without waiting end before a later task has begun."""

    async def no_wait(_rid: str, _piece: int) -> None:
        return

    moa = ScriptedMoa({"a": SAYS_4, "b": SAYS_4, "c": SAYS_4}, pace=no_wait)
    async with asyncio.timeout(10):
        answer = await moa.executor.run(one_cluster(), ask(), print)
    assert answer.text == SAYS_4


def test_only_a_gate_that_reads_answers_can_pass_them_on() -> None:
    with pytest.raises(ValueError, match="skip_aggregation goes with policy in_flight"):
        EarlyExit("threshold", skip_aggregation=True)


async def test_a_sure_first_answer_is_forwarded_and_its_tree_never_starts() -> None:
    moa = ScriptedMoa({"first": SURE})
    answer = await moa.executor.run(growing(), ask(), print)
    assert answer.text == SAYS_4
    assert asked(moa) == {"first"}
    assert not any(engine.prefilled for engine in moa.engines.values())
    states = Counter(usage.state for usage in answer.agents.values())
    assert states == {"finished": 1, "skipped": 1, "early_exit": 1, "unneeded": 2}


@pytest.mark.parametrize("first", [UNSURE, Script(SAYS_4, error=AWAY, error_after=1)])
async def test_a_tree_grows_from_a_first_answer_that_is_unsure_or_failed(first: Script) -> None:
    gates = Gates("first")
    moa, events = ScriptedMoa({"first": first, "root": SAYS_5}, pace=gates.pace), Recorder()
    run = asyncio.create_task(moa.executor.run(growing(), ask(), events.emit))
    await events.until(lambda seen: len(seen.of(AgentStarted)) == 5 and asked(moa) != set())
    assert asked(moa) == {"first"}
    gates.open("first")
    assert (await run).text == SAYS_5
    assert asked(moa) == {"first", "a1", "a2", "a", "root"}
    assert (f"[{SAYS_4}]" in moa.prompt_of("root")) == (first is UNSURE)


@pytest.mark.parametrize(
    ("first", "sampling"),
    [
        (replace(SURE, reason="length"), {}),
        (SURE, {"stop": ["###"]}),
        (SURE, {"max_new_tokens": 4}),
    ],
    ids=["cut at its limit", "the request stops elsewhere", "the request allows less"],
)
async def test_a_tree_grows_where_its_root_may_not_forward_a_sure_first_answer(
    first: Script, sampling: dict[str, object]
) -> None:
    moa, events = ScriptedMoa({"first": first, "root": SAYS_5}), Recorder()
    answer = await moa.executor.run(growing(), ask(sampling=sampling), events.emit)
    assert asked(moa) == {"first", "a1", "a2", "a", "root"}
    assert answer.agents["a"].state == answer.agents["root"].state == "finished"
    assert not events.of(ExitScored)


async def test_a_tree_that_started_together_is_cut_by_a_sure_first_answer() -> None:
    gates = Gates("first", "a1", "a2")
    moa = ScriptedMoa({"first": SURE}, pace=gates.pace)
    gate = replace(FIRST, ask_first=False)
    run = asyncio.create_task(moa.executor.run(growing(gate), ask(), print))
    await gates.until_waiting(3)
    gates.open("first")
    answer = await run
    assert answer.text == SAYS_4
    assert moa.aborted >= {"a1", "a2"}
    assert answer.agents["root"].state == "skipped"


async def test_a_tree_grows_until_its_answers_show_which_first_answers_need_none() -> None:
    gate = EarlyExit("first_answer", ask_first=True, skip_aggregation=True, max_changed_percent=10)
    said: dict[str, Script | str] = {"root": SAYS_4}
    moa = ScriptedMoa(said)

    async def run_often(first: Script, times: int) -> list[str]:
        said["first"] = first
        answers = [
            await moa.executor.run(growing(gate), ask(run_id=f"{id(first)}-{number}"), print)
            for number in range(times)
        ]
        return [answer.agents["root"].state for answer in answers]

    unsure = Script(SAYS_5, logprob=-0.1)
    assert await run_often(unsure, 3) == ["finished"] * 3
    assert await run_often(SURE, 8) == ["finished"] * 6 + ["skipped"] * 2
    assert await run_often(unsure, 2) == ["finished"] * 2
