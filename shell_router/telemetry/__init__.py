"""What is known of runs from the outside: metrics and traces, both read from the events of core/events.py."""

from shell_router.telemetry.engine_metrics import AdapterState, EngineReports, QueueState, ServerState
from shell_router.telemetry.metrics import Metrics
from shell_router.telemetry.recorder import Recorder, RecordTo
from shell_router.telemetry.run_metrics import RunMetrics
from shell_router.telemetry.trace import Trace
from shell_router.telemetry.trace_store import TraceStore

__all__ = [
    "AdapterState",
    "EngineReports",
    "Metrics",
    "QueueState",
    "RecordTo",
    "Recorder",
    "RunMetrics",
    "ServerState",
    "Trace",
    "TraceStore",
]
