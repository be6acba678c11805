"""A batch on the terminal while it runs: its plan, then a bar with an estimate of the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from shell_router.batch.journal import Output
from shell_router.batch.report import plan_table
from shell_router.batch.run import Follow, Stage
from shell_router.batch.sessions import Sessions


@contextmanager
def on_screen(console: Console) -> Iterator[Follow]:
    """What follows a batch there."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        screen = _Screen(progress)
        yield Follow(screen.stage, screen.output, partial(progress.console.print, markup=False, highlight=False))


class _Screen:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._sessions: Sessions | None = None

    def stage(self, stage: Stage, sessions: Sessions) -> None:
        total = sum(session.prompts for session in stage.plan.sessions)
        if total:
            self._progress.console.print(plan_table(stage.plan))
        self._task = self._progress.add_task(
            f"{stage.role}s" if stage.role == "expert" else stage.role, total=total, left=""
        )
        self._sessions = sessions

    def output(self, _output: Output) -> None:
        assert self._task is not None and self._sessions is not None
        self._progress.update(self._task, advance=1, left=f"about {self._sessions.left_s:.0f} s left")
