"""The body of a chat completion: its fields, and the request that they make."""

import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Required

from annotated_types import Interval
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from shell_router.api.conversation import (
    Content,
    Messages,
    ToolFields,
    calls_schema,
    join_texts,
    read_messages,
    read_tools,
)
from shell_router.api.fields import (
    CONSTRAINTS,
    EndUserFields,
    Labels,
    Names,
    NoEffect,
    OpenAISampling,
    SamplingFields,
    Tokens,
    check_asks_nothing,
    check_template_kwargs,
    read_end_user,
    read_labels,
    read_sampling,
)
from shell_router.api.panels import BRINGING, BringingFields, PanelFields
from shell_router.core.engine import UNSTREAMED_INTERVAL, value
from shell_router.core.validation import JsonObject, field_error, without_nulls
from shell_router.moa.requests import MoaRequest

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_CHUNK_TOKENS = 2**20

IDENTIFIER_PATTERN = r"^[A-Za-z0-9_.:@-]{1,128}$"
Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
"""A program's or agent's id, fit for URLs and cache keys."""


@with_config(ConfigDict(extra="forbid"))
class PrefillFields(TypedDict, total=False):
    """When a prompt is prefilled while it grows."""

    incremental: bool
    chunk_tokens: Annotated[int, Interval(ge=1, le=MAX_CHUNK_TOKENS)] | Literal["adaptive"]


PrefillField = Annotated[PrefillFields, without_nulls]


class SharedFields(SamplingFields, BringingFields, PanelFields, total=False):
    """Fields that mean the same in chats, responses and messages."""

    model: Names
    stream: bool
    chat_template_kwargs: dict[str, Any]
    program: Identifier
    lazy: bool
    prefill: PrefillField


class StreamOptions(TypedDict):
    """What a stream holds besides the text."""

    include_usage: NotRequired[bool | None]


class Prediction(TypedDict):
    """A text that the answer is expected to repeat."""

    type: Literal["content"]
    content: Content


class InertFields(TypedDict, total=False):
    """OpenAI's fields that never change an answer: billing, storage, speed."""

    prompt_cache_options: NoEffect
    prompt_cache_retention: NoEffect
    safety_identifier: NoEffect
    service_tier: NoEffect
    store: NoEffect


class ForwardedFields(TypedDict, total=False):
    """Fields that only an engine's own chats and completions have."""

    n: Annotated[int, Interval(ge=1, le=MAX_CHOICES)]
    logit_bias: dict[str, Any]
    stream_options: StreamOptions


class ChatBody(
    SharedFields,
    OpenAISampling,
    ForwardedFields,
    ToolFields,
    EndUserFields,
    InertFields,
    total=False,
):
    """A chat completion."""

    messages: Required[Messages]
    logprobs: bool
    top_logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP_LOGPROBS)]
    separate_reasoning: bool
    reasoning_effort: Any
    include_agents: bool
    max_thinking_tokens: Tokens
    prediction: Prediction
    metadata: Labels


CHAT = JsonObject(
    ChatBody,
    {
        "messages": "Send at least one user message.",
        "tools.type": "Only function tools are served.",
    },
)

ENGINE_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "separate_reasoning": (True,),
    "reasoning_effort": (),
}
"""Fields that only an engine's own chats serve, with the values that ask for nothing."""

NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": (),
    "best_of": (1,),
    "echo": (False,),
    "top_a": (0,),
}
"""Fields that would change the answer and that no chat serves, with values that ask for nothing."""

NOT_BY_ROUTER = {name: ENGINE_FIELDS[name] for name in ENGINE_FIELDS if name != "tools"}
UNSUPPORTED = "has a value that is not supported"
ELSEWHERE = ", or ask a plain model on SGLang: GET /v1/models names each model's engine"


@value
class ChatRequest(MoaRequest):
    """A chat completion, read."""

    stream: bool = False
    include_usage: bool = False
    include_agents: bool = False


def read_chat(
    body: ChatBody, sent: Mapping[str, Any], run_id: str, tenant: str, timeout_s: float
) -> ChatRequest:
    """Return the chat that the router itself is to run, without its models.

    Args:
        body: The validated body.
        sent: The body as it was sent.
        run_id: The run's id, from which a `seed` is made where the body has none.
        tenant: The tenant.
        timeout_s: The limit of the run.

    Raises:
        InvalidField: A field asks for something that is not served.
    """
    check_asks_nothing(sent, NOT_SERVED, UNSUPPORTED)
    check_asks_nothing(sent, NOT_BY_ROUTER, UNSUPPORTED, ELSEWHERE)
    stream = body.get("stream", False)
    sampling = read_sampling(body)
    offer = None
    if not body.keys().isdisjoint(ToolFields.__annotations__):
        offer = read_tools(body, sent)
    if offer is not None:
        _constrain_calls(sampling, calls_schema(offer))
    if not stream:
        sampling = {"stream_interval": UNSTREAMED_INTERVAL, **sampling}
    template_kwargs = body.get("chat_template_kwargs")
    if template_kwargs:
        check_template_kwargs(template_kwargs)
    prediction = body.get("prediction")
    options = body.get("stream_options")
    return ChatRequest(
        id=run_id,
        tenant=tenant,
        messages=read_messages(body["messages"]),
        sampling=sampling,
        seed=body["seed"] if "seed" in body else zlib.crc32(run_id.encode()),
        timeout_s=timeout_s,
        labels=read_labels(body["metadata"]) if "metadata" in body else {},
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        include_agents=body.get("include_agents", False),
        end_user=read_end_user(body),
        prediction=join_texts(prediction["content"], "prediction.content") if prediction else "",
        chat_template_kwargs=template_kwargs or {},
        max_thinking_tokens=body.get("max_thinking_tokens"),
        offer=offer,
    )


def find_ignored(body: ChatBody, sent: Mapping[str, Any], *, is_brought: bool) -> list[str]:
    """Return the fields without effect, of a body that brings its topology or does not.

    Raises:
        InvalidField: A name is nearly a known one.
    """
    ignored = CHAT.find_unknown(sent, NOT_SERVED)
    if not is_brought or not body.keys().isdisjoint(OBJECTS_OF_PANELS):
        ignored += [name for name in body if name in PanelFields.__annotations__]
    return ignored


OBJECTS_OF_PANELS = BRINGING - {"judge"}
"""Fields that hold all of a topology or panel."""


def _constrain_calls(sampling: dict[str, Any], schema: str) -> None:
    """Add the schema of calls that must come to the constraints, of which there is at most one."""
    constraint = next((name for name in CONSTRAINTS if name in sampling), None)
    if constraint is not None:
        what = f"cannot go with response_format or {constraint}"
        raise field_error("tools", what, "Send only one of them.")
    if schema:
        sampling["json_schema"] = schema
