"""What is compared: policies that choose the engine, and orders in which requests wait for one."""

from collections.abc import Mapping, Sequence

from shell_router.scheduling.engine_selection import SelectionSettings
from shell_router.scheduling.queue_order import QueueSettings
from shell_router.scheduling.settings import SchedulingSettings

DEFAULT = "least_running, no queue"
POLICIES = ("least_running", "round_robin", "gimbal", "scored")
ORDERS = ("no queue", "shortest_prefill")
AT_ONCE = 8
"""Requests that an engine gets at once where the others wait in the router: about what it needs to be busy."""
PATIENT_S = 600.0


def settings(policies: Sequence[str], orders: Sequence[str]) -> Mapping[str, SchedulingSettings]:
    """By name, the default first, with which all others are compared."""
    found = {DEFAULT: SchedulingSettings()}
    for order in orders:
        for policy in policies:
            found[f"{policy}, {order}"] = scheduling(policy, order)
    return found


def scheduling(policy: str, order: str) -> SchedulingSettings:
    """One of them."""
    if order == "no queue":
        return SchedulingSettings(SelectionSettings(policy))
    return SchedulingSettings(SelectionSettings(policy), QueueSettings(order, max_running=AT_ONCE, wait_s=PATIENT_S))
