"""POST /v1/chat/completions: a topology, or a single model, answers."""

import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shell_router.api.admission import ADMISSION
from shell_router.api.conversation import (
    TOOL_FIELDS,
    calls_schema,
    has_markers,
    read_messages,
    read_tools,
    text_of,
)
from shell_router.api.drain import Drain
from shell_router.api.engine_chat import ENGINE_FIELDS, NOT_SERVED, asks_engine, read_engine_chat
from shell_router.api.fields import (
    MAX_TOKENS,
    SAMPLING,
    Fields,
    parse_body,
    read_body,
    read_end_user,
    read_sampling,
    read_template_kwargs,
)
from shell_router.api.frames import ChatFrames
from shell_router.api.keys import permit
from shell_router.api.lazy import LAZY_HEADER, PROGRAM_HEADER, begin_lazy, of_program, read_wish
from shell_router.api.models import Targets
from shell_router.api.native import forwarded
from shell_router.api.panels import BRINGING, FUSIONS, brought_by
from shell_router.api.replies import note_ignored
from shell_router.api.runs import KEPT_RUNS, KEY_HEADER, Run, key_of, place_of
from shell_router.api.services import SERVICES, TENANT, TRACE, ApiSettings, Services
from shell_router.api.streaming import Frames, respond
from shell_router.api.translation import ItemTranslation, TranslatedFrames
from shell_router.core.engine import UNSTREAMED_INTERVAL, value
from shell_router.http.app import Key, Reply, Request
from shell_router.moa.expectations import AGENT_REQUEST
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.topology import AUTO, Graph

INERT = frozenset(
    {
        "parallel_tool_calls",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""OpenAI fields that never change an answer: billing, storage, speed."""

REFUSED = {name: nothing for name, nothing in ENGINE_FIELDS.items() if name != "tools"} | NOT_SERVED

PROMPTING = TOOL_FIELDS | {"chat_template_kwargs", "max_thinking_tokens", "prediction"}
"""Fields with which a request changes the prompt, or what of the output is the answer."""

KNOWN = frozenset(
    {*INERT, *REFUSED, *SAMPLING, *PROMPTING, *BRINGING, "lazy", "prefill", "program"}
)


@value
class ChatRequest(MoaRequest):
    """A chat completion as asked. Of several `models` one is to be chosen. `labels` are the body's
    `metadata`.
    """

    models: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    include_agents: bool = False


def read_chat(
    body: Fields, run_id: str, tenant: str, timeout_s: float, default: str | None = None
) -> ChatRequest:
    """Raises InvalidField for what is missing, wrong or not served. Without a `seed` one is made
    from `run_id`.

    `default` is the model where the body may go without one.
    """
    for name in body.given(REFUSED):
        if body.raw(name) not in REFUSED[name]:
            remedy = f"Leave {name} out"
            if name in ENGINE_FIELDS:
                remedy += (
                    ", or ask a plain model on SGLang: GET /v1/models names each model's engine"
                )
            raise body.refuse(name, "has a value that is not supported", remedy + ".")
    options = body.object("stream_options")
    metadata = body.object("metadata")
    stream = body.flag("stream")
    sampling = read_sampling(body)
    seed = body.raw("seed")
    if body.given(PROMPTING):
        prompting = _prompting(body, sampling)
    else:
        prompting = {}
    chat = ChatRequest(
        id=run_id,
        tenant=tenant,
        messages=_messages(body),
        sampling=sampling if stream else {"stream_interval": UNSTREAMED_INTERVAL, **sampling},
        seed=zlib.crc32(run_id.encode()) if seed is None else seed,
        timeout_s=timeout_s,
        labels=_labels(metadata) if metadata else {},
        models=body.names("model")
        if default is None or body.raw("model") is not None
        else (default,),
        stream=stream,
        include_usage=options.flag("include_usage") if options else False,
        include_agents=body.flag("include_agents"),
        end_user=read_end_user(body),
        **prompting,
    )
    body.check_spelling(KNOWN)
    return chat


def _prompting(body: Fields, sampling: dict[str, Any]) -> dict[str, Any]:
    """What PROMPTING asks for. Calls that must come are a constraint in `sampling`."""
    offer = read_tools(body)
    if constraint := next(
        (name for name in ("json_schema", "regex", "ebnf") if name in sampling), ""
    ):
        if offer is not None:
            raise body.refuse(
                "tools", f"cannot go with response_format or {constraint}", "Send only one of them."
            )
    elif offer is not None and (schema := calls_schema(offer)):
        sampling["json_schema"] = schema
    return {
        "prediction": _prediction(body),
        "chat_template_kwargs": read_template_kwargs(body),
        "max_thinking_tokens": body.integer("max_thinking_tokens", 1, MAX_TOKENS),
        "offer": offer,
    }


def _labels(metadata: Fields) -> Mapping[str, str]:
    return {name: text for name in metadata.unread if (text := metadata.text(name)) is not None}


def _prediction(body: Fields) -> str:
    found = body.object("prediction")
    if found is None:
        return ""
    if found.text("type") != "content":
        raise found.refuse("type", "must be content")
    return text_of(found)


def _messages(body: Fields) -> tuple[Mapping[str, Any], ...]:
    messages = read_messages(body, text_of)
    if not any(message["role"] == "user" for message in messages):
        raise body.refuse("messages", "hold no user message", "Send the question before the calls.")
    return tuple(messages)


@dataclass(frozen=True, slots=True)
class Chats:
    """Reads chat completions, and begins them."""

    services: Services
    settings: ApiSettings
    targets: Targets
    drain: Drain

    async def read(self, body: Fields, tenant: str) -> tuple[ChatRequest, Graph, str, str]:
        """What is asked, of which graph, and the names of target and model. Raises InvalidRequest.

        A graph that the request brings has another name than its target.
        """
        services = self.services
        limit_s = self.settings.request_timeout_s
        brings = body.given(BRINGING) or body.raw("model") in [*FUSIONS]
        if brings:
            brought = brought_by(body, services.models, self.targets)
        else:
            brought = None
        if brought is None:
            chat = read_chat(body, services.new_id(), tenant, limit_s)
            if len(chat.models) == 1:
                alone = self.targets.alone.get(chat.models[0])
            else:
                alone = None
            graph = alone or self.targets.choice(chat.models)
            return chat, graph, graph.name, graph.name
        document, target = brought
        chat = read_chat(body, services.new_id(), tenant, limit_s, target)
        return chat, await services.topologies.inline(document), target, chat.models[0]

    async def begin(self, body: Fields, tenant: str) -> tuple[Run, ChatFrames]:
        """A run to be answered as one object. Checks all that can be checked before. Raises
        InvalidRequest.
        """
        chat, graph, target, model = await self.read(body, tenant)
        if has_markers(chat.messages):
            raise body.refuse(
                "messages", "hold a lazy answer's marker", "Send the text that it stands for."
            )
        run = self.run(chat, graph, target)
        return run, ChatFrames(run, model, chat.include_usage, chat.include_agents)

    def run(self, asked: MoaRequest | AgentRequest, graph: Graph, target: str) -> Run:
        """The run of `graph`, or of an agent of a program."""
        if isinstance(asked, AgentRequest):
            return Run(
                self.services, self.drain, self.services.new_id(), asked, None, AGENT_REQUEST
            )
        return Run(self.services, self.drain, asked.id, asked, graph, target)


CHATS = Key[Chats]("CHATS")


async def chat_completions(request: Request) -> Reply:
    """Answer a chat with a topology, a model or a panel."""
    return await answer_chat(request, parse_body(await read_body(request)))


async def answer_chat(
    request: Request,
    body: Fields,
    translation: ItemTranslation | None = None,
    background: Callable[[Run, str, Fields], Awaitable[Reply]] | None = None,
) -> Reply:
    """The answer to a chat completion's body, in the form that `translation` gives it, or what
    `background` gives for the run, which it counts, its model's name and the body."""
    headers = request.headers
    model = body.one_of("model")
    app = request.app
    relay = app[SERVICES].relays.get(model)
    wishes = body.given(("program", "lazy")) or PROGRAM_HEADER in headers or LAZY_HEADER in headers
    program, lazy = read_wish(body, headers) if wishes else (None, False)
    if (
        relay is not None
        and relay.chat is not None
        and asks_engine(body)
        and not body.given(BRINGING)
    ):
        if background is not None:
            raise body.refuse(
                "background", "cannot go with what the engine does itself", "Send it without."
            )
        if lazy:
            raise body.refuse(
                "lazy", "cannot go with tools, nor with what else the engine does itself"
            )
        permit(request, (model,))
        end_user = read_end_user(body)
        bodies = read_engine_chat(body, model, relay.chat)
        return await forwarded(request, relay, "v1/chat/completions", bodies, translation, end_user)
    chats = app[CHATS]
    chat, graph, target, model = await chats.read(body, request[TENANT])
    is_brought = graph.name != target
    permit(request, models_of(graph) if is_brought else chat.models, target)
    if lazy or has_markers(chat.messages):
        if background is not None:
            raise body.refuse(
                "background", "cannot go with lazy answers or their markers", "Send it without."
            )
        is_model = graph.name in (*chats.services.models, AUTO)
        if lazy and not is_model:
            raise body.refuse("lazy", f"cannot go with {model!r}, a topology", "Name a model.")
        asked = await of_program(
            request, body, chat, chat.models if is_model else (), program, lazy=lazy
        )
        run = chats.run(asked, graph, target)
        model = asked.model if isinstance(asked, AgentRequest) else model
    else:
        run = chats.run(chat, graph, target)
    if background is not None:
        return await background(run, model, body)
    app[ADMISSION].count(request, run.agents - 1)
    if KEY_HEADER in headers:
        run = app[KEPT_RUNS].join(run, key_of(request), body)
    request[TRACE] = run.trace
    place = None if translation else place_of(request)
    frames: Frames = ChatFrames(run, model, chat.include_usage, chat.include_agents, place)
    if translation is not None:
        frames = TranslatedFrames(frames, translation)
    answer = (partial(begin_lazy, request, run)) if (lazy) else (run.answer)
    warnings = note_ignored(request, [name for name in body.unread if name not in INERT])
    return await respond(request, answer, frames, stream=chat.stream, warnings=warnings)


def models_of(graph: Graph) -> set[str]:
    """What a graph that a request has brought may ask."""
    agents = [agent for part in graph.parts for agent in part.agents.values()]
    return {
        name
        for agent in agents
        for name in (agent.model, *agent.candidates, *agent.fallbacks)
        if name
    }
