"""Bodies of requests: how they are received, and the chat that a validated body makes."""

import asyncio
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from shell_router.api.conversation import (
    list_texts,
    read_messages,
    read_tools,
)
from shell_router.api.fields import (
    CHAT,
    ENGINE_FIELDS,
    IDENTIFIER_PATTERN,
    NOT_SERVED,
    ChatBody,
    EndUserFields,
    OpenAISampling,
    PanelFields,
    SharedFields,
    TierField,
)
from shell_router.api.services import SETTINGS
from shell_router.api.sessions import digest
from shell_router.core.budget import Budget
from shell_router.core.engine import TIERS, UNSTREAMED_INTERVAL, ServiceTier, value
from shell_router.core.exact_json import NewValues, Values, write_json
from shell_router.core.json_schema import close_objects
from shell_router.core.sampling import LEAST_TOP_P, check_depth, check_schema
from shell_router.core.validation import field_error, parse_object, show
from shell_router.errors import InvalidField, InvalidRequest
from shell_router.http.app import Request
from shell_router.moa.requests import MoaRequest

LONG_BODY_BYTES = 2**18
"""The size from which a body's values are counted before it is parsed: parsing takes 1 µs each."""
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


async def read_object(request: Request) -> NewValues:
    """Return the JSON object that is the body; raises InvalidRequest."""
    return parse_object(await read_body(request))


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


def as_json(body: Values, option: int = 0) -> bytes:
    """Return a client's body as JSON; raises InvalidRequest if it nests too deeply."""
    try:
        return write_json(body, option)
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
    sent: Values, nothing: Mapping[str, Collection[Any]], what: str, remedy: str = ""
) -> None:
    """Raise InvalidField, saying `what`, for a value that is none of the field's in `nothing`."""
    if nothing.keys().isdisjoint(sent):
        return
    for name in nothing.keys() & sent.keys():
        value = sent[name]
        if value is not None and value not in nothing[name]:
            raise field_error(name, what, f"Leave {name} out{remedy}.")


# --- fields of several routes


def read_models(body: Values) -> tuple[str, ...]:
    """Return the names in a validated body's `model`; raises InvalidField if there is none."""
    model = body.get("model")
    if model is None:
        raise field_error("model", "is missing", "Set it to a name, or an array of names.")
    return (model,) if isinstance(model, str) else tuple(model)


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


def read_sampling(body: Values) -> NewValues:
    """Return SGLang's `sampling_params` for a validated body; raises InvalidField."""
    params: NewValues = {}
    constraint = ""
    for name, setting in body.items():
        native = NATIVE_NAMES.get(name)
        if native is None:
            continue
        if name not in CONSTRAINTS:
            if params.get(native, setting) != setting:
                what = "differs from max_completion_tokens"
                raise field_error("max_tokens", what, "Send only one of them.")
            params[native] = setting
        elif (text := _read_constraint(name, setting)) is not None:
            if constraint:
                raise field_error(name, f"cannot go with {constraint}", "Send only one of them.")
            constraint = name
            params[native] = text
    if params.get("top_p") == 0:
        params["top_p"] = LEAST_TOP_P
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
    check_schema(value, name)
    if name.startswith("response_format"):
        value = close_objects(value)
    return write_json(value).decode()


def read_end_user(body: EndUserFields) -> str | None:
    """Return a digest of the tenant's own user: OpenAI's `prompt_cache_key`, else `user`."""
    key = body.get("prompt_cache_key") or body.get("user")
    if not key:
        return None
    return digest(key)


def read_tier(body: TierField, highest: ServiceTier) -> ServiceTier:
    """Return the class of a request, whose key allows `highest`."""
    asked = body.get("service_tier", "default")
    return max(asked if asked in TIERS else "default", highest, key=TIERS.index)


def read_labels(metadata: Values) -> Mapping[str, str]:
    """Return an object of strings without its nulls; raises InvalidField."""
    labels = {name: text for name, text in metadata.items() if text is not None}
    for name, text in labels.items():
        if not isinstance(text, str):
            raise field_error(f"metadata.{name}", f"must be a string, not {show(text)}")
    return labels


MAX_TEMPLATE_BYTES = 2**14
"""The limit of a chat template's variables as JSON: it may write one for every message."""


def check_template_kwargs(variables: Values) -> None:
    """Raise InvalidField for `chat_template_kwargs` that nest too deeply or are too large."""
    check_depth(variables, "chat_template_kwargs")
    if variables and len(write_json(variables)) > MAX_TEMPLATE_BYTES:
        raise field_error(
            "chat_template_kwargs", f"takes more than {MAX_TEMPLATE_BYTES} bytes", "Send fewer."
        )


def check_identifier(value: str, name: str) -> None:
    """Raise InvalidField for a program's or agent's id that is unfit for URLs and cache keys."""
    if not re.fullmatch(IDENTIFIER_PATTERN, value):
        raise field_error(name, "may hold 1 to 128 letters, digits and any of _ . : @ -")


# --- chats

PROGRAM_HEADER = "x-shell-router-program"
LAZY_HEADER = "x-shell-router-lazy"


@dataclass(frozen=True, slots=True)
class Wish:
    """The program that a chat completion belongs to, and whether its answer is lazy."""

    program: str | None = None
    is_lazy: bool = False


def read_wish(body: SharedFields, headers: Mapping[str, str]) -> Wish:
    """Return the wish in a validated body or in the headers; raises InvalidField."""
    program = body.get("program")
    is_lazy = body.get("lazy", False)
    header = headers.get(PROGRAM_HEADER)
    lazy_header = headers.get(LAZY_HEADER)
    if header is not None:
        check_identifier(header, PROGRAM_HEADER)
        if program not in (None, header):
            what = f"differs from the header {PROGRAM_HEADER}"
            raise field_error("program", what, "Send only one of them.")
        program = header
    if lazy_header is not None:
        if lazy_header.lower() not in ("true", "false"):
            what = f"The header {LAZY_HEADER} must be true or false."
            raise InvalidField(what, field=LAZY_HEADER)
        is_lazy = is_lazy or lazy_header.lower() == "true"
    if is_lazy and program is None:
        remedy = "A lazy answer needs one: name it with an id of your own per run."
        raise field_error("program", "is missing", remedy)
    return Wish(program, is_lazy)


READ_BY_ROUTER = ("n", "tools", "reasoning_effort")
NOT_BY_ROUTER = {name: ENGINE_FIELDS[name] for name in ENGINE_FIELDS if name not in READ_BY_ROUTER}
UNSUPPORTED = "has a value that is not supported"
ELSEWHERE = ", or ask a plain model on SGLang: GET /v1/models names each model's engine"


@value
class ChatRequest(MoaRequest):
    """A chat completion, read."""

    stream: bool = False
    include_usage: bool = False
    usage: Any = "all"
    include_agents: bool = False


def read_chat(
    body: ChatBody, sent: Values, run_id: str, tenant: str, timeout_s: float
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
    if not stream:
        sampling = {"stream_interval": UNSTREAMED_INTERVAL, **sampling}
    template_kwargs = body.get("chat_template_kwargs", {})
    check_template_kwargs(template_kwargs)
    prediction = body.get("prediction")
    return ChatRequest(
        id=run_id,
        tenant=tenant,
        messages=read_messages(body["messages"]),
        sampling=sampling,
        seed=body["seed"] if "seed" in body else zlib.crc32(run_id.encode()),
        timeout_s=timeout_s,
        labels=read_labels(body.get("metadata", {})),
        stream=stream,
        include_usage=bool(body.get("stream_options", {}).get("include_usage")),
        usage=body.get("usage", "all"),
        include_agents=body.get("include_agents", False),
        end_user=read_end_user(body),
        prediction="".join(list_texts(prediction["content"], "prediction.content"))
        if prediction
        else "",
        chat_template_kwargs=template_kwargs,
        max_thinking_tokens=body.get("max_thinking_tokens"),
        offer=read_tools(body, sent),
        budget=Budget(**body.get("budget", {})),
    )


def find_ignored(body: ChatBody, sent: Values, *, is_panel: bool) -> list[str]:
    """Return the fields without effect, of a body whose own fields describe a panel or do not.

    Raises:
        InvalidField: A name is nearly a known one.
    """
    ignored = CHAT.find_unknown(sent, NOT_SERVED)
    if "reasoning_effort" in body:
        ignored.append("reasoning_effort")
    if not is_panel:
        ignored += [name for name in body if name in PanelFields.__annotations__]
    return ignored
