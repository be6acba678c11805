"""Sends finished runs to an OTLP/HTTP receiver, as OpenTelemetry spans that a process of its own
makes and encodes.

The router only pickles a run's trace, which takes a tenth of the CPU that making and encoding its
spans takes.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from shell_router.core.engine import Placement
from shell_router.core.events import AgentFinished, AgentPlaced, PrefillIncrement, PromptReady
from shell_router.telemetry.recorder import Outbox
from shell_router.telemetry.trace import AgentTrace, Trace

MOST_WAITING = 2_000
MAX_BATCH_SIZE = 16
"""Runs. Pickling more would hold up the event loop, which shares the interpreter with this thread.
"""


class SpanExport(Outbox[Trace]):
    """Sends the spans of finished runs to `endpoint`, each time within `limit_s`.

    Headers, certificates, compression, the service's name and further attributes of it come from
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
        self._command = [
            sys.executable,
            "-m",
            "shell_router.telemetry.otlp_process",
            endpoint,
            str(limit_s),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
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
        if self._process is not None:
            self._process.kill()  # it has answered, or is late
            self._process.wait()

    def _take(self, items: Sequence[Trace]) -> None:
        try:
            spans, why = self._asked(items)
        except Exception as error:  # one run must not end the export of all others
            self._lost(
                sum(map(self._size, items)), f"their process ended, or cannot take them: {error!r}"
            )
            return
        self._lost(spans, why) if why else self._done(spans)

    def _asked(self, items: Sequence[Trace]) -> tuple[int, str]:
        """The number of their spans, and why these are lost, if they are."""
        if self._is_closed:
            raise EOFError("the router ends")
        if self._process is None or self._process.poll() is not None:
            self._pipe, there = Pipe()
            with there:
                # a Ctrl-C at the terminal is for the router, which then closes the pipe
                command = [*self._command, str(there.fileno())]
                inherited = [there.fileno()]
                self._process = subprocess.Popen(
                    command,
                    pass_fds=inherited,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                )
        self._pipe.send_bytes(pickled(items))
        found: tuple[int, str] = self._pipe.recv()
        return found

    def _size(self, item: Trace) -> int:
        agents = item.agents.values()
        return (
            1
            + len(item.exits)
            + sum(1 + len(one.increments) + (one.ready is not None) for one in agents)
        )


def _by_position(of: type[Any]) -> Callable[[Any], tuple[type[Any], tuple[Any, ...]]]:
    values = attrgetter(*(one.name for one in fields(of)))
    return lambda item: (of, values(item))


MANY = (Trace, AgentTrace, PrefillIncrement, PromptReady, AgentPlaced, Placement, AgentFinished)
REDUCED: Mapping[type, Callable[[Any], tuple[type[Any], tuple[Any, ...]]]] = {
    one: _by_position(one) for one in MANY
}
"""How those classes are pickled of which a trace holds many: by name, their fields would take three
times as long.
"""


def pickled(traces: Sequence[Trace]) -> bytes:
    """What `pickle.loads` makes the same traces of."""
    into = BytesIO()
    pickler = pickle.Pickler(into, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = REDUCED
    pickler.dump(traces)
    return into.getvalue()
