"""Replies with their common headers, and errors as replies, by one table."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from typing_extensions import TypedDict

from agent_cache import CacheUnavailable
from shell_router import errors
from shell_router.api.services import IGNORED, OWN_NAMES, PLACED, REQUEST_ID, SETTINGS, TRACE
from shell_router.core.events import ModelChosen
from shell_router.core.exact_json import NewValues, Values, write_json
from shell_router.http.app import (
    BodyTooLarge,
    MethodNotAllowed,
    Request,
    Response,
    UnknownRoute,
    UnreadableBody,
    allowed_methods,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """An error as clients see it."""

    status: int
    type: str
    code: str
    param: str | None = None


PROBLEMS: dict[type[BaseException], ErrorStatus] = {
    errors.InvalidRequest: ErrorStatus(400, "invalid_request_error", "invalid_request"),
    errors.InvalidField: ErrorStatus(400, "invalid_request_error", "invalid_field"),
    errors.UnknownModel: ErrorStatus(404, "invalid_request_error", "model_not_found", "model"),
    errors.UnknownTopology: ErrorStatus(404, "invalid_request_error", "unknown_topology"),
    errors.TopologyConflict: ErrorStatus(409, "invalid_request_error", "topology_conflict"),
    errors.TopologiesOff: ErrorStatus(403, "permission_error", "topologies_off"),
    errors.ConfigError: ErrorStatus(409, "invalid_request_error", "config_conflict"),
    errors.PromptTooLong: ErrorStatus(400, "invalid_request_error", "context_length_exceeded"),
    errors.DuplicateAgent: ErrorStatus(409, "invalid_request_error", "duplicate_agent"),
    errors.UnknownProgram: ErrorStatus(404, "invalid_request_error", "unknown_program"),
    errors.UnknownTrace: ErrorStatus(404, "invalid_request_error", "unknown_trace"),
    errors.UnknownFile: ErrorStatus(404, "invalid_request_error", "unknown_file"),
    errors.UnknownBatch: ErrorStatus(404, "invalid_request_error", "unknown_batch"),
    errors.UnknownResponse: ErrorStatus(404, "invalid_request_error", "unknown_response"),
    errors.ResponseCancelled: ErrorStatus(409, "invalid_request_error", "response_cancelled"),
    errors.StreamChanged: ErrorStatus(409, "invalid_request_error", "stream_changed"),
    CacheUnavailable: ErrorStatus(503, "server_error", "store_unavailable"),
    errors.BatchEnded: ErrorStatus(409, "invalid_request_error", "batch_ended"),
    errors.KeyReused: ErrorStatus(422, "invalid_request_error", "idempotency_key_reused"),
    errors.FileTooLarge: ErrorStatus(413, "invalid_request_error", "file_too_large"),
    errors.QuotaExceeded: ErrorStatus(403, "invalid_request_error", "quota_exceeded"),
    errors.Unauthorized: ErrorStatus(401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: ErrorStatus(403, "permission_error", "forbidden"),
    errors.RemoteRefused: ErrorStatus(403, "permission_error", "loopback_only"),
    errors.UnsupportedMediaType: ErrorStatus(
        415, "invalid_request_error", "unsupported_media_type"
    ),
    errors.Overloaded: ErrorStatus(429, "rate_limit_error", "too_many_requests"),
    errors.EngineError: ErrorStatus(502, "server_error", "engine_error"),
    errors.AdapterMissing: ErrorStatus(502, "server_error", "adapter_missing"),
    errors.ModelFailed: ErrorStatus(502, "server_error", "model_load_failed"),
    errors.EngineUnavailable: ErrorStatus(503, "server_error", "engine_unavailable"),
    errors.EngineStalled: ErrorStatus(504, "server_error", "engine_stalled"),
    errors.AgentFailed: ErrorStatus(502, "server_error", "agent_failed"),
    errors.PrecursorTimeout: ErrorStatus(504, "server_error", "precursor_timeout"),
    errors.BudgetExceeded: ErrorStatus(402, "budget_error", "budget_exceeded"),
    errors.DeadlineExceeded: ErrorStatus(504, "server_error", "deadline_exceeded"),
    errors.StorageFailed: ErrorStatus(507, "server_error", "storage_failed"),
    errors.RouterStopping: ErrorStatus(503, "server_error", "router_stopping"),
    UnreadableBody: ErrorStatus(400, "invalid_request_error", "invalid_request"),
    UnknownRoute: ErrorStatus(404, "invalid_request_error", "unknown_route"),
    MethodNotAllowed: ErrorStatus(405, "invalid_request_error", "method_not_allowed"),
    BodyTooLarge: ErrorStatus(413, "invalid_request_error", "body_too_large"),
}
BUSY_ENGINE = ErrorStatus(503, "server_error", "engine_unavailable")
REJECTED_BY_ENGINE = ErrorStatus(400, "invalid_request_error", "rejected_by_engine")
INTERNAL = ErrorStatus(500, "server_error", "internal_error")
STATUSES = {problem.code: problem.status for problem in (*PROBLEMS.values(), REJECTED_BY_ENGINE)}
BY_STATUS = {
    401: "authentication",
    403: "permission",
    404: "not_found",
    429: "rate_limit",
    503: "overloaded",
}
"""The types of Anthropic's errors; others are by their hundred."""


def problem_of(error: BaseException) -> ErrorStatus:
    """Return the entry of the error's nearest class.

    An engine that has too much to do asks for patience; its other 4xx are the client's to mend. A
    failed agent answers as its cause does, so that a timeout or a refused parameter is not hidden
    behind the tree.
    """
    if isinstance(error, errors.EngineRejected) and error.status in (429, 503):
        return BUSY_ENGINE
    if isinstance(error, errors.EngineRejected) and 400 <= error.status < 500:
        return REJECTED_BY_ENGINE
    if isinstance(error, errors.AgentFailed) and isinstance(
        error.__cause__, errors.ShellRouterError
    ):
        return problem_of(error.__cause__)
    listed = (PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)
    return next(listed, INTERNAL)


def is_retryable(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later.

    An engine is away, or has too much to do.
    """
    if isinstance(error, errors.AgentFailed) and error.__cause__ is not None:
        return is_retryable(error.__cause__)
    waits = (errors.EngineUnreachable, errors.WeightsLost, errors.Overloaded)
    return isinstance(error, waits) or problem_of(error).code == BUSY_ENGINE.code


class ErrorBody(TypedDict):
    """The fields of an error. The OpenAPI document gets them from here.

    OpenAI's shape has all of them, Anthropic's and failed responses the `list_shared_fields`.
    """

    message: str
    type: str
    param: str | None
    code: str


OPENAI_FIELDS = frozenset({"type", "param", "code"})
"""Fields that only OpenAI's shape has, or in which others differ from it."""


def problem_body(error: BaseException, request_id: str) -> NewValues:
    """Return the error envelope in OpenAI's shape.

    An unexpected error gives away nothing but the request's id.
    """
    problem = problem_of(error)
    param = problem.param
    if isinstance(error, errors.InvalidField):
        param = error.field[:200]
    body = ErrorBody(
        message=_message(error, problem, request_id),
        type=problem.type,
        param=param,
        code=problem.code,
    )
    return {"error": body}


def list_shared_fields(error: Values) -> NewValues:
    """Return the fields of the envelope's `error` that every API's shape has."""
    return {name: field for name, field in error.items() if name not in OPENAI_FIELDS}


def stream_error(error: Exception, request_id: str) -> NewValues:
    """Return the envelope of an error that comes after the head was sent.

    An unexpected error is logged.
    """
    if problem_of(error) is INTERNAL:
        log.error("request %s failed while it was streamed", request_id, exc_info=error)
    return problem_body(error, request_id)


def anthropic_error(error: Values, status: int | None = None) -> NewValues:
    """Return the envelope's `error` in Anthropic's shape; by default its code gives the status."""
    status = status or STATUSES.get(str(error.get("code")), 500)
    kind = BY_STATUS.get(status, "api" if status >= 500 else "invalid_request") + "_error"
    if status == 413:
        kind = "request_too_large"
    return {**list_shared_fields(error), "type": kind}


def _message(error: BaseException, problem: ErrorStatus, request_id: str) -> str:
    if isinstance(error, CacheUnavailable):
        error = errors.ShellRouterError(
            "Redis is away, and the request needs it.", remedy="Try again when it is back."
        )
    if isinstance(error, errors.ShellRouterError):
        return str(error)
    if isinstance(error, BodyTooLarge):
        return "The body is over this server's limit. Send less, or raise max_body_bytes."
    if isinstance(error, UnreadableBody):
        return "The body is not framed or encoded as its headers say."
    if isinstance(error, MethodNotAllowed):
        return f"{error.method} is not allowed here. Allowed: {allowed_methods(error)}."
    if isinstance(error, UnknownRoute):
        return (
            "There is no such route; base URLs end with one /v1, Anthropic's with none. "
            "docs/reference/api.md lists all. Files and batches need a batches.folder."
        )
    return (
        "Something went wrong inside the router; its log has the details under request "
        f"{request_id}."
    )


UNFIT_FOR_HEADER = re.compile(r"[^\w./-]", re.ASCII)
NAMED_IGNORED = 16
NAMED_CHOICES = 16
NO_HEADERS: Mapping[str, str] = {}


def cors_headers(request: Request) -> dict[str, str]:
    """Return the headers by which a page of an origin of the settings' `cors` reads the reply."""
    origin = request.headers.get("origin")
    if origin is None or {origin, "*"}.isdisjoint(request.app[SETTINGS].cors):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": "*",
        "Vary": "Origin",
    }


def preflight_reply(request: Request) -> Response:
    """Return the permission that a browser asks for before a page's request; it sends no key."""
    allowed = {
        "Access-Control-Allow-Methods": "*",
        "Access-Control-Allow-Headers": "*, Authorization",  # which * does not include
        "Access-Control-Max-Age": "600",
    }
    return whole_reply(request, b"", 204, headers=allowed)


def common_headers(request: Request) -> dict[str, str]:
    """Return the headers of every reply.

    x-request-id, which Anthropic calls request-id, is always there. The others say what is known by
    then: x-trace-id of the run, x-model-choice and x-steps of what was chosen for it, x-fan-out of
    its turn, x-shell-router-engine of the engines that answer and why, x-ignored-fields of the
    body. A server that is about to stop closes the connection.
    """
    headers = {
        "Server": "shell-router",
        "x-request-id": request[REQUEST_ID],
        "request-id": request[REQUEST_ID],
        **cors_headers(request),
    }
    if request.app.leaving.is_set():
        headers["Connection"] = "close"  # one that is kept would break when the listener closes
    placed = request[PLACED]() if PLACED in request else ()
    if TRACE in request:
        trace = request[TRACE]
        headers["x-trace-id"] = trace.id
        placed = trace.list_placements()
        if trace.choices:
            headers["x-model-choice"] = "; ".join(
                map(_format_choice, trace.choices[:NAMED_CHOICES])
            )
        if trace.steps:
            headers["x-steps"] = "; ".join(
                [f"{step.step}: {step.after} {step.rule}" for step in trace.steps[:NAMED_CHOICES]]
            )
        if any(agent.state == "kept" for agent in trace.agents.values()):
            headers["x-fan-out"] = "kept"
    if placed:
        headers["x-shell-router-engine"] = "; ".join(
            [f"{choice.engine} ({choice.policy}: {choice.why})" for choice in placed]
        )
    if IGNORED in request:
        ignored = request[IGNORED]
        headers["x-ignored-fields"] = ", ".join(ignored)
    return headers


def note_ignored(request: Request, names: Sequence[str]) -> dict[str, list[str]]:
    """Have a header name the body's fields without effect; return `warnings` for the reply."""
    before = request.get(IGNORED, ())  # of the body that this one was translated from
    if not names and not before:
        return {}
    own = request.get(OWN_NAMES, {})
    fit = [UNFIT_FOR_HEADER.sub("?", own.get(name, name)[:64]) for name in names[:NAMED_IGNORED]]
    request[IGNORED] = list(dict.fromkeys((*before, *fit)))[:NAMED_IGNORED]
    return {
        "warnings": [f"{name} was ignored: it has no effect here." for name in request[IGNORED]]
    }


def join_warnings(*bodies: Values) -> dict[str, list[str]]:
    """Return the `warnings` of all these bodies together, each once."""
    warnings = dict.fromkeys(text for body in bodies for text in body.get("warnings", ()))
    return {"warnings": list(warnings)} if warnings else {}


def json_reply(
    request: Request, body: Any, *, status: int = 200, headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """Return `body` as JSON with the common headers."""
    return whole_reply(
        request, write_json(body, orjson.OPT_SERIALIZE_NUMPY), status, headers=headers
    )


def whole_reply(
    request: Request,
    body: bytes,
    status: int,
    kind: str = "application/json",
    headers: Mapping[str, str] = NO_HEADERS,
) -> Response:
    """Return `body` with the common headers."""
    return Response(status, {"Content-Type": kind, **common_headers(request), **headers}, body)


def problem_reply(request: Request, error: BaseException, status: int, **headers: str) -> Response:
    """Return the error in the shape of the route's API."""
    body = problem_body(error, request[REQUEST_ID])
    if request.path.startswith("/v1/messages"):
        body = {
            "type": "error",
            "error": anthropic_error(body["error"], status),
            "request_id": request[REQUEST_ID],
        }
    return json_reply(request, body, status=status, headers=headers)


def _format_choice(choice: ModelChosen) -> str:
    """Return, say, `root=large, chimera: better`; the first agent stands for all that share it."""
    agent, model = (
        UNFIT_FOR_HEADER.sub("?", name[:64]) for name in (choice.agents[0], choice.model)
    )
    return f"{agent}={model}, {choice.policy}: {choice.why}"
