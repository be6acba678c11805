"""A batch for people: the plan as a table, the progress on a terminal, and the outcome."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from shell_router.batch.journal import Output
from shell_router.batch.planner import OPTIMAL_GAP, BatchPlan
from shell_router.batch.prompts import Result
from shell_router.batch.sessions import Follow, Move, Sessions, Stage
from shell_router.core.statistics import wilson

MOVES: Mapping[Move, str] = {
    "taken": "were taken by idle workers",
    "replanned": "were moved by a new plan",
}
COLORS = ("blue", "green", "yellow", "magenta", "cyan", "red")


def draw_plan(plan: BatchPlan) -> Table:
    """Return a table with a line per session, its bar on the time axis and a color per model."""
    table = Table(title=f"Plan: {plan.method}", title_justify="left")
    table.add_column("worker", justify="right")
    table.add_column("model \u00d7 prompts")
    for heading in ("from s", "to s", f"0 to {plan.makespan_s:.1f} s"):
        table.add_column(heading, justify="right")
    names = sorted({session.model for session in plan.sessions})
    worker = None
    for session in plan.sessions:
        if session.worker != worker:
            table.add_section()
        worker = session.worker
        color = COLORS[names.index(session.model) % len(COLORS)]
        table.add_row(
            str(worker),
            Text(f"{session.model} \u00d7 {session.prompts}"),
            f"{session.begin_s:.1f}",
            f"{session.end_s:.1f}",
            Bar(plan.makespan_s, session.begin_s, session.end_s, color=color),
        )
    return table


def summarize_plan(plan: BatchPlan, others: Sequence[BatchPlan]) -> list[str]:
    """Return lines on the plan's makespan, its gap, and how it compares with `others`."""
    if plan.optimal:
        quality = f"no plan within the same limits is shorter by more than {OPTIMAL_GAP:.2%}"
    else:
        quality = f"the best plan within the same limits may be up to {plan.gap:.2%} shorter"
    lines = [f"{plan.makespan_s:.1f} s in all; {quality}."]
    if plan.makespan_s:
        for other in others:
            ratio = other.makespan_s / plan.makespan_s
            lines.append(f"{other.method} takes {ratio:.2f} times as long.")
    return lines


def summarize_run(results: Sequence[Result], stages: Sequence[Stage]) -> list[str]:
    """Return lines on the stages as planned and as run, who answered, and the accuracy."""
    lines = []
    for stage in stages:
        if stage.sessions:
            moves = [f" {number} prompts {MOVES[why]}." for why, number in stage.moved.items()]
            seconds = f"{stage.measured.makespan_s:.1f} s, planned {stage.plan.makespan_s:.1f} s."
            lines.append(f"{stage.role}: {seconds}{''.join(moves)}")
    by = Counter(result.by for result in results)
    lines.append(
        f"{len(results)} lines: {by['proposers']} answered by proposers alone, "
        f"{by['aggregator']} by the aggregator."
    )
    failed = [result for result in results if result.error]
    if failed:
        lines.append(
            f"{len(failed)} with an error; the first, line {failed[0].line}: {failed[0].error}"
        )
    rights = [result.right for result in results if result.right is not None]
    if rights and by["proposers"] + by["aggregator"]:
        share = wilson(sum(rights) / len(rights), len(rights))
        lines.append(
            f"{share.value:.1%} of {len(rights)} right ({share.low:.1%} to {share.high:.1%})."
        )
    return lines


class _OnScreen(Follow):
    """A follower on a terminal: plans, a bar of outputs, and lines of text."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._sessions: Sessions | None = None

    def on_stage(self, stage: Stage, sessions: Sessions) -> None:
        """Print the plan, and begin a bar."""
        total = sum(session.prompts for session in stage.plan.sessions)
        if total:
            self._progress.console.print(draw_plan(stage.plan))
        name = "proposers" if stage.role == "proposer" else stage.role
        self._task = self._progress.add_task(name, total=total, left="")
        self._sessions = sessions

    def on_output(self, _output: Output) -> None:
        """Move the bar."""
        assert self._task is not None and self._sessions is not None
        self._progress.update(
            self._task, advance=1, left=f"about {self._sessions.queues.left_s:.0f} s left"
        )

    def on_progress(self, line: str) -> None:
        """Print the line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)


@contextmanager
def follow_on_screen(console: Console) -> Iterator[Follow]:
    """Yield a follower that shows a batch on the console."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield _OnScreen(progress)
