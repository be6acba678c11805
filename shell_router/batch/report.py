"""A plan in words: a table of its sessions, and how good it is."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from shell_router.batch.plan import OPTIMAL_GAP, Plan, Session
from shell_router.batch.results import Result
from shell_router.batch.run import Stage
from shell_router.batch.tau import Trial
from shell_router.core.intervals import wilson


def plan_table(plan: Plan) -> Table:
    """A line per worker."""
    table = Table(title=f"Plan: {plan.method}", title_justify="left")
    for heading in ("worker", "sessions: expert \u00d7 prompts, from second to second", "done after s"):
        table.add_column(heading, justify="left" if heading.startswith("sessions") else "right")
    for worker, sessions in groupby(plan.sessions, key=lambda session: session.worker):
        row = list(sessions)
        table.add_row(str(worker), Text("\n".join(map(_session, row))), f"{row[-1].end_s:.1f}")
    return table


def _session(session: Session) -> str:
    return f"{session.expert} \u00d7 {session.prompts}, {session.begin_s:.1f} to {session.end_s:.1f}"


def said(plan: Plan, others: Sequence[Plan]) -> list[str]:
    """How long the plan takes, how much better another may be, and how it stands to `others`."""
    if plan.optimal:
        judged = f"no plan within the same limits is shorter by more than {OPTIMAL_GAP:.2%}"
    else:
        judged = f"the best plan within the same limits may be up to {plan.gap:.2%} shorter"
    lines = [f"{plan.makespan_s:.1f} s in all; {judged}."]
    for other in others if plan.makespan_s else ():
        unlimited = ", loading every expert on every worker" if other.method == "data-parallel" else ""
        lines.append(f"{other.method} takes {other.makespan_s / plan.makespan_s:.2f} times as long{unlimited}.")
    return lines


def outcome(results: Sequence[Result], stages: Sequence[Stage]) -> list[str]:
    """What a batch came to: its stages as planned and as run, who answered, and how right that is where it is known."""
    lines = [
        f"{stage.role}: {stage.measured.makespan_s:.1f} s, planned {stage.plan.makespan_s:.1f} s."
        for stage in stages
        if stage.sessions
    ]
    by = Counter(result.by for result in results)
    asked = by["experts"] + by["aggregator"]
    lines.append(
        f"{len(results)} lines: {by['experts']} answered by experts alone, {by['aggregator']} by the aggregator."
    )
    if failed := [result for result in results if result.error]:
        lines.append(f"{len(failed)} with an error; the first, line {failed[0].line}: {failed[0].error}")
    graded = [result for result in results if result.right is not None]
    if graded and asked:
        share = wilson(sum(bool(result.right) for result in graded) / len(graded), len(graded))
        lines.append(f"{share.value:.1%} of {len(graded)} right ({share.low:.1%} to {share.high:.1%}).")
    return lines


def trial_table(tried: Sequence[Trial], chosen: Trial) -> Table:
    """A line per tau, of many such as differ in what they skip by a twentieth; the chosen one is marked."""
    table = Table(title="Gate", title_justify="left")
    for heading in ("tau", "aggregator skipped", "right, % [95 %]", "points lost [95 %]", ""):
        table.add_column(heading, justify="right")
    for trial in _told_apart(tried, chosen):
        right, loss = trial.accuracy, trial.loss
        table.add_row(
            "always asked" if trial is tried[0] else f"{trial.tau:.3g}",
            f"{trial.skipped:.0%}",
            f"{right.value:.1%} [{right.low:.1%}, {right.high:.1%}]",
            f"{loss.value:+.1f} [{loss.low:+.1f}, {loss.high:+.1f}]",
            "chosen" if trial is chosen else "",
        )
    return table


def _told_apart(tried: Sequence[Trial], chosen: Trial) -> list[Trial]:
    told = [tried[0]]
    for trial in tried[1:]:
        if trial is chosen or trial is tried[-1] or trial.skipped - told[-1].skipped >= 0.05:
            told.append(trial)
    return told
