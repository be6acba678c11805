"""The early-exit gate of Faster-MoA (section 4.2, Algorithm 1), as pure functions of completed outputs."""

from shell_router.early_exit.agreement import Features, features, similarity
from shell_router.early_exit.confidence import Confidence, rms_confidence, token_confidence
from shell_router.early_exit.gate import ClusterGate, Score, decide, score
from shell_router.early_exit.in_flight import NO_QUORUM, InFlightGate, Overlap
from shell_router.early_exit.settings import POLICIES, EarlyExit

__all__ = [
    "NO_QUORUM",
    "POLICIES",
    "ClusterGate",
    "Confidence",
    "EarlyExit",
    "Features",
    "InFlightGate",
    "Overlap",
    "Score",
    "decide",
    "features",
    "rms_confidence",
    "score",
    "similarity",
    "token_confidence",
]
