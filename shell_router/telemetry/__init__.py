"""Metrics and traces, both made from the events of core/events.py."""

from shell_router.telemetry.metrics import Metrics, RunMetrics
from shell_router.telemetry.trace import Trace, TraceStore
from shell_router.telemetry.usage import StallWatch, TokenRates

__all__ = ["Metrics", "RunMetrics", "StallWatch", "TokenRates", "Trace", "TraceStore"]
