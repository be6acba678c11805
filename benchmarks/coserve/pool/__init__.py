"""Component pools: hundreds of components, memory for a few, requests in which one follows on
another (CoServe).
"""

from benchmarks.coserve.pool.executor import Event, GaveUp, Served, Switched
from benchmarks.coserve.pool.policies import Policies
from benchmarks.coserve.pool.pool import Answer, ComponentPool
from benchmarks.coserve.pool.values import (
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
