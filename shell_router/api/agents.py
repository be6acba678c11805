"""/v1/agent/requests: single agents of programs that an external framework runs."""

import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from shell_router.api.admission import DRAIN
from shell_router.api.fields import (
    SAMPLING,
    Fields,
    as_object,
    parse_body,
    read_body,
    read_sampling,
    read_template_kwargs,
    shown,
)
from shell_router.api.frames import AgentFrames, agent_answer, program_reply
from shell_router.api.observed import Observed
from shell_router.api.plain import Reply, Request
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TRACE, Emit
from shell_router.api.streaming import LiveRun, stream_run
from shell_router.errors import InvalidField
from shell_router.moa import AGENT_REQUEST, AgentRequest, Answer, OutputOf, Segment
from shell_router.topology import AUTO, Prefill

IDENTIFIER = re.compile(r"[\w.:@-]{1,128}", re.ASCII)
DEFAULT_WAIT_S = 60.0


def read_agent_body(body: Fields, tenant: str, max_timeout_s: float) -> tuple[AgentRequest, bool]:
    """The request, and whether its tokens shall be streamed. Raises InvalidField for what is missing or wrong."""
    timeout_s = body.number("timeout_s", 0.001, max_timeout_s) or max_timeout_s
    wait_s = body.number("wait_s", 0.0, max_timeout_s)
    prompt, messages = _prompt(body), _messages(body)
    if bool(prompt) == bool(messages):
        raise body.refuse("prompt", "or messages must be set, and not both", "Send exactly one of them.")
    template_kwargs = read_template_kwargs(body)
    if prompt and template_kwargs:
        raise body.refuse("chat_template_kwargs", "has no effect on a raw prompt", "Send messages, or leave it out.")
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
        chat_template_kwargs=template_kwargs,
    )
    stream = body.flag("stream")
    body.check_spelling(SAMPLING)
    return request, stream


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
    """Either SGLang's own `sampling_params`, sent unread, or OpenAI's fields."""
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
    chunk = body.raw("chunk_tokens")
    if chunk is not None and chunk != "adaptive":
        chunk = body.integer("chunk_tokens", 1, 2**20)
    if body.unread:
        raise body.refuse(body.unread[0], "is unknown", "Known are incremental and chunk_tokens.")
    return Prefill(incremental, "adaptive" if chunk is None else chunk)


TARGET = AGENT_REQUEST
"""What traces and metrics call these runs: clients' own program names would make metrics without bound."""


async def run_agent(request: Request) -> Reply:
    """POST: run one agent to its end."""
    body = parse_body(await read_body(request))
    asked, streamed = read_agent_body(body, request[TENANT], request.app[SETTINGS].request_timeout_s)
    run = AgentRequestRun(request, asked, note_ignored(request, body.unread))
    return await (run.streamed() if streamed else run.whole())


async def show_program(request: web.Request) -> web.Response:
    """GET: the program's agents, their states and outputs so far."""
    programs = request.app[SERVICES].programs
    return json_reply(request, program_reply(programs.state(request[TENANT], request.match_info["program"])))


async def cancel_program(request: web.Request) -> web.Response:
    """DELETE: end the program's running agents and forget it."""
    program = request.match_info["program"]
    await request.app[SERVICES].programs.cancel(request[TENANT], program)
    return json_reply(request, {"object": "agent.program", "program": program, "deleted": True})


class AgentRequestRun:
    """One agent request under way."""

    def __init__(self, request: Request, asked: AgentRequest, warnings: Mapping[str, list[str]]) -> None:
        self._request = request
        self._warnings = warnings
        self._asked = asked
        services = request.app[SERVICES]
        self._seen = Observed(services, services.new_id(), asked.tenant, TARGET, {asked.agent}, {})
        self._seen.record(asked)
        request[TRACE] = self._seen.trace

    async def whole(self) -> web.Response:
        """The answer as one object."""
        answer = await self._run()
        body = agent_answer(self._seen.id, self._seen.created, self._asked, answer)
        return json_reply(self._request, {**body, **self._warnings})

    async def streamed(self) -> Reply:
        """The answer as typed events."""
        frames = AgentFrames(self._seen.id, self._seen.created, self._asked, self._seen.trace.started_s)
        async with LiveRun(self._run, frames.wants) as run:
            return await stream_run(self._request, run, frames)

    async def _run(self, also: Emit | None = None) -> Answer:
        self._seen.also = also
        programs = self._request.app[SERVICES].programs
        async with self._request.app[DRAIN].deadline():
            with self._seen:
                return await programs.run(self._asked, self._seen.emit)
