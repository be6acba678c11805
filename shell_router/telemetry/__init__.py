"""Metrics and traces, both made from the events of core/events.py."""

from shell_router.telemetry.metrics import Metrics, RunMetrics, StallWatch
from shell_router.telemetry.trace import FullTrace, TokenRates, Trace, TraceStore

__all__ = [
    "FullTrace",
    "Metrics",
    "RunMetrics",
    "StallWatch",
    "TokenRates",
    "Trace",
    "TraceStore",
]
