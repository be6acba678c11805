"""The batch mode: a workload of many experts, planned over few workers (MOSAIC)."""

from shell_router.batch.baselines import BASELINES
from shell_router.batch.picture import draw_plan
from shell_router.batch.plan import Expert, Plan, Session, Workload
from shell_router.batch.planner import plan
from shell_router.batch.report import plan_table, said

__all__ = ["BASELINES", "Expert", "Plan", "Session", "Workload", "draw_plan", "plan", "plan_table", "said"]
