"""The process that exports finished runs as OpenTelemetry spans. It needs the extra `otel`.

Names are those of the semantic conventions for generative AI, version 1.41.0, which are in
development; what they have no name for begins with `shell_router.`, or OpenInference's. Texts are
exported only if the traces hold them.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace import SpanContext as OtelContext

from shell_router import __version__
from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    ExitScored,
    PrefillIncrement,
    PromptReady,
)
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.spans import SpanContext
from shell_router.errors import hide_user
from shell_router.telemetry.trace import AgentTrace, FullTrace, Trace

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
SCOPE = InstrumentationScope("shell_router", __version__, SCHEMA)
SPANS_AT_ONCE = 2_000
"""Of an OTLP request: receivers bound its bytes."""
PHOENIX_KINDS: Mapping[object, str] = {"chat": "LLM", "invoke_agent": "AGENT"}
"""Phoenix's kinds of spans by operation; it knows no other operation of ours."""
Value = str | int | float | bool | Sequence[str]


def export_spans(connection: Connection, endpoint: str, limit_s: float) -> None:
    """Export the traces that come, until the process is killed; answer with what was lost."""
    exporter = OTLPSpanExporter(endpoint, timeout=limit_s)
    reason = _Reason(logging.getLogger(OTLPSpanExporter.__module__))
    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "shell-router")})
    while True:
        spans = [span for trace in connection.recv() for span in spans_of(trace, resource)]
        parts = (spans[at : at + SPANS_AT_ONCE] for at in range(0, len(spans), SPANS_AT_ONCE))
        if all(exporter.export(part) is SpanExportResult.SUCCESS for part in parts):
            connection.send((len(spans), ""))
        else:
            failure = hide_user(f"{endpoint} does not take them: {reason.last}")
            connection.send((len(spans), failure))


class _Reason(logging.Handler):
    """Keeps the exporter's last complaint, instead of a line in the log for each."""

    def __init__(self, of: logging.Logger) -> None:
        super().__init__()
        self.last = "no reason given"
        of.addHandler(self)
        of.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def spans_of(trace: Trace, resource: Resource) -> Iterator[ReadableSpan]:
    """Yield the run, its agents, their prefill updates and decodes, and the gate's scores.

    All are in the trace of the run's client, if it sent one. An agent's span links to those of the
    agents it reads.
    """
    return _Spans(trace, resource).all()


class _Spans:
    """The spans of one trace.

    The SDK's own tracer would make the ids, which engines have been sent already.
    """

    def __init__(self, trace: Trace, resource: Resource) -> None:
        self._trace = trace
        self._run_span = trace.span
        self._resource = resource
        self._origin_ns = round((trace.wall_s - trace.started_s) * 1e9)
        self._ended_s = trace.started_s if trace.ended_s is None else trace.ended_s

    def all(self) -> Iterator[ReadableSpan]:
        yield self._run()
        for agent, ran in self._trace.agents.items():
            yield self._agent(agent, ran)
            for update in ran.increments:
                yield self._update(agent, ran.model, update)
            if ran.ready is not None:
                yield self._decode(agent, ran, ran.ready)
        for scored in self._trace.exits:
            yield self._exit(scored)

    def _run(self) -> ReadableSpan:
        trace = self._trace
        chosen = [
            self._event("model_chosen", choice.at_s, model=choice.model, why=choice.why)
            for choice in trace.choices
        ]
        steps = [
            self._event("step_chosen", step.at_s, step=step.step, why=step.why)
            for step in trace.steps
        ]
        degraded = [
            self._event("degraded", event.at_s, what=event.what, error=event.error)
            for event in trace.degraded
        ]
        return self._span(
            f"invoke_workflow {trace.target}",
            self._run_span,
            trace.parent,
            (trace.started_s, None),
            {
                "gen_ai.operation.name": "invoke_workflow",
                "gen_ai.workflow.name": trace.target,
                "shell_router.run.id": trace.id,
                "shell_router.run.outcome": trace.outcome,
                "shell_router.tenant": trace.tenant,
                "session.id": trace.session or trace.program or None,
                "shell_router.parent_session": trace.parent_session or None,
                "user.id": trace.user or None,
                "input.value": trace.question,
                "output.value": trace.answer,
                "error.type": trace.error.partition(":")[0] or None,
            },
            events=chosen + steps + degraded,
            error=trace.error,
        )

    def _agent(self, agent: str, ran: AgentTrace) -> ReadableSpan:
        precursors = self._trace.precursors.get(agent, ())
        return self._span(
            f"invoke_agent {agent}",
            self._run_span.child(agent),
            self._run_span,
            (ran.started_s, ran.end.at_s if ran.end else None),
            {
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.agent.name": agent,
                "gen_ai.request.model": ran.model,
                "shell_router.agent.state": ran.state,
                "shell_router.agent.confidence": ran.confidence,
            },
            reads=[precursor for precursor in precursors if precursor in self._trace.agents],
            error=ran.end.error if isinstance(ran.end, AgentErred) else "",
        )

    def _update(self, agent: str, model: str, update: PrefillIncrement) -> ReadableSpan:
        return self._span(
            f"prefill {model}",
            self._run_span.child(agent, update.started_s),
            self._run_span.child(agent),
            (update.started_s, update.at_s),
            {
                "gen_ai.request.model": model,
                "shell_router.prefill.slot": update.slot,
                # receivers add up gen_ai.usage over spans
                "shell_router.prefill.prompt_tokens": update.prompt_tokens,
                "shell_router.prefill.cached_tokens": update.cached_tokens,
                "shell_router.prefill.resident_tokens": update.resident_tokens,
            },
            SpanKind.CLIENT,
        )

    def _decode(self, agent: str, ran: AgentTrace, ready: PromptReady) -> ReadableSpan:
        """Return the decode, which begins when the complete prompt was sent."""
        facts: dict[str, Value | None] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": ran.model,
            "gen_ai.usage.input_tokens": ready.prompt_tokens,
            "gen_ai.usage.output_tokens": ran.usage[1],
            "shell_router.engines": list(map(str, ran.placed.placed)) if ran.placed else None,
        }
        if isinstance(ran.end, AgentFinished):
            facts |= {
                "gen_ai.usage.cache_read.input_tokens": ran.end.cached_tokens,
                "gen_ai.response.finish_reasons": [ran.end.reason],
                "shell_router.drafted_tokens": ran.end.drafted_tokens,
                "shell_router.accepted_tokens": ran.end.accepted_tokens,
            }
        if isinstance(self._trace, FullTrace) and ran.messages:
            messages = map(_to_parts, self._trace.list_messages(agent))
            output = _to_parts({"role": "assistant", "content": "".join(ran.texts)})
            output["finish_reason"] = getattr(ran.end, "reason", ran.state)
            facts["gen_ai.input.messages"] = json.dumps(list(messages), ensure_ascii=False)
            facts["gen_ai.output.messages"] = json.dumps([output], ensure_ascii=False)
        events = []
        if ran.first_token_s is not None:
            facts["gen_ai.response.time_to_first_chunk"] = ran.first_token_s - ready.at_s
            events.append(self._event("first_token", ran.first_token_s))
        return self._span(
            f"chat {ran.model}",
            self._run_span.child(agent, ready.at_s),
            self._run_span.child(agent),
            (ready.at_s, ran.end.at_s if ran.end else None),
            facts,
            SpanKind.CLIENT,
            events=events,
        )

    def _exit(self, scored: ExitScored) -> ReadableSpan:
        names = ("cluster", "confidence", "agreement", "probability", "exited", "aborted")
        return self._span(
            f"early_exit {scored.cluster}",
            self._run_span.child("exit", scored.cluster, scored.started_s),
            self._run_span,
            (scored.started_s, scored.at_s),
            {f"shell_router.exit.{name}": getattr(scored, name) for name in names},
            reads=scored.completed,
        )

    def _span(
        self,
        name: str,
        span: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float | None],
        facts: Mapping[str, Value | None],
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        reads: Sequence[str] = (),
        events: Sequence[Event] = (),
        error: str = "",
    ) -> ReadableSpan:
        """Return a span, linked to the agents it reads; one without an end ended with the run."""
        attributes = {key: fact for key, fact in facts.items() if fact is not None}
        operation = facts.get("gen_ai.operation.name")
        attributes["openinference.span.kind"] = PHOENIX_KINDS.get(operation, "CHAIN")
        status = Status()
        if facts.get("shell_router.run.outcome") == "finished":
            status = Status(StatusCode.OK)
        elif error:
            status = Status(StatusCode.ERROR, error)
        return ReadableSpan(
            name,
            _context(span),
            None if parent is None else _context(parent, is_remote=not parent.run),
            self._resource,
            attributes,
            events,
            [Link(_context(self._run_span.child(agent))) for agent in reads],
            kind,
            status=status,
            start_time=self._ns(times[0]),
            end_time=self._ns(self._ended_s if times[1] is None else times[1]),
            instrumentation_scope=SCOPE,
        )

    def _event(self, name: str, at_s: float, **facts: str) -> Event:
        return Event(f"shell_router.{name}", facts, self._ns(at_s))

    def _ns(self, at_s: float) -> int:
        return self._origin_ns + round(at_s * 1e9)


def _to_parts(message: Values) -> NewValues:
    """Return a chat message in the conventions' form."""
    parts: list[NewValues] = []
    if message["role"] == "tool":
        response = {"id": message["tool_call_id"], "response": message["content"]}
        parts.append({"type": "tool_call_response", **response})
    elif message["content"]:
        parts.append({"type": "text", "content": message["content"]})
    calls = message.get("tool_calls") or ()
    parts += [{"type": "tool_call", "id": call["id"], **call["function"]} for call in calls]
    return {"role": message["role"], "parts": parts}


def _context(span: SpanContext, *, is_remote: bool = False) -> OtelContext:
    state = TraceState.from_header([span.state]) if span.state else None
    return OtelContext(
        int(span.trace_id, 16), int(span.span_id, 16), is_remote, TraceFlags(span.flags), state
    )
