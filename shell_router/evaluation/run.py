"""An evaluation from start to end: the router, the rounds, the tables and the files."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shell_router.errors import ConfigError, ShellRouterError
from shell_router.evaluation.asked_router import asked_router
from shell_router.evaluation.asking import asked
from shell_router.evaluation.client import START_LIMIT_S, Asks
from shell_router.evaluation.dataset import Item, read_items
from shell_router.evaluation.files import check_files, record_file, write_reports
from shell_router.evaluation.options import EvaluationOptions
from shell_router.evaluation.records import Record
from shell_router.evaluation.report import Report, engines_of
from shell_router.evaluation.rounds import Round, rounds_of
from shell_router.evaluation.rows import accuracy_by, rows_of
from shell_router.evaluation.settings import Served, Setting, baseline_of, chosen_settings
from shell_router.evaluation.table import tables

__all__ = ["START_LIMIT_S", "WARM_UP", "Outcome", "evaluate", "run_evaluation"]

TABLE_COLUMNS = 170
WARM_UP = Item(-1, "Ready?", "yes", "exact", {})


@dataclass(frozen=True, slots=True)
class Outcome:
    """A report whose tables are printed, and what files could not be written."""

    report: Report
    trouble: Sequence[str]

    def refuse_trouble(self) -> None:
        """Raises ShellRouterError where a file could not be written."""
        if self.trouble:
            raise ShellRouterError(f"Not all was written. {'. '.join(self.trouble)}.", remedy="The tables are whole.")


@dataclass(slots=True)
class Evaluation:
    """What is known so far of one run. Records are in the order in which they were made."""

    options: EvaluationOptions
    items: Sequence[Item]
    served: Sequence[Served]
    settings: Sequence[Setting]
    baseline: Setting
    records: list[Record] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> list[Round]:
        """All that is to be asked."""
        options = self.options
        return rounds_of(self.items, options.seeds, self.settings, at_once=options.concurrency)

    @property
    def wanted(self) -> int:
        """How many records there will be."""
        return len(self.items) * len(self.options.seeds) * len(self.settings)

    def report(self) -> Report:
        """The records so far, summed up."""
        options, names = self.options, tuple(one.name for one in self.settings)
        engine, simulated = engines_of(self.settings, self.served)
        by = options.reports.by
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
            by={} if by is None else accuracy_by(self.records, names, self._value_of(by)),
        )

    def _value_of(self, key: str) -> Callable[[int], str]:
        values = {item.index: str(item.facts.get(key, "(none)")) for item in self.items}
        return values.__getitem__


async def run_evaluation(options: EvaluationOptions) -> Report:
    """Ask, print the tables, write the files and return what they say; when cancelled, for what was asked so far.

    Raises ShellRouterError when nothing can be asked, and after the tables when more than half of the requests failed
    or a file could not be written.
    """
    outcome = await evaluate(options)
    outcome.refuse_trouble()
    return outcome.report


async def evaluate(options: EvaluationOptions) -> Outcome:
    """The same, leaving it to the caller what to do about a file that could not be written."""
    console = _console()
    check_files(options.reports)
    items = read_items(options.data, grader=options.grader, offset=options.offset, limit=options.limit)
    _check_key(options.reports.by, items)
    evaluation: Evaluation | None = None
    try:
        async with asked_router(options, lambda step: console.print(f"  {step}", style="dim")) as (client, order):
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
    _refuse_failures(evaluation.records)
    return Outcome(evaluation.report(), evaluation.trouble)


def _check_key(key: str | None, items: Sequence[Item]) -> None:
    known = sorted({name for item in items for name in item.facts})
    if key is not None and key not in known:
        remedy = f"Their further keys: {', '.join(known)}." if known else "They have no keys but these two."
        raise ConfigError(f"--by {key}: no question has it beside `question` and `answer`.", remedy=remedy)


def _console() -> Console:
    """As wide as the tables need where nobody's terminal says otherwise. What data say is never taken for markup."""
    console = Console(markup=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, width=TABLE_COLUMNS)


async def _ask_all(client: Asks, evaluation: Evaluation, console: Console) -> None:
    """Fill the evaluation's records, round by round."""
    options, settings = evaluation.options, evaluation.settings
    for setting in settings:  # an engine's first batches pay for what is done only once
        await asked(client, setting, WARM_UP, 0, options.sampling)
    console.print(f"Asking {len(evaluation.items)} questions in {len(settings)} settings: {evaluation.wanted} answers.")
    with _progress(console, evaluation.wanted) as advance, record_file(options.reports.records) as file:
        evaluation.trouble = file.trouble

        async def ask(setting: Setting, item: Item, seed: int) -> None:
            record = await asked(client, setting, item, seed, options.sampling)
            evaluation.records.append(record)
            file.add(record)
            advance()

        for turn in evaluation.rounds:
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
    if not evaluation.records:
        return
    report = evaluation.report()
    for table in tables(report):
        console.print(table)
    evaluation.trouble += write_reports(report, evaluation.options.reports)


def _refuse_failures(records: Sequence[Record]) -> None:
    errors = [record.error for record in records if record.error]
    if len(errors) > len(records) / 2:
        raise ShellRouterError(f"{len(errors)} of {len(records)} requests failed, the first one so: {errors[0]}")
