"""Agents that ask no model and forward what most of their precursors answer."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

import pytest

from shell_router.api.frames import list_warnings
from shell_router.core.events import AgentFinished, AgentStopped, AggregationSkipped, Degraded
from shell_router.core.predictors import TokenStates
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import AgentFailed, EngineUnreachable
from shell_router.moa.executor import Executor
from shell_router.moa.requests import AgentUsage, Answer
from shell_router.topology import Topology, parse_topology
from tests.fakes.moa import FixedPredictor, Recorder, ScriptedMoa, agent_of, ask
from tests.fakes.scripted_engine import Gates, Script

BY_CONFIDENCE = Path("topologies/confidence-vote.yaml").read_text("utf-8")
BEST_OF_N = Path("topologies/best-of-n.yaml").read_text("utf-8")
SAYS_4, SAYS_5 = "2 plus 2 is 4 Answer: 4", "no idea at all Answer: 5"


def panel(size: int = 3, more: str = "") -> Topology:
    """Samples of one model, and a root that votes."""
    return parse_topology(
        f"tree: {{shape: [{size}, 1], models: [small], root: {{vote: majority}}}}\n{more}",
        source="panel.yaml",
    )


def read_vote(model: str = "small") -> Topology:
    """Three votes of three, which the root reads."""
    return parse_topology(
        "tree:\n  shape: [9, 3, 1]\n  models: [small]\n"
        f"  root_model: {model}\n  aggregator: {{vote: majority}}\n"
        "  root: {prompt: {prefix: 'Q: {question}', slot: ' [{output}]', suffix: ''}}\n",
        source="votes.yaml",
    )


def proposers(*said: str | Script) -> dict[str, str | Script]:
    return {f"proposer-{n}": text for n, text in enumerate(said, start=1)}


async def test_the_answer_of_most_is_forwarded_and_no_model_is_asked_for_it() -> None:
    moa, events = ScriptedMoa(proposers(SAYS_4, SAYS_5, SAYS_4)), Recorder()
    answer = await moa.executor.run(panel(), ask(), events.emit)
    assert (answer.text, answer.reason) == (SAYS_4, "stop")
    assert answer.agents["root"] == AgentUsage("vote", 0, 0, 0, "skipped")
    (forwarded,) = events.of(AggregationSkipped)
    assert (forwarded.agent, forwarded.text, forwarded.confidence) == (
        "root",
        SAYS_4,
        answer.confidence,
    )
    assert {agent_of(request) for request in moa.engines["small"].generated} == set(
        proposers("", "", "")
    )


@pytest.mark.parametrize(("vote", "winner"), [("confidence", SAYS_5), ("majority", SAYS_4)])
async def test_the_shipped_vote_by_confidence_lets_the_sure_outvote_the_many(
    vote: str, winner: str
) -> None:
    file = BY_CONFIDENCE.replace("vote: confidence", f"vote: {vote}")
    unsure, sure = Script(SAYS_4, logprob=-2.0), Script(SAYS_5, logprob=-0.1)
    moa = ScriptedMoa(proposers(unsure, sure, unsure, sure, unsure))
    answer = await moa.executor.run(parse_topology(file, source="vote.yaml"), ask(), print)
    assert answer.text == winner


async def choose_best(
    judge: str | Script, *said: str | Script, sampling: Mapping[str, object] | None = None
) -> tuple[Answer, ScriptedMoa, Recorder]:
    """Run the shipped topology in which a judge chooses."""
    moa, events = ScriptedMoa({**proposers(*said), "judge": judge}), Recorder()
    graph = parse_topology(BEST_OF_N, source="best.yaml")
    answer = await moa.executor.run(graph, ask("Why?", sampling=sampling or {}), events.emit)
    return answer, moa, events


POEMS = (SAYS_5, "Answer: 4\n\n  a second one ", "a third. Answer: 5", SAYS_5)


@pytest.mark.parametrize(
    "judge", ["2", "**2**", "Answer 2", "2.", "I like 1, 3 and 4 less.\nAnswer: 2", "Draft-2: 2"]
)
async def test_the_output_whose_number_the_judge_writes_is_the_answer_word_for_word(
    judge: str,
) -> None:
    answer, moa, events = await choose_best(judge, *POEMS)
    assert answer.text == POEMS[1]
    assert answer.agents["best"] == AgentUsage("vote", 0, 0, 0, "skipped")
    assert list_warnings(answer, "best") == {}
    (forwarded,) = events.of(AggregationSkipped)
    assert (forwarded.agent, forwarded.source) == ("best", "proposer-2")
    assert not events.of(Degraded)
    assert f"Answer 2:\n{POEMS[1]}" in moa.prompt_of("judge")


@pytest.mark.parametrize(
    "judge", ["none of them", "0", "5", "-1", "1 or 3", "2.5", Script("2", reason="length")]
)
async def test_the_majority_chooses_with_a_warning_if_the_judge_names_no_output(
    judge: str | Script,
) -> None:
    answer, _, events = await choose_best(judge, SAYS_4, SAYS_5, SAYS_5, SAYS_5)
    assert answer.text == SAYS_5
    (warning,) = list_warnings(answer, "best")["warnings"]
    assert "'judge'" in warning
    assert "named no output" in warning
    assert [(event.agent, event.what) for event in events.of(Degraded)] == [("judge", "judge")]


@pytest.mark.parametrize("lost", ["", Script("Answer: 5", error=EngineUnreachable("gone."))])
async def test_a_judge_cannot_choose_an_output_that_is_not_there(lost: str | Script) -> None:
    answer, _, events = await choose_best("2", SAYS_4, lost, SAYS_4, SAYS_4)
    assert answer.text == SAYS_4
    assert [event.what for event in events.of(Degraded)] == ["judge"]
    assert len(list_warnings(answer, "best")["warnings"]) == 2


async def test_outputs_keep_their_numbers_if_one_before_them_is_lost() -> None:
    answer, moa, _ = await choose_best("3", "", *POEMS[1:])
    assert answer.text == POEMS[2]
    assert f"Answer 3:\n{POEMS[2]}" in moa.prompt_of("judge")


async def test_the_majority_chooses_if_the_judge_fails() -> None:
    gone = Script("2", error=EngineUnreachable("gone."))
    answer, _, _ = await choose_best(gone, SAYS_5, SAYS_4, SAYS_5, SAYS_5)
    assert answer.text == SAYS_5
    (warning,) = list_warnings(answer, "best")["warnings"]
    assert "'judge'" in warning
    with pytest.raises(AgentFailed, match="'best' has no output to count"):
        await choose_best("1", "", "", "", "")


async def test_the_clients_form_holds_for_the_outputs_and_not_for_the_judge() -> None:
    _, moa, _ = await choose_best("1", *POEMS, sampling={"stop": ["x"], "max_new_tokens": 7})
    asked = {
        agent_of(one): one.sampling for engine in moa.engines.values() for one in engine.generated
    }
    assert asked["proposer-1"]["stop"] == ["x"]
    assert asked["proposer-1"]["max_new_tokens"] == 7
    assert "stop" not in asked["judge"]
    assert asked["judge"]["max_new_tokens"] == 256


async def test_of_a_judge_that_an_early_exit_skips_the_agreed_output_is_forwarded() -> None:
    file = BEST_OF_N + "early_exit: {policy: in_flight, threshold: 0.5, skip_aggregation: on}\n"
    moa = ScriptedMoa({**proposers(*[SAYS_4] * 4), "judge": "5"})
    answer = await moa.executor.run(parse_topology(file, source="best.yaml"), ask(), print)
    assert answer.text == SAYS_4
    assert answer.agents["judge"].state == "skipped"
    assert list_warnings(answer, "best") == {}


async def test_nothing_is_predicted_of_an_agent_that_votes() -> None:
    moa = ScriptedMoa(proposers(SAYS_4, SAYS_5, SAYS_4), predictor=FixedPredictor({"small": 0.9}))
    assert (await moa.executor.run(panel(), ask(), print)).text == SAYS_4


async def test_a_decided_vote_cuts_the_voters_that_are_left() -> None:
    moa, events = (
        ScriptedMoa(proposers(*[SAYS_4] * 3), pace=Gates("proposer-4", "proposer-5").pace),
        Recorder(),
    )
    answer = await moa.executor.run(panel(5), ask(), events.emit)
    assert answer.text == SAYS_4
    assert Counter(one.state for one in answer.agents.values()) == {
        "finished": 3,
        "unneeded": 2,
        "skipped": 1,
    }
    assert {event.agent for event in events.of(AgentStopped)} == {"proposer-4", "proposer-5"}
    assert moa.aborted == {"proposer-4", "proposer-5"}
    assert not moa.running


async def test_a_vote_waits_while_another_answer_could_win() -> None:
    gates = Gates("proposer-3", "proposer-4")
    moa, events = (
        ScriptedMoa(proposers(SAYS_4, SAYS_4, SAYS_5, SAYS_5), pace=gates.pace),
        Recorder(),
    )
    run = asyncio.create_task(moa.executor.run(panel(4), ask(), events.emit))
    await events.until(lambda r: len(r.of(AgentFinished)) == 2)
    assert not events.of(AggregationSkipped)
    gates.open("proposer-3")
    gates.open("proposer-4")
    answer = await run
    assert Counter(one.state for one in answer.agents.values()) == {"finished": 4, "skipped": 1}


@pytest.mark.parametrize("model", ["small", "other"])
async def test_a_reader_of_votes_reads_what_they_forward(model: str) -> None:
    said = [SAYS_4, SAYS_4, SAYS_5, SAYS_5, SAYS_5, SAYS_4, SAYS_4, SAYS_4, SAYS_4]
    moa = ScriptedMoa({**proposers(*said), "root": "4"})
    answer = await moa.executor.run(read_vote(model), ask("Why?"), print)
    assert answer.text == "4"
    assert moa.prompt_of("root") == f"<user>Q: Why? [{SAYS_4}] [{SAYS_5}] [{SAYS_4}]<assistant>"


async def test_updates_of_a_votes_reader_are_prefixes_of_its_prompt() -> None:
    long = "many words " * 40 + SAYS_4
    moa = ScriptedMoa({**proposers(*[long] * 9), "root": "4"})
    await moa.executor.run(read_vote(), ask("Why?"), print)
    whole, tokenizer = moa.prompt_of("root"), moa.tokenizers["small"]
    assert all(
        whole.startswith(tokenizer.decode(update.input_ids))
        for update in moa.engines["small"].prefilled
    )


async def test_a_voter_that_another_agent_reads_too_goes_on() -> None:
    graph = parse_topology(
        "agents:\n  a: {}\n  b: {}\n  c: {}\n  most: {vote: majority, precursors: [a, b, c]}\n"
        "  other: {precursors: [c]}\n  root: {precursors: [most, other]}\ndefaults: {model: "
        "small}\n",
        source="graph.yaml",
    )
    gates = Gates("c")
    moa, events = (
        ScriptedMoa({"a": SAYS_4, "b": SAYS_4, "c": SAYS_5, "root": "so"}, pace=gates.pace),
        Recorder(),
    )
    run = asyncio.create_task(moa.executor.run(graph, ask(), events.emit))
    await events.until(lambda r: bool(r.of(AggregationSkipped)))
    gates.open("c")
    answer = await run
    assert answer.agents["c"].state == "finished"


async def test_an_output_cut_at_its_limit_is_forwarded_only_if_there_is_no_other() -> None:
    cut = Script("Answer: 5", reason="length", logprob=0.0)
    moa = ScriptedMoa(proposers(cut, cut, "Answer: 4"))
    assert (await moa.executor.run(panel(), ask(), print)).text == "Answer: 4"
    answer = await ScriptedMoa(proposers(cut, cut)).executor.run(panel(2), ask(), print)
    assert (answer.text, answer.reason) == ("Answer: 5", "length")


async def test_blank_outputs_have_no_vote_and_are_never_forwarded() -> None:
    moa = ScriptedMoa(proposers("", " \n", SAYS_5))
    answer = await moa.executor.run(panel(), ask(), print)
    assert answer.text == SAYS_5
    assert [spent.state for spent in answer.agents.values()] == ["failed"] * 2 + [
        "finished",
        "skipped",
    ]
    with pytest.raises(AgentFailed, match="no output to count"):
        await ScriptedMoa(proposers("", "", "")).executor.run(panel(), ask(), print)


async def test_failed_voters_have_no_vote_and_a_vote_of_none_fails() -> None:
    gone = Script("Answer: 5", error=EngineUnreachable("gone."))
    drop = "on_failure: drop\n"
    answer = await ScriptedMoa(proposers(gone, gone, SAYS_4)).executor.run(
        panel(3, drop), ask(), print
    )
    assert answer.text == SAYS_4
    with pytest.raises(AgentFailed, match="'root' has no output to count"):
        await ScriptedMoa(proposers(gone, gone, gone)).executor.run(panel(3, drop), ask(), print)


async def test_the_clients_length_and_form_hold_for_those_whose_output_may_be_the_answer() -> None:
    sampling = {"max_new_tokens": 7, "stop": ["x"], "temperature": 0.1}
    moa = ScriptedMoa(proposers(SAYS_4, SAYS_4, SAYS_4))
    await moa.executor.run(
        panel(more="defaults: {sampling: {temperature: 0.8}}"), ask(sampling=sampling), print
    )
    asked = moa.engines["small"].generated[0].sampling
    assert (asked["max_new_tokens"], asked["stop"], asked["temperature"]) == (7, ["x"], 0.8)
    await moa.executor.run(read_vote(), ask(sampling=sampling, run_id="second"), print)
    assert "stop" not in moa.engines["small"].generated[-2].sampling


async def test_votes_that_a_cluster_judges_in_flight_end_it() -> None:
    scripts = {**proposers(*[SAYS_4] * 6), "root": "4"}
    gates = Gates("proposer-7", "proposer-8", "proposer-9")
    graph = parse_topology(
        "tree: {shape: [9, 3, 1], models: [small], aggregator: {vote: majority}}\n"
        "early_exit: {policy: in_flight, threshold: 0.5}\n",
        source="votes.yaml",
    )
    answer = await ScriptedMoa(scripts, pace=gates.pace).executor.run(graph, ask(), print)
    assert answer.agents["aggregator-3"] == AgentUsage("vote", 0, 0, 0, "early_exit")
    assert answer.text == "4"


async def test_a_cancelled_vote_leaves_nothing_running() -> None:
    moa, events = (
        ScriptedMoa(proposers(SAYS_4), pace=Gates("proposer-2", "proposer-3").pace),
        Recorder(),
    )
    run = asyncio.create_task(moa.executor.run(panel(), ask(), events.emit))
    await events.until(lambda r: bool(r.of(AgentFinished)))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not moa.running


async def test_an_exit_of_a_layer_ends_the_branches_that_it_leaves_nothing_to_read() -> None:
    tree = parse_topology(
        "tree: {shape: [9, 3, 1], models: [small]}\n"
        "early_exit: {policy: threshold, threshold: 0, scope: layer, min_completed: 1}\n",
        source="tree.yaml",
    )
    assert [len(cluster.agents) for cluster in tree.clusters] == [9, 3]
    waiting = [f"proposer-{n}" for n in range(2, 10)]
    moa = ScriptedMoa(
        {"proposer-1": SAYS_4, "aggregator-1": "4", "root": "so 4"}, pace=Gates(*waiting).pace
    )
    answer = await moa.executor.run(tree, ask(), print)
    assert answer.text == "so 4"
    assert {name for name, one in answer.agents.items() if one.state == "finished"} == {
        "proposer-1",
        "aggregator-1",
        "root",
    }
    assert {answer.agents[one].state for one in ("aggregator-2", *waiting)} == {"early_exit"}
    assert tree.clusters[0].early_exit == EarlyExit(
        "threshold", threshold=0, scope="layer", min_completed=1
    )


async def test_a_vote_does_not_wait_for_the_judgement_of_its_voters() -> None:
    class Stuck:
        async def embed(self, text: str) -> TokenStates:
            await asyncio.Event().wait()
            raise AssertionError

    moa = ScriptedMoa(proposers(SAYS_4, SAYS_4, SAYS_4))
    executor = Executor(moa.models, moa.cache, Stuck(), clock=monotonic)
    async with asyncio.timeout(10):
        answer = await executor.run(panel(more="early_exit: {policy: threshold}\n"), ask(), print)
    assert answer.text == SAYS_4
