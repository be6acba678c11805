"""Native request bodies: checked once, and extended as bytes, so nothing in them is rewritten."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import orjson

from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS, NativeRoute, value
from shell_router.core.exact_json import Values, parse_json, write_json
from shell_router.core.sampling import (
    GRAMMARS,
    MAX_INTEGER,
    MAX_TOKEN_IDS,
    PLAIN,
    Range,
    are_ids,
    check_depth,
    check_sampling,
    check_schema,
    require_possible,
)
from shell_router.core.validation import field_error, parse_object
from shell_router.errors import InvalidField, InvalidRequest, PromptTooLong

_RESERVED = ("bootstrap_", "rid")
_PROMPTS = {"input_ids", "messages", "prompt", "tools"}
RANKS = ("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank")
"""SGLang's fields for routers: a wrong one makes servers answer 500."""
ADAPTER = "lora_path"
"""SGLang's field for the name of a request's adapter."""
CACHE_KEY = "extra_key"
"""SGLang's field for the prefix cache that a request shares."""


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


SAMPLING_FIELDS = _names(
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
    "max_tokens min_tokens"
    " max_completion_tokens seed stop stop_token_ids ignore_eos no_stop_trim skip_special_tokens "
    "regex ebnf json_schema"
    " response_format logit_bias n logprobs top_logprobs"
)
"""Sampling fields of OpenAI's routes, which have no `sampling_params`."""
GENERATE_FIELDS = _names(
    "text input_ids sampling_params stream model return_logprob logprob_start_len "
    "top_logprobs_num token_ids_logprob"
    " return_text_in_logprobs return_prompt_token_ids"
)
CHAT_FIELDS = SAMPLING_FIELDS | _names(
    "messages model stream stream_options tools tool_choice parallel_tool_calls "
    "chat_template_kwargs reasoning_effort"
    " separate_reasoning return_token_ids user metadata store service_tier safety_identifier "
    "prompt_cache_key"
    " prompt_cache_retention"
)
FIELDS: Mapping[NativeRoute, frozenset[str]] = {
    "generate": GENERATE_FIELDS,
    "prefill_only": GENERATE_FIELDS,
    "v1/chat/completions": CHAT_FIELDS,
    "v1/completions": SAMPLING_FIELDS | _names("prompt model stream stream_options user"),
}
"""Fields that may be forwarded. Other fields load code or files, reach hosts, or choose a server, a
rank or a priority.
"""
MEANT_BY_FALSE = frozenset({"log_metrics", "priority", *RANKS})
"""Other fields that ask for something even if they are false; SGLang takes it for the number 0."""
_PLAIN = PLAIN.union(*FIELDS.values()) - {
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "response_format",
    *GRAMMARS,
}
MEDIA = "image_url"
"""The kind of message part whose URL an engine fetches from a host, unless it is a data: URL."""
MAX_BATCH = 1024
MAX_TOP_LOGPROBS = 128


@value
class NativeBody:
    """A JSON object in SGLang's native shape, of one request or of a batch.

    Attributes:
        rid: The request's id.
        batch: The number of requests; None for a single prompt.
        stream: Whether the answer is streamed.
        input_logprobs: Whether the answer holds log probabilities of the prompt.
        opened: The client's object without its closing brace, ready for more fields.
        own: The router's fields, besides `rid`.
        max_output_tokens: The limit of each output.
        odd_fields: Fields that ended servers before, or that the router does not know.
    """

    rid: str
    batch: int | None
    stream: bool
    input_logprobs: bool
    opened: bytes
    own: Mapping[str, str]
    max_output_tokens: int = DEFAULT_MAX_NEW_TOKENS
    odd_fields: Set[str] = frozenset()

    @property
    def rids(self) -> tuple[str, ...]:
        """The ids that the engine gives its requests.

        SGLang appends `_<index>` to the single `rid` of a batch.
        """
        if self.batch is None:
            return (self.rid,)
        return tuple(f"{self.rid}_{index}" for index in range(self.batch))

    def with_fields(self, fields: Values) -> bytes:
        """Return the body with `fields` at its end, every other byte as the client wrote it."""
        return self.opened + orjson.dumps({"rid": self.rid, **self.own, **fields})[1:]

    def replace_fields(self, fields: Values) -> bytes:
        """Return the body, parsed and written again, with `fields` in place of the client's.

        `sampling_params` are merged with the client's, of each request in a batch.
        """
        body = parse_json(self.with_fields({}))
        changes = fields.get("sampling_params", {})
        sampling = body.get("sampling_params") or {}
        if isinstance(sampling, list):
            changed: Any = [{**params, **changes} for params in sampling]
        else:
            changed = {**sampling, **changes}
        return write_json({**body, **fields, "sampling_params": changed})


@dataclass(frozen=True, slots=True)
class NativeRules:
    """A model's rules for bodies.

    Attributes:
        vocabulary: The number of token ids, None if unknown. An id beyond it would crash SGLang.
        context_length: Prompts that cannot fit into it are refused.
        fields: Fields that are forwarded besides FIELDS; with MEDIA among them engines may fetch
            URLs.
    """

    vocabulary: int | None = None
    context_length: int | None = None
    fields: frozenset[str] = frozenset()


ANY_MODEL = NativeRules()
NO_FIELDS: Mapping[str, str] = {}


def read_native(
    body: bytes,
    rid: str,
    rules: NativeRules = ANY_MODEL,
    own: Mapping[str, str] = NO_FIELDS,
    route: NativeRoute = "generate",
) -> NativeBody:
    """Check `body` by `rules`, and give it `rid` and the router's `own` fields.

    The id is never the client's: SGLang aborts every request whose id begins with an aborted one.

    Raises:
        InvalidRequest: A field or value is not forwarded.
        PromptTooLong: The prompt cannot fit.
    """
    fields = parse_object(body)
    batch = _count_batch(fields)
    for name, content in fields.items():
        _check_field(name, content, FIELDS[route], rules, own, batch)
    _check_sampling(fields, rules.vocabulary, openai=route.startswith("v1/"))
    opened = body.rstrip()[:-1].rstrip()
    if fields:
        opened += b","
    return NativeBody(
        rid,
        batch,
        fields.get("stream") is True,
        wants_input_logprobs(fields),
        opened,
        own,
        _max_output_tokens(fields),
        _list_odd(fields),
    )


def _list_odd(fields: Values) -> Set[str]:
    names = set(fields)
    for params in as_list(fields.get("sampling_params") or {}):
        names.update(params)
    return names - _PLAIN


def _check_field(
    name: str,
    content: object,
    forwarded: Set[str],
    rules: NativeRules,
    own: Mapping[str, str],
    batch: int | None,
) -> None:
    if name.startswith(_RESERVED) or (name in own and content is not None):
        raise InvalidField(
            f"The body sets {name[:40]}, which the router chooses.",
            field=name,
            remedy="Leave it out; the answer's meta_info.id is the request's id, and models name "
            "adapters.",
        )
    if content is None:
        return
    asks_something = content is not False or name in MEANT_BY_FALSE
    if asks_something and name not in forwarded and name not in rules.fields:
        raise InvalidField(
            f"The field {name[:40]!r} is not forwarded to engines.",
            field=name,
            remedy="Leave it out; an operator may list it in native_fields, of limits or of the "
            "API key.",
        )
    if name in _SHAPES:
        _check_shape(name, content, rules, batch)
    elif name == "messages" and MEDIA not in rules.fields:
        _refuse_media(content)


def _is_text(value: Any, rules: NativeRules) -> bool:
    if isinstance(value, str) and rules.context_length is not None:
        require_possible(len(value), rules.context_length)
    return isinstance(value, str) and value != ""


def _are_prompt_ids(value: Any, rules: NativeRules) -> bool:
    limit = rules.context_length
    if limit is not None and isinstance(value, list) and len(value) > limit:
        raise PromptTooLong(
            f"The prompt has {len(value)} token ids; the model takes {limit}.", remedy="Send fewer."
        )
    return bool(value) and are_ids(value, rules.vocabulary or MAX_INTEGER, inf)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The values of a field: `allows` tells them, given the model's rules, and `words` name them.

    If `listed`, a batch may have an array of them, with one for each of its prompts.
    """

    allows: Callable[[Any, NativeRules], bool]
    words: str
    listed: bool = True


def _range_shape(limits: Range) -> _Shape:
    return _Shape(lambda value, _: limits.allows(value), str(limits))


_IDS = "token ids of at least 0 and below {vocabulary}"
_FLAG = _Shape(lambda value, _: isinstance(value, bool), "true or false", listed=False)
_SHAPES: Mapping[str, _Shape] = {
    "text": _Shape(_is_text, "text that is not empty"),
    "input_ids": _Shape(_are_prompt_ids, f"an array of {_IDS}"),
    "prompt": _Shape(
        lambda value, rules: _is_text(value, rules) or _are_prompt_ids(value, rules),
        f"text or {_IDS}",
        listed=False,
    ),
    "sampling_params": _Shape(lambda value, _: isinstance(value, dict), "an object"),
    "return_logprob": replace(_FLAG, listed=True),
    "logprob_start_len": _range_shape(Range(-1, MAX_INTEGER, whole=True)),
    "top_logprobs_num": _range_shape(Range(0, MAX_TOP_LOGPROBS, whole=True)),
    "token_ids_logprob": _Shape(
        lambda value, rules: are_ids(value, rules.vocabulary or MAX_INTEGER),
        f"at most {MAX_TOKEN_IDS} {_IDS}",
    ),
    **dict.fromkeys(("stream", "return_text_in_logprobs", "return_prompt_token_ids"), _FLAG),
}
"""SGLang 0.5.23 answers other values with status 500, or its servers end or hang."""
_ARRAYS = frozenset({"input_ids", "token_ids_logprob"})
"""Fields that are arrays even of a single prompt."""


def _check_shape(name: str, content: Any, rules: NativeRules, batch: int | None) -> None:
    """Check the field's value; in a batch it may be an array of values, one for each prompt."""
    shape = _SHAPES[name]
    values = [content]
    is_listed = shape.listed and batch is not None and isinstance(content, list)
    if is_listed and name in _ARRAYS:
        is_listed = bool(content) and isinstance(content[0], list)
    if is_listed:
        values = content
        if len(values) != batch:
            raise field_error(
                name, f"has {len(values)} values for {batch} prompts", "Send one for each."
            )
    if not all(shape.allows(value, rules) for value in values):
        words = shape.words.replace("{vocabulary}", str(rules.vocabulary or MAX_INTEGER))
        remedy = "Send such a value; only a batch may have an array of them, one for each prompt."
        raise field_error(name, f"must be {words}", remedy)


def _refuse_media(messages: object) -> None:
    """Refuse parts whose URL engines would fetch; the engine refuses malformed messages itself."""
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            for name, media in part.items() if isinstance(part, dict) else ():
                url = media if name.endswith("_url") else None
                if isinstance(media, dict):
                    url = media.get("url")
                if isinstance(url, str) and not url.startswith("data:"):
                    raise InvalidRequest(
                        f"The {name[:40]} of a message is not a data: URL, and engines fetch no "
                        "others.",
                        remedy=f"Send the content itself; an operator may list {MEDIA} in "
                        "native_fields.",
                    )


def _check_sampling(fields: Values, vocabulary: int | None, openai: bool) -> None:
    """Check `sampling_params`: an object, or for a batch one per request."""
    if openai:
        check_depth({name: fields[name] for name in fields.keys() - {"prompt"}}, "body")
        check_sampling({name: fields[name] for name in fields.keys() - _PROMPTS}, vocabulary)
        for path, schema in _list_schemas(fields):
            check_schema(schema, path)
        return
    for params in as_list(fields.get("sampling_params") or {}):
        check_sampling(params, vocabulary, "sampling_params")


def _list_schemas(fields: Values) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of an OpenAI body, with the fields that hold them."""
    match fields.get("response_format"):
        case {"json_schema": {"schema": schema}}:
            yield "response_format.json_schema.schema", schema
    for tool in as_list(fields.get("tools")):
        match tool:
            case {"function": {"parameters": dict(schema)}}:
                yield "tools", schema


def _count_batch(fields: Values) -> int | None:
    """Count the requests that a list of prompts makes; None for a single prompt.

    Raises:
        InvalidField: There are two kinds of prompts, or too many or no prompts.
    """
    text = fields.get("text")
    ids = fields.get("input_ids")
    if text is not None and ids is not None:
        raise field_error("input_ids", "is sent beside text", "Send one of both.")
    prompts = text if ids is None else ids
    if not isinstance(prompts, list) or (ids and not isinstance(ids[0], list)):
        return None
    if not 0 < len(prompts) <= MAX_BATCH:
        name = "text" if ids is None else "input_ids"
        raise field_error(name, f"has {len(prompts)} prompts", f"Send 1 to {MAX_BATCH} at a time.")
    return len(prompts)


def _max_output_tokens(fields: Values) -> int:
    """Return the highest output limit of the body, under whichever name a route has for it."""
    sampling = fields.get("sampling_params") or {}
    limits = [
        params.get(name)
        for params in (fields, *as_list(sampling))
        for name in ("max_new_tokens", "max_tokens", "max_completion_tokens")
    ]
    default = MAX_INTEGER if "messages" in fields else DEFAULT_MAX_NEW_TOKENS
    return max([limit for limit in limits if isinstance(limit, int)], default=default)


def wants_input_logprobs(fields: Values) -> bool:
    """Tell whether a body may get log probabilities of its prompts' tokens.

    In a batch both fields may be lists.
    """
    if True not in as_list(fields.get("return_logprob")):
        return False
    return any(
        start is not None and start >= 0 for start in as_list(fields.get("logprob_start_len"))
    )


def as_list(value: object) -> list[Any]:
    """Wrap a value that is not a list."""
    if isinstance(value, list):
        return value
    return [value]
