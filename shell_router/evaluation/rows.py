"""What is reported of each setting, from the records alone."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from shell_router.core.intervals import Interval, clustered_share, paired_difference, quantile
from shell_router.evaluation.activity import Exits, ModelUse, agents_cut, exits_of, model_uses, saved_tokens
from shell_router.evaluation.records import Record

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
Key = tuple[int, int]
"""A question and a seed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. Tokens and agents are means per answer; None where nothing was answered to take it from.

    A failed request counts among `answers`, as a wrong one, and among `failed`; all but the accuracy leaves it out.
    `difference` and `latency_ratio` are relative to the baseline, over the questions and seeds that both were asked;
    the ratio is the median over those that both answered, and the baseline differs from itself by None. `cached_share`
    is of the prompts of agents that finished.
    """

    setting: str
    questions: int
    answers: int
    failed: int
    accuracy: Interval
    difference: Interval | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_ratio: float | None
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_share: float | None
    models: Mapping[str, ModelUse]
    agents_cut: float
    exits: Exits | None
    saved_tokens: float


def rows_of(records: Sequence[Record], settings: Sequence[str], baseline: str) -> list[Row]:
    """A row for each of `settings` that has a record."""
    grouped = {name: [one for one in records if one.setting == name] for name in settings}
    return [_row(group, grouped[baseline], name == baseline) for name, group in grouped.items() if group]


def accuracy_by(
    records: Sequence[Record], settings: Sequence[str], value_of: Callable[[int], str]
) -> dict[str, dict[str, Interval]]:
    """Accuracy per value of a question's fact, smallest number or first word first, and per setting."""
    grouped: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        grouped[value_of(record.question)][record.setting].append(record)
    return {
        value: {name: accuracy_of(grouped[value][name]) for name in settings if grouped[value][name]}
        for value in sorted(grouped, key=_natural)
    }


def accuracy_of(records: Sequence[Record]) -> Interval:
    """The share of right answers among at least one record."""
    return clustered_share([[one.right for one in same] for same in _by_question(records).values()])


def _row(records: Sequence[Record], baseline: Sequence[Record], is_baseline: bool) -> Row:
    answered = [one for one in records if not one.error]
    finished = [agent for record in answered for agent in record.agents if agent.state == "finished"]
    cached = sum(agent.cached_tokens for agent in finished)
    return Row(
        setting=records[0].setting,
        questions=len(_by_question(records)),
        answers=len(records),
        failed=len(records) - len(answered),
        accuracy=accuracy_of(records),
        difference=None if is_baseline else _difference(records, baseline),
        latency_p50_s=_or_none(lambda of: quantile(of, 0.5), [one.latency_s for one in answered]),
        latency_p95_s=_or_none(lambda of: quantile(of, 0.95), [one.latency_s for one in answered]),
        latency_ratio=_or_none(median, _latency_ratios(answered, baseline)),
        prompt_tokens=_or_none(fmean, [one.prompt_tokens for one in answered]),
        completion_tokens=_or_none(fmean, [one.completion_tokens for one in answered]),
        cached_share=cached / sum(agent.prompt_tokens for agent in finished) if finished else None,
        models=model_uses(answered),
        agents_cut=agents_cut(answered) if answered else 0.0,
        exits=exits_of(answered),
        saved_tokens=saved_tokens(answered) if answered else 0.0,
    )


def _difference(records: Sequence[Record], baseline: Sequence[Record]) -> Interval | None:
    """Per question the mean over the seeds that both have, then over questions."""
    theirs = {_key(one): one.right for one in baseline}
    differences: dict[int, list[int]] = defaultdict(list)
    for one in records:
        if _key(one) in theirs:
            differences[one.question].append(one.right - theirs[_key(one)])
    return paired_difference([fmean(of) for of in differences.values()]) if differences else None


def _latency_ratios(answered: Sequence[Record], baseline: Sequence[Record]) -> list[float]:
    theirs = {_key(one): one.latency_s for one in baseline if not one.error}
    return [one.latency_s / theirs[_key(one)] for one in answered if _key(one) in theirs]


def _or_none(figure: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return figure(values) if values else None


def _by_question(records: Sequence[Record]) -> Mapping[int, list[Record]]:
    grouped: dict[int, list[Record]] = defaultdict(list)
    for one in records:
        grouped[one.question].append(one)
    return grouped


def _key(record: Record) -> Key:
    return record.question, record.seed


def _natural(value: str) -> tuple[bool, float, str]:
    number = bool(_NUMBER.fullmatch(value))
    return not number, float(value) if number else 0.0, value
