"""A/B comparisons of runs with and without an optimization, which show whether it pays."""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean

from shell_router.moa.agent import AgentTask
from shell_router.moa.requests import AgentUsage, Answer, MoaRequest
from shell_router.routing.holdout import Compared, Holdouts
from shell_router.topology import INLINE, Agent, Topology

HeldOut = Mapping[Compared, bool]
"""Whether a run goes without an optimization, for each that could pay."""


def choose_holdouts(
    holdouts: Holdouts,
    topology: Topology,
    request: MoaRequest,
    *,
    grows: bool,
    drafting: Sequence[Agent],
    now_s: float,
) -> HeldOut:
    """Decide which optimizations the run goes without, for comparison.

    Args:
        holdouts: Decides.
        topology: The graph, with models chosen.
        request: Its seed and question fix the draws.
        grows: Whether prompts could be prefilled while they grow.
        drafting: The agents whose drafts are compared.
        now_s: The time.
    """
    compared = [name_updates(topology)] if grows else []
    compared += [name_drafts(topology, agent) for agent in drafting]
    # by the question, too: a client with one seed for all would be a group of its own
    seed = f"{request.seed}/{request.question[-1000:]}"
    held_out = {}
    for key in dict.fromkeys(compared):
        draw = random.Random(f"{key.optimization}/{seed}").random()
        held_out[key] = holdouts.holds_out(key, draw, now_s)
    return held_out


def observe_run(
    holdouts: Holdouts,
    topology: Topology,
    tasks: Mapping[str, AgentTask],
    held_out: HeldOut,
    answer: Answer,
    *,
    seconds: float,
    now_s: float,
) -> None:
    """Learn from a run that ended after `seconds`."""
    for key, is_held_out in held_out.items():
        if key.optimization == "incremental_prefill":
            holdouts.observe(key, held_out=is_held_out, seconds=seconds, now_s=now_s)
            continue
        usages = []
        for name, task in tasks.items():
            agent = topology.agents[name]
            # a fallback may have answered in place of the agent's model
            is_of_model = answer.agents[name].model == key.models
            is_drafting = agent.drafts and not task.prediction
            if is_drafting and is_of_model and name_drafts(topology, agent) == key:
                usages.append(answer.agents[name])
        observe_drafts(holdouts, key, usages, held_out=is_held_out, now_s=now_s)


def observe_drafts(
    holdouts: Holdouts, key: Compared, agents: Sequence[AgentUsage], *, held_out: bool, now_s: float
) -> None:
    """Learn from agents of one run; before an engine has drafted for any of `key`, do nothing."""
    token_s = [usage.token_s for usage in agents if usage.token_s is not None]
    if token_s and (key in holdouts or any(usage.drafted_tokens for usage in agents)):
        holdouts.observe(key, held_out=held_out, seconds=fmean(token_s), now_s=now_s)


def name_updates(topology: Topology) -> Compared:
    """Return the comparison of this topology's incremental prefill."""
    name = _name_compared(topology)
    models = "" if name == INLINE else ", ".join(sorted(topology.models))
    return Compared("incremental_prefill", name, models)


def name_drafts(topology: Topology, agent: Agent) -> Compared:
    """Return the comparison of the drafts of this agent and of those like it."""
    return Compared("drafts", _name_compared(topology), agent.model, find_role(topology, agent))


def _name_compared(topology: Topology) -> str:
    """Return the topology's name; those inside of requests share one, as few runs share them."""
    if topology.name.startswith(f"{INLINE}/"):
        return INLINE
    return topology.name


def find_role(topology: Topology, agent: Agent) -> str:
    """Return whether the agent is the root, an aggregator, which reads others, or a proposer."""
    if agent.id == topology.root.id:
        return "root"
    if agent.precursors:
        return "aggregator"
    return "proposer"
