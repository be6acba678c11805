"""A run with its trace, its metrics, and its lines in the trace files."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from shell_router.api.services import Emit, Services
from shell_router.core.events import Event
from shell_router.core.spans import CURRENT, SAMPLED
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.telemetry import RunMetrics, Trace
from shell_router.topology import Graph

if TYPE_CHECKING:
    from shell_router.api.recording import Recording


class Observed:
    """Keeps a run's trace, metrics and lines. The run goes inside its context; `emit` takes its events.

    `id` is fresh for every run, and its trace's. The tokens of `answering` agents are the answer, of whom at least
    one is named; `precursors` is the graph, by agent.
    """

    def __init__(
        self,
        services: Services,
        id: str,
        tenant: str,
        target: str,
        answering: Collection[str],
        precursors: Mapping[str, Sequence[str]],
    ) -> None:
        wall_s = services.wall()
        self.id = id
        self.created = int(wall_s)
        self._services = services
        self.trace = Trace(
            self.id,
            tenant=tenant,
            target=target,
            root=min(answering),
            started_s=services.clock(),
            wall_s=wall_s,
            precursors=precursors,
            parent=CURRENT.get(),
        )
        self._spans = services.spans
        if self._spans is not None and not self.trace.span.flags & SAMPLED:
            self._spans = None
        self._metrics = RunMetrics(services.metrics, self.trace, answering)
        self._recording: Recording | None = None
        self.also: Emit | None = None
        """Gets every event, too: what a stream is written from."""

    def record(self, request: MoaRequest | AgentRequest, graph: Graph | None = None) -> None:
        """Have the run's lines written to the trace files, where there are any."""
        if self._services.recorder is not None:
            from shell_router.api.recording import Recording  # noqa: PLC0415 - most deployments write no traces

            models = self._services.models
            self._recording = Recording(self._services.recorder, request, graph, self.trace, models)

    def emit(self, event: Event) -> None:
        """Put an event into the trace, the metrics and the recording, and pass it on."""
        self.trace.add(event)
        self._metrics.observe(event)
        if self._recording is not None:
            self._recording.observe(event)
        if self.also is not None:
            self.also(event)

    def __enter__(self) -> "Observed":
        """The run begins: from here on it has a trace, and engine requests are part of its spans."""
        self._services.traces.add(self.trace)
        if self._spans is not None:
            CURRENT.set(self.trace.span)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Note how the run has ended."""
        at_s = self._services.clock()
        if error is None:
            outcome, text = "finished", ""
        elif isinstance(error, asyncio.CancelledError):
            outcome, text = "cancelled", ""
        else:
            outcome, text = "failed", f"{type(error).__name__}: {error}"
        self.trace.ended(at_s, outcome, text)
        self._services.rates.add(self.trace.tenant, sum(self.trace.usage), at_s)
        self._metrics.ended(at_s, outcome)
        if self._recording is not None:
            self._recording.end()
        if self._spans is not None:
            self._spans.add(self.trace)
