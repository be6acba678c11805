"""Component pools: hundreds of components, memory for a few, requests in which one follows on
another (CoServe).
"""

from shell_router.experts.components.executor import Event, GaveUp, Served, Switched
from shell_router.experts.components.policies import Policies
from shell_router.experts.components.pool import Answer, ComponentPool
from shell_router.experts.components.values import (
    Component,
    Components,
    Costs,
    ExecutorSettings,
    Request,
    Tier,
)

__all__ = [
    "Answer",
    "Component",
    "ComponentPool",
    "Components",
    "Costs",
    "Event",
    "ExecutorSettings",
    "GaveUp",
    "Policies",
    "Request",
    "Served",
    "Switched",
    "Tier",
]
