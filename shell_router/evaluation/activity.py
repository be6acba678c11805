"""What the agents did: who ran to the end, who was cut off, what early exit cost and saved."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shell_router.evaluation.records import AgentRecord, Record

CUT_OFF = ("early_exit", "unneeded")
"""States, in traces, of agents whose work was thrown away to save time."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One model's agents in one answer, on average: how many the setting has, `started`, and `completed`.

    `activation_rate` is `completed` / `agents`: the share of its possible invocations that were carried through.
    """

    agents: int
    started: float
    completed: float
    activation_rate: float


@dataclass(frozen=True, slots=True)
class Exits:
    """Early exit over a setting's answers; None where no cluster was judged.

    `clusters_exited` is a share of the clusters that were judged, `questions_with_exit` of the answers.
    `exposed_share` is the part of the end-to-end latency that judging which led to an exit took at most, `exposed_s`
    the same in seconds; both are means.
    """

    clusters_judged: int
    clusters_exited: float
    questions_with_exit: float
    exposed_s: float
    exposed_share: float


def model_uses(records: Sequence[Record]) -> dict[str, ModelUse]:
    """Per model, in the order of the agents; a setting has as many agents of it as its fullest answer."""
    models = list(dict.fromkeys(agent.model for record in records for agent in record.agents))
    return {
        model: _use([[one for one in record.agents if one.model == model] for record in records]) for model in models
    }


def _use(per_answer: Sequence[Sequence[AgentRecord]]) -> ModelUse:
    agents = max(map(len, per_answer))
    completed = fmean(sum(one.state == "finished" for one in ran) for ran in per_answer)
    return ModelUse(agents, fmean(sum(one.started for one in ran) for ran in per_answer), completed, completed / agents)


def agents_cut(records: Sequence[Record]) -> float:
    """Agents cut off per answer, whether by an exit or because nobody needed them any more."""
    return fmean(sum(agent.state in CUT_OFF for agent in record.agents) for record in records)


def exits_of(records: Sequence[Record]) -> Exits | None:
    """Sums over all `records`; see Exits."""
    judged = [{judged.cluster for judged in record.exits} for record in records]
    exited = [{judged.cluster for judged in record.exits if judged.exited} for record in records]
    if not any(judged):
        return None
    exposed = [exposed_s(record) for record in records]
    return Exits(
        sum(map(len, judged)),
        sum(map(len, exited)) / sum(map(len, judged)),
        sum(map(bool, exited)) / len(records),
        fmean(exposed),
        fmean(took / record.latency_s for took, record in zip(exposed, records, strict=True)),
    )


def exposed_s(record: Record) -> float:
    """At most how long the judgements that led to exits kept the answer waiting.

    Clusters of a layer are judged side by side, so that each layer counts with the longest of its own.
    """
    longest: dict[int, float] = defaultdict(float)
    for judged in record.exits:
        if judged.exited:
            longest[judged.layer] = max(longest[judged.layer], judged.duration_s)
    return sum(longest.values())


def saved_tokens(records: Sequence[Record]) -> float:
    """An estimate, per answer, of the tokens that cut agents would still have written.

    An agent would have written as many as agents of its model and layer did on average, of those that finished in these
    `records`; where none did, nothing is counted.
    """
    usual = _usual_tokens(records)
    cut = [agent for record in records for agent in record.agents if agent.state in CUT_OFF]
    saved = (usual.get((agent.model, agent.layer), 0.0) - agent.completion_tokens for agent in cut)
    return sum(max(0.0, one) for one in saved) / len(records)


def _usual_tokens(records: Sequence[Record]) -> Mapping[tuple[str, int], float]:
    written: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in records:
        for agent in record.agents:
            if agent.state == "finished":
                written[agent.model, agent.layer].append(agent.completion_tokens)
    return {key: fmean(tokens) for key, tokens in written.items()}
