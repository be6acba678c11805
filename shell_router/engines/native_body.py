"""A client's native request body: checked once, extended as bytes, so that nothing in it is ever
rewritten.
"""

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
CACHE_KEY = "extra_key"
"""SGLang's fields for the name of a request's adapter, and for the prefix cache that it has a part
of.
"""


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


SAMPLING_FIELDS = _names(
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
    "max_tokens min_tokens"
    " max_completion_tokens seed stop stop_token_ids ignore_eos no_stop_trim skip_special_tokens "
    "regex ebnf json_schema"
    " response_format logit_bias n logprobs top_logprobs"
)
"""Of OpenAI's routes, which have no `sampling_params`."""
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
"""What may be forwarded. Others load code or files, reach hosts, or choose a server, a rank or a
priority.
"""
MEDIA = "image_url"
"""A chat's part by whose URL an engine would fetch from a host; data: URLs fetch nothing."""
MAX_BATCH = 1024
MAX_TOP_LOGPROBS = 128


@value
class NativeBody:
    """A JSON object in SGLang's native shape, with one request, or with `batch` requests of
    `max_output_tokens` each.

    `opened` is the client's object without its closing brace, ready for more fields, which are
    `rid` and the router's `own`. With `input_logprobs` the answer shall hold log probabilities of
    the prompt.
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
        """The ids the engine gives its requests (SGLang appends `_<index>` to a batch's single
        `rid`).
        """
        if self.batch is None:
            return (self.rid,)
        return tuple(f"{self.rid}_{index}" for index in range(self.batch))

    def with_fields(self, fields: Mapping[str, Any]) -> bytes:
        """The body with `fields` added at its end, every other byte as the client wrote it."""
        return self.opened + orjson.dumps({"rid": self.rid, **self.own, **fields})[1:]

    def replaced(self, fields: Mapping[str, Any]) -> bytes:
        """The body with `fields` in place of the client's; numbers may be written differently
        afterwards.
        """
        found = orjson.loads(self.with_fields({}))
        own = fields.get("sampling_params", {})
        given = found.get("sampling_params") or {}
        sampling = (
            ([{**one, **own} for one in given]) if (isinstance(given, list)) else ({**given, **own})
        )
        return orjson.dumps({**found, **fields, "sampling_params": sampling})


@dataclass(frozen=True, slots=True)
class NativeRules:
    """What a model asks of bodies.

    Token ids must lie below `vocabulary`, where it is known: SGLang ends at one that does not.
    Prompts that cannot fit into `context_length` are refused. `fields` are forwarded besides
    FIELDS, MEDIA among them if engines may fetch it.
    """

    vocabulary: int | None = None
    context_length: int | None = None
    fields: frozenset[str] = frozenset()


ANY_MODEL = NativeRules()
NOTHING: Mapping[str, str] = {}


def read_native(
    body: bytes,
    rid: str,
    rules: NativeRules = ANY_MODEL,
    own: Mapping[str, str] = NOTHING,
    route: NativeRoute = "generate",
) -> NativeBody:
    """Check `body` by `rules`, and give it `rid` and the router's `own` fields; raises
    InvalidRequest, PromptTooLong.

    The id is never the client's: SGLang aborts every request whose id begins with an aborted one.
    """
    found = parse_object(body)
    for name, given in found.items():
        _check_field(name, given, FIELDS[route], rules, own)
    _check_sampling(found, rules.vocabulary, openai=route.startswith("v1/"))
    opened = body.rstrip()[:-1].rstrip() + (b"," if found else b"")
    batch = _batch(found)
    stream = found.get("stream") is True
    limit = _max_output_tokens(found)
    return NativeBody(rid, batch, stream, wants_input_logprobs(found), opened, own, limit)


def _check_field(
    name: str, given: object, forwarded: Set[str], rules: NativeRules, own: Mapping[str, str]
) -> None:
    if name.startswith(_RESERVED) or (name in own and given is not None):
        raise InvalidField(
            f"The body sets {name[:40]}, which the router chooses.",
            field=name,
            remedy=(
                "Leave it out; the answer's meta_info.id is the request's id, and models name "
                "adapters."
            ),
        )
    if given is None:
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
        _check_prompt(name, given, rules)
    elif name == "messages" and MEDIA not in rules.fields:
        _refuse_media(given)
    elif name == "logprob_start_len":
        for start in as_list(given):
            if isinstance(start, int) and start < -1:  # SGLang's prefill server ends at one
                raise InvalidRequest(
                    f"`{name}` is {start}.", remedy="Make it -1 (no prompt tokens) or more."
                )
    elif name == "top_logprobs_num" and any(
        isinstance(top, int) and top > MAX_TOP_LOGPROBS for top in as_list(given)
    ):
        raise InvalidRequest(f"`{name}` is above {MAX_TOP_LOGPROBS}.", remedy="Ask for fewer.")


_LIST_OR_TEXT = (list, str)
_KINDS: Mapping[str, tuple[type, ...]] = {"text": (str,), "input_ids": _LIST_OR_TEXT}
_TOKENS_OR_TEXT = frozenset({"text", "input_ids", "prompt", "token_ids_logprob"})


def _check_prompt(name: str, given: object, rules: NativeRules) -> None:
    """A text or token ids, or a list of either. What is neither is left to the engine to refuse."""
    if isinstance(given, list) and given and isinstance(given[0], _LIST_OR_TEXT):
        several = given
    else:
        several = [given]
    if len(several) > MAX_BATCH:
        raise InvalidRequest(
            f"`{name}` has {len(several)} prompts.", remedy=f"Send at most {MAX_BATCH} at a time."
        )
    for one in several:
        if name in _KINDS and one is not None and not (one and isinstance(one, _KINDS[name])):
            raise InvalidRequest(
                f"`{name}` is empty, or of the wrong kind.", remedy="Send `text` or `input_ids`."
            )
        if isinstance(one, str):
            if rules.context_length is not None:
                require_possible(len(one), rules.context_length)
            if one and rules.vocabulary is not None and name not in ("text", "prompt"):
                raise _no_ids(name, rules.vocabulary)
        elif isinstance(one, list):
            _check_ids(name, one, rules)


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
    words = f"`{name}` holds something else than token ids below {vocabulary}."
    return InvalidRequest(words, remedy="Tokenize for this model.")


def _refuse_media(messages: object) -> None:
    """Refuse parts whose URL engines would fetch; what is no message is left to the engine."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
        else:
            content = None
        for part in content if isinstance(content, list) else ():
            for name, media in part.items() if isinstance(part, dict) else ():
                if isinstance(media, dict):
                    url = media.get("url")
                elif name.endswith("_url"):
                    url = media
                else:
                    url = None
                if isinstance(url, str) and not url.startswith("data:"):
                    raise InvalidRequest(
                        (
                            f"The {name[:40]} of a message is not a data: URL, and engines fetch "
                            "no "
                            "others."
                        ),
                        remedy=(
                            f"Send the content itself; an operator may list {MEDIA} in "
                            "native_fields."
                        ),
                    )


def _check_sampling(found: Mapping[str, Any], vocabulary: int | None, openai: bool) -> None:
    """`sampling_params`: an object, or for a batch one for each of its requests."""
    if openai:
        check_depth({name: found[name] for name in found.keys() - {"prompt"}}, "body")
        check_sampling({name: found[name] for name in found.keys() - _PROMPTS}, vocabulary)
        return
    given = found.get("sampling_params")
    for one in given if isinstance(given, list) else (given or {},):
        if not isinstance(one, dict):
            raise InvalidRequest(
                "`sampling_params` is not an object.", remedy="Make it one, or leave it out."
            )
        check_sampling(one, vocabulary, "sampling_params")


def _batch(found: Mapping[str, Any]) -> int | None:
    """How many requests a list of prompts makes; None for a prompt alone."""
    text = found.get("text")
    ids = found.get("input_ids")
    if isinstance(text, list):
        return len(text)
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return None


def _max_output_tokens(found: Mapping[str, Any]) -> int:
    """The highest limit that is given for an output, in the names of all routes."""
    sampling = found.get("sampling_params") or {}
    if isinstance(sampling, dict) and isinstance(limit := sampling.get("max_new_tokens"), int):
        return limit  # as most requests have it
    given = [found, *as_list(sampling)]
    limits = [
        one.get(name)
        for one in given
        for name in ("max_new_tokens", "max_tokens", "max_completion_tokens")
    ]
    if "messages" in found:
        default = MAX_INTEGER
    else:
        default = DEFAULT_MAX_NEW_TOKENS
    return max([limit for limit in limits if isinstance(limit, int)], default=default)


def wants_input_logprobs(found: Mapping[str, Any]) -> bool:
    """Whether this native body may get log probabilities of its prompts' tokens; a batch has lists
    of both fields.
    """
    if "return_logprob" not in found:
        return False
    asked = as_list(found.get("return_logprob"))
    starts = as_list(found.get("logprob_start_len"))
    return any(one is True for one in asked) and any(
        type(start) is int and start >= 0 for start in starts
    )


def as_list(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]
