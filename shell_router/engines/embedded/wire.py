"""SGLang's `/generate` body, read and checked."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from shell_router.engines.embedded.sampling_params import SamplingParams, parse_sampling_params
from shell_router.errors import InvalidRequest

FAKE_BOOTSTRAP_HOST = "2.2.2.2"

# Known to SGLang, absent here; refused when set, because ignoring them would change what the caller gets.
UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "return_sampling_mask",
    "session_params",
    "custom_logit_processor",
)


class MalformedBody(InvalidRequest):
    """The body is not JSON."""


class ContractViolation(InvalidRequest):
    """A field has a type that the schema does not allow."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, checked; `input_ids` are given or tokenized from `text`.

    `scored_from` is the first prompt token whose log probability is asked for. `lora_path` is an adapter's name, as
    in SGLang.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stream: bool
    return_logprob: bool
    return_text_in_logprobs: bool
    scored_from: int | None
    bootstrap_host: str | None
    bootstrap_port: int | None
    bootstrap_room: int | None
    lora_path: str | None = None

    @property
    def prefill_only(self) -> bool:
        """SGLang's fake host: prefill without a decode partner."""
        return self.bootstrap_host == FAKE_BOOTSTRAP_HOST

    @property
    def heard_every(self) -> int:
        """How many tokens after its first one are worth an event; all of them where nothing is streamed."""
        return self.sampling.stream_interval if self.stream else max(1, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a server can take. All are tokens; `max_total_tokens` bounds one request too."""

    context_length: int
    max_total_tokens: int
    vocab_size: int


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """The JSON object of a `/generate`. Raises `MalformedBody`, or `ContractViolation` on a field of a wrong type."""
    body = parse_object(raw)
    _check_types(body)
    return body


def parse_object(raw: bytes) -> Mapping[str, Any]:
    """The JSON object of a request's body. Raises `MalformedBody`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The body is not JSON: {error}.", remedy="Send one JSON object.") from error
    if not isinstance(body, dict):
        raise MalformedBody("The body is not a JSON object.", remedy="Send one JSON object.")
    return body


def read_request(body: Mapping[str, Any], tokenizer: Tokenizer, limits: RequestLimits) -> GenerateRequest:
    """Check a parsed body in full. Raises `InvalidRequest` where SGLang answers 400."""
    for name in UNSUPPORTED:
        if body.get(name):
            raise InvalidRequest(f"The embedded engine has no {name}.", remedy="Leave it out, or use SGLang.")
    sampling = parse_sampling_params(body.get("sampling_params"), limits.vocab_size)
    input_ids = _input_ids(body, tokenizer, limits)
    # Only what was asked for is checked; SGLang silently cuts its default to what is left.
    wanted = (body.get("sampling_params") or {}).get("max_new_tokens")
    _check_lengths(len(input_ids), wanted, limits)
    return GenerateRequest(
        rid=body.get("rid") or uuid.uuid4().hex,
        input_ids=input_ids,
        sampling=sampling,
        max_new_tokens=_max_new_tokens(len(input_ids), sampling, limits),
        stream=bool(body.get("stream")),
        return_logprob=bool(body.get("return_logprob")),
        return_text_in_logprobs=bool(body.get("return_text_in_logprobs")),
        scored_from=_scored_from(body, len(input_ids)),
        bootstrap_host=body.get("bootstrap_host"),
        bootstrap_port=body.get("bootstrap_port"),
        bootstrap_room=body.get("bootstrap_room"),
        lora_path=body.get("lora_path") or None,
    )


def _input_ids(body: Mapping[str, Any], tokenizer: Tokenizer, limits: RequestLimits) -> tuple[int, ...]:
    text, given = body.get("text"), body.get("input_ids")
    if text is None and given is None:
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.")
    ids = tuple(given) if given is not None else tuple(tokenizer.encode(text, add_special_tokens=True).ids)
    if not ids:
        raise InvalidRequest("input_ids cannot be empty.")
    outside = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(
            f"The input_ids contain {outside}, which is outside the vocabulary; "
            f"valid range is [0, {limits.vocab_size})."
        )
    return ids


def _check_lengths(prompt: int, wanted: int | None, limits: RequestLimits) -> None:
    """SGLang's wording, so that clients that read it work on both."""
    context = limits.context_length
    if prompt >= context:
        raise InvalidRequest(
            f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        )
    if wanted is not None and prompt + wanted > context:
        raise InvalidRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. "
            f"You requested a total of {prompt + wanted} tokens: {prompt} tokens from the input messages and "
            f"{wanted} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
    if prompt >= limits.max_total_tokens:
        raise InvalidRequest(
            f"Input length ({prompt} tokens) exceeds the maximum allowed length ({limits.max_total_tokens} tokens). "
            "Use a shorter input or start the engine with more --max-total-tokens."
        )


def _scored_from(body: Mapping[str, Any], prompt: int) -> int | None:
    start = body.get("logprob_start_len")
    if not body.get("return_logprob") or start in (None, -1, prompt):
        return None
    if start > prompt:
        raise InvalidRequest(
            f"logprob_start_len={start} is higher than the number of input tokens {prompt}. "
            "Please use a smaller logprob_start_len."
        )
    if start < -1:
        raise InvalidRequest(f"logprob_start_len={start} is below -1.")
    return int(start)


def _max_new_tokens(prompt: int, sampling: SamplingParams, limits: RequestLimits) -> int:
    room = min(limits.context_length, limits.max_total_tokens) - prompt
    return room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)


def _check_types(body: Mapping[str, Any]) -> None:
    for name, (holds, wanted) in _CONTRACT.items():
        value = body.get(name)
        if value is not None and not holds(value):
            raise ContractViolation(f"{name}: expected {wanted}.")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_room(value: Any) -> bool:
    return _is_integer(value) and 0 <= value < 2**63


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


_CONTRACT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "rid": (_is_text, "a string (one request per body)"),
    "text": (_is_text, "a string (one request per body)"),
    "input_ids": (_is_ids, "a list of integers (one request per body)"),
    "sampling_params": (lambda value: isinstance(value, dict), "an object (one request per body)"),
    "stream": (_is_flag, "true or false"),
    "return_logprob": (_is_flag, "true or false"),
    "return_text_in_logprobs": (_is_flag, "true or false"),
    "logprob_start_len": (_is_integer, "an integer (one request per body)"),
    "priority": (_is_integer, "an integer"),
    "lora_path": (_is_text, "a string (one request per body)"),
    "bootstrap_host": (_is_text, "a string"),
    "bootstrap_port": (_is_integer, "an integer"),
    "bootstrap_room": (_is_room, "an integer of at least 0 and below 2^63"),
}
