"""All that can be decided, and refused, before the first agent of a request runs."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_cache import LogKey
from shell_router.core.model import ServedModel
from shell_router.errors import UnknownModel
from shell_router.execution.agent_run import Decoding, check_parts
from shell_router.execution.assembly import agent_parts
from shell_router.execution.expectations import NOTHING_LEARNED, Learned, hints_of
from shell_router.execution.incremental import Filling, Source, ids_are_text
from shell_router.execution.pace import Pace
from shell_router.execution.prompt import Part
from shell_router.execution.requests import MoaRequest
from shell_router.scheduling import order_slots, tokens_per_event
from shell_router.topology import Agent, Topology


@dataclass(frozen=True, slots=True)
class PreparedAgent:
    """One agent of one request, ready to run."""

    agent: Agent
    key: LogKey
    filling: Filling
    decoding: Decoding


class Preparation:
    """Puts a request and a topology together, agent by agent."""

    def __init__(
        self,
        topology: Topology,
        request: MoaRequest,
        models: Mapping[str, ServedModel],
        pace: Pace,
        learned: Learned = NOTHING_LEARNED,
    ) -> None:
        self._topology = topology
        self._request = request
        self._models = models
        self._finish_s = pace.expected_finish_s(topology)
        self._hints = hints_of(topology, request.tenant, request.id, pace, learned)
        self._parts: dict[tuple[object, ...], tuple[Part, ...]] = {}

    def agents(self) -> dict[str, PreparedAgent]:
        """Every agent by id, in topological order. Raises UnknownModel and PromptTooLong."""
        self._check_models()
        return {agent.id: self._prepared(agent) for agent in self._topology.agents.values()}

    def _check_models(self) -> None:
        wanted = {agent.model for agent in self._topology.agents.values()}
        if unknown := sorted(wanted - self._models.keys()):
            raise UnknownModel(
                f"Topology {self._topology.name!r} names models that are not configured: {', '.join(unknown)}.",
                remedy=f"Configure them, or use one of: {', '.join(sorted(self._models))}.",
            )

    def _prepared(self, agent: Agent) -> PreparedAgent:
        cluster = self._topology.cluster_of.get(agent.id)
        judged = cluster is not None and cluster.early_exit is not None
        judged |= agent.id == self._topology.root.id and self._request.confidence
        decoding = Decoding(self._sampling(agent), logprobs=judged, timeout_s=agent.timeout_s)
        filling = self._filling(agent)
        check_parts(agent.id, filling.model, filling.parts, decoding.sampling)
        return PreparedAgent(agent, self._key(agent.id), filling, decoding)

    def _sampling(self, agent: Agent) -> Mapping[str, object]:
        if agent.id == self._topology.root.id:
            return {**agent.sampling, **self._request.sampling}
        return {"stream_interval": self._tokens_per_event(agent), **self._seeded(agent), **agent.sampling}

    def _tokens_per_event(self, agent: Agent) -> int:
        cluster, prefill = self._topology.cluster_of.get(agent.id), self._topology.prefill
        in_flight = cluster is not None and cluster.early_exit is not None and not cluster.early_exit.embeds
        return tokens_per_event(prefill.increments, prefill.incremental, judged=in_flight)

    def _seeded(self, agent: Agent) -> Mapping[str, object]:
        """A client that seeds the answer means every agent that writes it; each has a seed of its own (31 bits)."""
        seed = self._request.sampling.get("sampling_seed")
        return {} if seed is None else {"sampling_seed": zlib.crc32(f"{seed}/{agent.id}".encode()) >> 1}

    def _filling(self, agent: Agent) -> Filling:
        model, prefill = self._models[agent.model], self._topology.prefill
        order = order_slots(agent.precursors, prefill.slot_order, self._finish_s)
        return Filling(
            agent.id,
            self._rid(agent),
            model,
            self._agent_parts(agent, order, model),
            {precursor: self._source(precursor, model) for precursor in agent.precursors},
            prefill,
            all_needed=False,
            begin_s=self._request.timeout_s,
            silence_s=self._request.timeout_s,
            hints=self._hints[agent.id],
        )

    def _agent_parts(self, agent: Agent, order: Sequence[str], model: ServedModel) -> tuple[Part, ...]:
        """Put together once for agents that differ in their names alone, as a tree's leaves do."""
        same = (model.alias, agent.prompt, agent.given, tuple(order))
        if same not in self._parts:
            self._parts[same] = agent_parts(agent, order, model, self._request.messages)
        return self._parts[same]

    def _rid(self, agent: Agent) -> str:
        """Numbered, since SGLang aborts every request whose id begins with the given one, and `p-1` begins `p-10`."""
        return f"{self._request.id}.{list(self._topology.agents).index(agent.id)}.{agent.id}"

    def _source(self, precursor: str, reader: ServedModel) -> Source:
        agent = self._topology.agents[precursor]
        shares_ids = ids_are_text(self._models[agent.model], self._sampling(agent), reader)
        return Source(self._key(precursor), lambda: shares_ids)

    def _key(self, agent: str) -> LogKey:
        return LogKey(self._request.tenant, self._request.id, agent)
