"""POST /v1/chat/completions: a topology, or a single model, answers."""

import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from shell_router.api.admission import ADMISSION, Drain
from shell_router.api.agents import WORDS, AgentRequestRun, marker_of
from shell_router.api.engine_chat import ENGINE_FIELDS, NOT_SERVED, asks_engine, read_engine_chat
from shell_router.api.fields import (
    MAX_TOKENS,
    SAMPLING,
    Fields,
    as_object,
    parse_body,
    read_body,
    read_sampling,
    read_template_kwargs,
    shown,
)
from shell_router.api.frames import ChatFrames, agents, chunk_base, completion
from shell_router.api.kept_runs import KEY_HEADER, KeptRun, KeptRuns, key_of, place_of, refuse_key
from shell_router.api.keys import permit
from shell_router.api.lazy import (
    LAZY_HEADER,
    PROGRAM_HEADER,
    agent_of,
    filled,
    marked_elsewhere,
    program_read,
    read_wish,
    refuse_tools,
    split,
)
from shell_router.api.models import Targets
from shell_router.api.native import forwarded
from shell_router.api.observed import Observed
from shell_router.api.panels import BRINGING, FUSIONS, brought_by
from shell_router.api.plain import Reply, Request
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, SETTINGS, TENANT, TRACE, ApiSettings, Emit, Services
from shell_router.api.streaming import LiveRun, TranslatedFrames, Translation, open_stream, stream_run
from shell_router.api.tools import TOOL_FIELDS, ToolUse, call_id, calls_schema, check_answers, read_calls, read_tools
from shell_router.core.engine import UNSTREAMED_INTERVAL, value
from shell_router.core.events import AgentTokens
from shell_router.moa.calls import ToolOffer
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.topology import AUTO, Conditional, Graph

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

INERT = frozenset(
    {
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""OpenAI fields that never change an answer: billing, storage, speed."""

REFUSED = {name: nothing for name, nothing in ENGINE_FIELDS.items() if name != "tools"} | NOT_SERVED

PROMPTING = TOOL_FIELDS | {"chat_template_kwargs", "max_thinking_tokens", "prediction"}
"""Fields with which a request changes the prompt, or what of the output is the answer."""

KNOWN = frozenset({*INERT, *REFUSED, *SAMPLING, *PROMPTING, *BRINGING, "lazy", "prefill", "program"})


@value
class ChatRequest(MoaRequest):
    """A chat completion as asked. Of several `models` one is to be chosen. `labels` are the body's `metadata`."""

    models: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    include_agents: bool = False


def read_chat(body: Fields, run_id: str, tenant: str, timeout_s: float, default: str | None = None) -> ChatRequest:
    """Raises InvalidField for what is missing, wrong or not served. Without a `seed` one is made from `run_id`.

    `default` is the model where the body may go without one.
    """
    for name in body.given(REFUSED):
        if body.raw(name) not in REFUSED[name]:
            remedy = f"Leave {name} out"
            if name in ENGINE_FIELDS:
                remedy += ", or ask a plain model on SGLang: GET /v1/models names each model's engine"
            raise body.refuse(name, "is not served as asked", remedy + ".")
    options, metadata = body.object("stream_options"), body.object("metadata")
    stream, sampling, seed = body.flag("stream"), read_sampling(body), body.raw("seed")
    prompting = _prompting(body, sampling) if body.given(PROMPTING) else {}
    chat = ChatRequest(
        id=run_id,
        tenant=tenant,
        messages=_messages(body),
        sampling=sampling if stream else {"stream_interval": UNSTREAMED_INTERVAL, **sampling},
        seed=zlib.crc32(run_id.encode()) if seed is None else seed,
        timeout_s=timeout_s,
        labels=_labels(metadata) if metadata else {},
        models=body.names("model") if default is None or body.raw("model") is not None else (default,),
        stream=stream,
        include_usage=options.flag("include_usage") if options else False,
        include_agents=body.flag("include_agents"),
        **prompting,
    )
    body.check_spelling(KNOWN)
    return chat


def _prompting(body: Fields, sampling: dict[str, Any]) -> dict[str, Any]:
    """What PROMPTING asks for. Calls that must come are a constraint in `sampling`."""
    tools = read_tools(body)
    if constraint := next((name for name in ("json_schema", "regex", "ebnf") if name in sampling), ""):
        if tools.mode != "none":
            raise body.refuse("tools", f"cannot go with response_format or {constraint}", "Send only one of them.")
    elif schema := calls_schema(tools):
        sampling["json_schema"] = schema
    return {
        "prediction": _prediction(body),
        "chat_template_kwargs": read_template_kwargs(body),
        "max_thinking_tokens": body.integer("max_thinking_tokens", 1, MAX_TOKENS),
        "offer": _offer(tools),
    }


def _offer(use: ToolUse) -> ToolOffer | None:
    """Of a function that must be called the others are no part of the prompt, as in SGLang."""
    if use.mode == "none":
        return None
    tools = tuple([tool for tool in use.tools if use.name in ("", tool["function"]["name"])])
    return ToolOffer(tools, use.mode != "auto", use.parallel)


def ignored_fields(body: Fields) -> tuple[str, ...]:
    """Fields of a body already read that are set, unknown here, and so without effect."""
    unread = body.unread
    return tuple(name for name in unread if name not in INERT) if unread else ()


def _labels(metadata: Fields) -> Mapping[str, str]:
    return {name: text for name in metadata.unread if (text := metadata.text(name)) is not None}


def _prediction(body: Fields) -> str:
    found = body.object("prediction")
    if found is None:
        return ""
    if found.text("type") != "content":
        raise found.refuse("type", "must be content")
    return _content(found)


def _messages(body: Fields) -> tuple[Mapping[str, Any], ...]:
    listed = body.listed("messages")
    if not listed:
        raise body.refuse("messages", "is missing or empty", "Send at least one user message.")
    messages: list[Mapping[str, Any]] = []
    has_tools = False
    for at, one in enumerate(listed):
        role, content = (one.get("role"), one.get("content")) if isinstance(one, dict) else (None, None)
        is_plain = role in ("user", "system")
        if is_plain and isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            messages.append(_message(as_object(one, f"messages[{at}]")))
            has_tools |= bool({"tool_calls", "tool_call_id"} & messages[-1].keys())
    if messages[-1]["role"] not in ("user", "tool"):
        where, remedy = (
            f"messages[{len(messages) - 1}].role",
            "Put the question, or a call's result, in the last message.",
        )
        raise body.refuse(where, "must be user or tool", remedy)
    if has_tools:
        check_answers(messages)
        if not any(message["role"] == "user" for message in messages):
            raise body.refuse("messages", "hold no user message", "Send the question before the calls.")
    return tuple(messages)


def _message(message: Fields) -> Mapping[str, Any]:
    role = message.text("role")
    if role not in ROLES:
        raise message.refuse("role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    if role == "tool":
        return {"role": role, "content": _content(message), "tool_call_id": call_id(message, "tool_call_id")}
    if role != "assistant":
        return {"role": ROLES[role], "content": _content(message)}
    calls, thinking = read_calls(message), message.text("reasoning_content")
    found = {"role": role, "content": "" if message.raw("content") is None else _content(message)}
    return found | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thinking} if thinking else {})


def _content(message: Fields) -> str:
    value = message.raw("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise message.refuse("content", f"must be a string or an array of text parts, not {shown(value)}")
    path = message.path("content")
    return "".join(_part(as_object(part, f"{path}[{at}]")) for at, part in enumerate(value))


def _part(part: Fields) -> str:
    if part.text("type") != "text":
        raise part.refuse("type", "must be text", "Only text is served; leave other parts out.")
    text = part.text("text")
    if text is None:
        raise part.refuse("text", "is missing")
    return text


@dataclass(frozen=True, slots=True)
class Chats:
    """Begins chat completions."""

    services: Services
    settings: ApiSettings
    targets: Targets
    drain: Drain
    kept: "KeptRuns[ChatRun]"

    async def read(self, body: Fields, tenant: str) -> tuple[ChatRequest, Graph, str, str]:
        """What is asked, of which graph, and the names of target and model. Raises InvalidRequest."""
        services, limit_s = self.services, self.settings.request_timeout_s
        brings = body.given(BRINGING) or body.raw("model") in [*FUSIONS]
        brought = brought_by(body, services.models, self.targets) if brings else None
        if brought is None:
            chat = read_chat(body, services.new_id(), tenant, limit_s)
            alone = self.targets.alone.get(chat.models[0]) if len(chat.models) == 1 else None
            graph = alone or self.targets.choice(chat.models)
            return chat, graph, graph.name, graph.name
        chat = read_chat(body, services.new_id(), tenant, limit_s, brought.target)
        return chat, await services.topologies.inline(brought), brought.target, chat.models[0]

    async def begin(self, body: Fields, tenant: str) -> "ChatRun":
        """Check everything that can be checked before anything runs. Raises InvalidRequest."""
        chat, graph, target, model = await self.read(body, tenant)
        if _has_markers(chat.messages):
            raise body.refuse("messages", "hold a lazy answer's marker", "Send the text that it stands for.")
        return ChatRun(self, chat, graph, target, model)


class ChatRun:
    """One completion under way. `asked.id` is its trace's.

    Metrics and traces call what is run `target`, the answer names `model`.
    """

    def __init__(self, chats: Chats, asked: ChatRequest, topology: Graph, target: str, model: str) -> None:
        self._chats = chats
        self._topology = topology
        self._model = model
        self.asked = asked
        self.id = asked.id
        self.kept: KeptRun | None = None
        answering, graph = topology.answering, topology.waits_for
        self._seen = Observed(chats.services, asked.id, asked.tenant, target, answering, graph)
        self.trace = self._seen.trace
        self._seen.record(asked, topology)
        parts = topology.parts if isinstance(topology, Conditional) else (topology,)
        self.agents = max([len(part.agents) for part in parts])
        """That run at a time: of a topology with steps those of the largest."""

    async def answer(self, also: Emit | None = None) -> Answer:
        """Run; `also` gets the events. If the server ends first, raises RouterStopping."""
        return await (self.run(self.asked, also) if self.kept is None else self.kept.follow(also))

    async def run(self, asked: MoaRequest, also: Emit | None) -> Answer:
        """Run as `asked`, for one or several requests."""
        self._seen.also = also
        with self._chats.drain.deadline(), self._seen as seen:
            return await self._chats.services.executor.run(self._topology, asked, seen.emit)

    def reply(self, answer: Answer) -> dict[str, Any]:
        """The completion as one object."""
        body = completion(self.asked.id, self._seen.created, self._model, answer)
        if self.asked.include_agents:
            body["agents"] = agents(answer, self.trace)
        return body

    async def stream(self, request: Request, translation: Translation | None = None) -> Reply:
        """Run, and write the completion in chunks meanwhile, as `translation` puts them."""
        base = chunk_base(self.asked.id, self._seen.created, self._model)
        asked, answering = self.asked, self._topology.answering
        place = None if translation else place_of(request)
        frames = ChatFrames(base, answering, self.trace, asked.include_usage, asked.include_agents, place)
        async with LiveRun(self.answer, frames.wants) as live:
            written = frames if translation is None else TranslatedFrames(frames, translation)
            return await stream_run(request, live, written)


CHATS = web.AppKey("CHATS", Chats)


async def chat_completions(request: Request) -> Reply:
    """Answer a chat with a topology, a model or a panel: check everything that can be checked, then run."""
    return await answer_chat(request, parse_body(await read_body(request)))


async def answer_chat(
    request: Request,
    body: Fields,
    translation: Translation | None = None,
    background: Callable[[ChatRun, Fields], Awaitable[Reply]] | None = None,
) -> Reply:
    """The answer to a chat completion's body, in the form that `translation` gives it, or what `background` gives for
    the run, which goes on without its client."""
    model, headers, program, lazy = body.one_of("model"), request.headers, None, False
    relay = request.app[SERVICES].relays.get(model)
    if body.given(("program", "lazy")) or PROGRAM_HEADER in headers or LAZY_HEADER in headers:
        program, lazy = read_wish(body, headers)
    if relay is not None and relay.chat is not None and asks_engine(body) and not body.given(BRINGING):
        if background is not None:
            raise body.refuse("background", "cannot go with what the engine does itself", "Send it without.")
        if lazy:
            raise body.refuse("lazy", "cannot go with tools, nor with what else the engine does itself")
        permit(request, (model,))
        bodies = read_engine_chat(body, model, relay.chat)
        return await forwarded(request, relay, "v1/chat/completions", bodies, translation)
    chats = request.app[CHATS]
    chat, graph, target, model = await chats.read(body, request[TENANT])
    brings = body.given(BRINGING) or target not in chats.targets
    permit(request, models_of(graph) if brings else chat.models, target)
    if lazy or _has_markers(chat.messages):
        refuse_tools(body, chat, lazy=lazy)
        if background is not None:
            raise body.refuse("background", "cannot go with lazy answers or their markers", "Send it without.")
        parts = split(chat.messages)
        program = program_read(chats.services.programs, chat.tenant, parts.reads, program)
        if graph.name in (*chats.services.models, AUTO) and not body.given(BRINGING):
            refuse_key(request, "lazy answers or their markers")
            asked = agent_of(request, body, chat, chat.models, program, parts, lazy=lazy)
            run = AgentRequestRun(request, asked, note_ignored(request, ignored_fields(body)))
            request[TRACE] = run.trace
            return await _agent_of_program(request, run, chat, lazy, translation)
        if lazy:
            raise body.refuse("lazy", f"cannot go with {model!r}, a topology", "Name a model.")
        chat = replace(chat, messages=await filled(request, program, parts, chat.timeout_s))
    whole = ChatRun(chats, chat, graph, target, model)
    request.app[ADMISSION].count(request, whole.agents - 1)
    if background is not None:
        return await background(whole, body)
    if KEY_HEADER in headers:
        whole = chats.kept.join(whole, key_of(request), body)
    request[TRACE] = whole.trace
    warnings = note_ignored(request, ignored_fields(body))
    if chat.stream:
        return await whole.stream(request, translation)
    reply = whole.reply(await whole.answer()) | warnings
    return json_reply(request, reply if translation is None else translation.whole(reply))


def models_of(graph: Graph) -> set[str]:
    """What a graph that a request has brought may ask."""
    parts = graph.parts if isinstance(graph, Conditional) else (graph,)
    agents = [agent for part in parts for agent in part.agents.values()]
    return {name for agent in agents for name in (agent.model, *agent.candidates, *agent.fallbacks) if name}


def _has_markers(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is a lazy answer's marker in them, whole or altered."""
    texts = "\n".join([message["content"] for message in messages])
    found = WORDS[0] in texts or WORDS[1] in texts or WORDS[2] in texts
    return found or any(map(marked_elsewhere, messages))


async def _agent_of_program(
    request: Request, run: AgentRequestRun, chat: ChatRequest, lazy: bool, translation: Translation | None
) -> Reply:
    """Begin it and answer with its marker, or answer with what it writes."""
    asked, base = run.asked, chunk_base(run.id, run.created, run.asked.model)
    frames = ChatFrames(base, {asked.agent}, run.trace, chat.include_usage, chat.include_agents)
    written = frames if translation is None else TranslatedFrames(frames, translation)
    if chat.stream and not lazy:
        async with LiveRun(run.answer, frames.wants) as live:
            return await stream_run(request, live, written)
    answer = await (run.begin(marker_of(asked.agent)) if lazy else run.answer())
    if chat.stream:
        stream = await open_stream(request, request.app[SETTINGS].write_timeout_s)
        text = written.events([AgentTokens(0.0, asked.agent, (), answer.text)])
        await stream.send(text + written.answer(answer))
        return await stream.end()
    reply = {**completion(run.id, run.created, asked.model, answer), **run.warnings}
    if chat.include_agents:
        reply["agents"] = agents(answer, run.trace)
    return json_reply(request, reply if translation is None else translation.whole(reply))
