import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest

from shell_router.core.engine import Generation, Hints, PrefillCost
from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentStopped,
    AgentTokens,
    Degraded,
    Emit,
    ExitScored,
    PrefillIncrement,
    PromptReady,
)
from shell_router.core.marks import REASONING_PARSERS, ReasoningMarks
from shell_router.core.predictors import TokenStates
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import (
    AgentFailed,
    ConfigError,
    DeadlineExceeded,
    EngineUnreachable,
    PromptTooLong,
    UnknownModel,
)
from shell_router.moa.executor import Executor
from shell_router.moa.prompt import CUT_MARK
from shell_router.routing.holdout import Compared, HoldoutSettings
from shell_router.topology import Agent, Cluster, Prefill, Prompt, Topology
from tests.fakes.moa import Recorder, ScriptedMoa, WordTokenizer, agent_of, ask
from tests.fakes.scripted_engine import Gates, Script, at_once

Pace = Callable[[str, int], Awaitable[None]]

LEAF = Prompt()
AGGREGATE = Prompt(prefix="Q: {question}", slot=" [{index}: {output}]", suffix=" So?")
ALWAYS = EarlyExit("threshold", threshold=0.0, min_completed=1)


def agent(name: str, *precursors: str, model: str = "small", **fields: object) -> Agent:
    return Agent(name, model, precursors, AGGREGATE if precursors else LEAF, **fields)  # type: ignore[arg-type]


def topology(
    *agents: Agent, clusters: tuple[Cluster, ...] = (), prefill: Prefill = Prefill(chunk_tokens=8)
) -> Topology:
    return Topology("graph", {a.id: a for a in agents}, clusters, prefill)


TWO_BRANCHES = topology(
    agent("a1"),
    agent("a2"),
    agent("b1"),
    agent("b2"),
    agent("left", "a1", "a2", model="medium"),
    agent("right", "b1", "b2", model="medium"),
    agent("root", "left", "right", model="large"),
)


async def test_a_models_own_sampling_is_below_the_topologys_and_the_requests() -> None:
    moa = ScriptedMoa()
    for name, model in moa.models.items():
        moa.models[name] = replace(model, sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20})
    graph = topology(
        agent("a"), agent("root", "a", model="large", sampling={"temperature": 0.3, "top_p": 0.5})
    )
    await moa.executor.run(graph, ask(sampling={"temperature": 0}), print)
    sent = {
        agent_of(request): [request.sampling[name] for name in ("temperature", "top_p", "top_k")]
        for engine in moa.engines.values()
        for request in engine.generated
    }
    assert sent == {"a": [0.6, 0.9, 20], "root": [0, 0.5, 20]}


async def test_the_root_answers_from_its_precursors_outputs_in_slot_order() -> None:
    moa = ScriptedMoa({"a": "first words", "b": "other words", "root": "the answer"})
    answer = await moa.executor.run(
        topology(agent("a"), agent("b"), agent("root", "a", "b")), ask("Why?"), print
    )
    assert answer.text == "the answer"
    assert moa.prompt_of("root") == "<user>Q: Why? [1: first words] [2: other words] So?<assistant>"


async def test_a_slot_has_the_text_of_its_precursor_and_takes_no_more_than_it_may() -> None:
    moa = ScriptedMoa({"a": "one two three four", "b": "five", "root": "the answer"})
    root = agent("root", "a", "b")
    prompt = replace(root.prompt, slots={"b": " ({index}. {output})"}, slot_tokens=3)
    graph = topology(agent("a"), agent("b"), replace(root, prompt=prompt))
    await moa.executor.run(graph, ask("Why?"), print)
    wanted = f"<user>Q: Why? [1: one two three{CUT_MARK}] (2. five) So?<assistant>"
    assert moa.prompt_of("root") == wanted


async def test_usage_sums_all_agents() -> None:
    moa = ScriptedMoa({"a": "one two", "root": "three"})
    answer = await moa.executor.run(topology(agent("a"), agent("root", "a")), ask(), print)
    assert sum(usage.completion_tokens for usage in answer.agents.values()) == 3
    assert {usage.state for usage in answer.agents.values()} == {"finished"}


async def test_an_agent_starts_when_its_own_precursors_are_done() -> None:
    gates = Gates("b1")
    moa, events = ScriptedMoa(pace=gates.pace), Recorder()
    run = asyncio.create_task(moa.executor.run(TWO_BRANCHES, ask(), events.emit))
    await events.until(lambda r: any(e.agent == "left" for e in r.of(AgentFinished)))
    assert not any(e.agent in ("b1", "right") for e in events.of(AgentFinished))
    gates.open("b1")
    assert (await run).text


async def test_a_successor_is_prefilled_while_its_precursor_still_decodes() -> None:
    gates = Gates("b")
    moa, events = ScriptedMoa({"a": "word " * 40}, pace=gates.pace), Recorder()
    graph = topology(agent("a"), agent("b"), agent("root", "a", "b"))
    run = asyncio.create_task(moa.executor.run(graph, ask(), events.emit))
    await events.until(
        lambda r: any(e.agent == "root" and e.slot == "a" for e in r.of(PrefillIncrement))
    )
    assert not events.of(PromptReady) or all(e.agent != "root" for e in events.of(PromptReady))
    gates.open("b")
    await run


@pytest.mark.parametrize("model", ["large", "other"])
async def test_the_complete_prompt_is_the_same_with_incremental_prefill_and_without(
    model: str,
) -> None:
    graph = [agent("a"), agent("b", model="medium"), agent("root", "a", "b", model=model)]
    prompts = []
    for incremental in (True, False):
        moa = ScriptedMoa({"a": "pre fix " * 30, "b": "x"})
        await moa.executor.run(
            topology(*graph, prefill=Prefill(incremental, chunk_tokens=8)), ask(), print
        )
        prompts.append(moa.prompt_of("root"))
        assert bool(moa.engines[model].prefilled) == incremental
    assert prompts[0] == prompts[1]


async def test_every_increment_finds_what_earlier_ones_prefilled() -> None:
    moa, events = (
        ScriptedMoa({name: f"{name} says things " * 50 for name in ("a1", "a2", "b1", "b2")}),
        Recorder(),
    )
    await moa.executor.run(TWO_BRANCHES, ask(), events.emit)
    later = [e for e in events.of(PrefillIncrement) if e.resident_tokens]
    assert later
    assert all(e.cached_tokens >= e.resident_tokens for e in later)


async def test_early_exit_cuts_off_the_unfinished_and_leaves_their_slots_out() -> None:
    gates = Gates("c")
    moa, events = ScriptedMoa({"a": "yes", "b": "yes", "root": "done"}, pace=gates.pace), Recorder()
    graph = topology(
        agent("a"),
        agent("b"),
        agent("c", model="large"),
        agent("root", "c", "a", "b"),
        clusters=(
            Cluster("one", ("a", "b", "c"), EarlyExit("threshold", threshold=0.0, min_completed=2)),
        ),
    )
    answer = await moa.executor.run(graph, ask("Why?"), events.emit)
    assert answer.text == "done"
    assert moa.prompt_of("root") == "<user>Q: Why? [2: yes] [3: yes] So?<assistant>"
    assert answer.agents["c"].state == "early_exit"
    assert moa.aborted == {"c"}
    assert [e.agent for e in events.of(AgentStopped)] == ["c"]
    assert events.of(ExitScored)[-1].aborted == ("c",)


IN_FLIGHT = EarlyExit("in_flight", threshold=0.6, min_completed=1)


def judged_in_flight(gate: EarlyExit = IN_FLIGHT) -> Topology:
    return topology(
        agent("a"),
        agent("b"),
        agent("root", "a", "b"),
        clusters=(Cluster("one", ("a", "b"), gate),),
    )


def stalls_after(name: str, pieces: int, gates: Gates) -> Callable[[str, int], Awaitable[None]]:
    """A pace at which agent `name` writes some pieces, and then waits at its gate."""

    async def pace(rid: str, piece: int) -> None:
        await (
            gates.pace(rid, piece)
            if rid.endswith(f".{name}") and piece >= pieces
            else asyncio.sleep(0)
        )

    return pace


async def test_an_agent_in_flight_that_says_the_same_is_not_waited_for() -> None:
    said = "2 plus 2 is 4 Answer: 4"
    moa, events = (
        ScriptedMoa(
            {"a": said, "b": Script(said, piece_words=1)}, pace=stalls_after("b", 5, Gates("b"))
        ),
        Recorder(),
    )
    answer = await moa.executor.run(judged_in_flight(), ask("Why?"), events.emit)
    assert answer.agents["b"].state == "early_exit"
    assert moa.prompt_of("root") == f"<user>Q: Why? [1: {said}] So?<assistant>"
    assert moa.aborted == {"b"}
    scored = events.of(ExitScored)[-1]
    assert (scored.completed, scored.exited, scored.aborted) == (("a",), True, ("b",))
    assert scored.probability > 0.6


async def test_an_agent_in_flight_that_says_something_else_is_waited_for() -> None:
    gates = Gates("b")
    scripts = {
        "a": "2 plus 2 is 4 Answer: 4",
        "b": "I have no idea what the two of us should say Answer: 5",
    }
    moa, events = ScriptedMoa(scripts, pace=stalls_after("b", 4, gates)), Recorder()
    run = asyncio.create_task(moa.executor.run(judged_in_flight(), ask(), events.emit))
    await events.until(lambda r: bool(r.of(ExitScored)))
    gates.open("b")
    answer = await run
    assert answer.agents["b"].state == "finished"
    assert not any(scored.exited for scored in events.of(ExitScored))


async def test_an_agent_is_cut_off_by_its_own_words_as_soon_as_they_agree() -> None:
    said = "2 plus 2 is 4 and 4 and 4 is 8 Answer: 8"
    gates = Gates("b")
    moa, events = ScriptedMoa({"a": said, "b": said}, pace=gates.pace), Recorder()
    run = asyncio.create_task(moa.executor.run(judged_in_flight(), ask(), events.emit))
    await events.until(lambda r: any(e.agent == "a" for e in r.of(AgentFinished)))
    gates.open("b")
    answer = await run
    assert answer.agents["b"].state == "early_exit"
    assert 0 < answer.agents["b"].completion_tokens < answer.agents["a"].completion_tokens
    stopped = events.events.index(events.of(AgentStopped)[0])
    assert not any(
        isinstance(e, AgentTokens | AgentFinished) and e.agent == "b"
        for e in events.events[stopped:]
    )
    assert not moa.running


async def test_early_exit_in_flight_needs_no_embedder() -> None:
    moa = ScriptedMoa({"a": "Answer: 4", "b": "Answer: 4"})
    executor = Executor(moa.models, moa.cache, None, clock=monotonic)
    answer = await executor.run(judged_in_flight(), ask(), print)
    assert answer.agents["a"].state == "finished"


async def test_a_half_read_slot_that_is_cut_off_leaves_no_token_behind() -> None:
    gates = Gates("b", "stop")

    async def pace(rid: str, piece: int) -> None:
        # c writes some pieces and then stalls
        await gates.pace(f"{rid}.stop" if rid.endswith(".c") and piece >= 6 else rid, piece)

    moa, events = ScriptedMoa({"b": "yes", "c": "never to be read " * 9}, pace=pace), Recorder()
    graph = topology(
        agent("b"),
        agent("c"),
        agent("root", "c", "b"),
        clusters=(Cluster("one", ("b", "c"), ALWAYS),),
        prefill=Prefill(chunk_tokens=4),
    )
    run = asyncio.create_task(moa.executor.run(graph, ask("Why?"), events.emit))
    await events.until(
        lambda r: any(e.slot == "c" and e.agent == "root" for e in r.of(PrefillIncrement))
    )
    gates.open("b")
    await run
    assert moa.prompt_of("root") == "<user>Q: Why? [2: yes] So?<assistant>"


async def test_precursors_that_are_no_longer_read_are_cut_off_too() -> None:
    gates = Gates("deep")
    moa, events = ScriptedMoa(pace=gates.pace), Recorder()
    graph = topology(
        agent("deep"),
        agent("quick"),
        agent("slow", "deep"),
        agent("root", "quick", "slow"),
        clusters=(Cluster("one", ("quick", "slow"), ALWAYS),),
    )
    answer = await moa.executor.run(graph, ask(), events.emit)
    assert {name: usage.state for name, usage in answer.agents.items()} == {
        "deep": "unneeded",
        "quick": "finished",
        "slow": "early_exit",
        "root": "finished",
    }
    assert not moa.running


async def test_exit_draws_depend_on_the_seed_alone() -> None:
    async def draw(seed: int) -> float:
        gates = Gates("b")
        moa, events = ScriptedMoa({"a": "yes"}, pace=gates.pace), Recorder()
        gate = EarlyExit("paper", min_completed=1)
        graph = topology(
            agent("a"),
            agent("b"),
            agent("root", "a", "b"),
            clusters=(Cluster("one", ("a", "b"), gate),),
        )
        run = asyncio.create_task(moa.executor.run(graph, ask(seed=seed), events.emit))
        await events.until(lambda r: bool(r.of(ExitScored)))
        gates.open("b")
        await run
        return events.of(ExitScored)[0].draw

    assert await draw(1) == await draw(1)
    assert await draw(1) != await draw(2)


def agreeing(root: str = "4", pace: Pace = at_once) -> ScriptedMoa:
    """Agents `a` and `b` answer at once, `c` writes for long, and the root answers `root`."""
    said = "Answer: 4\n"
    long = Script("word " * 40 + said, piece_words=1)
    return ScriptedMoa({"a": said, "b": said, "c": long, "root": f"Answer: {root}"}, pace=pace)


def panel(**gate: float) -> Topology:
    cluster = Cluster("one", ("a", "b", "c"), EarlyExit("in_flight", **gate))  # type: ignore[arg-type]
    agents = [agent(name) for name in cluster.agents]
    return topology(*agents, agent("root", *cluster.agents), clusters=(cluster,))


async def run_often(executor: Executor, graph: Topology, times: int, emit: Emit) -> list[str]:
    """Run the graph with one seed after the other; return how its agent `c` ended."""
    states = []
    for number in range(times):
        answer = await executor.run(graph, ask(run_id=f"run{number}", seed=number), emit)
        states.append(answer.agents["c"].state)
    return states


async def test_an_exit_waits_for_complete_runs_that_show_that_answers_stay_the_same() -> None:
    events = Recorder()
    graph = panel(max_changed_percent=10)
    states = await run_often(agreeing().executor, graph, 11, events.emit)
    assert states == ["finished"] * 9 + ["early_exit"] * 2
    assert [event.what for event in events.of(Degraded)] == ["evidence"] * 9


async def test_an_exit_that_would_change_the_answers_of_readers_never_falls() -> None:
    graph = panel(max_changed_percent=10, skip_aggregation=True)
    executor = agreeing(root="5").executor
    assert set(await run_often(executor, graph, 30, print)) == {"finished"}
    assert (await executor.run(graph, ask(run_id="last"), print)).text == "Answer: 5"


async def test_a_share_of_runs_stays_complete_so_that_a_calibrated_exit_goes_on_learning() -> None:
    moa = agreeing()
    holdouts = HoldoutSettings(share=0.5)
    executor = Executor(moa.models, moa.cache, None, clock=monotonic, holdouts=holdouts)
    states = await run_often(executor, panel(max_changed_percent=10), 40, print)
    assert set(states[:9]) == {"finished"}
    assert set(states[9:]) == {"finished", "early_exit"}


async def test_a_straggler_is_cut_off_once_its_model_is_measured() -> None:
    events = Recorder()
    graph = panel(threshold=1.0, straggler_factor=3)
    chooser = agreeing().executor.chooser
    moa = agreeing(pace=stalls_after("c", 5, Gates("c")))
    executor = Executor(moa.models, moa.cache, None, clock=monotonic, chooser=chooser)
    hints = Hints(topology="graph", agent="a")
    chooser.estimates.observe_run("small", hints, tokens=5, run_s=1.0, token_s=1e-4)
    assert await run_often(executor, graph, 1, events.emit) == ["early_exit"]
    assert moa.aborted == {"c"}
    assert not events.of(Degraded)


async def test_a_cluster_with_a_straggler_teaches_its_exit_nothing() -> None:
    events = Recorder()
    graph = panel(max_changed_percent=10, straggler_factor=3)
    moa = agreeing(pace=stalls_after("c", 5, Gates("c")))
    hints = Hints(topology="graph", agent="a")
    moa.executor.estimates.observe_run("small", hints, tokens=5, run_s=1.0, token_s=1e-4)
    assert await run_often(moa.executor, graph, 11, events.emit) == 11 * ["early_exit"]
    assert [event.what for event in events.of(Degraded)].count("evidence") == 11


async def test_an_agent_of_a_slower_model_is_no_straggler() -> None:
    moa = agreeing()
    graph = panel(threshold=1.0, straggler_factor=3)
    graph = graph.with_models({"c": "large"})
    for model, token_s in (("small", 1e-9), ("large", 60.0)):
        hints = Hints(topology="graph", agent="a")
        moa.executor.estimates.observe_run(model, hints, tokens=5, run_s=1.0, token_s=token_s)
    assert await run_often(moa.executor, graph, 1, print) == ["finished"]


async def test_without_a_measurement_no_agent_is_a_straggler_and_the_run_says_so() -> None:
    events = Recorder()
    graph = panel(threshold=1.0, straggler_factor=3)
    assert await run_often(agreeing().executor, graph, 1, events.emit) == ["finished"]
    assert [event.what for event in events.of(Degraded)] == ["stragglers"]


async def test_a_cluster_whose_embedder_fails_goes_on_without_early_exit_and_says_so() -> None:
    class NoEmbedder:
        async def embed(self, text: str) -> TokenStates:
            raise EngineUnreachable(f"No embedder for {text!r}.")

    gates = Gates("b")
    moa, events = ScriptedMoa(pace=gates.pace), Recorder()
    executor = Executor(moa.models, moa.cache, NoEmbedder(), clock=monotonic)
    graph = topology(
        agent("a"),
        agent("b"),
        agent("root", "a", "b"),
        clusters=(Cluster("one", ("a", "b"), ALWAYS),),
    )
    run = asyncio.create_task(executor.run(graph, ask(), events.emit))
    await events.until(lambda r: bool(r.of(Degraded)))
    gates.open("b")
    assert {usage.state for usage in (await run).agents.values()} == {"finished"}
    assert [(e.agent, e.what) for e in events.of(Degraded)] == [("one", "early_exit")]


async def test_states_that_are_no_numbers_leave_their_output_out_of_the_judgement() -> None:
    class BrokenEmbedder:
        async def embed(self, text: str) -> TokenStates:
            return np.full((len(text), 4), np.nan, np.float32)

    gates = Gates("b")
    moa, events = ScriptedMoa(pace=gates.pace), Recorder()
    executor = Executor(moa.models, moa.cache, BrokenEmbedder(), clock=monotonic)
    graph = topology(
        agent("a"),
        agent("b"),
        agent("root", "a", "b"),
        clusters=(Cluster("one", ("a", "b"), ALWAYS),),
    )
    run = asyncio.create_task(executor.run(graph, ask(), events.emit))
    await events.until(lambda r: bool(r.of(Degraded)))
    gates.open("b")
    assert {usage.state for usage in (await run).agents.values()} == {"finished"}


async def test_early_exit_without_an_embedder_is_refused_before_anything_runs() -> None:
    moa = ScriptedMoa()
    executor = Executor(moa.models, moa.cache, None, clock=monotonic)
    graph = topology(
        agent("a"),
        agent("b"),
        agent("root", "a", "b"),
        clusters=(Cluster("one", ("a", "b"), ALWAYS),),
    )
    with pytest.raises(ConfigError, match="embedder"):
        await executor.run(graph, ask(), print)
    assert not moa.engines["small"].generated


async def test_a_failed_agent_fails_the_request_by_default_and_ends_all_others() -> None:
    gates = Gates("b")
    broken = Script("never", error=EngineUnreachable("The engine is gone."))
    moa, events = ScriptedMoa({"a": broken}, pace=gates.pace), Recorder()
    with pytest.raises(AgentFailed, match="engine is gone"):
        await moa.executor.run(
            topology(agent("a"), agent("b"), agent("root", "a", "b")), ask(), events.emit
        )
    assert not moa.running
    assert len(moa.cache) == 0
    assert [(e.agent, e.dropped) for e in events.of(AgentErred)] == [("a", False)]


async def test_the_root_of_a_failed_run_is_not_asked_and_the_remedy_is_for_the_agent_that_failed() -> (
    None
):
    broken = Script("never", error=EngineUnreachable("The engine is gone"))
    gates, events = Gates("a"), Recorder()
    moa = ScriptedMoa({"a": broken}, pace=gates.pace)
    graph = topology(agent("a"), agent("b"), agent("root", "a", "b", model="large"))
    running = asyncio.create_task(moa.executor.run(graph, ask(), events.emit))
    await events.until(lambda seen: bool(seen.of(AgentFinished)))
    gates.open("a")
    with pytest.raises(AgentFailed, match=r"is gone\. Ask again, or set on_failure: drop"):
        await running
    assert not moa.engines["large"].generated
    with pytest.raises(AgentFailed, match=r"is gone\. Ask again\.$"):
        await ScriptedMoa({"root": broken}).executor.run(graph, ask(), print)


async def test_the_error_of_a_lone_agent_is_raised_as_it_is() -> None:
    moa = ScriptedMoa({"a": Script("never", error=EngineUnreachable("The engine is gone."))})
    with pytest.raises(EngineUnreachable, match="engine is gone"):
        await moa.executor.run(topology(agent("a")), ask(), print)


async def test_a_failed_agent_that_may_be_dropped_leaves_its_slot_out() -> None:
    broken = Script("never", error=EngineUnreachable("The engine is gone."))
    moa = ScriptedMoa({"a": broken, "b": "yes"})
    graph = topology(agent("a", on_failure="drop"), agent("b"), agent("root", "a", "b"))
    answer = await moa.executor.run(graph, ask("Why?"), print)
    assert answer.agents["a"].state == "failed"
    assert moa.prompt_of("root") == "<user>Q: Why? [2: yes] So?<assistant>"


async def test_an_agent_whose_every_precursor_was_dropped_fails() -> None:
    broken = Script("never", error=EngineUnreachable("The engine is gone."))
    moa = ScriptedMoa({"a": broken, "b": broken})
    graph = topology(
        agent("a", on_failure="drop"), agent("b", on_failure="drop"), agent("root", "a", "b")
    )
    with pytest.raises(AgentFailed, match="no precursor left"):
        await moa.executor.run(graph, ask(), print)
    assert not moa.running
    assert len(moa.cache) == 0


@pytest.mark.parametrize("held", ["a1", "left", "root"])
async def test_cancelling_a_request_leaves_nothing_running(held: str) -> None:
    gates = Gates(held)
    moa = ScriptedMoa(pace=gates.pace)
    before = asyncio.all_tasks()
    run = asyncio.create_task(moa.executor.run(TWO_BRANCHES, ask(), lambda _event: None))
    await gates.until_waiting(1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not moa.running
    assert held in moa.aborted
    assert len(moa.cache) == 0
    assert asyncio.all_tasks() == before


async def test_the_deadline_ends_a_request_that_hangs() -> None:
    moa = ScriptedMoa(pace=Gates("a1").pace)
    with pytest.raises(DeadlineExceeded, match="no answer within"):
        await moa.executor.run(TWO_BRANCHES, ask(timeout_s=0.05), print)
    assert not moa.running
    assert len(moa.cache) == 0


async def test_an_agent_that_takes_longer_than_its_own_limit_fails() -> None:
    moa = ScriptedMoa(pace=Gates("a").pace)
    graph = topology(agent("a", timeout_s=0.05), agent("root", "a"))
    with pytest.raises(AgentFailed, match="did not end within"):
        await moa.executor.run(graph, ask(), print)


async def test_a_question_too_long_for_any_agent_is_refused_before_anything_runs() -> None:
    moa = ScriptedMoa(context_length=200)
    with pytest.raises(PromptTooLong, match="takes 200 in all"):
        await moa.executor.run(TWO_BRANCHES, ask("word " * 300), print)
    assert not any(engine.generated or engine.prefilled for engine in moa.engines.values())


async def test_a_prompt_that_outgrows_the_context_fails_by_name() -> None:
    moa = ScriptedMoa({"a": "word " * 150}, context_length=160)
    with pytest.raises(PromptTooLong, match="'root'"):
        await moa.executor.run(topology(agent("a"), agent("root", "a")), ask(), print)


@pytest.mark.parametrize("question", ["word", "word " * 150])
async def test_without_a_limit_each_agent_may_write_what_its_context_leaves(question: str) -> None:
    moa = ScriptedMoa(context_length=400)
    graph = topology(
        agent("a"), agent("b", sampling={"max_new_tokens": 9}), agent("root", "a", "b")
    )
    await moa.executor.run(graph, ask(question), print)
    asked = {agent_of(request): request for request in moa.engines["small"].generated}
    limits = {name: request.sampling["max_new_tokens"] for name, request in asked.items()}
    left = {name: 400 - len(request.input_ids) for name, request in asked.items()}
    assert limits == {**left, "b": 9}


async def test_outputs_that_it_reads_may_leave_an_agent_less_than_its_limit() -> None:
    moa = ScriptedMoa({"a": "word " * 100}, context_length=300)
    await moa.executor.run(
        topology(agent("a"), agent("root", "a")), ask(sampling={"max_new_tokens": 250}), print
    )
    root = next(one for one in moa.engines["small"].generated if agent_of(one) == "root")
    assert root.sampling["max_new_tokens"] == 300 - len(root.input_ids) < 250
    with pytest.raises(PromptTooLong, match="'root' asks for 300 tokens"):
        await moa.executor.run(
            topology(agent("a"), agent("root", "a")), ask(sampling={"max_new_tokens": 300}), print
        )


@pytest.mark.parametrize("reasoning", [None, REASONING_PARSERS["qwen3"]])
async def test_an_engine_with_less_room_than_the_context_gets_a_limit_that_fits_it(
    reasoning: ReasoningMarks | None,
) -> None:
    moa = ScriptedMoa(reasoning=reasoning)
    said = Script("<think>hm</think>It is 4." if reasoning else "It is 4.")

    def answer(request: Generation) -> Script:
        refusal = PromptTooLong("You requested too many tokens.")
        refusal.excess = len(request.input_ids) + request.sampling["max_new_tokens"] - 4000
        return said if refusal.excess <= 0 else Script("", error=refusal)  # type: ignore[arg-type]

    moa.engines["small"].answer = answer
    graph = topology(agent("root"))
    text = (await moa.executor.run(graph, ask(), print)).text
    first, second = moa.engines["small"].generated
    assert text == "It is 4."
    assert second.sampling["max_new_tokens"] == 4000 - len(second.input_ids)
    assert not second.rid.startswith(first.rid)
    with pytest.raises(PromptTooLong, match="Agent 'root' cannot ask 'small': You requested"):
        await moa.executor.run(graph, ask(sampling={"max_new_tokens": 4010}), print)


async def test_a_fallback_with_more_room_goes_before_a_shorter_output() -> None:
    moa = ScriptedMoa({"a": "word " * 100}, context_length=300)
    moa.models["large"] = replace(moa.models["large"], context_length=4096)
    graph = topology(agent("a"), agent("root", "a", fallbacks=("medium", "large")))
    answer = await moa.executor.run(graph, ask(sampling={"max_new_tokens": 250}), print)
    assert answer.agents["root"].model == "large"
    assert [one.sampling["max_new_tokens"] for one in moa.engines["large"].generated] == [250]


async def test_a_prompt_that_leaves_no_token_is_refused() -> None:
    moa = ScriptedMoa(context_length=200)
    room = 200 - len(WordTokenizer().encode("<user><assistant>"))
    await moa.executor.run(topology(agent("root")), ask("." * (room - 1)), print)
    with pytest.raises(PromptTooLong, match="has a prompt of 200 tokens"):
        await moa.executor.run(topology(agent("root")), ask("." * room), print)


async def test_models_that_are_not_configured_are_named_before_anything_runs() -> None:
    moa = ScriptedMoa()
    with pytest.raises(UnknownModel, match="huge"):
        await moa.executor.run(topology(agent("a"), agent("root", "a", model="huge")), ask(), print)
    assert not moa.engines["small"].generated


async def test_the_clients_sampling_goes_to_the_root_alone() -> None:
    moa = ScriptedMoa()
    graph = topology(
        agent("a", sampling={"temperature": 1}), agent("root", "a", sampling={"top_k": 5})
    )
    await moa.executor.run(graph, ask(sampling={"temperature": 0}), print)
    leaf, root = moa.engines["small"].generated
    left = 4096 - len(root.input_ids)
    assert root.sampling == {"top_k": 5, "temperature": 0, "max_new_tokens": left}
    assert (leaf.sampling["temperature"], "top_k" in leaf.sampling) == (1, False)


async def test_a_seed_reaches_every_agent_and_seeds_each_in_its_own_way() -> None:
    graph = topology(
        agent("a"),
        agent("b"),
        agent("c", sampling={"sampling_seed": 7}),
        agent("root", "a", "b", "c"),
    )

    async def seeds(seed: int) -> dict[str, object]:
        moa = ScriptedMoa()
        await moa.executor.run(graph, ask(sampling={"sampling_seed": seed}), print)
        requests = [request for engine in moa.engines.values() for request in engine.generated]
        return {agent_of(request): request.sampling["sampling_seed"] for request in requests}

    first, again, other = await seeds(1), await seeds(1), await seeds(2)
    assert first == again
    assert (first["root"], first["c"]) == (1, 7)
    assert len(set(first.values())) == 4
    assert first["a"] != other["a"]


async def test_precursors_stream_in_pieces_unless_the_topology_says_otherwise_and_the_root_token_by_token() -> (
    None
):
    moa = ScriptedMoa()
    graph = topology(
        agent("a"), agent("b", sampling={"stream_interval": 1}), agent("root", "a", "b")
    )
    await moa.executor.run(graph, ask(), print)
    assert [one.sampling.get("stream_interval") for one in moa.engines["small"].generated] == [
        8,
        1,
        None,
    ]


async def test_with_expected_finish_the_slower_model_comes_last() -> None:
    gates = Gates("slow")
    moa, events = ScriptedMoa({"slow": "late", "fast": "early"}, pace=gates.pace), Recorder()
    graph = topology(
        agent("slow", model="large"),
        agent("fast", model="small"),
        agent("root", "slow", "fast", model="medium"),
        prefill=Prefill(slot_order="expected_finish"),
    )
    first = asyncio.create_task(moa.executor.run(graph, ask(run_id="first"), events.emit))
    await events.until(lambda r: any(e.agent == "fast" for e in r.of(AgentFinished)))
    gates.open("slow")
    await first
    assert "[1: late] [2: early]" in moa.prompt_of("root")
    moa.engines["medium"].generated.clear()
    await moa.executor.run(graph, ask(run_id="second"), events.emit)
    assert "[1: early] [2: late]" in moa.prompt_of("root")


async def test_earlier_turns_and_system_messages_reach_every_agent() -> None:
    moa = ScriptedMoa()
    chat = (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?"},
    )
    graph = topology(
        agent("a"), Agent("root", "small", ("a",), Prompt(system="Judge.", slot=" {output}"))
    )
    request = ask()
    await moa.executor.run(graph, type(request)("run", "tenant", chat), print)
    assert moa.prompt_of("a") == "<system>Be kind.<user>Hi<assistant>Hello<user>Why?<assistant>"
    assert moa.prompt_of("root").startswith(
        "<system>Judge.\n\nBe kind.<user>Hi<assistant>Hello<user>Why?"
    )


async def test_requests_at_once_do_not_meet() -> None:
    moa = ScriptedMoa()
    for engine in moa.engines.values():
        engine.answer = lambda request: Script(
            f"{request.rid.partition('.')[0]} says {agent_of(request)}"
        )
    names = ["ann", "bob", "cat", "dan", "eve"]
    answers = await asyncio.gather(
        *(moa.executor.run(TWO_BRANCHES, ask(run_id=name), print) for name in names)
    )
    assert [answer.text for answer in answers] == [f"{name} says root" for name in names]
    for request in moa.engines["large"].generated:
        prompt = moa.tokenizers["large"].decode(request.input_ids)
        assert [name for name in names if name in prompt] == [request.rid.partition(".")[0]]
    assert len(moa.cache) == 0


async def test_what_a_run_has_held_needs_no_garbage_collector() -> None:
    """Neither do agents that were cut off, whose tasks keep what they were at; with thousands of
    runs it is much.
    """
    moa = ScriptedMoa({"a": "said", "b": "said, too"}, pace=Gates("c").pace, kept_requests=0)
    exiting = Cluster("cluster", ("a", "b", "c"), replace(ALWAYS, min_completed=2))
    graph = topology(
        agent("a"), agent("b"), agent("c"), agent("root", "a", "b", "c"), clusters=(exiting,)
    )
    gc.collect()
    gc.disable()
    try:
        answer = await moa.executor.run(graph, ask(), lambda _event: None)
        assert answer.agents["c"].state == "early_exit"
        assert gc.collect() == 0
    finally:
        gc.enable()


# --- whether incremental prefill pays

LONG = {"a": "word " * 200, "b": "word " * 200}


def priced(
    moa: ScriptedMoa, cost: PrefillCost, holdouts: HoldoutSettings | None = None
) -> Executor:
    """An executor of the same models, whose updates cost this much."""
    models = {alias: replace(model, prefill_cost=cost) for alias, model in moa.models.items()}
    return Executor(models, moa.cache, moa.embedder, clock=monotonic, holdouts=holdouts)


def adaptive(**fields: object) -> Topology:
    graph = (agent("a"), agent("b"), agent("root", "a", "b", model="large"))
    return topology(*graph, prefill=Prefill(), **fields)  # type: ignore[arg-type]


CHEAP = PrefillCost(fixed_s=0.001, token_s=1.0)
DEAR = PrefillCost(fixed_s=1000.0, token_s=0.001)


@pytest.mark.parametrize(("cost", "interval", "updates"), [(CHEAP, 8, True), (DEAR, 32, False)])
async def test_where_no_update_can_pay_the_run_is_that_of_the_plain_tree(
    cost: PrefillCost, interval: int, updates: bool
) -> None:
    moa = ScriptedMoa(LONG)
    await priced(moa, cost).run(adaptive(), ask(), print)
    assert bool(moa.engines["large"].prefilled) is updates
    assert [one.sampling["stream_interval"] for one in moa.engines["small"].generated] == [
        interval
    ] * 2


async def test_programs_that_are_held_out_run_as_the_plain_tree_and_equal_seeds_are_held_out_alike() -> (
    None
):
    held_out = []
    graph = topology(agent("a"), agent("b"), agent("root", "a", "b", model="large"))
    for _ in range(2):
        moa = ScriptedMoa(LONG)
        executor = priced(moa, CHEAP, HoldoutSettings(share=0.5))
        for seed in range(12):
            before = len(moa.engines["large"].prefilled)
            await executor.run(graph, replace(ask(run_id=f"run{seed}"), seed=seed), print)
            held_out.append(len(moa.engines["large"].prefilled) == before)
        (seen,) = executor.holdouts.comparisons()
        assert seen.compared == Compared("incremental_prefill", "graph", "large, small")
    assert held_out[:12] == held_out[12:]
    assert 0 < sum(held_out[:12]) < 12


async def test_a_program_that_fails_compares_nothing() -> None:
    moa = ScriptedMoa({**LONG, "root": Script("", error=EngineUnreachable("gone"))})
    executor = priced(moa, CHEAP, HoldoutSettings())
    with pytest.raises(AgentFailed):
        await executor.run(adaptive(), ask(), print)
    assert not list(executor.holdouts.comparisons())


async def test_a_reader_whose_aggregation_is_skipped_time_and_again_is_no_longer_prefilled() -> (
    None
):
    says = "word " * 60 + "Answer: 4"
    moa = ScriptedMoa({"a": says, "b": says})
    gate = EarlyExit("in_flight", threshold=0.6, min_completed=1, skip_aggregation=True)
    graph = adaptive(clusters=(Cluster("one", ("a", "b"), gate),))
    executor = priced(moa, CHEAP)
    for number in range(20):
        answer = await executor.run(graph, ask(run_id=f"run{number}"), print)
        assert answer.agents["root"].state == "skipped"
    assert executor.estimates.get_chance("graph", "root", "decoded") < 0.05
    before = len(moa.engines["large"].prefilled)
    await executor.run(graph, ask(run_id="last"), print)
    assert len(moa.engines["large"].prefilled) == before


async def test_a_quorum_that_fails_as_a_whole_fails_the_request_though_the_root_reads_others() -> (
    None
):
    broken = Script("never", error=EngineUnreachable("The engine is gone."))
    moa = ScriptedMoa({"a": broken, "b": broken})
    agents = [agent(name, on_failure="drop") for name in "ab"] + [
        agent("c"),
        agent("root", "a", "b", "c"),
    ]
    quorum = Cluster("panel", ("a", "b"), EarlyExit("quorum", min_completed=1))
    with pytest.raises(AgentFailed, match="No agent of 'panel' has answered"):
        await moa.executor.run(topology(*agents, clusters=(quorum,)), ask(), print)
    assert not moa.running
