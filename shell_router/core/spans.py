"""W3C Trace Context: spans from the client through the router to the engines."""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b

from shell_router.core.engine import value

_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")
SAMPLED = 1


@value
class SpanContext:
    """A span, as the headers `traceparent` and `tracestate` name it.

    `run` is the id of the router's run that the span is part of, empty for a client's span. The ids
    of a run's spans follow from `run` and names, so engines can be sent the id of a span that is
    only made when the run has ended.
    """

    trace_id: str
    span_id: str
    flags: int = SAMPLED
    state: str = ""
    run: str = ""

    def child(self, *names: object) -> "SpanContext":
        """Return the span with `names` in the same run."""
        return SpanContext(
            self.trace_id, _digest(8, self.run, *names), self.flags, self.state, self.run
        )

    def headers(self) -> bytes:
        """Return the header lines of a request."""
        lines = f"traceparent: 00-{self.trace_id}-{self.span_id}-{self.flags:02x}\r\n"
        return (lines + (f"tracestate: {self.state}\r\n" if self.state else "")).encode()


CURRENT: ContextVar[SpanContext | None] = ContextVar("span", default=None)
"""The span of this task's engine requests; None if neither client nor router traces."""


def read_client_span(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the client's span; None if the header is missing or invalid, as the standard says."""
    parent = _PARENT.fullmatch(headers.get("traceparent", "").strip())
    if parent is None or (parent[1] == "00" and len(parent[0]) > 55):
        return None
    state = headers.get("tracestate", "")
    if not _STATE.fullmatch(state):
        state = ""
    return SpanContext(parent[2], parent[3], int(parent[4], 16), state)


def make_run_span(run: str, client: SpanContext | None) -> SpanContext:
    """Return a run's span: in the client's trace, else in a trace whose id is the run's."""
    if client is not None:
        return SpanContext(client.trace_id, _digest(8, run), client.flags, client.state, run)
    return SpanContext(
        run if _TRACE_ID.fullmatch(run) else _digest(16, run), _digest(8, run), run=run
    )


def enter_span(*names: object) -> None:
    """Make this task's further engine requests part of the span with `names` in its run."""
    span = CURRENT.get()
    if span is not None and span.run:
        CURRENT.set(span.child(*names))


def _digest(size: int, *names: object) -> str:
    return blake2b("\0".join(map(str, names)).encode(), digest_size=size).hexdigest()
