"""The report: each setting's figures, from the records alone, and their tables."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import fmean, median

from rich.console import Console

from shell_router.core.exact_json import NewValues, Values
from shell_router.core.statistics import (
    METHOD_DIFFERENCE,
    METHOD_SHARE,
    Interval,
    estimate_clustered_share,
    estimate_paired_difference,
    quantile,
)
from shell_router.lab.evaluation.records import Record, Setting
from shell_router.lab.tables import print_table
from shell_router.topology import VOTE

CUT_OFF = ("early_exit", "unneeded", "deadline", "budget")
"""States, in traces, of agents whose work was thrown away to save time."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A model's agents in an answer, on average: how many there are, `started`, and `completed`.

    `activation_rate` is `completed` / `agents`: the share of its possible invocations that ended.
    """

    agents: int
    started: float
    completed: float
    activation_rate: float


@dataclass(frozen=True, slots=True)
class Exits:
    """Early exit over a setting's answers; None where no cluster was judged.

    `clusters_exited` is a share of the clusters that were judged, `questions_with_exit` of the
    answers. `exposed_share` is the part of the end-to-end latency that judging which led to an exit
    took at most, `measure_exposed_s` the same in seconds; both are means.
    """

    clusters_judged: int
    clusters_exited: float
    questions_with_exit: float
    exposed_s: float
    exposed_share: float


def count_uses(records: Sequence[Record]) -> dict[str, ModelUse]:
    """Return the use per model, in the order of the agents; votes ask no model.

    A setting has as many agents as its answer with the most.
    """
    agents = [agent for record in records for agent in record.agents]
    uses = {}
    for model in dict.fromkeys(agent.model for agent in agents if agent.model != VOTE):
        own = [agent for agent in agents if agent.model == model]
        started = sum(agent.started for agent in own) / len(records)
        completed = sum(agent.state == "finished" for agent in own) / len(records)
        most = max(sum(agent.model == model for agent in record.agents) for record in records)
        uses[model] = ModelUse(most, started, completed, completed / most)
    return uses


def sum_exits(records: Sequence[Record]) -> Exits | None:
    """Sums over all `records`; see Exits."""
    judged = [{judged.cluster for judged in record.exits} for record in records]
    exited = [{judged.cluster for judged in record.exits if judged.exited} for record in records]
    if not any(judged):
        return None
    exposed = [measure_exposed_s(record) for record in records]
    return Exits(
        sum(map(len, judged)),
        sum(map(len, exited)) / sum(map(len, judged)),
        sum(map(bool, exited)) / len(records),
        fmean(exposed),
        fmean(took / record.latency_s for took, record in zip(exposed, records, strict=True)),
    )


def measure_exposed_s(record: Record) -> float:
    """At most how long the judgements that led to exits kept the answer waiting.

    Clusters of a layer are judged side by side, so that each layer counts with the longest of its
    own.
    """
    longest: dict[int, float] = defaultdict(float)
    for judged in record.exits:
        if judged.exited:
            longest[judged.layer] = max(longest[judged.layer], judged.duration_s)
    return sum(longest.values())


@dataclass(frozen=True, slots=True)
class Row:
    """A setting's figures. Tokens and agents are means per answer; None without any answer.

    A failed request counts among `answers`, as a wrong one, and among `failed`; all but the
    accuracy leaves it out. `difference` and `latency_ratio` are relative to the baseline, over the
    questions and seeds that both were asked; the ratio is the median over those that both answered,
    and the baseline differs from itself by None. `cached_share` is of the prompts of agents that
    finished. `latencies_s` are in the order of questions and seeds.
    """

    setting: str
    questions: int
    answers: int
    failed: int
    accuracy: Interval
    difference: Interval | None
    latencies_s: Sequence[float]
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_ratio: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_share: float | None
    models: Mapping[str, ModelUse]
    agents_cut: float
    exits: Exits | None


def build_rows(records: Sequence[Record], settings: Sequence[str], baseline: str) -> list[Row]:
    """Return a row for each of `settings` that has a record."""
    grouped = {name: [record for record in records if record.setting == name] for name in settings}
    return [
        _build_row(group, grouped[baseline], name == baseline)
        for name, group in grouped.items()
        if group
    ]


def _build_row(records: Sequence[Record], baseline: Sequence[Record], is_baseline: bool) -> Row:
    answered = [record for record in records if not record.error]
    finished = [
        agent for record in answered for agent in record.agents if agent.state == "finished"
    ]
    cached = sum(agent.cached_tokens for agent in finished)
    in_order = sorted(answered, key=lambda record: (record.question, record.seed))
    waits = [record.latency_s for record in in_order]
    theirs = {
        (record.question, record.seed): record.latency_s for record in baseline if not record.error
    }
    ratios = [
        record.latency_s / theirs[record.question, record.seed]
        for record in answered
        if (record.question, record.seed) in theirs
    ]
    rights: dict[int, list[bool]] = defaultdict(list)
    for record in records:
        rights[record.question].append(record.right)
    return Row(
        setting=records[0].setting,
        questions=len(rights),
        answers=len(records),
        failed=len(records) - len(answered),
        accuracy=estimate_clustered_share([*rights.values()]),
        difference=None if is_baseline else _estimate_difference(records, baseline),
        latencies_s=waits,
        latency_p50_s=quantile(waits, 0.5) if waits else None,
        latency_p95_s=quantile(waits, 0.95) if waits else None,
        latency_ratio=median(ratios) if ratios else None,
        prompt_tokens=_mean([record.prompt_tokens for record in answered]),
        completion_tokens=_mean([record.completion_tokens for record in answered]),
        cached_share=cached / sum(agent.prompt_tokens for agent in finished) if finished else None,
        models=count_uses(answered),
        agents_cut=_mean([_count_cut(record) for record in answered]) or 0.0,
        exits=sum_exits(answered),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _count_cut(record: Record) -> int:
    return sum(agent.state in CUT_OFF for agent in record.agents)


def _estimate_difference(records: Sequence[Record], baseline: Sequence[Record]) -> Interval | None:
    """Return the mean per question over the seeds that both have, and then over questions."""
    theirs = {(record.question, record.seed): record.right for record in baseline}
    differences: dict[int, list[int]] = defaultdict(list)
    for record in records:
        if (record.question, record.seed) in theirs:
            differences[record.question].append(record.right - theirs[record.question, record.seed])
    if differences:
        return estimate_paired_difference([fmean(of) for of in differences.values()])
    return None


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation's setup and rows; fewer `asked` answers than `wanted` mean an interruption."""

    data: str
    engine: str
    settings: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    concurrency: int
    sampling: Values
    asked: int
    wanted: int
    rows: Sequence[Row]

    @property
    def partial(self) -> bool:
        """Whether something that was wanted was not asked."""
        return self.asked < self.wanted

    @property
    def title(self) -> str:
        """The report's title: its subject, its data, and whether it is whole."""
        if self.partial:
            partial = f"\nPARTIAL: interrupted after {self.asked} of {self.wanted} answers"
        else:
            partial = ""
        return f"Evaluation of {self.data}\n{self.engine}{partial}"

    def as_json(self) -> NewValues:
        """Return the object of `--json`, with rows and intervals as objects."""
        methods = {"accuracy": METHOD_SHARE, "difference": METHOD_DIFFERENCE}
        return {"title": self.title, "partial": self.partial, **asdict(self), "methods": methods}


def describe_engines(settings: Sequence[Setting], served: Sequence[Setting]) -> str:
    """Return in words what serves the models; topologies may use any of them."""
    every = any(setting.kind in ("topology", "auto") for setting in settings)
    models = [setting for setting in (served if every else settings) if setting.kind == "model"]
    if not models or not all(setting.engine for setting in models):
        return "engines unknown: the router does not name them"
    return "; ".join(dict.fromkeys(setting.engine for setting in models))


NOTHING = "-"


def print_tables(report: Report, console: Console) -> None:
    """Print accuracy and latency, and then agents and exits."""
    print_table(report.title, [_format_figures(row) for row in report.rows], console)
    activity = [_format_activity(row) for row in report.rows]
    print_table("Per answer: agents and early exit", activity, console)


def _format_figures(row: Row) -> dict[str, str]:
    points = NOTHING
    if row.difference:
        value, low, high = (f"{100 * share:+.1f}" for share in astuple(row.difference))
        points = f"{value} [{low}, {high}]"
    return {
        "setting": row.setting,
        "answers": str(row.answers),
        "failed": str(row.failed),
        "accuracy [95 %]": _format_share(row.accuracy),
        "vs baseline, points [95 %]": points,
        "p50 s": _format_number(row.latency_p50_s, ".2f"),
        "p95 s": _format_number(row.latency_p95_s, ".2f"),
        "latency ratio": _format_number(row.latency_ratio, ".2f"),
        "prompt tokens": _format_number(row.prompt_tokens, ".0f"),
        "cached": _format_number(row.cached_share, ".0%"),
        "new tokens": _format_number(row.completion_tokens, ".0f"),
    }


def _format_activity(row: Row) -> dict[str, str]:
    uses = (
        f"{model} {use.started:.3g}, {use.completed:.3g} of {use.agents}"
        for model, use in row.models.items()
    )
    exits = row.exits
    return {
        "setting": row.setting,
        "started, completed": "\n".join(uses) or NOTHING,
        "cut off": f"{row.agents_cut:.2f}",
        "clusters exited": _format_number(exits.clusters_exited if exits else None, ".0%"),
        "answers with exit": _format_number(exits.questions_with_exit if exits else None, ".0%"),
        "exit cost": _format_number(exits.exposed_share if exits else None, ".1%"),
    }


def _format_share(interval: Interval) -> str:
    return f"{interval.value:.1%} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _format_number(value: float | None, form: str) -> str:
    if value is None:
        return NOTHING
    return format(value, form)
