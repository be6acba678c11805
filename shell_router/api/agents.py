"""/v1/agent: single agents of programs that an external framework runs, and their outputs."""

import asyncio
import codecs
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from shell_router.api.admission import ADMISSION, DRAIN
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
from shell_router.api.kept_runs import KEY_HEADER, KeptRun, KeptRuns, key_of, refuse_key
from shell_router.api.keys import permit
from shell_router.api.observed import Observed
from shell_router.api.plain import Reply, Request
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TRACE, ApiSettings, Emit
from shell_router.api.streaming import LiveRun, stream_run
from shell_router.core.events import AgentTokens, Event, answer_in
from shell_router.errors import InvalidField, InvalidRequest
from shell_router.moa import AGENT_REQUEST, AgentRequest, AgentUsage, Answer, OutputOf, Segment
from shell_router.topology import AUTO, Graph, Prefill

WORD = "lazyanswer"
WORDS = (WORD, "LAZYANSWER", "Lazyanswer")
"""Stands in every marker of a lazy answer, and in no other prompt: where it is, a marker is, whole or altered."""
MARKER = re.compile(rf"\[\[{WORD}:([\w-]{{1,64}})\]\]", re.ASCII)
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


def marker_of(agent: str) -> str:
    """The text that stands for the agent's output. JSON, HTML and template languages leave all of it as it is."""
    return f"[[{WORD}:{agent}]]"


def split_text(text: str, path: str) -> tuple[Segment, ...]:
    """`text` with slots where markers stood. Raises InvalidField for altered markers."""
    if not holds_marker(text):
        return (text,)
    pieces = MARKER.split(text)
    if any(map(holds_marker, pieces[::2])):
        raise InvalidField(
            f"{path} holds a lazy answer's marker that was altered.",
            field=path,
            remedy="Send markers whole. Where code cuts or reads text, ask without lazy, or first get the text from"
            " GET /v1/agent/outputs/{marker}.",
        )
    return tuple(OutputOf(piece) if odd % 2 else piece for odd, piece in enumerate(pieces) if piece)


def holds_marker(text: str) -> bool:
    """Whether there is a marker in `text`, whole or altered."""
    return any(word in text for word in WORDS)


def _prompt(body: Fields) -> tuple[Segment, ...]:
    value = body.raw("prompt")
    if isinstance(value, str):
        return (_unmarked(value, body.path("prompt")),) if value else ()
    return _segments(body.listed("prompt") or [], body.path("prompt"))


def _segments(listed: list[Any], path: str) -> tuple[Segment, ...]:
    return tuple(_segment(one, f"{path}[{at}]") for at, one in enumerate(listed))


def _segment(value: Any, path: str) -> Segment:
    if isinstance(value, str):
        return _unmarked(value, path)
    segment = as_object(value, path)
    text = segment.text("text")
    if (segment.raw("output_of") is None) == (text is None):
        raise InvalidField(f"{path} must hold either text or output_of.", field=path)
    return OutputOf(identifier(segment, "output_of")) if text is None else _unmarked(text, path)


def _unmarked(text: str, path: str) -> str:
    if holds_marker(text):
        raise InvalidField(
            f"{path} holds a lazy answer's marker.",
            field=path,
            remedy='Agent requests name it: send {"output_of": "<what stands behind the colon>"}.',
        )
    return text


def _messages(body: Fields) -> tuple[tuple[str, tuple[Segment, ...]], ...]:
    listed = body.listed("messages") or []
    return tuple(_message(as_object(one, f"messages[{at}]")) for at, one in enumerate(listed))


def _message(message: Fields) -> tuple[str, tuple[Segment, ...]]:
    role, content = message.required_text("role"), message.raw("content")
    if role not in ("system", "user", "assistant"):
        raise message.refuse("role", f"must be one of system, user, assistant, not {role!r}")
    if isinstance(content, str):
        return role, (_unmarked(content, message.path("content")),)
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


TARGET = AGENT_REQUEST
"""What traces and metrics call these runs: clients' own program names would make metrics without bound."""


async def run_agent(request: Request) -> Reply:
    """POST: run one agent to its end."""
    body = parse_body(await read_body(request))
    asked, streamed = read_agent_body(body, request[TENANT], request.app[SETTINGS].request_timeout_s)
    permit(request, asked.candidates or (asked.model,))
    graph = request.app[SERVICES].topologies.get(asked.model)
    if graph is not None:
        _require_chat(body, asked)
        refuse_key(request, "a topology as an agent")
        request.app[ADMISSION].count(request, max(len(part.agents) for part in graph.parts) - 1)
    run = AgentRequestRun(request, asked, note_ignored(request, body.unread), graph)
    if KEY_HEADER in request.headers:
        run = request.app[KEPT_AGENTS].join(run, key_of(request), body)
    request[TRACE] = run.trace
    return await (run.streamed(request) if streamed else run.whole(request))


def _require_chat(body: Fields, asked: AgentRequest) -> None:
    """Raise InvalidField for what a topology cannot be asked."""
    for name in ("prompt", "prefill"):
        if body.raw(name) is not None:
            raise body.refuse(name, "is for models", f"{asked.model!r} is a topology: send messages, without {name}.")
    if asked.messages[-1][0] != "user":
        raise body.refuse(
            "messages", "must end with a user's", f"{asked.model!r} is a topology: put the question last."
        )


async def show_program(request: web.Request) -> web.Response:
    """GET: the program's agents, their states and outputs so far."""
    programs = request.app[SERVICES].programs
    return json_reply(request, program_reply(programs.state(request[TENANT], request.match_info["program"])))


async def cancel_program(request: web.Request) -> web.Response:
    """DELETE: end the program's running agents and forget it."""
    program = request.match_info["program"]
    await request.app[SERVICES].programs.cancel(request[TENANT], program)
    return json_reply(request, {"object": "agent.program", "program": program, "deleted": True})


async def write_output(request: web.Request) -> web.Response:
    """PUT: take the body as the output of an agent that runs elsewhere, for other agents to read as it comes."""
    program, agent = (identifier(Fields(request.match_info), name) for name in ("program", "agent"))
    asked = AgentRequest(request[TENANT], program, agent, "")
    settings = request.app[SETTINGS]
    programs = request.app[SERVICES].programs
    wrote = partial(programs.wrote, asked.tenant, program)
    with request.app[DRAIN].deadline():
        answer = await programs.write(asked, _texts(request, settings, wrote))
    body = {"object": "agent.output", "program": program, "agent": agent, "state": "finished", "text": answer.text}
    return json_reply(request, body, status=201)


async def _texts(request: web.Request, settings: ApiSettings, wrote: Callable[[int], None]) -> AsyncIterator[str]:
    decoder, received = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        async with asyncio.timeout(settings.request_timeout_s):
            async for piece in request.content.iter_any():
                received += len(piece)
                if received > settings.max_body_bytes:
                    raise web.HTTPRequestEntityTooLarge(settings.max_body_bytes, received)
                wrote(len(piece))
                yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8: {error}.", remedy="Send the output as plain text.") from None
    except TimeoutError:
        limit = f"{settings.request_timeout_s:g} s"
        raise InvalidRequest(f"The output did not end within {limit}.", remedy="Send it in less time.") from None


class AgentRequestRun:
    """One agent request under way; where `graph` is the agent, its answer's events get the agent's name."""

    def __init__(
        self, request: Request, asked: AgentRequest, warnings: Mapping[str, list[str]], graph: Graph | None = None
    ) -> None:
        self._request, self._graph = request, graph
        self.warnings = warnings
        self.asked = asked
        services = request.app[SERVICES]
        answering, waits_for = (graph.answering, graph.waits_for) if graph else ({asked.agent}, {})
        self._seen = Observed(services, services.new_id(), asked.tenant, TARGET, answering, waits_for)
        if graph is None:
            self._seen.record(asked)
        self.trace = self._seen.trace
        self.kept: KeptRun | None = None
        self.id, self.created = self._seen.id, self._seen.created

    async def begin(self, text: str) -> Answer:
        """`text` in place of the agent's answer. The agent runs on by itself; raises what is refused before that."""
        begun: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def mark(_: Event) -> None:
            if not begun.done():
                begun.set_result(None)

        task = self._request.app[ADMISSION].detach(self._request, self.run(self.asked, mark))
        try:
            await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # no client will know of it
            task.cancel()
            raise
        if task.done():
            task.result()
        return Answer(text, "stop", {self.asked.agent: AgentUsage(self.asked.model, 0, 0, 0, "finished")})

    async def whole(self, request: Request) -> web.Response:
        """The answer as one object."""
        answer = await self.answer()
        body = agent_answer(self._seen.id, self._seen.created, self.asked, answer)
        return json_reply(request, {**body, **self.warnings})

    async def streamed(self, request: Request) -> Reply:
        """The answer as typed events."""
        frames = AgentFrames(self._seen.id, self._seen.created, self.asked, self._seen.trace.started_s)
        async with LiveRun(self.answer, frames.wants) as run:
            return await stream_run(request, run, frames)

    async def answer(self, also: Emit | None = None) -> Answer:
        """Run; `also` gets the events. If the server ends first, raises RouterStopping."""
        return await (self.run(self.asked, also) if self.kept is None else self.kept.follow(also))

    async def run(self, asked: AgentRequest, also: Emit | None) -> Answer:
        """Run as `asked`, whoever waits for it."""
        services, graph = self._request.app[SERVICES], self._graph

        def name(event: Event) -> None:
            if also is not None and graph is not None and (text := answer_in(event, graph.answering)):
                also(AgentTokens(event.at_s, asked.agent, event.ids if isinstance(event, AgentTokens) else (), text))

        self._seen.also = also if graph is None else name
        with self._request.app[DRAIN].deadline(), self._seen:
            if graph is None:
                return await services.programs.run(asked, self._seen.emit)
            return await services.programs.run_graph(asked, graph, services.executor.run, self._seen.emit)


KEPT_AGENTS = web.AppKey("KEPT_AGENTS", KeptRuns[AgentRequestRun])
