"""A/B comparisons of runs with and without an optimization, which show whether it pays."""

import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from shell_router.moa.agent import AgentTask
from shell_router.moa.requests import AgentUsage, Answer, MoaRequest
from shell_router.routing.holdout import Compared, Holdouts
from shell_router.topology import INLINE, Agent, Topology


class RunComparison:
    """The optimizations that one run goes without, for comparison with other runs.

    Attributes:
        drops_updates: The run goes without incremental prefill.
        dropped_drafts: The agents that go without drafts.
    """

    def __init__(
        self,
        holdouts: Holdouts,
        topology: Topology,
        request: MoaRequest,
        *,
        grows: bool,
        drafting: Iterable[Agent],
        now_s: float,
    ) -> None:
        """Decide by the request's seed and question.

        Args:
            holdouts: Keeps all comparisons.
            topology: The graph, with models chosen.
            request: Gives the draws.
            grows: Whether prompts could be prefilled while they grow.
            drafting: The agents whose drafts are compared.
            now_s: The time.
        """
        self._holdouts = holdouts
        self._held_out: dict[Compared, bool] = {}
        self._drafting: dict[Compared, list[str]] = {}
        # by the question, too: a client with one seed for all would be a group of its own
        seed = f"{request.seed}/{request.question[-1000:]}"
        updates = name_updates(topology)
        if grows:
            self._held_out[updates] = self._draw(updates, seed, now_s)
        for agent in drafting:
            key = name_drafts(topology, agent)
            if key not in self._drafting:
                self._held_out[key] = self._draw(key, seed, now_s)
            self._drafting.setdefault(key, []).append(agent.id)
        self.drops_updates = self._held_out.get(updates, False)
        self.dropped_drafts: set[str] = set()
        for key, agents in self._drafting.items():
            if self._held_out[key]:
                self.dropped_drafts.update(agents)

    def _draw(self, key: Compared, seed: str, now_s: float) -> bool:
        draw = random.Random(f"{key.optimization}/{seed}").random()
        return self._holdouts.holds_out(key, draw, now_s)

    def observe(
        self, tasks: Mapping[str, AgentTask], answer: Answer, seconds: float, now_s: float
    ) -> None:
        """Learn from the run, which ended after `seconds`."""
        for key, is_held_out in self._held_out.items():
            if key.optimization == "incremental_prefill":
                self._holdouts.observe(key, held_out=is_held_out, seconds=seconds, now_s=now_s)
                continue
            agents = [agent for agent in self._drafting[key] if agent in tasks]
            agents = [agent for agent in agents if not tasks[agent].prediction]
            usages = [answer.agents[agent] for agent in agents]
            # a fallback may have answered in place of the agent's model
            usages = [usage for usage in usages if usage.model == key.models]
            observe_drafts(self._holdouts, key, usages, held_out=is_held_out, now_s=now_s)


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
