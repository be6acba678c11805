from itertools import permutations
from pathlib import Path

from shell_router.topology import load_topology
from tests.fakes.moa import ScriptedMoa, ask


async def test_no_request_id_begins_with_another_agents() -> None:
    """SGLang's abort is by prefix."""
    moa = ScriptedMoa()
    topology = load_topology(Path("topologies/all-to-all-9-9-1.yaml"))
    await moa.executor.run(topology, ask(), lambda _: None)
    rids = [request.rid for engine in moa.engines.values() for request in engine.generated]
    assert len(rids) == len(topology.agents) > 10
    assert not [pair for pair in permutations(rids, 2) if pair[0].startswith(pair[1])]
