"""An evaluation from start to end: the order of asking, the requests, the tables and the files."""

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shell_router.batch.questions import plurality, read_answer
from shell_router.errors import ConfigError, ShellRouterError
from shell_router.lab.evaluation.client import Client, running_router
from shell_router.lab.evaluation.dataset import Item, read_items
from shell_router.lab.evaluation.output import RecordFile, check_files, tables, write_reports
from shell_router.lab.evaluation.records import Record, Reply
from shell_router.lab.evaluation.report import Report, accuracy_by, engines_of, rows_of
from shell_router.lab.evaluation.settings import (
    EvaluationOptions,
    Sampling,
    Served,
    Setting,
    baseline_of,
    chosen_settings,
)

VOTE_TOP_P = 0.95
"""Of the members of a vote."""
TABLE_COLUMNS = 170
WARM_UP = Item(-1, "Ready?", "yes", "exact", {})


@dataclass(frozen=True, slots=True)
class Round:
    """Questions that are asked at the same time, each with its seed, in one setting after the other."""

    asked: tuple[tuple[Item, int], ...]
    settings: tuple[Setting, ...]


def rounds_of(
    items: Sequence[Item], seeds: Sequence[int], settings: Sequence[Setting], *, at_once: int = 1
) -> list[Round]:
    """All rounds of `at_once` questions, every question once before the next seed begins.

    Each round begins with another setting: what comes first finds other caches and another machine than what comes
    last. Two settings are never asked at the same time, so that neither slows the other.
    """
    groups = [
        tuple((item, seed) for item in items[begin : begin + at_once])
        for seed in seeds
        for begin in range(0, len(items), at_once)
    ]
    shifts = [number % len(settings) for number in range(len(groups))]
    return [Round(group, (*settings[by:], *settings[:by])) for group, by in zip(groups, shifts, strict=True)]


def request_seed(seed: int, question: int, member: int = 0) -> int:
    """The seed of one request, the same for all settings; the members of a vote have one each. Below 2^31."""
    return zlib.crc32(f"{seed}/{question}/{member}".encode()) >> 1


async def asked(client: Client, setting: Setting, item: Item, seed: int, sampling: Sampling) -> Record:
    """The record of `item` in `setting`; a request that fails gives one too, and cancels the other votes."""
    bodies = [
        {
            "model": member,
            "messages": [{"role": "user", "content": item.question}],
            "seed": request_seed(seed, item.index, place),
            **({"metadata": dict(item.labels)} if item.labels else {}),
            **_sampling(setting, sampling),
        }
        for place, member in enumerate(setting.members)
    ]
    failed = ""
    try:
        async with asyncio.TaskGroup() as tasks:
            replies = [tasks.create_task(client.ask(body)) for body in bodies]
    except* ShellRouterError as failures:
        failed = str(failures.exceptions[0])
    if failed:
        return Record(item.index, seed, setting.name, right=False, stated=None, latency_s=0.0, error=failed)
    return _graded(setting, item, seed, [task.result() for task in replies])


def _sampling(setting: Setting, sampling: Sampling) -> Mapping[str, Any]:
    wanted: dict[str, Any] = {"temperature": sampling.temperature}
    if setting.kind in ("model", "auto"):
        wanted = {"temperature": sampling.temperature or 0.0, "max_tokens": sampling.max_tokens}
    if setting.kind == "vote":
        tokens = {"max_tokens": sampling.max_tokens}
        wanted = {"temperature": sampling.vote_temperature, "top_p": VOTE_TOP_P, **tokens}
    return {name: value for name, value in wanted.items() if value is not None}


def _graded(setting: Setting, item: Item, seed: int, replies: Sequence[Reply]) -> Record:
    """The record of the answers; of several the plurality counts."""
    values = [read_answer(reply.text, item.grader) for reply in replies]
    winner = plurality(values)
    value = None if winner is None else values[winner]
    return Record(
        item.index,
        seed,
        setting.name,
        right=value is not None and value == read_answer(item.answer, item.grader),
        stated=None if value is None else str(value),
        latency_s=max(reply.latency_s for reply in replies),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        completion_tokens=sum(reply.completion_tokens for reply in replies),
        agents=tuple(agent for reply in replies for agent in reply.agents),
        exits=tuple(judged for reply in replies for judged in reply.exits),
    )


@dataclass(slots=True)
class Evaluation:
    """What is known so far of one run: records in the order in which they were made, and files that failed."""

    options: EvaluationOptions
    items: Sequence[Item]
    served: Sequence[Served]
    settings: Sequence[Setting]
    baseline: Setting
    records: list[Record] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        """How many records there will be."""
        return len(self.items) * len(self.options.seeds) * len(self.settings)

    def report(self) -> Report:
        """The records so far, summed up."""
        options, names = self.options, tuple(one.name for one in self.settings)
        engine, simulated = engines_of(self.settings, self.served)
        by = options.reports.by
        values = {item.index: str(item.facts.get(by, "(none)")) for item in self.items} if by else {}
        return Report(
            data=f"{options.data.name}, {len(self.items)} questions",
            engine=engine,
            simulated=simulated,
            settings=names,
            baseline=self.baseline.name,
            seeds=options.seeds,
            concurrency=options.concurrency,
            sampling=asdict(options.sampling),
            asked=len(self.records),
            wanted=self.wanted,
            rows=rows_of(self.records, names, self.baseline.name),
            by_key=by,
            by={} if by is None else accuracy_by(self.records, names, values.__getitem__),
        )

    def refuse_trouble(self) -> None:
        """Raise ShellRouterError where a file could not be written."""
        if self.trouble:
            raise ShellRouterError(f"Not all was written. {'. '.join(self.trouble)}.", remedy="The tables are whole.")


async def run_evaluation(options: EvaluationOptions) -> Report:
    """Ask, print the tables, write the files and return what they say; when cancelled, for what was asked so far.

    Raises ShellRouterError when nothing can be asked, and after the tables when more than half of the requests failed
    or a file could not be written.
    """
    evaluation = await evaluate(options)
    evaluation.refuse_trouble()
    return evaluation.report()


async def evaluate(options: EvaluationOptions) -> Evaluation:
    """The same, but the caller decides what to do about a file that could not be written."""
    console = Console(markup=False, emoji=False)  # data and files are never taken for markup
    console = console if console.is_terminal else Console(markup=False, emoji=False, width=TABLE_COLUMNS)
    check_files(options.reports)
    items = read_items(options.data, grader=options.grader, offset=options.offset, limit=options.limit)
    known, key = sorted({name for item in items for name in item.facts}), options.reports.by
    if key is not None and key not in known:
        remedy = f"Their further keys: {', '.join(known)}." if known else "They have no keys but these two."
        raise ConfigError(
            f"--by {key}: the questions have no such key, besides `question` and `answer`.", remedy=remedy
        )
    evaluation: Evaluation | None = None
    try:
        async with running_router(options, lambda step: console.print(f"  {step}", style="dim")) as (client, order):
            served = sorted(await client.served(), key=lambda one: order.index(one.name) if one.name in order else -1)
            settings = chosen_settings(options.settings, served)
            evaluation = Evaluation(options, items, served, settings, baseline_of(settings, options.baseline))
            await _ask_all(client, evaluation, console)
    except asyncio.CancelledError:
        if evaluation is not None:
            _conclude(evaluation, console)
            console.print(*evaluation.trouble, sep="\n", end="\n" if evaluation.trouble else "")
        raise
    _conclude(evaluation, console)
    errors = [record.error for record in evaluation.records if record.error]
    if len(errors) > len(evaluation.records) / 2:
        answers = len(evaluation.records)
        raise ShellRouterError(f"{len(errors)} of {answers} requests failed, the first one with: {errors[0]}")
    return evaluation


async def _ask_all(client: Client, evaluation: Evaluation, console: Console) -> None:
    """Fill the evaluation's records, round by round."""
    options, settings = evaluation.options, evaluation.settings
    for setting in settings:  # an engine's first batches pay for what is done only once
        await asked(client, setting, WARM_UP, 0, options.sampling)
    console.print(f"Asking {len(evaluation.items)} questions in {len(settings)} settings: {evaluation.wanted} answers.")
    with _progress(console, evaluation.wanted) as advance, closing(RecordFile(options.reports.records)) as file:
        evaluation.trouble = file.trouble

        async def ask(setting: Setting, item: Item, seed: int) -> None:
            record = await asked(client, setting, item, seed, options.sampling)
            evaluation.records.append(record)
            file.add(record)
            advance()

        for turn in rounds_of(evaluation.items, options.seeds, settings, at_once=options.concurrency):
            for setting in turn.settings:
                async with asyncio.TaskGroup() as tasks:
                    for item, seed in turn.asked:
                        tasks.create_task(ask(setting, item, seed))


@contextmanager
def _progress(console: Console, answers: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answers", total=answers)
        yield lambda: progress.advance(task)


def _conclude(evaluation: Evaluation, console: Console) -> None:
    """The tables and files, where anything was asked."""
    if evaluation.records:
        report = evaluation.report()
        for table in tables(report):
            console.print(table)
        evaluation.trouble += write_reports(report, evaluation.options.reports)
