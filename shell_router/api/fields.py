"""Bodies of requests as they arrive, and the fields that bodies of several routes share."""

import asyncio
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from annotated_types import Ge, Interval, MaxLen, MinLen
from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from shell_router.api.services import SETTINGS
from shell_router.core.sampling import MAX_INTEGER, MAX_STOPS, MAX_TOKEN_IDS, RANGES, check_depth
from shell_router.core.validation import Array, Name, field_error, show
from shell_router.errors import InvalidRequest
from shell_router.http.app import Request

LONG_BODY_BYTES = 2**18
"""From here on a body's values are counted before it is parsed, which takes 1 µs for each."""
MAX_BODY_VALUES = 50_000
MAX_BODY_NUMBERS = 1_000_000


async def read_body(request: Request) -> bytes:
    """Return all of the JSON body; raises InvalidRequest."""
    limit_s = request.app[SETTINGS].body_timeout_s
    try:
        body = await request.read(limit_s)
    except TimeoutError:
        raise InvalidRequest(
            f"The body did not arrive within {limit_s:g} s.", remedy="Send it at once."
        ) from None
    if len(body) > LONG_BODY_BYTES:
        await asyncio.to_thread(check_few, body)
    return body


def check_few(body: bytes, times: int = 1) -> None:
    """Raise InvalidRequest where reading the body `times` times would block the event loop."""
    marks = body.count(b'"') // 2 + body.count(b"{") + body.count(b"[")
    commas = body.count(b",")
    if times * marks <= MAX_BODY_VALUES and times * commas <= MAX_BODY_NUMBERS:
        return  # also if none of them stands in a string
    values, numbers = count_values(body)
    if times * values > MAX_BODY_VALUES or times * numbers > MAX_BODY_NUMBERS:
        most = f"{MAX_BODY_VALUES} strings, arrays and objects, or {MAX_BODY_NUMBERS} commas"
        choices = f", times {times} choices" if times > 1 else ""
        raise InvalidRequest(
            f"The body holds more than {most}{choices}.", remedy="Send fewer values at a time."
        )


def count_values(body: bytes) -> tuple[int, int]:
    """Count the strings (keys too), arrays and objects of JSON text, and its commas."""
    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    quotes = text == ord('"')
    outside = ~np.bitwise_xor.accumulate(quotes)
    opening = (text | 0x20 == ord("{")) & outside  # 0x20 makes "{" of "["
    commas = (text == ord(",")) & outside
    values = np.count_nonzero(quotes) // 2 + np.count_nonzero(opening)
    return int(values), int(np.count_nonzero(commas))


def as_json(body: Mapping[str, Any], option: int = 0) -> bytes:
    """Return a client's body as JSON; raises InvalidRequest if it nests too deeply."""
    try:
        return orjson.dumps(body, option=option)
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(
            f"The body cannot be kept or sent on: {error}.", remedy="Flatten it."
        ) from None


def query_number(query: Mapping[str, str], name: str, default: float, most: float) -> float:
    """Return the number from 0 to `most` that the query sets; raises InvalidField."""
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise field_error(name, f"must be a number from 0 to {most:g}")
    return value


def check_asks_nothing(
    sent: Mapping[str, Any], nothing: Mapping[str, Collection[Any]], what: str, remedy: str = ""
) -> None:
    """Raise InvalidField, saying `what`, for a value that is none of the field's in `nothing`."""
    if nothing.keys().isdisjoint(sent):
        return
    for name in nothing.keys() & sent.keys():
        value = sent[name]
        if value is not None and value not in nothing[name]:
            raise field_error(name, what, f"Leave {name} out{remedy}.")


# --- fields of several routes


def _require_different(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("an array of different strings")
    return names


Names = Name | Annotated[Array[Name], MinLen(1), AfterValidator(_require_different)]
"""One name, or several different ones."""


def read_models(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in a validated body's `model`; raises InvalidField if there is none."""
    model = body.get("model")
    if model is None:
        raise field_error("model", "is missing", "Set it to a name, or an array of names.")
    return (model,) if isinstance(model, str) else tuple(model)


Tokens = Annotated[int, Interval(ge=1, le=MAX_INTEGER)]
"""A limit of what is written: an answer has at least one token."""
NoEffect = Annotated[Any, Field(description="Accepted without effect.")]
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
Labels = Annotated[dict[str, Any], WithJsonSchema(STRINGS)]
"""An object of strings. They are checked where they are read, as there may be thousands."""
MAX_TEMPLATE_BYTES = 2**14
"""The limit of a chat template's variables as JSON: it may write one for every message."""


class SamplingFields(TypedDict, total=False):
    """Sampling parameters that all routes have."""

    temperature: Annotated[float, RANGES["temperature"]]
    top_p: Annotated[float, RANGES["top_p"]]
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
    json_schema: str | dict[str, Any]


class StopField(TypedDict, total=False):
    """The texts at which an output ends."""

    stop: str | Annotated[Array[str], MaxLen(MAX_STOPS)]


class PlainFormat(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(TypedDict):
    """A JSON schema by OpenAI's name."""

    schema: dict[str, Any]


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


NATIVE_NAMES: Mapping[str, str] = {
    **{name: name for name in OpenAISampling.__annotations__},
    "min_tokens": "min_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "seed": "sampling_seed",
    "response_format": "json_schema",
}
"""SGLang's names of sampling parameters, by OpenAI's."""
CONSTRAINTS = frozenset({"regex", "ebnf", "json_schema", "response_format"})


def read_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's `sampling_params` for a validated body; raises InvalidField."""
    params: dict[str, Any] = {}
    constraint = ""
    for name, value in body.items():
        native = NATIVE_NAMES.get(name)
        if native is None:
            continue
        if name not in CONSTRAINTS:
            if params.get(native, value) != value:
                what = "differs from max_completion_tokens"
                raise field_error("max_tokens", what, "Send only one of them.")
            params[native] = value
        elif (text := _read_constraint(name, value)) is not None:
            if constraint:
                raise field_error(name, f"cannot go with {constraint}", "Send only one of them.")
            constraint = name
            params[native] = text
    return params


def _read_constraint(name: str, value: Any) -> str | None:
    """Return the text of a pattern, a grammar or a JSON schema; None for any text."""
    if isinstance(value, str):
        return value
    if name == "response_format":
        if value["type"] == "text":
            return None
        if value["type"] == "json_object":
            return '{"type": "object"}'
        name = "response_format.json_schema.schema"
        value = value["json_schema"]["schema"]
    check_depth(value, name)
    return orjson.dumps(value).decode()


class EndUserFields(TypedDict, total=False):
    """Names of the tenant's own user."""

    prompt_cache_key: str
    user: str


def read_end_user(body: EndUserFields) -> str | None:
    """Return a digest of the tenant's own user: OpenAI's `prompt_cache_key`, else `user`."""
    key = body.get("prompt_cache_key") or body.get("user")
    if not key:
        return None
    return blake2b(key.encode(), digest_size=16).hexdigest()


def read_labels(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """Return an object of strings without its nulls; raises InvalidField."""
    labels = {name: text for name, text in metadata.items() if text is not None}
    for name, text in labels.items():
        if not isinstance(text, str):
            raise field_error(f"metadata.{name}", f"must be a string, not {show(text)}")
    return labels


def check_template_kwargs(variables: Mapping[str, Any]) -> None:
    """Raise InvalidField for `chat_template_kwargs` that nest too deeply or are too large."""
    check_depth(variables, "chat_template_kwargs")
    if variables and len(orjson.dumps(variables)) > MAX_TEMPLATE_BYTES:
        raise field_error(
            "chat_template_kwargs", f"takes more than {MAX_TEMPLATE_BYTES} bytes", "Send fewer."
        )
