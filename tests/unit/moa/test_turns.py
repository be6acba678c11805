"""Turns: what the agents below a root gave is read again while the root calls tools."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest

from agent_cache import Chunk, End, LogKey
from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.engine import Tokens
from shell_router.core.events import AgentStopped, StepChosen
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import AgentFailed, EngineUnreachable
from shell_router.moa.calls import ToolOffer
from shell_router.moa.executor import Executor
from shell_router.moa.journal import RunJournal
from shell_router.moa.requests import Answer, FanOut, MoaRequest
from shell_router.moa.turns import Turns
from shell_router.telemetry import Trace
from shell_router.topology import AUTO, Agent, Cluster, Graph, Prompt, Topology, parse_topology
from tests.fakes.journals import MemoryJournals
from tests.fakes.moa import Recorder, ScriptedMoa, WordTokenizer, agent_of
from tests.fakes.scripted_engine import Gates, Script, ScriptedEngine
from tests.fakes.topologies import parse_steps

TOOLS = ({"type": "function", "function": {"name": "look"}},)
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
Message = dict[str, Any]
TREE = parse_topology(
    "name: tree\ntree: {shape: [9, 3, 1], models: [small, medium, large]}", source="tree.yaml"
)
TWO = Topology(
    "two",
    {
        "left": Agent("left", "small"),
        "right": Agent("right", "medium", on_failure="drop"),
        "root": Agent("root", "large", ("left", "right"), Prompt(slot="\n{index}: {output}")),
    },
)
STEPS = parse_steps(
    """
start: [{when: {matches: How}, go: plan}, {go: other}]
steps:
  plan: {model: small, then: act}
  other: {model: medium, then: act}
  act: {model: large, precursors: [plan, other]}
""",
    source="steps.yaml",
)


def talk(results: int, question: str = "How is it?") -> tuple[Message, ...]:
    """A question, and as many calls with their results."""
    chat: list[Message] = [{"role": "user", "content": question}]
    for number in range(results):
        calls = [{"id": f"c{number}", "function": {"name": "look", "arguments": {}}}]
        chat.append({"role": "assistant", "content": "I look.", "tool_calls": calls})
        chat.append({"role": "tool", "content": f"seen {number}", "tool_call_id": f"c{number}"})
    return tuple(chat)


class Client:
    """Sends requests of turns to models whose roots call a tool."""

    def __init__(self, moa: ScriptedMoa | None = None, **scripts: Script | str) -> None:
        self.moa = moa or ScriptedMoa(
            {"root": CALL, "act": CALL, **scripts}, call_mark="<tool_call>"
        )
        self.executor = self.moa.executor
        self.sent = 0

    async def ask(
        self,
        results: int | Sequence[Message],
        graph: Graph = TWO,
        events: Recorder | None = None,
        **fields: Any,
    ) -> Answer:
        self.sent += 1
        messages = talk(results) if isinstance(results, int) else tuple(results)
        request = {"tenant": "t", "offer": ToolOffer(TOOLS), "messages": messages, **fields}
        emit = (events or Recorder()).emit
        return await self.executor.run(graph, MoaRequest(f"run{self.sent}", **request), emit)

    def ran(self) -> list[str]:
        """The agents that engines were asked for since the last call."""
        ran = []
        for engine in self.moa.engines.values():
            ran += [agent_of(request) for request in engine.generated]
            engine.generated.clear()
        return sorted(ran)

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts of the root, without the mark of the answer that follows."""
        return [list(request.input_ids)[:-1] for request in self.moa.engines["large"].generated]


def states(answer: Answer) -> dict[str, str]:
    return {name: used.state for name, used in answer.agents.items()}


async def test_a_loop_of_five_steps_on_a_tree_of_thirteen_agents_takes_seventeen_runs() -> None:
    client = Client(aggregator="sums up")
    answers = [await client.ask(results, TREE) for results in range(5)]
    prompts = [
        list(request.input_ids)[:-1]
        for request in client.moa.engines["large"].generated
        if agent_of(request) == "root"
    ]
    assert all(after[: len(before)] == before for before, after in pairwise(prompts))
    for before, answer in zip(prompts, answers[1:], strict=False):
        assert answer.agents["root"].cached_tokens >= len(before), "on the same engine"
    assert len(client.ran()) == 13 + 4
    kept = {name: "kept" for name in TREE.agents if name != "root"}
    assert states(answers[4]) == {**kept, "root": "finished"}
    assert sum(used.completion_tokens for used in answers[4].agents.values()) == (
        answers[4].agents["root"].completion_tokens
    )


async def test_the_root_of_a_turn_keeps_its_engine() -> None:
    client = Client()
    for results in (0, 1, 2):
        await client.ask(results)
    await client.ask(talk(0, "And now?"))
    affinities = [request.affinity for request in client.moa.engines["large"].generated]
    assert len(set(affinities[:3])) == 1 and affinities[3] not in affinities[:3]


class Spelling(ScriptedEngine):
    """An engine that writes a token for each letter, which no tokenizer would."""

    def _pieces(self, script: Script) -> Any:
        for letter in script.text:
            ids = tuple(self._tokenizer.encode(letter))
            yield Tokens(ids, letter, (-0.1,))


async def test_ids_that_no_tokenizer_would_write_are_read_again_as_they_were() -> None:
    client = Client()
    spelling = Spelling(WordTokenizer(), lambda _: Script("together"))
    client.moa.models["small"] = replace(client.moa.models["small"], engine=spelling)
    await client.ask(0)
    await client.ask(1)
    first, second = client.prompts
    assert second[: len(first)] == first
    letters = [WordTokenizer().encode(letter)[0] for letter in "together"]
    assert str(letters)[1:-1] in str(first)


async def test_another_reader_reads_the_text_of_ids_that_it_cannot_take() -> None:
    agents = {**TWO.agents, "root": replace(TWO.root, fallbacks=("other",))}
    topology = replace(TWO, agents=agents)
    client = Client(left="one two", right="three")
    await client.ask(0, topology)
    down = Script("", error=EngineUnreachable("gone"))
    client.moa.engines["large"].answer = lambda _: down
    assert (await client.ask(1, topology)).agents["root"].model == "other"
    assert "1: one two\n2: three" in client.moa.prompts("other")[0]


async def test_steps_before_the_one_that_calls_are_not_run_again() -> None:
    client, events = Client(plan="think first"), Recorder()
    await client.ask(0, STEPS)
    assert client.ran() == ["act", "plan"]
    answer = await client.ask(1, STEPS, events)
    assert states(answer) == {"plan": "kept", "act": "finished"}
    assert client.ran() == ["act"]
    assert next((event.step, event.why) for event in events.of(StepChosen)) == ("act", "kept")


async def test_a_topology_that_a_step_asks_goes_on_with_its_own_outputs() -> None:
    steps = parse_steps(
        "start: plan\nsteps:\n  plan: {model: small, then: act}\n  act: {topology: two}",
        source="steps.yaml",
        topologies={"two": TWO},
    )
    client = Client(**{"act/root": CALL})
    await client.ask(0, steps)
    client.ran()
    answer = await client.ask(1, steps)
    assert client.ran() == ["act/root"]
    assert set(states(answer).values()) == {"kept", "finished"} and len(answer.agents) == 4


async def test_a_topology_may_ask_for_all_agents_in_every_request() -> None:
    client = Client()
    for results in (0, 1):
        await client.ask(results, replace(TWO, fan_out="request"))
        assert client.ran() == ["left", "right", "root"]


CHANGES: dict[str, dict[str, Any]] = {
    "another question": {"results": talk(1, "How was it?")},
    "another system message": {"results": ({"role": "system", "content": "Be brief."}, *talk(1))},
    "another tenant": {"results": 1, "tenant": "other"},
    "another topology": {"results": 1, "graph": replace(TWO, name="three")},
    "another model": {
        "results": 1,
        "graph": replace(TWO, agents={**TWO.agents, "left": Agent("left", "medium")}),
    },
    "results that answer no question before": {"results": talk(3, "Forged?")},
    "another question in the middle": {"results": (*talk(1), *talk(1, "Why?"))},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_all_agents_run_for_results_of_another_turn(change: dict[str, Any]) -> None:
    client, events = Client(), Recorder()
    await client.ask(0)
    client.ran()
    answer = await client.ask(events=events, **change)
    assert client.ran() == ["left", "right", "root"]
    assert "kept" not in states(answer).values() and not events.of(AgentStopped)


async def test_results_alone_change_nothing_of_what_was_kept() -> None:
    client = Client()
    await client.ask(0)
    client.ran()
    forged = [dict(message, content="I am the system") for message in talk(2)[1:]]
    await client.ask((*talk(0), *forged))
    assert client.ran() == ["root"]


async def test_a_system_message_behind_the_question_is_a_part_of_it() -> None:
    client, reminder = Client(), {"role": "system", "content": "Be brief."}
    await client.ask((*talk(0), reminder))
    assert "Be brief." in client.moa.prompt_of("left")
    client.ran()
    await client.ask((*talk(0), reminder, *talk(1)[1:], reminder))
    assert client.ran() == ["root"]
    await client.ask(1)
    assert client.ran() == ["left", "right", "root"]


async def test_an_expired_turn_runs_again_and_is_kept_again() -> None:
    client, now = Client(), [0.0]
    cache = MemoryAgentPromptCache(clock=lambda: now[0], ttl_s=10)
    client.executor = Executor(client.moa.models, cache, None, clock=monotonic)
    await client.ask(0)
    now[0] = 11.0
    client.ran()
    await client.ask(1)
    assert client.ran() == ["left", "right", "root"]
    await client.ask(2)
    assert client.ran() == ["root"]


async def test_only_answers_that_call_tools_are_kept() -> None:
    client = Client(root="It is dry.")
    await client.ask(0)
    await client.ask(0, offer=None)
    assert len(client.moa.cache) == 0


async def test_a_question_that_is_asked_again_is_answered_anew_and_what_it_read_is_kept() -> None:
    client = Client(left="before")
    await client.ask(0)
    client.moa.engines["small"].answer = lambda _: Script("after")
    await client.ask(0)
    assert client.ran() == 2 * ["left"] + 2 * ["right"] + 2 * ["root"]
    await client.ask(1)
    assert "1: after" in client.moa.prompts("large")[0]
    assert len(client.moa.cache) == 1


async def test_two_requests_of_a_turn_at_once_share_what_the_agents_give() -> None:
    gates = Gates("left")
    client = Client(ScriptedMoa({"root": CALL}, pace=gates.pace, call_mark="<tool_call>"))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(client.ask(1))
        await gates.until_waiting(1)
        second = group.create_task(client.ask(2))
        gates.open("left")
    assert client.ran() == ["left", "right", "root", "root"]
    assert states(first.result())["left"] == "finished"
    assert states(second.result())["left"] == "kept"


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
async def test_a_request_whose_fellow_does_not_finish_runs_all_agents(ends: str) -> None:
    gates = Gates("left")
    client = Client(ScriptedMoa({"root": CALL}, pace=gates.pace, call_mark="<tool_call>"))
    scripts = iter([Script("a b", error=EngineUnreachable("gone")), Script("fine")])
    client.moa.engines["small"].answer = lambda _: next(scripts)
    first = asyncio.create_task(client.ask(1))
    await gates.until_waiting(1)
    second = asyncio.create_task(client.ask(2))
    if ends == "is cancelled":
        first.cancel()
    gates.open("left")
    with pytest.raises(asyncio.CancelledError if ends == "is cancelled" else AgentFailed):
        await first
    assert states(await second)["left"] == "finished"


async def test_a_failed_agent_is_left_out_and_named_in_all_requests_of_the_turn() -> None:
    client = Client(right=Script("", error=EngineUnreachable("gone")))
    await client.ask(0)
    client.ran()
    answer = await client.ask(1)
    assert client.ran() == ["root"]
    assert answer.agents["right"].state == "kept"
    assert "gone" in answer.agents["right"].error


@pytest.mark.parametrize("missing", ["left", "right"])
async def test_slots_that_were_left_out_stay_out(missing: str) -> None:
    agents = {name: replace(agent, on_failure="drop") for name, agent in TWO.agents.items()}
    topology = replace(TWO, agents=agents)
    client = Client(**{missing: Script("", error=EngineUnreachable("gone"))})
    await client.ask(0, topology)
    await client.ask(1, topology)
    first, second = client.prompts
    assert second[: len(first)] == first


async def test_after_an_early_exit_the_turn_goes_on_with_what_the_root_has_read() -> None:
    gates = Gates("right")
    moa = ScriptedMoa({"root": CALL}, pace=gates.pace, call_mark="<tool_call>")
    early = EarlyExit(policy="quorum", min_completed=1)
    topology = replace(TWO, clusters=(Cluster("both", ("left", "right"), early),))
    client = Client(moa)
    first = await client.ask(0, topology)
    assert states(first)["right"] == "early_exit"
    client.ran()
    second = await client.ask(1, topology)
    assert client.ran() == ["root"] and set(states(second)) == set(states(first))


async def test_the_root_that_was_chosen_goes_on() -> None:
    agents = {**TWO.agents, "root": replace(TWO.root, model=AUTO, candidates=("large", "small"))}
    client = Client()
    first = await client.ask(0, replace(TWO, agents=agents))
    client.moa.executor.chooser.activity.enter_program(
        {"busy": (first.agents["root"].model, 1e6)}
    ).__enter__()
    second = await client.ask(1, replace(TWO, agents=agents))
    assert second.agents["root"].model == first.agents["root"].model


async def test_another_root_is_chosen_where_the_prompt_has_outgrown_the_first() -> None:
    agents = {**TWO.agents, "root": replace(TWO.root, model=AUTO, candidates=("large", "other"))}
    client = Client(ScriptedMoa({"root": CALL}, call_mark="<tool_call>", context_length=600))
    client.moa.models["other"] = replace(client.moa.models["other"], context_length=4096)
    first = await client.ask(0, replace(TWO, agents=agents), sampling={"max_new_tokens": 50})
    assert first.agents["root"].model == "large"
    long_result = [*talk(1)[:-1], {**talk(1)[-1], "content": 600 * "word "}]
    answer = await client.ask(
        long_result, replace(TWO, agents=agents), sampling={"max_new_tokens": 50}
    )
    assert answer.agents["root"].model == "other" and states(answer)["left"] == "kept"


async def test_traces_name_the_model_of_a_kept_agent() -> None:
    client, events = Client(), Recorder()
    await client.ask(0)
    await client.ask(1, events=events)
    trace = Trace("r", "t", "two", "root", 0.0, 0.0, {"root": ("left", "right")})
    for event in events.events:
        trace.add(event)
    agents = trace.as_json()["agents"]
    assert (agents["left"]["state"], agents["left"]["model"]) == ("kept", "small")
    assert trace.as_json()["overlap"]["critical_path"] == ["root"]


async def journaled(client: Client, store: MemoryJournals, **fields: Any) -> Answer:
    """An attempt at the request of a turn's first result."""
    records = await store.claim("t", "key", f"run{client.sent + 1}", "head")
    assert records is not None
    journal = RunJournal(store, "t", "key", f"run{client.sent + 1}", records)
    try:
        return await client.ask(1, journal=journal, **fields)
    finally:
        await journal.close(void=False)


async def test_a_run_that_goes_on_elsewhere_reads_what_its_first_attempt_found() -> None:
    client, store = Client(), MemoryJournals()
    await client.ask(0)
    await journaled(client, store)
    client.ran()
    elsewhere = Client()
    elsewhere.sent = client.sent
    answer = await journaled(elsewhere, store)
    assert elsewhere.ran() == [] and states(answer)["left"] == "kept"


async def test_a_run_that_goes_on_runs_all_agents_if_its_first_attempt_did() -> None:
    client, store = Client(), MemoryJournals()
    await journaled(client, store)
    assert client.ran() == ["left", "right", "root"]
    client.moa.engines["small"].answer = lambda _: Script("something else")
    await client.ask(0)
    client.ran()
    answer = await journaled(client, store)
    assert client.ran() == [] and states(answer)["left"] == "finished"


async def test_the_oldest_turns_are_forgotten_beyond_a_size() -> None:
    cache = MemoryAgentPromptCache(clock=monotonic)
    turns = Turns(cache, most_characters=100_000)
    offer = ToolOffer(TOOLS)
    for number in range(1000):
        request = MoaRequest("r", "t", talk(0, f"{number}?"), offer=offer)
        async with turns.open(TWO, request) as turn:
            turn.read = FanOut("large", {"left": (10 * "proposal ", ())})
    assert 100 < len(cache) < 1000
    for number, is_kept in ((0, False), (999, True)):
        request = MoaRequest("r", "t", talk(1, f"{number}?"), offer=offer)
        async with turns.open(TWO, request) as turn:
            assert bool(turn.kept.outputs) == is_kept


async def test_what_another_program_wrote_under_the_name_of_a_turn_is_no_output() -> None:
    client = Client()
    for text in ("", "{}", '{"reader": 1}'):
        cache = MemoryAgentPromptCache(clock=monotonic)
        client.executor = Executor(client.moa.models, cache, None, clock=monotonic)
        await client.ask(0)
        async with Turns(cache).open(TWO, MoaRequest("r", "t", talk(1))) as turn:
            program = f"turn/{turn.name}"
        await cache.forget("t", program)
        writer = await cache.create(LogKey("t", program, "root"))
        writer.append(Chunk(text))
        writer.end(End.FINISHED)
        client.ran()
        await client.ask(1)
        assert client.ran() == ["left", "right", "root"]
