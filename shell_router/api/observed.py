"""A run with its trace and its metrics."""

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from shell_router.api.recorded import Recording, Run
from shell_router.api.services import Emit, Services
from shell_router.core.events import Event
from shell_router.telemetry import RunMetrics, Trace


class Observed:
    """What is seen of one run: its id is the trace's id and fresh for every run.

    The tokens of `answering` agents are the answer, of whom at least one is named; `precursors` is the graph, by agent.
    """

    def __init__(
        self,
        services: Services,
        tenant: str,
        target: str,
        answering: Collection[str],
        precursors: Mapping[str, Sequence[str]],
    ) -> None:
        self.id = services.new_id()
        self.started_s = services.clock()
        self.created = int(services.wall())
        self._clock = services.clock
        self._metrics = RunMetrics(services.metrics, target, answering, self.started_s)
        self.trace = Trace(
            self.id,
            tenant=tenant,
            target=target,
            root=min(answering),
            started_s=self.started_s,
            wall_s=services.wall(),
            precursors=precursors,
        )
        services.traces.add(self.trace)
        self._services = services
        self._recording: Recording | None = None

    def recorded(self, run: Run) -> None:
        """Have the run's lines written to the trace files, where there are any."""
        if self._services.recorder is not None:
            self._recording = Recording(self._services.recorder, run, self.trace, self._services.models)

    def tell(self, also: Emit | None = None) -> Emit:
        """Where the run emits: into trace and metrics, and on to `also`."""

        def emit(event: Event) -> None:
            self.trace.add(event)
            self._metrics.observe(event)
            if self._recording is not None:
                self._recording.observe(event)
            if also is not None:
                also(event)

        return emit

    @contextlib.contextmanager
    def until_end(self) -> Iterator[None]:
        """The run itself goes inside; how it ends is recorded."""
        try:
            yield
        except asyncio.CancelledError:
            self._ended("cancelled")
            raise
        except Exception as error:
            self._ended("failed", f"{type(error).__name__}: {error}")
            raise
        self._ended("finished")

    def _ended(self, outcome: str, error: str = "") -> None:
        at_s = self._clock()
        self.trace.ended(at_s, outcome, error)
        self._metrics.ended(at_s, outcome)
        if self._recording is not None:
            self._recording.end()
