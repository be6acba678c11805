"""A plan in words: a table of its sessions, and how good it is."""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from shell_router.batch.plan import OPTIMAL_GAP, Plan, Session


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
