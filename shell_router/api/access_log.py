"""The line that the access log gets for each request."""

from typing import Any

from shell_router.api.services import MODELS_ASKED, REQUEST_ID, TENANT, TOKENS, TRACE
from shell_router.http.app import Request


def format_line(request: Request, status: int, started_s: float, took_s: float) -> dict[str, Any]:
    """Return the facts of an answered request; `started_s` is Unix time."""
    trace = request.get(TRACE)
    prompt_tokens, output_tokens = trace.usage if trace else request.get(TOKENS, (0, 0))
    return {
        "at_s": round(started_s, 6),
        "request_id": request[REQUEST_ID],
        "tenant": request.get(TENANT),
        "method": request.method,
        "route": request.route,
        "model": request.get(MODELS_ASKED),
        "status": status,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "took_s": round(took_s, 6),
        "first_token_s": trace.first_token_s if trace else None,
        "trace_id": trace.id if trace else None,
    }
