"""The early-exit gate of Faster-MoA (section 4.2, Algorithm 1), as pure functions of completed outputs."""

from shell_router.early_exit.agreement import Features, features, similarity
from shell_router.early_exit.confidence import Confidence, rms_confidence, token_confidence
from shell_router.early_exit.gate import ClusterGate, Score, decide, score
from shell_router.early_exit.settings import EarlyExit

__all__ = [
    "ClusterGate",
    "Confidence",
    "EarlyExit",
    "Features",
    "Score",
    "decide",
    "features",
    "rms_confidence",
    "score",
    "similarity",
    "token_confidence",
]
