"""A graph that keeps time for its root: what is cut off, and what the answer is."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from shell_router.core.events import AgentStopped, AggregationSkipped
from shell_router.core.marks import REASONING_PARSERS
from shell_router.errors import DeadlineExceeded
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.requests import Answer
from shell_router.topology import Graph, parse_topology
from tests.fakes.moa import Recorder, ScriptedMoa, ask
from tests.fakes.scripted_engine import Script
from tests.fakes.topologies import parse_steps

DUO = """
name: duo
root_reserve_s: 10
agents:
  quick: {model: small}
  slow: {model: medium}
  root: {model: large, precursors: [quick, slow]}
"""
DEEP = """
name: deep
root_reserve_s: 10
agents:
  a: {model: small}
  b: {model: small}
  left: {model: medium, precursors: [a, b]}
  right: {model: medium, precursors: [b]}
  root: {model: large, precursors: [left, right]}
"""
VOTE = """
name: vote
root_reserve_s: 10
agents:
  a: {model: small}
  b: {model: small}
  c: {model: small}
  root: {vote: majority, precursors: [a, b, c]}
"""
NEVER = 1e6


class Paced:
    """A run in virtual time; each piece of an agent comes after its seconds."""

    def __init__(self, seconds: Mapping[str, float], scripts: Mapping[str, Any], **fields: Any):
        self._seconds = seconds
        self.events = Recorder()
        self.moa = ScriptedMoa(scripts, pace=self.pace, **fields)

    async def pace(self, rid: str, piece: int) -> None:
        if piece >= 0:
            await asyncio.sleep(self._seconds.get(rid.rpartition(".")[2], 0))

    def run(self, graph: Graph, **fields: Any) -> tuple[Answer, float]:
        """The answer to a request of 60 s, and when it came."""

        async def answer() -> tuple[Answer, float]:
            request = ask(timeout_s=60, **fields)
            answer = await self.moa.executor.run(graph, request, self.events.emit)
            assert not self.moa.running and not len(self.moa.cache)
            return answer, asyncio.get_running_loop().time()

        return run_virtual(answer())

    @property
    def streamed(self) -> str:
        return "".join(getattr(e, "text", "") for e in self.events.events if e.agent == "root")


def run(
    graph: str, seconds: Mapping[str, float], **scripts: Script | str
) -> tuple[Answer, float, Paced]:
    paced = Paced(seconds, scripts)
    return *paced.run(parse_topology(graph, source="graph.yaml")), paced


def states(answer: Answer) -> dict[str, str]:
    return {name: used.state for name, used in answer.agents.items()}


def test_the_root_answers_with_what_has_finished_when_its_time_begins() -> None:
    answer, ended_s, paced = run(DUO, {"slow": NEVER}, quick="it is 4", root="four")
    assert (answer.text, answer.reason, ended_s) == ("four", "stop", 50)
    assert states(answer) == {"quick": "finished", "slow": "deadline", "root": "finished"}
    assert "cut off" in answer.agents["slow"].error
    assert [(e.agent, e.why) for e in paced.events.of(AgentStopped)] == [("slow", "deadline")]
    assert "it is 4" in paced.moa.prompt_of("root") and paced.moa.aborted == {"slow"}


def test_without_a_reserve_the_request_fails_at_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"'duo' gave no answer within 60 s"):
        run(DUO.replace("root_reserve_s: 10", ""), {"slow": NEVER})


def test_agents_that_end_in_time_are_not_cut_off() -> None:
    answer, ended_s, _ = run(DUO, {"slow": 20, "root": 35}, slow="5", root="four")
    assert (answer.text, answer.reason, answer.warning, ended_s) == ("four", "stop", "", 55)
    assert set(states(answer).values()) == {"finished"}


def test_an_output_that_comes_late_still_gives_the_root_its_start() -> None:
    answer, ended_s, _ = run(DUO, {"quick": 55, "slow": NEVER}, quick="it is 4", root="four")
    assert (answer.text, answer.reason, ended_s) == ("four", "stop", 55)
    assert states(answer)["slow"] == "deadline"


def test_where_nothing_has_finished_the_request_fails_as_without_a_reserve() -> None:
    with pytest.raises(DeadlineExceeded, match=r"'duo' gave no answer within 60 s"):
        run(DUO, {"quick": NEVER, "slow": NEVER})


@pytest.mark.parametrize(
    ("seconds", "text", "source"),
    [
        ({"left": NEVER, "right": NEVER}, "first", "a"),
        ({"a": NEVER, "right": NEVER}, "second", "b"),
        ({"left": NEVER, "root": NEVER}, "half", "right"),
        ({"root": NEVER}, "whole", "left"),
    ],
    ids=["proposals", "one proposal", "one aggregator", "aggregators"],
)
def test_a_root_without_text_is_replaced_by_the_nearest_output(
    seconds: dict[str, float], text: str, source: str
) -> None:
    scripts = {"a": "first", "b": "second", "left": "whole", "right": "half"}
    answer, ended_s, paced = run(DEEP, seconds, **scripts)
    assert (answer.text, answer.reason, ended_s) == (text, "length", pytest.approx(59.8))
    assert f"'{source}' answers in its place" in answer.warning
    assert states(answer)["root"] == "deadline" and states(answer)[source] == "finished"
    assert [e.source for e in paced.events.of(AggregationSkipped)] == [source]
    assert paced.streamed == text


def test_a_root_that_has_text_ends_with_it() -> None:
    root = Script("it is four and more", piece_words=1)
    answer, ended_s, paced = run(DUO, {"root": 25}, root=root)
    assert (answer.text, answer.reason, ended_s) == ("it is", "length", pytest.approx(59.8))
    assert "'root' off: the answer is its text so far" in answer.warning
    assert answer.agents["root"].state == "deadline"
    assert answer.agents["root"].completion_tokens == 2
    assert paced.streamed == "it is" and paced.moa.aborted == {"root"}


def test_thinking_is_no_text() -> None:
    scripts = {"root": Script("<think> so much to think of </think> four", piece_words=2)}
    paced = Paced({"root": 20}, {**scripts, "quick": "4"}, reasoning=REASONING_PARSERS["qwen3"])
    answer, _ = paced.run(parse_topology(DUO, source="graph.yaml"))
    assert answer.text == "4" and answer.reasoning.split() == ["so", "much", "to"]


def test_a_vote_counts_what_has_finished() -> None:
    answer, ended_s, _ = run(VOTE, {"a": NEVER, "b": NEVER}, c="The answer is 4.")
    assert (answer.text, answer.reason, ended_s) == ("The answer is 4.", "stop", 50)
    assert states(answer) == {"a": "deadline", "b": "deadline", "c": "finished", "root": "skipped"}


def test_a_graph_of_one_agent_ends_with_its_text() -> None:
    one = "name: one\nroot_reserve_s: 1\nagents: {root: {model: large}}"
    answer, _, _ = run(one, {"root": 25}, root=Script("a b c", piece_words=1))
    assert (answer.text, answer.reason) == ("a b", "length")


def test_a_step_keeps_time_before_the_deadline_of_its_request() -> None:
    duo = parse_topology(DUO, source="duo.yaml")
    steps = parse_steps(
        "name: walk\nstart: first\n"
        "steps: {first: {model: small, then: both}, both: {topology: duo}}",
        source="walk.yaml",
        topologies={"duo": duo},
    )
    paced = Paced({"first": 30, "both/slow": NEVER, "slow": NEVER}, {"first": "go", "root": "four"})
    answer, ended_s = paced.run(steps)
    assert (answer.reason, ended_s) == ("stop", 50)
    assert states(answer)["both/slow"] == "deadline"
