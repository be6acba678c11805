"""What a simulation came to, in figures."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shell_router.errors import DataError
from shell_router.simulation.figures import Figures, figures_of
from shell_router.simulation.run import EngineUse, Simulated

PREFILL, WAITING = "prefill that nothing hid", "waiting"


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulation in figures. Seconds are means over the answered requests but for the percentiles.

    `path` is where an answer's time goes: along the chain of agents that set it, seconds of decoding by model, of
    prefill that nothing hid, and of waiting beside these. `bound_s` is the longest chain if no prefill were exposed;
    `late` the share of the readers' prompts still to be prefilled when their last input ended; `completed` counts, per
    model, the agents that were not cut off in an answer, of `agents`.
    """

    requests: int
    failed: int
    elapsed_s: float
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    bound_s: float
    second_layer_s: float | None
    exposed_s: float | None
    late: float | None
    new_tokens: float
    path: Mapping[str, float]
    agents: Mapping[str, int]
    completed: Mapping[str, float]
    engines: Sequence[EngineUse]

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return (self.requests - self.failed) / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def over_bound(self) -> float:
        """By what share answers take longer than their bound."""
        return self.mean_s / self.bound_s - 1 if self.bound_s else 0.0


def summary_of(simulated: Simulated) -> Summary:
    """The figures. Raises DataError where no request was answered."""
    topology = simulated.topology
    traces = [run.trace for run in simulated.runs if not run.error]
    if not traces:
        raise DataError(
            f"{topology.name!r} answered no request: {simulated.runs[0].error}", remedy="Ask less, or allow more time."
        )
    latencies = [trace["duration_s"] for trace in traces]
    p50_s, p95_s, p99_s = (float(one) for one in np.percentile(latencies, (50, 95, 99)))
    figures = [figures_of(topology, trace) for trace in traces] if len(topology.agents) > 1 else []
    paths = [path_s(trace) for trace in traces]
    agents = Counter(agent.model for agent in topology.agents.values())
    each = [one for trace in traces for one in trace["agents"].values()]
    completed = Counter(one["model"] for one in each if one["state"] == "finished")
    return Summary(
        len(simulated.runs),
        len(simulated.runs) - len(traces),
        simulated.elapsed_s,
        statistics.mean(latencies),
        p50_s,
        p95_s,
        p99_s,
        _mean(figures, "bound_s") or statistics.mean(latencies),
        _mean(figures, "second_layer_s"),
        _mean(figures, "reader_exposed_s"),
        _mean(figures, "late_share"),
        sum(one["decoded_tokens"] for one in each) / len(traces),
        {
            kind: sum(path.get(kind, 0.0) for path in paths) / len(paths)
            for kind in sorted({k for one in paths for k in one})
        },
        dict(agents),
        {model: completed[model] / len(traces) for model in agents},
        simulated.engines,
    )


def _mean(figures: Sequence[Figures], name: str) -> float | None:
    known = [value for one in figures if (value := getattr(one, name)) is not None]
    return statistics.mean(known) if known else None


def path_s(trace: Mapping[str, Any]) -> dict[str, float]:
    """Seconds along a finished run's critical path, by what they were spent on."""
    spent: Counter[str] = Counter()
    for name in trace["overlap"]["critical_path"]:
        agent = trace["agents"][name]
        for span in agent["spans"]:
            if span["name"] == "decode":
                spent[f"decoding on {agent['model']}"] += span["end_s"] - span["start_s"]
        spent[PREFILL] += agent.get("exposed_prefill_s", 0.0)
    spent[WAITING] = max(0.0, trace["duration_s"] - sum(spent.values()))
    return dict(spent)


def middle(simulated: Simulated) -> Mapping[str, Any]:
    """The trace of the answered request that took the median time; at least one was answered."""
    traces = sorted((run.trace for run in simulated.runs if not run.error), key=lambda trace: trace["duration_s"])
    return traces[(len(traces) - 1) // 2]
