"""How much every agent of a program is expected to write, and how much is still to come after it."""

from collections.abc import Mapping
from dataclasses import replace

from shell_router.core.hints import Hints
from shell_router.execution.pace import Pace
from shell_router.topology import Topology


def hints_of(topology: Topology, user: str, program: str, pace: Pace) -> Mapping[str, Hints]:
    """The hints of each agent of one run of `topology`.

    An agent is expected to write what it wrote before, in the mean, or, where it is new, what others of its model did;
    of agents whose model is new nothing is expected, nor of those that they come before.
    """
    names = {
        agent.id: Hints(
            user, program, topology.name, agent.id, pace.output_tokens(agent.model, topology.name, agent.id)
        )
        for agent in topology.agents.values()
    }
    after: dict[str, frozenset[str]] = {}
    paths: dict[str, float] = {}
    for agent in reversed(tuple(topology.agents)):
        followers = topology.successors[agent]
        after[agent] = frozenset((agent, *(one for follower in followers for one in after[follower])))
        own = names[agent].output_tokens
        if own is None or any(follower not in paths for follower in followers):
            continue
        paths[agent] = own + max((paths[follower] for follower in followers), default=0.0)
        total = sum(names[one].output_tokens or 0.0 for one in after[agent])
        names[agent] = replace(names[agent], total_tokens=total, path_tokens=paths[agent])
    return names
