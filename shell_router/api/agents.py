"""/v1/agent: single agents of programs that an external framework runs, and their outputs."""

import asyncio
import codecs
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from shell_router.api.admission import ADMISSION
from shell_router.api.conversation import holds_marker
from shell_router.api.drain import DRAIN
from shell_router.api.fields import (
    SAMPLING,
    Fields,
    as_object,
    parse_body,
    read_body,
    read_sampling,
    read_template_kwargs,
    refused,
    shown,
)
from shell_router.api.frames import AgentFrames
from shell_router.api.keys import permit
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.runs import KEPT_RUNS, KEY_HEADER, Run, key_of, refuse_key
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TRACE, ApiSettings
from shell_router.api.streaming import respond
from shell_router.errors import InvalidRequest
from shell_router.http.app import BodyTooLarge, Reply, Request, Response
from shell_router.moa.expectations import AGENT_REQUEST
from shell_router.moa.requests import AgentRequest, OutputOf, Segment
from shell_router.topology import AUTO, Prefill

IDENTIFIER = re.compile(r"[\w.:@-]{1,128}", re.ASCII)
DEFAULT_WAIT_S = 60.0


def read_agent_body(body: Fields, tenant: str, max_timeout_s: float) -> tuple[AgentRequest, bool]:
    """The request, and whether its tokens shall be streamed. Raises InvalidField for what is
    missing or wrong.
    """
    timeout_s = body.number("timeout_s", 0.001, max_timeout_s) or max_timeout_s
    wait_s = body.number("wait_s", 0.0, max_timeout_s)
    prompt = _prompt(body)
    messages = _messages(body)
    if bool(prompt) == bool(messages):
        raise body.refuse(
            "prompt", "or messages must be set, and not both", "Send exactly one of them."
        )
    template_kwargs = read_template_kwargs(body)
    if prompt and template_kwargs:
        raise body.refuse(
            "chat_template_kwargs",
            "has no effect on a raw prompt",
            "Send messages, or leave it out.",
        )
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
        prefill=read_prefill(body.object("prefill")),
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
        if value:
            return (_unmarked(value, body.path("prompt")),)
        return ()
    return _segments(body.listed("prompt") or [], body.path("prompt"))


def _segments(listed: list[Any], path: str) -> tuple[Segment, ...]:
    return tuple(_segment(one, f"{path}[{at}]") for at, one in enumerate(listed))


def _segment(value: Any, path: str) -> Segment:
    if isinstance(value, str):
        return _unmarked(value, path)
    segment = as_object(value, path)
    text = segment.text("text")
    if (segment.raw("output_of") is None) == (text is None):
        raise refused(path, "must hold either text or output_of")
    if text is None:
        return OutputOf(identifier(segment, "output_of"))
    return _unmarked(text, path)


def _unmarked(text: str, path: str) -> str:
    if holds_marker(text):
        remedy = 'Agent requests name it: send {"output_of": "<what stands behind the colon>"}.'
        raise refused(path, "holds a lazy answer's marker", remedy)
    return text


def _messages(body: Fields) -> tuple[tuple[str, tuple[Segment, ...]], ...]:
    return tuple([_message(one) for one in body.objects("messages")])


def _message(message: Fields) -> tuple[str, tuple[Segment, ...]]:
    role = message.required_text("role")
    content = message.raw("content")
    if role not in ("system", "user", "assistant"):
        raise message.refuse("role", f"must be one of system, user, assistant, not {role!r}")
    if isinstance(content, str):
        return role, (_unmarked(content, message.path("content")),)
    if not isinstance(content, list):
        raise message.refuse(
            "content", f"must be a string or an array of segments, not {shown(content)}"
        )
    return role, _segments(content, message.path("content"))


def _sampling(body: Fields) -> Mapping[str, Any]:
    """Either SGLang's own `sampling_params`, sent unread, or OpenAI's fields."""
    named = read_sampling(body)
    native = body.object("sampling_params")
    if native is None:
        return named
    if named:
        raise body.refuse(
            "sampling_params", f"cannot go with {next(iter(named))}", "Send only one kind."
        )
    params: Mapping[str, Any] = body.raw("sampling_params")
    return params


def read_prefill(body: Fields | None) -> Prefill:
    """When the prompt is prefilled while it grows. Raises InvalidField."""
    if body is None:
        return Prefill()
    incremental = body.raw("incremental") is None or body.flag("incremental")
    chunk = body.raw("chunk_tokens")
    if chunk is not None and chunk != "adaptive":
        chunk = body.integer("chunk_tokens", 1, 2**20)
    if body.unread:
        raise body.refuse(body.unread[0], "is unknown", "Known are incremental and chunk_tokens.")
    return Prefill(incremental, "adaptive" if chunk is None else chunk)


async def run_agent(request: Request) -> Reply:
    """POST: run one agent to its end."""
    body = parse_body(await read_body(request))
    asked, streamed = read_agent_body(
        body, request[TENANT], request.app[SETTINGS].request_timeout_s
    )
    permit(request, asked.candidates or (asked.model,))
    graph = request.app[SERVICES].topologies.get(asked.model)
    if graph is not None:
        _require_chat(body, asked)
        refuse_key(request, "a topology as an agent")
    services = request.app[SERVICES]
    kept = request.app[KEPT_RUNS]
    run = Run(services, request.app[DRAIN], services.new_id(), asked, graph, AGENT_REQUEST)
    request.app[ADMISSION].count(request, run.agents - 1)
    if KEY_HEADER in request.headers:
        run = kept.join(run, key_of(request), body)
    request[TRACE] = run.trace
    warnings = note_ignored(request, body.unread)
    return await respond(
        request, run.answer, AgentFrames(run, asked), stream=streamed, warnings=warnings
    )


def _require_chat(body: Fields, asked: AgentRequest) -> None:
    """Raise InvalidField for what a topology cannot be asked."""
    for name in ("prompt", "prefill"):
        if body.raw(name) is not None:
            raise body.refuse(
                name,
                "is for models",
                f"{asked.model!r} is a topology: send messages, without {name}.",
            )
    if asked.messages[-1][0] != "user":
        remedy = f"{asked.model!r} is a topology: put the question last."
        raise body.refuse("messages", "must end with a user's", remedy)


async def show_program(request: Request) -> Response:
    """GET: the program's agents, their states and outputs so far."""
    found = request.app[SERVICES].programs.state(request[TENANT], request.match["program"])
    agents = {
        name: {"state": how, "output": found.outputs.get(name, "")}
        for name, how in found.agents.items()
    }
    return json_reply(
        request, {"object": "agent.program", "program": found.program, "agents": agents}
    )


async def cancel_program(request: Request) -> Response:
    """DELETE: end the program's running agents and forget it."""
    program = request.match["program"]
    await request.app[SERVICES].programs.cancel(request[TENANT], program)
    return json_reply(request, {"object": "agent.program", "program": program, "deleted": True})


async def write_output(request: Request) -> Response:
    """Take the body as the output of an agent that runs elsewhere.

    Other agents read it as it comes.
    """
    program, agent = (identifier(Fields(request.match), name) for name in ("program", "agent"))
    asked = AgentRequest(request[TENANT], program, agent, "")
    settings = request.app[SETTINGS]
    programs = request.app[SERVICES].programs
    wrote = partial(programs.count_written, asked.tenant, program)
    with request.app[DRAIN].deadline():
        answer = await programs.write(asked, _texts(request, settings, wrote))
    body = {
        "object": "agent.output",
        "program": program,
        "agent": agent,
        "state": "finished",
        "text": answer.text,
    }
    return json_reply(request, body, status=201)


async def _texts(
    request: Request, settings: ApiSettings, wrote: Callable[[int], Awaitable[None]]
) -> AsyncIterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    received = 0
    try:
        async with asyncio.timeout(settings.request_timeout_s):
            async for piece in request.pieces():
                received += len(piece)
                if received > settings.max_body_bytes:
                    raise BodyTooLarge(settings.max_body_bytes, received)
                await wrote(len(piece))
                yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The body is not UTF-8: {error}.", remedy="Send the output as plain text."
        ) from None
    except TimeoutError:
        limit = f"{settings.request_timeout_s:g} s"
        raise InvalidRequest(
            f"The output did not end within {limit}.", remedy="Send it in less time."
        ) from None
