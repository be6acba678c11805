"""Native request bodies: checked once, and extended as bytes, so nothing in them is rewritten."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import orjson

from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS, NativeRoute, value
from shell_router.core.sampling import MAX_INTEGER, check_depth, check_sampling, require_possible
from shell_router.core.validation import parse_object
from shell_router.errors import InvalidField, InvalidRequest, PromptTooLong

_RESERVED = ("bootstrap_", "rid")
_PROMPTS = {"input_ids", "messages", "prompt", "tools"}
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
    """

    rid: str
    batch: int | None
    stream: bool
    input_logprobs: bool
    opened: bytes
    own: Mapping[str, str]
    max_output_tokens: int = DEFAULT_MAX_NEW_TOKENS

    @property
    def rids(self) -> tuple[str, ...]:
        """The ids that the engine gives its requests.

        SGLang appends `_<index>` to the single `rid` of a batch.
        """
        if self.batch is None:
            return (self.rid,)
        return tuple(f"{self.rid}_{index}" for index in range(self.batch))

    def with_fields(self, fields: Mapping[str, Any]) -> bytes:
        """Return the body with `fields` at its end, every other byte as the client wrote it."""
        return self.opened + orjson.dumps({"rid": self.rid, **self.own, **fields})[1:]

    def replace_fields(self, fields: Mapping[str, Any]) -> bytes:
        """Return the body, parsed and written again, with `fields` in place of the client's.

        `sampling_params` are merged with the client's, of each request in a batch.
        """
        body = orjson.loads(self.with_fields({}))
        changes = fields.get("sampling_params", {})
        sampling = body.get("sampling_params") or {}
        if isinstance(sampling, list):
            changed: Any = [{**params, **changes} for params in sampling]
        else:
            changed = {**sampling, **changes}
        return orjson.dumps({**body, **fields, "sampling_params": changed})


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
    for name, content in fields.items():
        _check_field(name, content, FIELDS[route], rules, own)
    _check_sampling(fields, rules.vocabulary, openai=route.startswith("v1/"))
    opened = body.rstrip()[:-1].rstrip()
    if fields:
        opened += b","
    return NativeBody(
        rid,
        _count_batch(fields),
        fields.get("stream") is True,
        wants_input_logprobs(fields),
        opened,
        own,
        _max_output_tokens(fields),
    )


def _check_field(
    name: str, content: object, forwarded: Set[str], rules: NativeRules, own: Mapping[str, str]
) -> None:
    if name.startswith(_RESERVED) or (name in own and content is not None):
        raise InvalidField(
            f"The body sets {name[:40]}, which the router chooses.",
            field=name,
            remedy=(
                "Leave it out; the answer's meta_info.id is the request's id, and models name "
                "adapters."
            ),
        )
    if content is None:
        return
    if name not in forwarded and name not in rules.fields:
        raise InvalidField(
            f"The field {name[:40]!r} is not forwarded to engines.",
            field=name,
            remedy=(
                "Leave it out; an operator may list it in native_fields, of limits or of the "
                "API key."
            ),
        )
    if name in _TOKENS_OR_TEXT:
        _check_prompt(name, content, rules)
    elif name == "messages" and MEDIA not in rules.fields:
        _refuse_media(content)
    elif name == "logprob_start_len":
        for start in as_list(content):
            if isinstance(start, int) and start < -1:  # it would crash SGLang's prefill server
                raise InvalidRequest(
                    f"`{name}` is {start}.", remedy="Make it -1 (no prompt tokens) or more."
                )
    elif name == "top_logprobs_num" and any(
        isinstance(top, int) and top > MAX_TOP_LOGPROBS for top in as_list(content)
    ):
        raise InvalidRequest(f"`{name}` is above {MAX_TOP_LOGPROBS}.", remedy="Ask for fewer.")


_LIST_OR_TEXT = (list, str)
_KINDS: Mapping[str, tuple[type, ...]] = {"text": (str,), "input_ids": _LIST_OR_TEXT}
_TOKENS_OR_TEXT = frozenset({"text", "input_ids", "prompt", "token_ids_logprob"})


def _check_prompt(name: str, content: object, rules: NativeRules) -> None:
    """Check a text or token ids, or a list of either; the engine refuses other values itself."""
    prompts = [content]
    if isinstance(content, list) and content and isinstance(content[0], _LIST_OR_TEXT):
        prompts = content
    if len(prompts) > MAX_BATCH:
        raise InvalidRequest(
            f"`{name}` has {len(prompts)} prompts.", remedy=f"Send at most {MAX_BATCH} at a time."
        )
    for prompt in prompts:
        is_wrong = not (prompt and isinstance(prompt, _KINDS.get(name, object)))
        if name in _KINDS and prompt is not None and is_wrong:
            raise InvalidRequest(
                f"`{name}` is empty, or of the wrong kind.", remedy="Send `text` or `input_ids`."
            )
        if isinstance(prompt, str):
            if rules.context_length is not None:
                require_possible(len(prompt), rules.context_length)
            if prompt and rules.vocabulary is not None and name not in ("text", "prompt"):
                raise _no_ids(name, rules.vocabulary)
        elif isinstance(prompt, list):
            _check_ids(name, prompt, rules)


def _check_ids(name: str, ids: list[Any], rules: NativeRules) -> None:
    limit = rules.context_length
    vocabulary = rules.vocabulary
    if ids and isinstance(ids[0], list):
        raise InvalidRequest(
            f"`{name}` nests lists in lists.", remedy="Send a list of token ids per prompt."
        )
    if limit is not None and len(ids) > limit:
        raise PromptTooLong(
            f"`{name}` has {len(ids)} token ids; the model takes {limit}.", remedy="Send fewer."
        )
    if (
        ids
        and vocabulary is not None
        and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary)
    ):
        raise _no_ids(name, vocabulary)


def _no_ids(name: str, vocabulary: int) -> InvalidRequest:
    words = f"`{name}` may hold only token ids of at least 0 and below {vocabulary}."
    return InvalidRequest(words, remedy="Tokenize for this model.")


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


def _check_sampling(fields: Mapping[str, Any], vocabulary: int | None, openai: bool) -> None:
    """Check `sampling_params`: an object, or for a batch one per request."""
    if openai:
        check_depth({name: fields[name] for name in fields.keys() - {"prompt"}}, "body")
        check_sampling({name: fields[name] for name in fields.keys() - _PROMPTS}, vocabulary)
        return
    for params in as_list(fields.get("sampling_params") or {}):
        if not isinstance(params, dict):
            raise InvalidRequest(
                "`sampling_params` is not an object.", remedy="Make it one, or leave it out."
            )
        check_sampling(params, vocabulary, "sampling_params")


def _count_batch(fields: Mapping[str, Any]) -> int | None:
    """Count the requests that a list of prompts makes; None for a single prompt."""
    text = fields.get("text")
    ids = fields.get("input_ids")
    if isinstance(text, list):
        return len(text)
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return None


def _max_output_tokens(fields: Mapping[str, Any]) -> int:
    """Return the highest output limit of the body, under whichever name a route has for it."""
    sampling = fields.get("sampling_params") or {}
    if isinstance(sampling, dict) and isinstance(limit := sampling.get("max_new_tokens"), int):
        return limit  # the common case
    limits = [
        params.get(name)
        for params in (fields, *as_list(sampling))
        for name in ("max_new_tokens", "max_tokens", "max_completion_tokens")
    ]
    default = MAX_INTEGER if "messages" in fields else DEFAULT_MAX_NEW_TOKENS
    return max([limit for limit in limits if isinstance(limit, int)], default=default)


def wants_input_logprobs(fields: Mapping[str, Any]) -> bool:
    """Tell whether a body may get log probabilities of its prompts' tokens.

    In a batch both fields may be lists.
    """
    if "return_logprob" not in fields:
        return False
    if not any(wish is True for wish in as_list(fields["return_logprob"])):
        return False
    starts = as_list(fields.get("logprob_start_len"))
    return any(type(start) is int and start >= 0 for start in starts)


def as_list(value: object) -> list[Any]:
    """Wrap a value that is not a list."""
    if isinstance(value, list):
        return value
    return [value]
