"""A batch for people: its plan as a table or a picture, its progress on a terminal, and what it
came to.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from shell_router.batch.journal import Output
from shell_router.batch.planner import OPTIMAL_GAP, Plan
from shell_router.batch.prompts import Result
from shell_router.batch.run import Follow, Stage
from shell_router.batch.sessions import Move, Sessions
from shell_router.core.statistics import wilson

MOVES: Mapping[Move, str] = {
    "taken": "were taken by idle workers",
    "replanned": "were moved by a new plan",
}
COLORS = ("blue", "green", "yellow", "magenta", "cyan", "red")


def plan_table(plan: Plan) -> Table:
    """A line per session with its place on the plan's time axis, and a color per model, worker
    after worker.
    """
    table = Table(title=f"Plan: {plan.method}", title_justify="left")
    for heading in (
        "worker",
        "model \u00d7 prompts",
        "from s",
        "to s",
        f"0 to {plan.makespan_s:.1f} s",
    ):
        table.add_column(heading, justify="left" if "model" in heading else "right")
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


def plan_summary(plan: Plan, others: Sequence[Plan]) -> list[str]:
    """How long the plan takes, how much better another may be, and how it compares with
    `others`."""
    if plan.optimal:
        judged = f"no plan within the same limits is shorter by more than {OPTIMAL_GAP:.2%}"
    else:
        judged = f"the best plan within the same limits may be up to {plan.gap:.2%} shorter"
    lines = [f"{plan.makespan_s:.1f} s in all; {judged}."]
    compared = others if plan.makespan_s else ()
    return [
        *lines,
        *(
            f"{one.method} takes {one.makespan_s / plan.makespan_s:.2f} times as long."
            for one in compared
        ),
    ]


def outcome(results: Sequence[Result], stages: Sequence[Stage]) -> list[str]:
    """What a batch came to: its stages as planned and as run, who answered, and how right that is
    where it is known.
    """
    lines = [
        f"{stage.role}: {stage.measured.makespan_s:.1f} s, planned {stage.plan.makespan_s:.1f} s."
        + "".join(f" {number} prompts {MOVES[why]}." for why, number in stage.moved.items())
        for stage in stages
        if stage.sessions
    ]
    by = Counter(result.by for result in results)
    asked = by["proposers"] + by["aggregator"]
    lines.append(
        f"{len(results)} lines: {by['proposers']} answered by proposers alone, "
        f"{by['aggregator']} by the aggregator."
    )
    if failed := [result for result in results if result.error]:
        lines.append(
            f"{len(failed)} with an error; the first, line {failed[0].line}: {failed[0].error}"
        )
    graded = [result for result in results if result.right is not None]
    if graded and asked:
        share = wilson(sum(bool(result.right) for result in graded) / len(graded), len(graded))
        lines.append(
            f"{share.value:.1%} of {len(graded)} right ({share.low:.1%} to {share.high:.1%})."
        )
    return lines


class _OnScreen(Follow):
    """Follows a batch on a terminal: its plans, its outputs, and lines of text."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._sessions: Sessions | None = None

    def on_stage(self, stage: Stage, sessions: Sessions) -> None:
        """Print the plan, and begin a bar."""
        total = sum(session.prompts for session in stage.plan.sessions)
        if total:
            self._progress.console.print(plan_table(stage.plan))
        if stage.role == "proposer":
            name = "proposers"
        else:
            name = stage.role
        self._task = self._progress.add_task(name, total=total, left="")
        self._sessions = sessions

    def on_output(self, _output: Output) -> None:
        """Move the bar."""
        assert self._task is not None and self._sessions is not None
        self._progress.update(
            self._task, advance=1, left=f"about {self._sessions.left_s:.0f} s left"
        )

    def on_progress(self, line: str) -> None:
        """Print the line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)


@contextmanager
def on_screen(console: Console) -> Iterator[Follow]:
    """What follows a batch there."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield _OnScreen(progress)
