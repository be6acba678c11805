"""Errors as HTTP answers in OpenAI's shape, by one table."""

import logging
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from shell_router.errors import (
    AdapterFailed,
    AdapterMissing,
    AgentFailed,
    BatchEnded,
    BatchesOff,
    DeadlineExceeded,
    DuplicateAgent,
    EngineError,
    EngineRejected,
    EngineStalled,
    EngineUnavailable,
    EngineUnreachable,
    ExpertError,
    FileTooLarge,
    InvalidField,
    InvalidRequest,
    Overloaded,
    PrecursorTimeout,
    PromptTooLong,
    RemoteRefused,
    RouterStopping,
    ShellRouterError,
    StorageFailed,
    Unauthorized,
    UnknownBatch,
    UnknownExpert,
    UnknownFile,
    UnknownModel,
    UnknownProgram,
    UnknownTrace,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """How an error looks to a client."""

    status: int
    type: str
    code: str
    param: str | None = None


PROBLEMS: dict[type[BaseException], Problem] = {
    InvalidRequest: Problem(400, "invalid_request_error", "invalid_request"),
    InvalidField: Problem(400, "invalid_request_error", "invalid_field"),
    UnknownModel: Problem(404, "invalid_request_error", "model_not_found", "model"),
    UnknownExpert: Problem(404, "invalid_request_error", "unknown_expert"),
    PromptTooLong: Problem(400, "invalid_request_error", "context_length_exceeded"),
    DuplicateAgent: Problem(409, "invalid_request_error", "duplicate_agent"),
    UnknownProgram: Problem(404, "invalid_request_error", "unknown_program"),
    UnknownTrace: Problem(404, "invalid_request_error", "unknown_trace"),
    UnknownFile: Problem(404, "invalid_request_error", "unknown_file"),
    UnknownBatch: Problem(404, "invalid_request_error", "unknown_batch"),
    BatchesOff: Problem(404, "invalid_request_error", "batches_off"),
    BatchEnded: Problem(409, "invalid_request_error", "batch_ended"),
    FileTooLarge: Problem(413, "invalid_request_error", "file_too_large"),
    Unauthorized: Problem(401, "authentication_error", "invalid_api_key"),
    RemoteRefused: Problem(403, "permission_error", "loopback_only"),
    Overloaded: Problem(429, "rate_limit_error", "too_many_requests"),
    EngineError: Problem(502, "server_error", "engine_error"),
    AdapterFailed: Problem(502, "server_error", "adapter_failed"),
    EngineUnavailable: Problem(503, "server_error", "engine_unavailable"),
    EngineStalled: Problem(504, "server_error", "engine_stalled"),
    ExpertError: Problem(502, "server_error", "expert_failed"),
    AgentFailed: Problem(502, "server_error", "agent_failed"),
    PrecursorTimeout: Problem(504, "server_error", "precursor_timeout"),
    DeadlineExceeded: Problem(504, "server_error", "deadline_exceeded"),
    StorageFailed: Problem(507, "server_error", "storage_failed"),
    RouterStopping: Problem(503, "server_error", "router_stopping"),
    web.HTTPNotFound: Problem(404, "invalid_request_error", "unknown_route"),
    web.HTTPMethodNotAllowed: Problem(405, "invalid_request_error", "method_not_allowed"),
    web.HTTPRequestEntityTooLarge: Problem(413, "invalid_request_error", "body_too_large"),
}
BUSY_ENGINE = Problem(503, "server_error", "engine_unavailable")
REJECTED_BY_ENGINE = Problem(400, "invalid_request_error", "rejected_by_engine")
INTERNAL = Problem(500, "server_error", "internal_error")


def problem_of(error: BaseException) -> Problem:
    """The entry of the error's nearest class.

    An engine that has too much to do asks for patience; its other 4xx are the client's to mend. A failed agent answers
    as its cause does, so that a timeout or a refused parameter is not hidden behind the tree.
    """
    if isinstance(error, EngineRejected) and error.status in (429, 503):
        return BUSY_ENGINE
    if isinstance(error, EngineRejected) and 400 <= error.status < 500:
        return REJECTED_BY_ENGINE
    if isinstance(error, AgentFailed) and isinstance(error.__cause__, ShellRouterError):
        return problem_of(error.__cause__)
    listed = (PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)
    return next(listed, INTERNAL)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a little later, an engine being away or having too much to do."""
    if isinstance(error, AgentFailed) and error.__cause__ is not None:
        return is_passing(error.__cause__)
    return isinstance(error, EngineUnreachable | AdapterMissing) or problem_of(error).code == BUSY_ENGINE.code


def problem_body(error: BaseException, request_id: str) -> dict[str, Any]:
    """The error envelope. An unexpected error gives away nothing but the request's id."""
    problem = problem_of(error)
    return {
        "error": {
            "message": _message(error, problem, request_id),
            "type": problem.type,
            "param": error.field if isinstance(error, InvalidField) else problem.param,
            "code": problem.code,
        }
    }


def told_in_stream(error: Exception, request_id: str) -> dict[str, Any]:
    """The envelope of an error that comes after the head has gone; an unexpected one is logged here."""
    if problem_of(error) is INTERNAL:
        log.error("request %s failed while it was streamed", request_id, exc_info=error)
    return problem_body(error, request_id)


def _message(error: BaseException, problem: Problem, request_id: str) -> str:
    if isinstance(error, ShellRouterError):
        return str(error)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return "The body is over this server's limit. Send less, or raise max_body_bytes."
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{error.method} is not allowed here. Allowed: {', '.join(sorted(error.allowed_methods))}."
    if isinstance(error, web.HTTPNotFound):
        return "There is no such route. docs/api.md lists them all."
    return f"Something went wrong inside the router; its log has the details under request {request_id}."
