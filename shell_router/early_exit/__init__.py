"""When the unfinished agents of a cluster are cut off: Faster-MoA's gate (section 4.2, Algorithm 1) and ours."""

from shell_router.early_exit.algorithm1 import ClusterGate, Confidence, features, similarity
from shell_router.early_exit.answers import Ballot, ballot, elected
from shell_router.early_exit.settings import POLICIES, EarlyExit

__all__ = [
    "POLICIES",
    "Ballot",
    "ClusterGate",
    "Confidence",
    "EarlyExit",
    "ballot",
    "elected",
    "features",
    "similarity",
]
