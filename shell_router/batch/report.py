"""A plan in words: a table of its sessions, and how good it is."""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from shell_router.batch.plan import Plan, Session


def plan_table(plan: Plan) -> Table:
    """A line per worker."""
    table = Table(title=f"Plan: {plan.method}", title_justify="left")
    for heading in ("worker", "sessions: expert \u00d7 prompts, from second to second", "done after s"):
        table.add_column(heading, justify="left" if heading.startswith("sessions") else "right")
    for worker, sessions in groupby(plan.sessions, key=lambda session: session.worker):
        row = list(sessions)
        table.add_row(str(worker), "\n".join(map(_session, row)), f"{row[-1].end_s:.1f}")
    return table


def _session(session: Session) -> str:
    return f"{session.expert} \u00d7 {session.prompts}, {session.begin_s:.1f} to {session.end_s:.1f}"


def said(plan: Plan, others: Sequence[Plan]) -> list[str]:
    """How long the plan takes, how much better another may be, and how it stands to `others`."""
    if plan.proof == "optimal":
        judged = "no plan is shorter by 0.01 % or more"
    else:
        judged = f"the best plan may be up to {plan.gap:.1%} shorter"
    lines = [f"{plan.makespan_s:.1f} s in all; {judged}."]
    if plan.makespan_s:
        lines += [f"{other.method} takes {other.makespan_s / plan.makespan_s:.2f} times as long." for other in others]
    return lines
