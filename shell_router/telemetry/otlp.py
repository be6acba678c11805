"""Export of finished runs to an OTLP/HTTP receiver, as OpenTelemetry spans.

A process of its own makes and encodes the spans. The router only pickles a run's trace, which takes
a tenth of the CPU time of encoding it.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from io import BytesIO
from operator import attrgetter
from typing import Any

from shell_router.core.engine import Placement
from shell_router.core.events import AgentFinished, AgentPlaced, PrefillIncrement, PromptReady
from shell_router.processes.child import Failure, PythonProcess
from shell_router.telemetry.recorder import Outbox
from shell_router.telemetry.trace import AgentTrace, FullTrace, Trace

MOST_WAITING = 2_000
MAX_BATCH_SIZE = 16
"""The most runs of a batch. Pickling more would delay the event loop, which shares the interpreter
with this thread.
"""


class SpanExport(Outbox[Trace]):
    """Sends the spans of finished runs to `endpoint`, each time within `limit_s`.

    Headers, certificates, compression, and the service's name and attributes come from
    OpenTelemetry's own environment variables (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`,
    ...). The process starts with the first run, and again after its end. It needs the extra `otel`.
    """

    def __init__(
        self,
        endpoint: str,
        count: Callable[[str, int], None],
        *,
        linger_s: float = 1.0,
        limit_s: float = 5.0,
    ) -> None:
        self._arguments = {"endpoint": endpoint, "limit_s": limit_s}
        self._process: PythonProcess | None = None
        self._is_closed = False
        super().__init__(
            "spans",
            "exported",
            count,
            most_waiting=MOST_WAITING,
            max_batch_size=MAX_BATCH_SIZE,
            linger_s=linger_s,
        )

    def close(self, limit_s: float = 10.0) -> None:
        """See `Outbox.close`."""
        super().close(limit_s)
        self._is_closed = True
        self._end_process()  # all runs are exported, or the limit is over

    def _take(self, items: Sequence[Trace]) -> None:
        try:
            spans, reason = self._export(items)
        except Exception as error:  # one run must not end the export of all others
            self._count_lost(
                sum(map(self._size, items)), f"their process ended, or cannot take them: {error!r}"
            )
            return
        if reason:
            self._count_lost(spans, reason)
        else:
            self._count_done(spans)

    def _export(self, items: Sequence[Trace]) -> tuple[int, str]:
        """Have the runs exported; return the number of spans, and why they are lost, or ""."""
        if self._is_closed:
            raise EOFError("the router ends")
        if self._process is None or not self._process.running:
            self._end_process()
            self._process = PythonProcess(
                "spans", "shell_router.telemetry.otlp_process:export_spans", self._arguments
            )
            self._process.start()
        self._process.connection.send_bytes(pickle_traces(items))
        outcome = self._process.connection.recv()
        if isinstance(outcome, Failure):
            raise EOFError(outcome.message)
        spans, reason = outcome
        return spans, reason

    def _end_process(self) -> None:
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _size(self, item: Trace) -> int:
        agents = item.agents.values()
        return (
            1
            + len(item.exits)
            + sum(1 + len(agent.increments) + (agent.ready is not None) for agent in agents)
        )


def _by_position(of: type[Any]) -> Callable[[Any], tuple[type[Any], tuple[Any, ...]]]:
    values = attrgetter(*(field.name for field in fields(of)))
    return lambda item: (of, values(item))


FREQUENT = (
    *(Trace, FullTrace, AgentTrace),
    *(PrefillIncrement, PromptReady, AgentPlaced, Placement, AgentFinished),
)
REDUCERS: Mapping[type, Callable[[Any], tuple[type[Any], tuple[Any, ...]]]] = {
    each: _by_position(each) for each in FREQUENT
}
"""Pickle reducers for the classes that a trace holds many of. They write fields by position; by
name they take three times as long.
"""


def pickle_traces(traces: Sequence[Trace]) -> bytes:
    """Pickle the traces, for `pickle.loads`, with fields by position."""
    into = BytesIO()
    pickler = pickle.Pickler(into, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = REDUCERS
    pickler.dump(traces)
    return into.getvalue()
