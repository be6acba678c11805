"""The fields of chats' bodies, and the ones that bodies of several routes share.

The OpenAPI document is made from these types.
"""

from typing import Annotated, Any, Literal, NotRequired, Required

from annotated_types import Ge, Gt, Interval, MaxLen, MinLen
from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, with_config
from typing_extensions import TypedDict

from shell_router.api.conversation import Content, Messages, ToolFields
from shell_router.config import UsageCount
from shell_router.core.exact_json import NewValues
from shell_router.core.sampling import MAX_INTEGER, MAX_STOPS, MAX_TOKEN_IDS, RANGES
from shell_router.core.validation import Array, JsonObject, Name, without_nulls

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_CHUNK_TOKENS = 2**20
IDENTIFIER_PATTERN = r"^[A-Za-z0-9_.:@-]{1,128}$"

closed_object = with_config(ConfigDict(extra="forbid"))


def _require_different(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("an array of different strings")
    return names


Names = Name | Annotated[Array[Name], MinLen(1), AfterValidator(_require_different)]
"""A name, or several different names."""


Tokens = Annotated[int, Interval(ge=1, le=MAX_INTEGER)]
"""A limit of what is written: an answer has at least one token."""
NoEffect = Annotated[Any, Field(description="Accepted without effect.")]
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
Labels = Annotated[NewValues, WithJsonSchema(STRINGS)]
"""An object of strings. They are checked where they are read, as there may be thousands."""
Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
"""A program's or agent's id, fit for URLs and cache keys."""


# --- sampling


class SamplingFields(TypedDict, total=False):
    """Sampling parameters that all routes have."""

    temperature: Annotated[float, RANGES["temperature"]]
    top_p: Annotated[float, Interval(ge=0, le=1)]
    min_p: Annotated[float, RANGES["min_p"]]
    frequency_penalty: Annotated[float, RANGES["frequency_penalty"]]
    presence_penalty: Annotated[float, RANGES["presence_penalty"]]
    repetition_penalty: Annotated[float, RANGES["repetition_penalty"]]
    top_k: Annotated[int, RANGES["top_k"]]
    min_tokens: Annotated[int, RANGES["min_new_tokens"]]
    seed: Annotated[int, RANGES["sampling_seed"]]
    ignore_eos: bool
    no_stop_trim: bool
    skip_special_tokens: bool
    stop_token_ids: Annotated[Array[Annotated[int, Ge(0)]], MaxLen(MAX_TOKEN_IDS)]
    regex: str
    ebnf: str
    json_schema: str | NewValues


class StopField(TypedDict, total=False):
    """The texts at which an output ends."""

    stop: str | Annotated[Array[str], MaxLen(MAX_STOPS)]


class PlainFormat(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(TypedDict):
    """A JSON schema by OpenAI's name."""

    schema: NewValues


class SchemaFormat(TypedDict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class OpenAISampling(SamplingFields, StopField, total=False):
    """Sampling parameters that OpenAI's chats and agents have."""

    max_tokens: Tokens
    max_completion_tokens: Tokens
    response_format: ResponseFormat


class EndUserFields(TypedDict, total=False):
    """Names of the tenant's own user."""

    prompt_cache_key: str
    user: str


# --- topologies and panels that requests bring

Models = str | Array[str]


@closed_object
class JudgeFields(TypedDict):
    """A judge and its criteria, as LiteLLM's."""

    model: Names
    criteria: NotRequired[str | None]


Judge = Models | Annotated[JudgeFields, without_nulls]


class PanelFields(TypedDict, total=False):
    """A panel as fields of a chat."""

    models: Models
    quorum: Annotated[int, Ge(1)]
    grace_s: Annotated[float, Interval(ge=0, le=86_400)]
    root_reserve_s: Annotated[float, Interval(ge=1, le=86_400)]
    criteria: str


@closed_object
class FusionFields(PanelFields, total=False):
    """A panel as an object of its own, in the names of OpenRouter, LiteLLM and Merge, too."""

    judge: Judge
    analysis_models: Models
    synthesis_model: Judge
    model: Judge
    max_completion_tokens: Tokens
    temperature: Annotated[float, RANGES["temperature"]]


@closed_object
class PluginFields(FusionFields, total=False):
    """A panel as OpenRouter's plugin."""

    id: Literal["fusion"]
    enabled: Literal[True]


class BringingFields(TypedDict, total=False):
    """Fields with which a request brings its topology."""

    topology: NewValues
    fusion: Annotated[FusionFields, without_nulls]
    judge: Judge
    plugins: Array[Annotated[PluginFields, without_nulls]]


BRINGING = frozenset(BringingFields.__annotations__)
OBJECTS_OF_PANELS = BRINGING - {"judge"}
"""Fields that hold all of a topology or panel."""


# --- chats


@closed_object
class PrefillFields(TypedDict, total=False):
    """When a prompt is prefilled while it grows."""

    incremental: bool
    chunk_tokens: Annotated[int, Interval(ge=1, le=MAX_CHUNK_TOKENS)] | Literal["adaptive"]


@closed_object
class BudgetFields(TypedDict, total=False):
    """The most that a request may spend on all of its agents."""

    calls: Annotated[int, Ge(1)]
    tokens: Annotated[int, Ge(1)]
    seconds: Annotated[float, Gt(0)]
    cost: Annotated[float, Gt(0)]


BudgetField = Annotated[BudgetFields, without_nulls]


PrefillField = Annotated[PrefillFields, without_nulls]


class SharedFields(SamplingFields, BringingFields, PanelFields, total=False):
    """Fields that mean the same in chats, responses and messages."""

    model: Names
    stream: bool
    usage: UsageCount | NewValues
    chat_template_kwargs: NewValues
    program: Identifier
    lazy: bool
    prefill: PrefillField
    budget: BudgetField


class StreamOptions(TypedDict):
    """The parts of a stream besides the text."""

    include_usage: NotRequired[bool | None]


class Prediction(TypedDict):
    """A text that the answer is expected to repeat."""

    type: Literal["content"]
    content: Content


class InertFields(TypedDict, total=False):
    """OpenAI's fields that never change an answer: billing, speed."""

    prompt_cache_options: NoEffect
    prompt_cache_retention: NoEffect
    safety_identifier: NoEffect


class TierField(TypedDict, total=False):
    """OpenAI's classes of requests."""

    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"],
        Field(
            description="Which requests go first where they wait for an engine: `priority` before "
            "`default`, and `flex` after all others. A key may limit it."
        ),
    ]


class ForwardedFields(TypedDict, total=False):
    """Fields that only an engine's own chats and completions have."""

    n: Annotated[int, Interval(ge=1, le=MAX_CHOICES)]
    logit_bias: NewValues
    stream_options: StreamOptions


class ChatBody(
    SharedFields,
    OpenAISampling,
    ForwardedFields,
    ToolFields,
    EndUserFields,
    InertFields,
    TierField,
    total=False,
):
    """A chat completion."""

    messages: Required[Messages]
    store: NoEffect
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
    "best_of": (1,),
    "echo": (False,),
    "top_a": (0,),
}
"""Fields that would change the answer and that no chat serves, with values that ask for nothing."""
