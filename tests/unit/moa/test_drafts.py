"""Which requests ask their engine for drafts, and from which texts."""

from dataclasses import replace

import pytest

from shell_router.core.engine import Finish
from shell_router.errors import InvalidField
from shell_router.moa import AgentRequest
from shell_router.moa.requests import OutputOf
from shell_router.topology import parse_topology
from tests.fakes.moa import Recorder, ScriptedMoa, agent_of, ask

TREE = "tree: {shape: [2, 1], models: [small, medium]%s}"


def tree(more: str = "") -> str:
    return TREE % more


async def asked_for_drafts(file: str, moa: ScriptedMoa | None = None, **fields: object) -> dict[str, object]:
    """The drafts that each agent's request asks for."""
    moa = moa or ScriptedMoa()
    request = replace(ask(), **fields)  # type: ignore[arg-type]
    await moa.executor.run(parse_topology(file, source="t.yaml"), request, Recorder().emit)
    return {
        agent_of(one): one.sampling.get("custom_params") for engine in moa.engines.values() for one in engine.generated
    }


async def test_agents_that_read_others_ask_and_proposers_do_not() -> None:
    assert await asked_for_drafts(tree()) == {"proposer-1": None, "proposer-2": None, "root": {"drafts": []}}


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
        await moa.programs.run(AgentRequest("me", "program", agent, "small", prompt), Recorder().emit)
    asked = [one.sampling.get("custom_params") for one in moa.engines["small"].generated]
    assert asked == [None, {"drafts": []}]


async def test_what_the_engine_accepted_is_in_the_answer() -> None:
    moa = ScriptedMoa()
    engine = moa.engines["medium"]
    generate = engine.generate

    class Drafting:
        """The scripted engine, whose requests end as those with drafts do."""

        prefill = engine.prefill

        async def generate(self, request):  # type: ignore[no-untyped-def]
            async for item in generate(request):
                yield replace(item, drafted_tokens=7, accepted_tokens=5) if isinstance(item, Finish) else item

    moa.models["medium"] = replace(moa.models["medium"], engine=Drafting())
    answer = await moa.executor.run(parse_topology(tree(), source="t.yaml"), ask(), Recorder().emit)
    assert {name: (one.drafted_tokens, one.accepted_tokens) for name, one in answer.agents.items()} == {
        "proposer-1": (0, 0),
        "proposer-2": (7, 5),
        "root": (7, 5),
    }
