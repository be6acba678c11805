"""How much every agent of a program is expected to write, and how much is still to come after it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shell_router.core.hints import Hints
from shell_router.execution.pace import Pace
from shell_router.topology import Topology


@dataclass(frozen=True, slots=True)
class Learned:
    """What predictors told of agents, where they did: tokens of the agent itself, and of it and all that follow it."""

    own_tokens: Mapping[str, float] = field(default_factory=dict)
    total_tokens: Mapping[str, float] = field(default_factory=dict)


NOTHING_LEARNED = Learned()


def own_tokens(topology: Topology, pace: Pace, learned: Learned) -> Mapping[str, float | None]:
    """Per agent the output tokens that are expected of it: as predictors told, or else as it wrote before, in the
    mean, or, where it is new, as others of its model did; None where the model is new.
    """
    return {
        agent.id: learned.own_tokens.get(agent.id, pace.output_tokens(agent.model, topology.name, agent.id))
        for agent in topology.agents.values()
    }


def hints_of(
    topology: Topology, user: str, program: str, pace: Pace, learned: Learned = NOTHING_LEARNED
) -> Mapping[str, Hints]:
    """The hints of each agent of one run of `topology`.

    Nothing is expected of agents that come before one of which nothing is.
    """
    expected = own_tokens(topology, pace, learned)
    names = {agent: Hints(user, program, topology.name, agent, expected[agent]) for agent in topology.agents}
    after: dict[str, frozenset[str]] = {}
    paths: dict[str, float] = {}
    for agent in reversed(tuple(topology.agents)):
        followers = topology.successors[agent]
        after[agent] = frozenset((agent, *(one for follower in followers for one in after[follower])))
        own = names[agent].output_tokens
        if own is None or any(follower not in paths for follower in followers):
            continue
        paths[agent] = own + max((paths[follower] for follower in followers), default=0.0)
        summed = sum(names[one].output_tokens or 0.0 for one in after[agent])
        total = learned.total_tokens.get(agent, summed)
        names[agent] = replace(names[agent], total_tokens=total, path_tokens=paths[agent])
    return names
