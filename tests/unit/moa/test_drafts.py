"""Which requests ask their engine for drafts, and from which texts."""

from collections.abc import AsyncIterator
from dataclasses import replace
from time import monotonic

import pytest

from shell_router.api.frames import sum_usage
from shell_router.api.live import make_single_agent
from shell_router.core.engine import Finish, Generation, Prefilled, Tokens
from shell_router.errors import EngineUnreachable, InvalidField
from shell_router.moa.executor import Executor
from shell_router.moa.requests import AgentRequest, OutputOf
from shell_router.routing.holdout import Comparison, HoldoutSettings
from shell_router.topology import parse_topology
from tests.fakes.moa import Recorder, ScriptedMoa, agent_of, ask, open_programs
from tests.fakes.scripted_engine import Script

LONG = [{"role": "user", "content": "a " * 1000}]
TREE = (
    "tree: {shape: [2, 1], models: [small, medium]%s}\ndefaults: {sampling: {max_new_tokens: 128}}"
)


def tree(more: str = "") -> str:
    return TREE % more


async def asked_for_drafts(
    file: str, moa: ScriptedMoa | None = None, **fields: object
) -> dict[str, object]:
    """The drafts that each agent's request asks for."""
    moa = moa or ScriptedMoa()
    request = replace(ask(), **fields)  # type: ignore[arg-type]
    await moa.executor.run(parse_topology(file, source="t.yaml"), request, Recorder().emit)
    return {
        agent_of(one): one.sampling.get("custom_params")
        for engine in moa.engines.values()
        for one in engine.generated
    }


async def test_agents_that_read_others_ask_and_proposers_do_not() -> None:
    assert await asked_for_drafts(tree()) == {
        "proposer-1": None,
        "proposer-2": None,
        "root": {"drafts": []},
    }


@pytest.mark.parametrize(("characters", "asked"), [(999, None), (1000, {"drafts": []})])
async def test_a_plain_request_asks_where_its_messages_are_long(
    characters: int, asked: object
) -> None:
    moa, messages = (
        ScriptedMoa(),
        [{"role": "user", "content": "a " * (characters // 2) + "b" * (characters % 2)}],
    )
    await moa.executor.run(
        make_single_agent("small"), replace(ask(), messages=messages), Recorder().emit
    )
    assert [one.sampling.get("custom_params") for one in moa.engines["small"].generated] == [asked]


async def test_a_topology_of_one_agent_drafts_as_it_says() -> None:
    for drafts in ("", ", drafts: off"):
        found = await asked_for_drafts(
            f"name: one\nagents: {{one: {{model: small{drafts}}}}}", messages=LONG
        )
        assert found == {"one": None}


async def test_a_prediction_goes_to_the_agent_that_answers_as_tokens_of_its_model() -> None:
    moa = ScriptedMoa()
    found = await asked_for_drafts(tree(", root: {drafts: off}"), moa, prediction="two plus two")
    ids = moa.tokenizers["medium"].encode("two plus two")
    assert found == {"proposer-1": None, "proposer-2": None, "root": {"drafts": [ids]}}


async def test_custom_parameters_of_the_topology_are_kept() -> None:
    found = await asked_for_drafts(tree(", root: {sampling: {custom_params: {mine: 1}}}"))
    assert found["root"] == {"drafts": [], "mine": 1}


async def test_custom_parameters_that_are_no_object_are_refused() -> None:
    request = AgentRequest("me", "program", "a", "small", ("say",), sampling={"custom_params": [1]})
    with pytest.raises(InvalidField, match="custom_params must be an object"):
        await ScriptedMoa().programs.run(request, Recorder().emit)


async def test_agents_of_a_program_ask_where_they_read_an_output() -> None:
    moa = ScriptedMoa()
    for agent, prompt in (("a", ("say",)), ("b", ("read ", OutputOf("a")))):
        await moa.programs.run(
            AgentRequest("me", "program", agent, "small", prompt), Recorder().emit
        )
    asked = [one.sampling.get("custom_params") for one in moa.engines["small"].generated]
    assert asked == [None, {"drafts": []}]


async def test_what_the_engine_accepted_is_in_the_answer() -> None:
    drafting = Script("so it is", drafted_tokens=7, accepted_tokens=5)
    moa = ScriptedMoa({"proposer-2": drafting, "root": drafting})
    answer = await moa.executor.run(parse_topology(tree(), source="t.yaml"), ask(), Recorder().emit)
    assert {
        name: (one.drafted_tokens, one.accepted_tokens) for name, one in answer.agents.items()
    } == {
        "proposer-1": (0, 0),
        "proposer-2": (7, 5),
        "root": (7, 5),
    }
    details = sum_usage(answer, "root")["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 10
    assert details["rejected_prediction_tokens"] == 4


async def test_a_model_without_drafts_is_asked_for_none_not_even_for_a_prediction() -> None:
    moa = ScriptedMoa()
    moa.models["medium"] = replace(moa.models["medium"], drafts=False)
    found = await asked_for_drafts(tree(), moa, prediction="two plus two")
    assert found == {"proposer-1": None, "proposer-2": None, "root": None}
    for agent, prompt in (("a", ("say",)), ("b", ("read ", OutputOf("a")))):
        await moa.programs.run(
            AgentRequest("me", "program", agent, "medium", prompt), Recorder().emit
        )
    assert [one.sampling.get("custom_params") for one in moa.engines["medium"].generated] == [
        None
    ] * 4


class World:
    """An engine that takes `drafted_s` per token of requests that ask for drafts, and a second per
    token of others.
    """

    def __init__(
        self, drafted_s: float, drafts: bool | str = "auto", *, drafted_tokens: int = 4
    ) -> None:
        self.now_s, self.drafted_s, self.drafted_tokens = 0.0, drafted_s, drafted_tokens
        self.asked: list[bool] = []
        moa = ScriptedMoa()
        models = {
            name: replace(one, engine=self, drafts=drafts) for name, one in moa.models.items()
        }
        self.executor = Executor(
            models,
            moa.cache,
            None,
            clock=lambda: self.now_s,
            holdouts=HoldoutSettings(share=0.2, retry_s=1e6),
        )
        self.programs = open_programs(
            models, moa.cache, clock=lambda: self.now_s, holdouts=self.executor.holdouts
        )

    async def generate(self, request: Generation) -> AsyncIterator[Tokens | Finish]:
        asks = "custom_params" in request.sampling
        if not agent_of(request).startswith("proposer"):
            self.asked.append(asks)
        for token in range(3):
            self.now_s += self.drafted_s if asks else 1.0
            yield Tokens((token,), "so ")
        yield Finish("stop", 1, 3, 0, self.drafted_tokens if asks else 0)

    async def prefill(self, request: Generation) -> Prefilled:
        return Prefilled(len(request.input_ids), 0)

    async def trees(self, count: int) -> list[bool]:
        """Whether the root's requests asked for drafts."""
        before = len(self.asked)
        graph = parse_topology(tree(), source="t.yaml")
        for number in range(count):
            await self.executor.run(
                graph, ask(f"Question {number}?", run_id=f"run{number}"), Recorder().emit
            )
        return self.asked[before:]

    async def agents(self, count: int) -> list[bool]:
        """The same of agents that are sent one by one."""
        before = len(self.asked)
        for number in range(count):
            for agent, prompt in (
                ("proposer", ("say",)),
                ("reader", ("read ", OutputOf("proposer"))),
            ):
                await self.programs.run(
                    AgentRequest("me", f"program-{before}-{number}", agent, "small", prompt),
                    Recorder().emit,
                )
        return self.asked[before:]

    def seen(self) -> Comparison:
        (only,) = self.executor.holdouts.comparisons()
        return only


@pytest.mark.parametrize("kind", ["trees", "agents"])
async def test_drafts_that_lose_are_switched_off_for_the_model_and_the_role(kind: str) -> None:
    world = World(drafted_s=2.0)
    first = await getattr(world, kind)(80)
    assert 0 < sum(first) < 80
    compared = world.seen().compared
    assert (compared.optimization, world.seen().state) == ("drafts", "off")
    assert (compared.role, compared.models) in (("root", "medium"), ("aggregator", "small"))
    assert not any(await getattr(world, kind)(20))


async def test_drafts_that_pay_stay_on_and_equal_seeds_are_held_out_alike() -> None:
    worlds = World(drafted_s=0.5), World(drafted_s=0.5)
    first, second = [await world.trees(60) for world in worlds]
    assert first == second
    assert 30 < sum(first) < 60
    benefit = worlds[0].seen().benefit
    assert worlds[0].seen().state == "on"
    assert benefit is not None
    assert benefit.mean == pytest.approx(0.5)


async def test_what_a_fallback_wrote_says_nothing_of_the_drafts_of_the_model_that_failed() -> None:
    moa = ScriptedMoa({"root": Script("so it is and goes on", piece_words=1, drafted_tokens=4)})
    models = {name: replace(one, drafts="auto") for name, one in moa.models.items()}
    executor = Executor(models, moa.cache, None, clock=monotonic, holdouts=HoldoutSettings())
    graph = parse_topology(tree(), source="t.yaml")
    graph = replace(
        graph, agents={**graph.agents, "root": replace(graph.root, fallbacks=("large",))}
    )
    moa.engines["medium"].answer = lambda request: Script(
        "so", error=EngineUnreachable("It is gone.") if agent_of(request) == "root" else None
    )
    answer = await executor.run(graph, ask(), Recorder().emit)
    usage = answer.agents["root"]
    assert (usage.model, usage.drafted_tokens) == ("large", 4)
    assert not list(executor.holdouts.comparisons())


async def test_a_model_that_always_drafts_is_not_compared_and_an_engine_that_drafts_nothing_neither() -> (
    None
):
    always = World(drafted_s=2.0, drafts=True)
    assert all(await always.trees(30))
    assert not list(always.executor.holdouts.comparisons())
    plain = World(drafted_s=1.0, drafted_tokens=0)
    await plain.trees(30)
    assert not list(plain.executor.holdouts.comparisons())
