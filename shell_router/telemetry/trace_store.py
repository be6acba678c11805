"""Keeps the latest traces in memory."""

from collections import OrderedDict

from shell_router.errors import UnknownTrace
from shell_router.telemetry.trace import Trace


class TraceStore:
    """The last `capacity` traces; a tenant sees only its own."""

    def __init__(self, capacity: int = 1_000) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must be at least 0, not {capacity}")
        self._capacity = capacity
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, trace: Trace) -> None:
        """Keep `trace`, and forget the oldest beyond capacity."""
        self._traces[trace.id] = trace
        while len(self._traces) > self._capacity:
            self._traces.popitem(last=False)

    def get(self, tenant: str, trace_id: str) -> Trace:
        """Raises UnknownTrace also for another tenant's."""
        trace = self._traces.get(trace_id)
        if trace is None or trace.tenant != tenant:
            raise UnknownTrace(
                f"No trace {trace_id!r} is held.",
                remedy=f"The last {self._capacity} are kept; see x-trace-id.",
            )
        return trace
