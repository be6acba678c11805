"""/v1/agent: single agents of programs that an external framework runs, and their outputs."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, NotRequired, Required

from annotated_types import Ge
from typing_extensions import TypedDict

from shell_router.api.admission import ADMISSION, permit
from shell_router.api.bodies import (
    check_identifier,
    check_template_kwargs,
    read_models,
    read_object,
    read_sampling,
)
from shell_router.api.conversation import holds_marker
from shell_router.api.fields import (
    Identifier,
    Names,
    OpenAISampling,
    PrefillField,
)
from shell_router.api.frames import AgentFrames
from shell_router.api.replies import join_warnings, json_reply, note_ignored
from shell_router.api.runs import KEPT_RUNS, KEY_HEADER, Run, read_key, require_no_key
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TRACE, ApiSettings
from shell_router.api.sessions import read_session
from shell_router.api.streaming import stream_run
from shell_router.config import UsageCount
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.validation import (
    Array,
    JsonObject,
    field_error,
)
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import InvalidRequest, SettingError
from shell_router.http.app import BodyTooLarge, Reply, Request, Response
from shell_router.moa.deadline import Deadline
from shell_router.moa.expectations import AGENT_REQUEST
from shell_router.moa.requests import AgentRequest, OutputOf, Segment
from shell_router.topology import AUTO, Prefill
from shell_router.topology.assemble import build_early_exit
from shell_router.topology.keys import EARLY_EXIT

DEFAULT_WAIT_S = 60.0


class SegmentFields(TypedDict):
    """A part of a prompt: a text, or another agent's output."""

    text: NotRequired[str | None]
    output_of: NotRequired[Identifier | None]


Segments = str | Array[str | SegmentFields]


class AgentMessage(TypedDict):
    """A message of an agent's chat."""

    role: Literal["system", "user", "assistant"]
    content: Segments


class AgentBody(OpenAISampling, total=False):
    """A request of one agent."""

    program: Required[Identifier]
    agent: Required[Identifier]
    model: Required[Names]
    prompt: Segments
    messages: Array[AgentMessage]
    chat_template_kwargs: NewValues
    sampling_params: NewValues
    stream: bool
    usage: UsageCount
    wait_s: Annotated[float, Ge(0)]
    timeout_s: Annotated[float, Ge(0.001)]
    on_precursor_failure: Literal["fail", "drop"]
    early_exit: EARLY_EXIT
    confidence: bool
    prefill: PrefillField


AGENT = JsonObject(AgentBody)
FOR_TOPOLOGIES = {
    "ask_first",
    "max_changed_percent",
    "scope",
    "skip_aggregation",
    "straggler_factor",
}
"""Settings of early exit that agent requests refuse."""


def read_agent(body: AgentBody, tenant: str, max_timeout_s: float) -> AgentRequest:
    """Return the request of a validated body; raises InvalidField."""
    timeout_s = body.get("timeout_s", max_timeout_s)
    wait_s = body.get("wait_s", min(DEFAULT_WAIT_S, timeout_s))
    for name, limit_s in (("timeout_s", timeout_s), ("wait_s", wait_s)):
        if limit_s > max_timeout_s:
            raise field_error(name, f"must be at most {max_timeout_s:g}")
    prompt = read_segments(body.get("prompt") or (), "prompt")
    messages = body.get("messages") or []
    if bool(prompt) == bool(messages):
        what = "or messages must be set, and not both"
        raise field_error("prompt", what, "Send exactly one of them.")
    template_kwargs = body.get("chat_template_kwargs", {})
    check_template_kwargs(template_kwargs)
    if prompt and template_kwargs:
        what = "has no effect on a raw prompt"
        raise field_error("chat_template_kwargs", what, "Send messages, or leave it out.")
    models = read_models(body)
    early_exit = _read_early_exit(body)
    return AgentRequest(
        tenant=tenant,
        program=body["program"],
        agent=body["agent"],
        model=models[0] if len(models) == 1 else AUTO,
        candidates=models if len(models) > 1 else (),
        prompt=prompt,
        messages=tuple(
            [
                (message["role"], read_segments(message["content"], f"messages[{at}].content"))
                for at, message in enumerate(messages)
            ]
        ),
        sampling=_read_sampling(body),
        prefill=Prefill(**body.get("prefill", {})),
        wait_s=wait_s,
        timeout_s=timeout_s,
        drops_failed=body.get("on_precursor_failure") == "drop",
        early_exit=early_exit,
        confidence=body.get("confidence", False),
        chat_template_kwargs=template_kwargs,
    )


def _read_early_exit(body: AgentBody) -> EarlyExit | None:
    value = body.get("early_exit", False)
    if isinstance(value, Mapping):
        for name in sorted(FOR_TOPOLOGIES & value.keys()):
            raise field_error(f"early_exit.{name}", "is for topologies", "Leave it out.")
    try:
        return build_early_exit(value)
    except SettingError as error:
        raise field_error("early_exit", f"is wrong: {error}", error.remedy) from error


def read_segments(segments: Segments | tuple[()], path: str) -> tuple[Segment, ...]:
    """Return validated segments, of which a text may be the only one; raises InvalidField."""
    if isinstance(segments, str):
        return (_require_unmarked(segments, path),)
    return tuple([_read_segment(segment, f"{path}[{at}]") for at, segment in enumerate(segments)])


def _read_segment(segment: str | SegmentFields, path: str) -> Segment:
    if isinstance(segment, str):
        return _require_unmarked(segment, path)
    text = segment.get("text")
    agent = segment.get("output_of")
    if (agent is None) == (text is None):
        raise field_error(path, "must hold either text or output_of")
    if text is None:
        return OutputOf(str(agent))
    return _require_unmarked(text, path)


def _require_unmarked(text: str, path: str) -> str:
    if holds_marker(text):
        remedy = 'Agent requests name it: send {"output_of": "<what stands behind the colon>"}.'
        raise field_error(path, "holds a lazy answer's marker", remedy)
    return text


def _read_sampling(body: AgentBody) -> Values:
    """Return either SGLang's own `sampling_params`, or OpenAI's fields."""
    sampling = read_sampling(body)
    native = body.get("sampling_params")
    if native is None:
        return sampling
    if sampling:
        what = f"cannot go with {next(iter(sampling))}"
        raise field_error("sampling_params", what, "Send only one kind.")
    return native


async def run_agent(request: Request) -> Reply:
    """Run one agent to its end."""
    sent = await read_object(request)
    body = AGENT.read(sent)
    agent_request = read_agent(body, request[TENANT], request.app[SETTINGS].request_timeout_s)
    agent_request = replace(agent_request, session=read_session(request.headers))
    ignored = AGENT.find_unknown(sent)
    permit(request, agent_request.candidates or (agent_request.model,))
    services = request.app[SERVICES]
    graph = services.topologies.get(agent_request.model)
    if graph is not None:
        _require_chat(body, agent_request)
        require_no_key(request, "a topology as an agent")
    kept = request.app[KEPT_RUNS]
    run = Run(services, services.new_id(), agent_request, graph, AGENT_REQUEST)
    request.app[ADMISSION].count(request, run.agents - 1)
    if KEY_HEADER in request.headers:
        run = kept.join(run, read_key(request), sent)
    request[TRACE] = run.trace
    warnings = note_ignored(request, ignored)
    frames = AgentFrames(run, agent_request, body.get("usage", request.app[SETTINGS].usage))
    if body.get("stream"):
        return await stream_run(request, run.answer, frames, run.require_lease)
    answer = frames.whole(await run.answer())
    return json_reply(request, {**answer, **join_warnings(warnings, answer)})


def _require_chat(body: AgentBody, agent_request: AgentRequest) -> None:
    """Raise InvalidField for a request that a topology cannot answer."""
    kind = f"{agent_request.model!r} is a topology:"
    for name in ("prompt", "prefill", "early_exit"):
        if name in body:
            remedy = f"{kind} send messages, without {name}."
            raise field_error(name, "is for models", remedy)
    if agent_request.messages[-1][0] != "user":
        raise field_error("messages", "must end with a user's", f"{kind} put the question last.")


async def show_program(request: Request) -> Response:
    """Show the program's agents, their states and outputs so far."""
    state = request.app[SERVICES].programs.state(request[TENANT], request.match["program"])
    agents = {
        name: {"state": of_agent, "output": state.outputs[name]}
        for name, of_agent in state.agents.items()
    }
    return json_reply(
        request, {"object": "agent.program", "program": state.program, "agents": agents}
    )


async def cancel_program(request: Request) -> Response:
    """End the program's running agents and forget it."""
    program = request.match["program"]
    await request.app[SERVICES].programs.cancel(request[TENANT], program)
    return json_reply(request, {"object": "agent.program", "program": program, "deleted": True})


async def write_output(request: Request) -> Response:
    """Take the body as the output of an agent that runs elsewhere.

    Other agents read it as it comes.
    """
    program = request.match["program"]
    agent = request.match["agent"]
    check_identifier(program, "program")
    check_identifier(agent, "agent")
    agent_request = AgentRequest(request[TENANT], program, agent, "")
    programs = request.app[SERVICES].programs
    wrote = partial(programs.count_written, agent_request.tenant, program)
    with Deadline(None, request.app[SERVICES].deadlines):
        texts = _decode(request, request.app[SETTINGS], wrote)
        answer = await programs.write(agent_request, texts)
    body = {
        "object": "agent.output",
        "program": program,
        "agent": agent,
        "state": "finished",
        "text": answer.text,
    }
    return json_reply(request, body, status=201)


async def _decode(
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
        raise InvalidRequest(
            f"The output did not end within {settings.request_timeout_s:g} s.",
            remedy="Send it in less time.",
        ) from None
