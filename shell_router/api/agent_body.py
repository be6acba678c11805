"""Reading the body of an agent request."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shell_router.api.fields import Fields, as_object, shown
from shell_router.api.sampling import read_sampling
from shell_router.errors import InvalidField
from shell_router.execution import AgentRequest, OutputOf, Segment
from shell_router.scheduling import IncrementSettings
from shell_router.topology import AUTO, Prefill

IDENTIFIER = re.compile(r"[\w.:@-]{1,128}", re.ASCII)
DEFAULT_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class AgentBody:
    """An agent request as asked, and whether its tokens shall be streamed."""

    request: AgentRequest
    stream: bool


def read_agent_body(body: Fields, tenant: str, max_timeout_s: float) -> AgentBody:
    """Raises InvalidField for what is missing or wrong."""
    timeout_s = body.number("timeout_s", 0.001, max_timeout_s) or max_timeout_s
    wait_s = body.number("wait_s", 0.0, max_timeout_s)
    prompt, messages = _prompt(body), _messages(body)
    if bool(prompt) == bool(messages):
        raise body.refuse("prompt", "or messages must be set, and not both", "Send exactly one of them.")
    models = body.names("model")
    request = AgentRequest(
        tenant=tenant,
        program=identifier(body, "program"),
        agent=identifier(body, "agent"),
        model=models[0] if len(models) == 1 else AUTO,
        candidates=models if len(models) > 1 else (),
        prompt=prompt,
        messages=messages,
        sampling=_sampling(body),
        prefill=_prefill(body.object("prefill")),
        wait_s=min(DEFAULT_WAIT_S, timeout_s) if wait_s is None else wait_s,
        timeout_s=timeout_s,
    )
    return AgentBody(request, body.flag("stream"))


def identifier(body: Fields, name: str) -> str:
    """A program's or agent's id, fit for URLs and cache keys."""
    value = body.required_text(name)
    if not IDENTIFIER.fullmatch(value):
        raise body.refuse(name, "may hold 1 to 128 letters, digits and any of _ . : @ -")
    return value


def _prompt(body: Fields) -> tuple[Segment, ...]:
    value = body.raw("prompt")
    if isinstance(value, str):
        return (value,) if value else ()
    return _segments(body.listed("prompt") or [], body.path("prompt"))


def _segments(listed: list[Any], path: str) -> tuple[Segment, ...]:
    return tuple(_segment(one, f"{path}[{at}]") for at, one in enumerate(listed))


def _segment(value: Any, path: str) -> Segment:
    if isinstance(value, str):
        return value
    segment = as_object(value, path)
    text = segment.text("text")
    if (segment.raw("output_of") is None) == (text is None):
        raise InvalidField(f"{path} must hold either text or output_of.", field=path)
    return OutputOf(identifier(segment, "output_of")) if text is None else text


def _messages(body: Fields) -> tuple[tuple[str, tuple[Segment, ...]], ...]:
    listed = body.listed("messages") or []
    return tuple(_message(as_object(one, f"messages[{at}]")) for at, one in enumerate(listed))


def _message(message: Fields) -> tuple[str, tuple[Segment, ...]]:
    role, content = message.required_text("role"), message.raw("content")
    if role not in ("system", "user", "assistant"):
        raise message.refuse("role", f"must be one of system, user, assistant, not {role!r}")
    if isinstance(content, str):
        return role, (content,)
    if not isinstance(content, list):
        raise message.refuse("content", f"must be a string or an array of segments, not {shown(content)}")
    return role, _segments(content, message.path("content"))


def _sampling(body: Fields) -> Mapping[str, Any]:
    """Either SGLang's own `sampling_params`, passed on unread, or OpenAI's fields."""
    named, native = read_sampling(body), body.object("sampling_params")
    if native is None:
        return named
    if named:
        raise body.refuse("sampling_params", f"cannot go with {next(iter(named))}", "Send only one kind.")
    params: Mapping[str, Any] = body.raw("sampling_params")
    return params


def _prefill(body: Fields | None) -> Prefill:
    if body is None:
        return Prefill()
    incremental = body.raw("incremental") is None or body.flag("incremental")
    prefill = Prefill(incremental, _increments(body))
    if body.unread:
        raise body.refuse(body.unread[0], "is unknown", "Known are incremental and the chunk settings.")
    return prefill


def _increments(body: Fields) -> IncrementSettings:
    chunk = body.raw("chunk_tokens")
    given: dict[str, Any] = {
        "chunk_tokens": chunk if chunk == "adaptive" else body.integer("chunk_tokens", 1, 2**20),
        "min_tokens": body.integer("min_tokens", 1, 2**20),
        "max_tokens": body.integer("max_tokens", 1, 2**20),
        "busy_share": body.number("busy_share", 0.001, 1.0),
        "tail_share": body.number("tail_share", 0.0, 1.0),
    }
    try:
        return IncrementSettings(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise body.refuse("min_tokens", f"does not fit: {error}") from None
