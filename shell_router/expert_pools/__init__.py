"""Expert pools: hundreds of experts, memory for a few, requests in which one expert follows on another (CoServe)."""

from shell_router.expert_pools.events import Event, GaveUp, Served, Switched
from shell_router.expert_pools.experts import Experts
from shell_router.expert_pools.policies import POLICIES, Policies
from shell_router.expert_pools.pool import Answer, ExpertPool
from shell_router.expert_pools.values import Costs, ExecutorSettings, Expert, Request, Tier

__all__ = [
    "POLICIES",
    "Answer",
    "Costs",
    "Event",
    "ExecutorSettings",
    "Expert",
    "ExpertPool",
    "Experts",
    "GaveUp",
    "Policies",
    "Request",
    "Served",
    "Switched",
    "Tier",
]
