"""POST /v1/chat/completions: a topology, or a single model, answers.

The first row that fits says which function answers a request:

| A request that ...                                                | leads to            |
|-------------------------------------------------------------------|---------------------|
| asks a model on SGLang for choices, images, log probabilities ... | `forward_to_engine` |
| asks for several choices                                          | `run_choices`       |
| is lazy                                                           | `answer_lazily`     |
| holds markers of lazy answers                                     | `read_markers`      |
| is a response in the background                                   | `run_in_background` |
| has an idempotency key                                            | `run_kept`          |
| has none of these                                                 | `run_once`          |

A topology or a panel that the request brings takes the place of its model in all but the first row.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shell_router.api.admission import ADMISSION, permit
from shell_router.api.bodies import (
    ChatRequest,
    Wish,
    check_asks_nothing,
    find_ignored,
    read_chat,
    read_end_user,
    read_models,
    read_object,
    read_tier,
    read_wish,
)
from shell_router.api.choices import forward_choices, open_choice
from shell_router.api.conversation import drop_other_tools, has_markers
from shell_router.api.engine_chat import (
    COMPLETION,
    NOT_COMPLETED,
    CompletionBody,
    asks_engine,
    read_completion,
    read_engine_chat,
    read_prompt,
    write_choices,
)
from shell_router.api.fields import CHAT, OBJECTS_OF_PANELS, ChatBody
from shell_router.api.frames import ChatFrames
from shell_router.api.lazy import begin_lazy, read_program
from shell_router.api.live import Targets
from shell_router.api.native import NativeAnswer, forward
from shell_router.api.panels import FUSIONS, list_brought, read_brought
from shell_router.api.replies import join_warnings, json_reply, note_ignored
from shell_router.api.runs import (
    KEPT_RUNS,
    KEY_HEADER,
    Run,
    read_key,
    read_position,
    require_no_key,
)
from shell_router.api.services import KEY, SERVICES, TENANT, TRACE, ApiSettings, Services
from shell_router.api.sessions import read_session
from shell_router.api.streaming import Frames, stream_run
from shell_router.api.translation import (
    CompletionTranslation,
    ItemTranslation,
    TranslatedFrames,
    Translation,
)
from shell_router.core.engine import TIERS, Hints, Relay, RequestClass, ServiceTier, Session
from shell_router.core.exact_json import Values
from shell_router.core.sampling import require_possible
from shell_router.core.validation import field_error, parse_object
from shell_router.http.app import Key, Reply, Request
from shell_router.moa.expectations import AGENT_REQUEST
from shell_router.moa.prompt import encode_text, render_agent_prompt
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.topology import AUTO, Graph

Background = Callable[[Run, str, Values], Awaitable[Reply]]
"""Answers for a run, which it counts, by the run, its model's name and the body."""


@dataclass(frozen=True, slots=True)
class Target:
    """The graph that answers a chat: its name in metrics and traces, and the model in answers.

    `models` are the names in the request, and `ignored` its fields without effect.
    """

    graph: Graph
    name: str
    model: str
    models: Sequence[str]
    ignored: Sequence[str]
    is_brought: bool

    @property
    def permitted(self) -> Sequence[str]:
        """The models that a key must permit."""
        if not self.is_brought:
            return self.models
        agents = [agent for part in self.graph.parts for agent in part.agents.values()]
        names = [(agent.model, *agent.candidates, *agent.fallbacks) for agent in agents]
        return [name for of_agent in names for name in of_agent if name]


@dataclass(frozen=True, slots=True)
class Chats:
    """Reads chat completions, and begins them."""

    services: Services
    settings: ApiSettings
    targets: Targets

    async def read(self, body: ChatBody, sent: Values, tenant: str) -> tuple[ChatRequest, Target]:
        """Return the chat of a validated body and its target; raises InvalidRequest."""
        services = self.services
        limit_s = self.settings.request_timeout_s
        if isinstance(body.get("usage", {}), dict):  # OpenRouter's object asks for what is there
            body["usage"] = self.settings.usage
        only_model = find_only_model(body)
        fused = only_model in FUSIONS and only_model not in self.targets
        brought = list_brought(body)
        is_brought = fused or bool(brought)
        chat = read_chat(body, sent, services.new_id(), tenant, limit_s)
        is_panel = is_brought and OBJECTS_OF_PANELS.isdisjoint(brought)
        ignored = find_ignored(body, sent, is_panel=is_panel)
        if is_brought:
            document, name = read_brought(body, services.models, fused=fused)
            models = read_models(body) if "model" in body else (name,)
            graph = await services.topologies.inline(document)
            return chat, Target(graph, name, models[0], models, ignored, is_brought)
        models = read_models(body)
        graph = self.targets.choose(models)
        return chat, Target(graph, graph.name, graph.name, models, ignored, is_brought)

    async def begin(
        self,
        sent: Values,
        tenant: str,
        tier: RequestClass = "default",
        session: Session | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Run, ChatFrames]:
        """Return a run to be answered as one object; raises InvalidRequest.

        Its limit is `timeout_s`, or that of the settings.
        """
        body = CHAT.read(sent)
        chat, target = await self.read(body, sent, tenant)
        if body.get("n", 1) > 1:
            raise field_error("n", "must be 1", "Send a line for each choice.")
        if has_markers(chat.messages):
            remedy = "Send the text that it stands for."
            raise field_error("messages", "hold a lazy answer's marker", remedy)
        limit_s = chat.timeout_s if timeout_s is None else timeout_s
        chat = replace(chat, tier=tier, session=session, timeout_s=limit_s)
        run = self.run(chat, target)
        return run, ChatFrames(run, target.model, chat)

    def run(self, task: MoaRequest | AgentRequest, target: Target) -> Run:
        """Return the run of the target's graph, or of an agent of a program."""
        services = self.services
        if isinstance(task, AgentRequest):
            return Run(services, services.new_id(), task, None, AGENT_REQUEST)
        return Run(services, task.id, task, target.graph, target.name)


CHATS = Key[Chats]("CHATS")


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat completion that the router itself is to answer.

    `body` is what was `sent`, validated. The answer has the form that `translation` gives it.
    """

    request: Request
    sent: Values
    body: ChatBody
    translation: Translation | None
    background: Background | None
    wish: Wish
    chat: ChatRequest
    target: Target

    @property
    def asks_model(self) -> bool:
        """Whether one model answers, chosen or named, and no topology."""
        return self.target.graph.name in (*self.request.app[SERVICES].models, AUTO)

    def run(self, task: MoaRequest | AgentRequest) -> Run:
        """Return the run of the chat, or of an agent in its place, counted as running."""
        run = self.request.app[CHATS].run(task, self.target)
        self.request.app[ADMISSION].count(self.request, run.agents - 1)
        return run

    def keep(self, run: Run) -> Run:
        """Return the run that goes on under the request's key, or else `run`; raises KeyReused."""
        return self.request.app[KEPT_RUNS].join(run, read_key(self.request), self.sent)


async def chat_completions(request: Request) -> Reply:
    """Answer a chat with a topology, a model or a panel."""
    return await answer_chat(request, await read_object(request))


async def completions(request: Request) -> Reply:
    """Complete a prompt; what has no engine's own completions answers it as a user's message."""
    sent = await read_object(request)
    body = COMPLETION.read(sent)
    model = find_only_model(body)
    relay = request.app[SERVICES].relays.get(model)
    if relay is not None and relay.chat is not None:
        permit(request, (model,))
        bodies = read_completion(body, sent, model)
        hints = Hints(request[TENANT], end_user=read_end_user(body))
        return await forward(request, relay, "v1/completions", bodies, None, hints)
    check_asks_nothing(sent, NOT_COMPLETED, "is not served")
    prompt = read_prompt(body)
    if not isinstance(prompt, str):
        raise field_error("prompt", "must be a string", "Ask a plain model on SGLang.")
    message = {"role": "user", "content": prompt}
    chat = {**sent, "prompt": None, "messages": [message], "logprobs": "logprobs" in body}
    return await answer_chat(request, chat, CompletionTranslation())


async def answer_chat(
    request: Request,
    sent: Values,
    translation: Translation | None = None,
    background: Background | None = None,
    *,
    bends_limits: bool = False,
) -> Reply:
    """Answer the chat completion that was `sent`; see the table above.

    It `bends_limits` if its limits are those of a client that has to send some.
    """
    sent, ignored = drop_other_tools(sent, "function")
    body = CHAT.read(sent)
    tier = read_tier(body, request[KEY].service_tier)
    if body.get("service_tier", tier) in TIERS[: TIERS.index(tier)]:
        ignored.append("service_tier")
    note_ignored(request, ignored)
    wish = read_wish(body, request.headers)
    relay = find_relay(request, body)
    if relay is not None:
        _check_forwarded(wish, background)
        context = request.app[SERVICES].models[find_only_model(body)].context_length
        if bends_limits and body.get("max_completion_tokens", 0) >= context:
            sent = {**sent, "max_completion_tokens": None}
        if bends_limits and "max_thinking_tokens" in body:
            sent = {**sent, "max_thinking_tokens": None}
            warnings = note_ignored(request, ["max_thinking_tokens"])
            if isinstance(translation, ItemTranslation):
                translation.warnings = warnings
        return await forward_to_engine(request, body, sent, relay, translation, tier)
    chat, target = await request.app[CHATS].read(body, sent, request[TENANT])
    session = read_session(request.headers)
    chat = replace(chat, bends_limits=bends_limits, tier=tier, session=session)
    permit(request, target.permitted, target.name)
    call = ChatCall(request, sent, body, translation, background, wish, chat, target)
    for fits, answer in PRODUCTS:
        if fits(call):
            return await answer(call)
    return await run_once(call)


async def count_prompt(request: Request, sent: Values) -> int:
    """Return the tokens of a chat's prompt: a model's, or a root's before others have written."""
    chat, target = await request.app[CHATS].read(CHAT.read(sent), sent, request[TENANT])
    permit(request, target.permitted, target.name)
    root = target.graph.parts[-1].root
    name = next(iter(root.candidates), root.model)
    models = request.app[SERVICES].models
    model = models.get(name) or next(iter(models.values()))
    tools = () if chat.offer is None else chat.offer.list_tools(model)
    prompt = render_agent_prompt(root, (), model, chat.messages, chat.chat_template_kwargs, tools)
    text = "".join(part for part in prompt.parts if isinstance(part, str))
    require_possible(len(text), model.context_length)
    return len(await encode_text(model.tokenizer, text))


def find_relay(request: Request, body: ChatBody) -> Relay | None:
    """Return the way to the engines whose own chats must answer; None if the router can."""
    relay = request.app[SERVICES].relays.get(find_only_model(body))
    if relay is None or relay.chat is None or not asks_engine(body, relay.chat):
        return None
    return None if list_brought(body) else relay


async def forward_to_engine(
    request: Request,
    body: ChatBody,
    sent: Values,
    relay: Relay,
    translation: Translation | None,
    tier: ServiceTier,
) -> Reply:
    """Have the model's engines answer on their own OpenAI route."""
    model = find_only_model(body)
    permit(request, (model,))
    assert relay.chat is not None, "it was found by its chats"
    defaults = request.app[SERVICES].models[model].sampling
    unset = {name: value for name, value in defaults.items() if sent.get(name) is None}
    bodies = read_engine_chat(body, {**sent, **unset}, model, relay.chat)
    hints = Hints(request[TENANT], end_user=read_end_user(body), tier=tier)
    return await forward(request, relay, "v1/chat/completions", bodies, translation, hints)


async def run_choices(call: ChatCall) -> Reply:
    """Run once for each choice, all at a time."""
    request = call.request
    require_no_key(request, "several choices")
    if call.wish.is_lazy:
        raise field_error("lazy", "cannot go with several choices", "Leave n out.")
    runs = []
    purse = None
    for body in write_choices(call.body["n"], call.sent, {}, ()):
        chat = call.chat
        begun = await request.app[CHATS].begin(
            parse_object(body), chat.tenant, chat.tier, chat.session
        )
        purse = begun[0].share_budget(purse)
        runs.append(begun)
        request.app[ADMISSION].count(request, runs[0][0].agents)
    request[TRACE] = runs[0][0].trace
    note_ignored(request, call.target.ignored)
    answer = NativeAnswer(request, call.translation)
    return await answer.send(forward_choices(open_choice, runs))


async def answer_lazily(call: ChatCall) -> Reply:
    """Answer with a marker at once; the agent of a program runs on by itself."""
    _check_not_in_background(call)
    if not call.asks_model:
        what = f"cannot go with {call.target.model!r}, a topology"
        raise field_error("lazy", what, "Name a model.")
    task = await read_program(call.request, call.body, call.chat, call.target.models, call.wish)
    assert isinstance(task, AgentRequest), "a model answers"
    run = call.run(task)
    answer = partial(begin_lazy, call.request, run)
    return await _respond(call, run, task.model, answer, ignored=())


async def read_markers(call: ChatCall) -> Reply:
    """Run the chat with the outputs that its markers stand for."""
    _check_not_in_background(call)
    models = call.target.models if call.asks_model else ()
    task = await read_program(call.request, call.body, call.chat, models, call.wish)
    run = call.run(task)
    if isinstance(task, AgentRequest):
        return await _respond(call, run, task.model, run.answer, ignored=())
    if KEY_HEADER in call.request.headers:
        run = call.keep(run)
    return await _respond(call, run, call.target.model, run.answer)


async def run_in_background(call: ChatCall) -> Reply:
    """Run without the client, which asks for the response by its id."""
    assert call.background is not None, "the table says so"
    run = call.request.app[CHATS].run(call.chat, call.target)
    return await call.background(run, call.target.model, call.sent)


async def run_kept(call: ChatCall) -> Reply:
    """Run, or go on with the run that has the request's key."""
    run = call.keep(call.run(call.chat))
    return await _respond(call, run, call.target.model, run.answer)


def run_once(call: ChatCall) -> Awaitable[Reply]:
    """Run for this request alone."""
    run = call.run(call.chat)
    return _respond(call, run, call.target.model, run.answer)


PRODUCTS: Sequence[tuple[Callable[[ChatCall], bool], Callable[[ChatCall], Awaitable[Reply]]]] = (
    (lambda call: call.body.get("n", 1) > 1, run_choices),
    (lambda call: call.wish.is_lazy, answer_lazily),
    (lambda call: has_markers(call.chat.messages), read_markers),
    (lambda call: call.background is not None, run_in_background),
    (lambda call: KEY_HEADER in call.request.headers, run_kept),
)
"""The rows of the table that the router itself answers; `run_once` answers all other chats."""


async def _respond(
    call: ChatCall, run: Run, model: str, answer: Any, ignored: Sequence[str] = ("prefill",)
) -> Reply:
    """Answer with the run; of the body's fields those that are `ignored` have no effect."""
    request = call.request
    chat = call.chat
    request[TRACE] = run.trace
    place = read_position(request) if call.translation is None else None
    frames: Frames = ChatFrames(run, model, chat, place)
    if call.translation is not None:
        frames = TranslatedFrames(frames, call.translation)
    without_effect = [*call.target.ignored, *(name for name in ignored if name in call.body)]
    warnings = note_ignored(request, without_effect)
    if chat.stream:
        return await stream_run(request, answer, frames, run.require_lease)
    body = frames.whole(await answer())
    return json_reply(request, {**body, **join_warnings(warnings, body)})


def find_only_model(body: ChatBody | CompletionBody) -> str:
    """Return the one model that the body names; empty for a choice of several, or none."""
    model = body.get("model", "")
    if isinstance(model, str):
        return model
    return model[0] if len(model) == 1 else ""


def _check_forwarded(wish: Wish, background: Background | None) -> None:
    if background is not None:
        what = "cannot go with what the engine does itself"
        raise field_error("background", what, "Send it without.")
    if wish.is_lazy:
        raise field_error("lazy", "cannot go with tools, nor with what else the engine does itself")


def _check_not_in_background(call: ChatCall) -> None:
    if call.background is not None:
        what = "cannot go with lazy answers or their markers"
        raise field_error("background", what, "Send it without.")
