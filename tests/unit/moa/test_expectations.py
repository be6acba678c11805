"""What agents are expected to write, and what is still to come after them."""

from shell_router.core.engine import Hints
from shell_router.moa.expectations import LatencyEstimates, expect_outputs
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.topology import Agent, Topology
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

TREE = Topology(
    "tree",
    {
        agent.id: agent
        for agent in (
            Agent("a", "small"),
            Agent("b", "small"),
            Agent("middle", "medium", ("a", "b")),
            Agent("root", "large", ("middle", "a")),
        )
    },
)


def hints(pace: LatencyEstimates) -> dict[str, Hints]:
    return dict(expect_outputs(TREE, pace, MoaRequest("run-1", "alice", ()), {}))


def paced(**tokens: int) -> LatencyEstimates:
    pace = LatencyEstimates()
    for agent, written in tokens.items():
        pace.observe_run(
            TREE.agents[agent].model, Hints(topology="tree", agent=agent), written, 1.0, None
        )
    return pace


def test_totals_count_each_follower_once() -> None:
    found = hints(paced(a=10, b=20, middle=100, root=1000))
    assert {name: one.total_tokens for name, one in found.items()} == {
        "a": 1110,
        "b": 1120,
        "middle": 1100,
        "root": 1000,
    }


def test_every_agent_asks_for_the_tenant_and_its_user_with_the_beginning_of_the_run() -> None:
    request = MoaRequest("run-1", "alice", (), end_user="ann", timeout_s=600.0, ends_s=700.0)
    found = expect_outputs(TREE, LatencyEstimates(), request, {})
    expected = ("alice", "ann", 100.0)
    assert {(one.user, one.end_user, one.began_s) for one in found.values()} == {expected}


def test_agents_that_read_others_go_on_with_their_run() -> None:
    goes_on = {name: one.goes_on for name, one in hints(paced()).items()}
    assert goes_on == {"a": False, "b": False, "middle": True, "root": True}


def test_an_agent_that_is_new_is_expected_to_write_what_its_model_does() -> None:
    found = hints(paced(a=10, middle=100, root=1000))
    assert found["b"].output_tokens == 10


def test_nothing_is_expected_of_a_model_that_is_new_nor_of_those_before_it() -> None:
    found = hints(paced(a=10, b=20, root=1000))
    assert (found["middle"].output_tokens, found["middle"].total_tokens) == (None, None)
    assert (found["a"].output_tokens, found["a"].total_tokens) == (10, None)
    assert found["root"].total_tokens == 1000


def test_what_was_written_of_late_counts_more() -> None:
    pace = paced(a=100)
    for _ in range(20):
        pace.observe_run("small", Hints(topology="tree", agent="a"), 200, 1.0, None)
    assert 195 < (pace.get_output_tokens("small", "tree", "a") or 0) <= 200


async def test_agents_that_tenants_name_alike_are_expected_to_write_what_each_tenants_own_did() -> (
    None
):
    moa = ScriptedMoa()
    engine = moa.engines["small"]
    engine.answer = lambda request: Script("so" + " so" * (len(request.input_ids) - 1))
    for number, (tenant, agent, said) in enumerate(
        (
            ("ann", "writer", "a"),
            ("ann", "critic", "a b c d e f"),
            ("ann", "writer", "a"),
            ("bob", "writer", "a"),
        )
    ):
        await moa.programs.run(AgentRequest(tenant, f"p{number}", agent, "small", (said,)), print)
    expected = [request.hints.output_tokens for request in engine.generated]
    assert expected[2] == 1, "ann's writer wrote one token"
    assert (expected[3] or 0) > 1, "bob's is new, and is expected to write what the model does"
