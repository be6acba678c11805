"""A simulation in figures, and as tables for a terminal."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from shell_router.core.exact_json import NewValues, Values
from shell_router.errors import DataError
from shell_router.lab.simulation.run import EngineUse, Simulated, SimulatedRun
from shell_router.topology import Topology

Agents = Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Figures:
    """A run's measurements, in seconds but for shares and counts. Readers are aggregators and root.

    Figures of the second layer are None if none of it wrote anything; if no reader did, nothing was
    late.
    """

    end_to_end_s: float
    second_layer_s: float | None
    exposed_s: float | None
    reader_exposed_s: float
    late_share: float
    cached_share: float
    bound_s: float
    token_bound_s: float
    cut_off: int


def compute_figures(topology: Topology, trace: Values) -> Figures:
    """Return a finished run's figures, from its trace as JSON."""
    agents: Agents = trace["agents"]
    finished = {name: agent for name, agent in agents.items() if agent["state"] == "finished"}
    readers = {name: agent for name, agent in finished.items() if topology.agents[name].precursors}
    aggregators = [name for name in topology.layers[1] if name in readers]
    inputs_end_s = {
        name: max(agents[p]["ended_s"] for p in topology.agents[name].precursors)
        for name in readers
    }
    prompts = sum(agent["prompt_tokens"] for agent in readers.values()) or 1
    in_time = sum(
        # an update may have held a slot that an early exit then left out
        min(count_prefilled_tokens(agent, inputs_end_s[name]), agent["cached_tokens"])
        for name, agent in readers.items()
    )
    return Figures(
        end_to_end_s=trace["duration_s"],
        second_layer_s=_mean(
            [agents[name]["ended_s"] - inputs_end_s[name] for name in aggregators]
        ),
        exposed_s=_mean([agents[name]["exposed_prefill_s"] for name in aggregators]),
        reader_exposed_s=_mean([agent["exposed_prefill_s"] for agent in readers.values()]) or 0.0,
        late_share=1 - in_time / prompts if readers else 0.0,
        cached_share=sum(agent["cached_tokens"] for agent in readers.values()) / prompts,
        bound_s=bound_path_s(topology, agents),
        token_bound_s=bound_path_s(topology, agents, pass_per_token=True),
        cut_off=sum(agent["state"] == "early_exit" for agent in agents.values()),
    )


def count_prefilled_tokens(agent: Values, at_s: float) -> int:
    """Return the tokens of an agent's prompt that were in the prefix cache at `at_s`.

    They come from its updates and its request. Without an update by then they are those that its
    first request found there: the question, which other agents have asked before.
    """
    updates = [span for span in agent["spans"] if span["name"] == "prefill_increment"]
    done = [span["prompt_tokens"] for span in updates if span["end_s"] <= at_s]
    first = [*updates, agent][0]["cached_tokens"]
    return int(max(done, default=first))


def bound_path_s(topology: Topology, agents: Agents, *, pass_per_token: bool = False) -> float:
    """Return the root's end if each agent decoded as soon as its last needed precursor ended.

    With `pass_per_token` no draft had been accepted, and the passes had taken as long each. An
    agent whose aggregation was skipped ends as long after its last needed precursor as it did.
    """
    end_s: dict[str, float] = {}
    for name, agent in topology.agents.items():
        needed = [p for p in agent.precursors if p in end_s]
        begin_s = max((end_s[p] for p in needed), default=None)
        if agents[name]["state"] == "skipped":
            waited_s = agents[name]["ended_s"] - max(agents[p]["ended_s"] for p in needed)
            end_s[name] = (begin_s or 0.0) + waited_s
        elif agents[name]["state"] == "finished":
            decode = next(span for span in agents[name]["spans"] if span["name"] == "decode")
            tokens = agents[name]["completion_tokens"] - 1
            passes = tokens - agents[name]["accepted_tokens"]
            decode_s = decode["end_s"] - decode["start_s"]
            if pass_per_token and passes > 0:
                decode_s = tokens / passes * decode_s
            if begin_s is None:
                begin_s = decode["start_s"]
            end_s[name] = begin_s + decode_s
    return end_s[topology.root.id]


@dataclass(frozen=True, slots=True)
class ProgramMeans:
    """The cost of a question with all of its requests, in the mean over those that were answered.

    Attributes:
        mean_s: From the question to the last answer, with the time of tools.
        agent_runs: Agents that were asked of an engine.
        cost: Dollars, by the models' prices.
        root_cached: The share of the root's prompts that engines found cached, in all requests but
            a question's first; None without such requests.
    """

    answered: int
    requests: float
    mean_s: float
    p95_s: float
    agent_runs: float
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    cost: float
    root_cached: float | None


def compute_program_means(root: str, runs: Sequence[SimulatedRun]) -> ProgramMeans:
    """Add up the requests of each question, of which at least one was answered."""
    latencies_s: Counter[int] = Counter()
    for run in runs:
        latencies_s[run.program] += run.waited_s + run.trace["duration_s"]
    used = [agent for run in runs for agent in run.usage.values() if agent.prompt_tokens]
    firsts = {run.program: run for run in reversed(runs)}
    later = [run.usage[root] for run in runs if run is not firsts[run.program]]
    later_tokens = sum(agent.prompt_tokens for agent in later)
    programs = len(latencies_s)
    return ProgramMeans(
        programs,
        len(runs) / programs,
        statistics.mean(latencies_s.values()),
        float(np.percentile([*latencies_s.values()], 95)),
        len(used) / programs,
        sum(agent.prompt_tokens for agent in used) / programs,
        sum(agent.cached_tokens for agent in used) / programs,
        sum(agent.completion_tokens for agent in used) / programs,
        sum(agent.cost for agent in used) / programs,
        sum(agent.cached_tokens for agent in later) / later_tokens if later_tokens else None,
    )


PREFILL = "exposed prefill"
WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Summary:
    """A simulation's figures; seconds are means over answered requests but for percentiles.

    `path` is where an answer's time goes along its critical path: decoding by model, exposed
    prefill, and waiting. `bound_s` is that path's length without exposed prefill, `token_bound_s`
    the same if every token had taken a pass; `late` the share of the readers' prompts still to be
    prefilled when their last input ended; `completed` counts, per model, the agents that were not
    cut off, of `agents`.
    """

    requests: int
    failed: int
    elapsed_s: float
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    bound_s: float
    token_bound_s: float
    second_layer_s: float | None
    exposed_s: float | None
    late: float | None
    new_tokens: float
    path: Mapping[str, float]
    agents: Mapping[str, int]
    completed: Mapping[str, float]
    engines: Sequence[EngineUse]
    program: ProgramMeans

    @property
    def per_s(self) -> float:
        """Answers a second."""
        if self.elapsed_s:
            return (self.requests - self.failed) / self.elapsed_s
        return 0.0

    @property
    def over_bound(self) -> float:
        """By what share answers take longer than their bound."""
        if self.bound_s:
            return self.mean_s / self.bound_s - 1
        return 0.0


def summarize(simulated: Simulated) -> Summary:
    """Summarize the runs. Raises DataError if no request was answered."""
    topology = simulated.topology
    runs = simulated.answered
    traces = [run.trace for run in runs]
    if not traces:
        raise DataError(
            f"{topology.name!r} answered no request: {simulated.error}",
            remedy="Ask less, or allow more time.",
        )
    latencies = [trace["duration_s"] for trace in traces]
    p50_s, p95_s, p99_s = np.percentile(latencies, (50, 95, 99)).tolist()
    figures = []
    if len(topology.agents) > 1:
        figures = [compute_figures(topology, trace) for trace in traces]
    mean_s = statistics.mean(latencies)
    paths = [split_path_s(trace) for trace in traces]
    agents = Counter(agent.model for agent in topology.agents.values() if not agent.votes)
    ran = [agent for trace in traces for agent in trace["agents"].values()]
    completed = Counter(agent["model"] for agent in ran if agent["state"] == "finished")
    return Summary(
        len(simulated.runs),
        len(simulated.runs) - len(traces),
        simulated.elapsed_s,
        mean_s,
        p50_s,
        p95_s,
        p99_s,
        _mean(figure.bound_s for figure in figures) or mean_s,
        _mean(figure.token_bound_s for figure in figures) or mean_s,
        _mean(figure.second_layer_s for figure in figures),
        _mean(figure.reader_exposed_s for figure in figures),
        _mean(figure.late_share for figure in figures),
        sum(agent["decoded_tokens"] for agent in ran) / len(traces),
        {
            kind: sum(path.get(kind, 0.0) for path in paths) / len(paths)
            for kind in sorted({name for path in paths for name in path})
        },
        dict(agents),
        {model: completed[model] / len(traces) for model in agents},
        simulated.engines,
        compute_program_means(topology.root.id, runs),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known."""
    present = [value for value in values if value is not None]
    return statistics.mean(present) if present else None


def split_path_s(trace: Values) -> dict[str, float]:
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


BUSY = 0.9
Row = Mapping[str, str]


def build_tables(summaries: Mapping[str, Summary]) -> list[tuple[str, list[Row]]]:
    """Titles and rows. Ratios are to the first simulation."""
    first = next(iter(summaries.values()))
    models = list(
        dict.fromkeys(model for summary in summaries.values() for model in summary.agents)
    )
    kinds = sorted({kind for summary in summaries.values() for kind in summary.path})

    def rows(describe: Callable[[Summary], Row]) -> list[Row]:
        return [{"simulation": name, **describe(summary)} for name, summary in summaries.items()]

    return [
        ("Simulated", rows(lambda summary: _format_latency(summary, first))),
        ("What a question takes with all of its requests, in the mean", rows(_format_program)),
        ("What an answer takes, in the mean", rows(_format_overlap)),
        (
            "Agents that were not cut off, in the mean",
            rows(lambda summary: {model: _count_completed(summary, model) for model in models}),
        ),
        (
            "Where the time of an answer goes: along its critical path",
            rows(lambda summary: {kind: _format_spent(summary, kind) for kind in kinds}),
        ),
        (
            "Engine pairs",
            [
                {"simulation": name, **_format_use(pair)}
                for name, summary in summaries.items()
                for pair in summary.engines
            ],
        ),
    ]


def _count_completed(summary: Summary, model: str) -> str:
    if model in summary.agents:
        return f"{summary.completed[model]:.2f} of {summary.agents[model]}"
    return "-"


def _format_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _format_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _format_latency(summary: Summary, first: Summary) -> Row:
    return {
        "answered": str(summary.requests - summary.failed),
        "failed": str(summary.failed),
        "mean s": _format_seconds(summary.mean_s),
        "p50 s": _format_seconds(summary.p50_s),
        "p95 s": _format_seconds(summary.p95_s),
        "p99 s": _format_seconds(summary.p99_s),
        "p50 ratio": f"{summary.p50_s / first.p50_s:.2f}" if first.p50_s else "-",
        "per s": f"{summary.per_s:.3g}",
    }


def _format_program(summary: Summary) -> Row:
    program = summary.program
    return {
        "answered": str(program.answered),
        "requests": f"{program.requests:.3g}",
        "mean s": _format_seconds(program.mean_s),
        "p95 s": _format_seconds(program.p95_s),
        "agent runs": f"{program.agent_runs:.1f}",
        "prompt tokens": f"{program.prompt_tokens:.0f}",
        "cached": f"{program.cached_tokens:.0f}",
        "completion tokens": f"{program.completion_tokens:.0f}",
        "dollars": f"{program.cost:.3g}",
        "root cached, later requests": _format_share(program.root_cached),
    }


def _format_overlap(summary: Summary) -> Row:
    return {
        "bound s": _format_seconds(summary.bound_s),
        "over bound": f"{summary.over_bound:.1%}",
        "bound s, a pass per token": _format_seconds(summary.token_bound_s),
        "second layer s": _format_seconds(summary.second_layer_s),
        "exposed prefill s": _format_seconds(summary.exposed_s),
        "late": _format_share(summary.late),
        "new tokens": f"{summary.new_tokens:.0f}",
    }


def _format_spent(summary: Summary, kind: str) -> str:
    seconds = summary.path.get(kind, 0.0)
    return f"{seconds:.3g} s, {seconds / (sum(summary.path.values()) or 1.0):.0%}"


def _format_use(pair: EngineUse) -> Row:
    return {
        "pair": pair.model,
        "prefill busy": f"{pair.prefill_busy:.0%}",
        "decode busy": f"{pair.decode_busy:.0%}",
        "mean batch": f"{pair.batch:.1f}",
        "prefilled tokens": str(pair.prefilled_tokens),
        "decoded tokens": str(pair.decoded_tokens),
        "preemptions": str(pair.preemptions),
    }


def describe_bound(name: str, summary: Summary) -> str:
    """Say in a sentence what bounds the latency."""
    kind = max(summary.path, key=summary.path.__getitem__)
    share = summary.path[kind] / (sum(summary.path.values()) or 1.0)
    full = [
        f"{role} of {pair.model}"
        for pair in summary.engines
        for role, busy in (("prefill", pair.prefill_busy), ("decode", pair.decode_busy))
        if busy >= BUSY
    ]
    engines = f"Always busy: {', '.join(full)}." if full else "No engine is always busy."
    return f"{name} is bound by {kind}, {share:.0%} of an answer's time. {engines}"


def to_json(summaries: Mapping[str, Summary]) -> NewValues:
    """Return all figures by simulation."""
    return {
        name: asdict(summary) | {"per_s": summary.per_s, "over_bound": summary.over_bound}
        for name, summary in summaries.items()
    }
