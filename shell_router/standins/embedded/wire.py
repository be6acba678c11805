"""SGLang's `/generate` body, read and checked: names, defaults, limits, and the wording of refusals."""

import math
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from tokenizers import Tokenizer

from shell_router.core.drafts import MOST_SOURCE_TOKENS, MOST_SOURCES
from shell_router.errors import InvalidRequest

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
WHOLE_VOCABULARY = 1 << 30
GREEDY_BELOW = 1e-6

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
    "lora_path",
)
UNSUPPORTED_SAMPLING = ("stop_regex", "structural_tag", "beam_width", "watermark", "choice")
GRAMMARS = ("json_schema", "regex", "ebnf")
IGNORED_SAMPLING = ("spaces_between_special_tokens", "custom_params")  # of the latter `drafts` is read


class MalformedBody(InvalidRequest):
    """The body is not JSON."""


class ContractViolation(InvalidRequest):
    """A field has a type that the schema does not allow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. `max_new_tokens` None means: up to the context length.

    `drafts` are texts that its output may repeat, besides its prompt; None asks for no drafts. `grammar` is what its
    output must follow: the kind, and the text.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = WHOLE_VOCABULARY
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None
    stream_interval: int = 1
    drafts: tuple[tuple[int, ...], ...] | None = None
    grammar: tuple[str, str] | None = None

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def shapes_logits(self) -> bool:
        """Whether the logits must be changed before temperature and truncation."""
        penalised = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.logit_bias or self.min_new_tokens or self.grammar)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, checked; `input_ids` are given or tokenized from `text`.

    `scored_from` is the first prompt token whose log probability is asked for. Only requests of one `extra_key` share
    a prefix cache, as in SGLang.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    stream: bool = False
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    scored_from: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    extra_key: str | None = None

    @property
    def prefill_only(self) -> bool:
        """SGLang's fake host: prefill without a decode partner."""
        return self.bootstrap_host == FAKE_BOOTSTRAP_HOST

    @property
    def stream_interval(self) -> int:
        """How many tokens after its first one are worth an event; all of them where nothing is streamed."""
        return self.sampling.stream_interval if self.stream else max(1, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a server can take. All are tokens; `max_total_tokens` bounds one request too."""

    context_length: int
    max_total_tokens: int
    vocab_size: int


# What JSON may be, by the words for it. `type` is exact: a bool is no integer.
_FLAG, _INTEGER, _NUMBER, _TEXT = "true or false", "an integer", "a number", "a string"
_INTEGERS, _OBJECT = "a list of integers", "an object"
_ROOM, _TEXTS, _BIAS = "an integer of at least 0 and below 2^63", "a string or a list of them", "numbers by token id"
_IS: Mapping[str, Callable[[Any], bool]] = {
    _FLAG: lambda value: type(value) is bool,
    _INTEGER: lambda value: type(value) is int,
    _NUMBER: lambda value: type(value) in (int, float),
    _TEXT: lambda value: type(value) is str,
    _INTEGERS: lambda value: type(value) is list and all(type(each) is int for each in value),
    _OBJECT: lambda value: type(value) is dict,
    _ROOM: lambda value: type(value) is int and 0 <= value < 2**63,
    _TEXTS: lambda value: type(value) is str or (type(value) is list and all(type(each) is str for each in value)),
    _BIAS: lambda value: (
        type(value) is dict
        and all(re.fullmatch(r"-?\d+", key) and type(bias) in (int, float) for key, bias in value.items())
    ),
}
_FIELDS = {
    "rid": _TEXT,
    "text": _TEXT,
    "input_ids": _INTEGERS,
    "sampling_params": _OBJECT,
    "stream": _FLAG,
    "return_logprob": _FLAG,
    "return_text_in_logprobs": _FLAG,
    "logprob_start_len": _INTEGER,
    "priority": _INTEGER,
    "extra_key": _TEXT,
    "bootstrap_host": _TEXT,
    "bootstrap_port": _INTEGER,
    "bootstrap_room": _ROOM,
}
# SGLang takes lists of these, with a request for each entry.
_BATCHED = ("rid", "text", "input_ids", "sampling_params", "logprob_start_len", "extra_key")
_SAMPLING_FIELDS = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "sampling_seed", "stream_interval"), _INTEGER),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "no_stop_trim"), _FLAG),
    **dict.fromkeys(GRAMMARS, _TEXT),
    "stop": _TEXTS,
    "stop_token_ids": _INTEGERS,
    "logit_bias": _BIAS,
}


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """The JSON object of a request. Raises `MalformedBody`, or `ContractViolation` on a field of a wrong type."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The body is not JSON: {error}.", remedy="Send one JSON object.") from error
    if not isinstance(body, dict):
        raise MalformedBody("The body is not a JSON object.", remedy="Send one JSON object.")
    for name, wanted in _FIELDS.items():
        value = body.get(name)
        if value is not None and not _IS[wanted](value):
            raise ContractViolation(f"{name}: expected {wanted}{' (one request per body)' * (name in _BATCHED)}.")
    return body


def read_request(body: Mapping[str, Any], tokenizer: Tokenizer, limits: RequestLimits) -> GenerateRequest:
    """Check a parsed body in full. Raises `InvalidRequest` where SGLang answers 400."""
    _refuse_set(UNSUPPORTED, body)
    given = body.get("sampling_params") or {}
    sampling = parse_sampling_params(given, limits.vocab_size)
    input_ids = _input_ids(body, tokenizer, limits.vocab_size)
    # Only what was asked for is checked; SGLang silently cuts its default to what is left.
    _check_lengths(len(input_ids), given.get("max_new_tokens"), limits)
    left = min(limits.context_length, limits.max_total_tokens) - len(input_ids)
    return GenerateRequest(
        rid=body.get("rid") or uuid.uuid4().hex,
        input_ids=input_ids,
        sampling=sampling,
        max_new_tokens=left if sampling.max_new_tokens is None else min(sampling.max_new_tokens, left),
        stream=bool(body.get("stream")),
        return_logprob=bool(body.get("return_logprob")),
        return_text_in_logprobs=bool(body.get("return_text_in_logprobs")),
        scored_from=_scored_from(body, len(input_ids)),
        bootstrap_host=body.get("bootstrap_host"),
        bootstrap_port=body.get("bootstrap_port"),
        bootstrap_room=body.get("bootstrap_room"),
        extra_key=body.get("extra_key") or None,
    )


def _refuse_set(names: tuple[str, ...], given: Mapping[str, Any]) -> None:
    for name in names:
        if given.get(name):
            raise InvalidRequest(f"The embedded engine has no {name}.", remedy="Leave it out, or use SGLang.")


def _input_ids(body: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    text, given = body.get("text"), body.get("input_ids")
    if text is None and given is None:
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.")
    ids = tuple(given) if given is not None else tuple(tokenizer.encode(text, add_special_tokens=True).ids)
    if not ids:
        raise InvalidRequest("input_ids cannot be empty.")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequest(
            f"The input_ids contain {outside}, which is outside the vocabulary; valid range is [0, {vocab_size})."
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


def parse_sampling_params(raw: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Read a request's `sampling_params`; nulls mean defaults. Raises `InvalidRequest` as SGLang refuses."""
    given = {name: value for name, value in raw.items() if value is not None and name not in IGNORED_SAMPLING}
    if given.pop("n", 1) != 1:
        raise InvalidRequest("The embedded engine answers one completion per request.", remedy="Send n = 1.")
    _refuse_set(UNSUPPORTED_SAMPLING, given)
    given = {name: value for name, value in given.items() if name not in UNSUPPORTED_SAMPLING}
    if unknown := sorted(given.keys() - _SAMPLING_FIELDS.keys()):
        raise InvalidRequest(f"sampling_params: unknown field {unknown[0]!r}.", remedy="Leave it out.")
    for name, value in given.items():
        if not _IS[_SAMPLING_FIELDS[name]](value):
            raise InvalidRequest(f"sampling_params.{name}: {value!r} has the wrong type.")
    params = SamplingParams(**_normal(given), drafts=_drafts(raw.get("custom_params"), vocab_size))
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        params = replace(params, max_new_tokens=None)
    if 0.0 <= params.temperature < GREEDY_BELOW:
        params = replace(params, temperature=1.0, top_k=1)
    if params.top_k == -1:
        params = replace(params, top_k=WHOLE_VOCABULARY)
    _check_ranges(params, vocab_size)
    return params


def _normal(given: dict[str, Any]) -> dict[str, Any]:
    stop = given.get("stop", ())
    grammars = [(kind, given.pop(kind)) for kind in GRAMMARS if kind in given]
    if len(grammars) > 1 or (grammars and given.get("min_new_tokens")):
        others = [kind for kind, _ in grammars[1:]] or ["min_new_tokens"]
        raise InvalidRequest(f"{grammars[0][0]} cannot go with {others[0]} here.", remedy="Send only one of them.")
    normal = {
        "grammar": grammars[0] if grammars else None,
        "stop": tuple(each for each in ([stop] if isinstance(stop, str) else stop) if each),
        "stop_token_ids": frozenset(given.get("stop_token_ids", ())),
        "logit_bias": {int(token): float(bias) for token, bias in given.get("logit_bias", {}).items()},
        "stream_interval": given.get("stream_interval") or 1,
    }
    return {**given, **normal}


def _drafts(custom: object, vocab_size: int) -> tuple[tuple[int, ...], ...] | None:
    """What `custom_params` say of drafts, the field that the SGLang plugin reads."""
    found = custom.get("drafts") if isinstance(custom, dict) else None
    if found is None:
        return None
    if not isinstance(found, list) or not all(_IS[_INTEGERS](one) for one in found[: MOST_SOURCES + 1]):
        raise InvalidRequest("sampling_params.custom_params.drafts: expected a list of lists of integers.")
    if len(found) > MOST_SOURCES or sum(map(len, found)) > MOST_SOURCE_TOKENS:
        raise InvalidRequest(
            f"custom_params.drafts: at most {MOST_SOURCES} lists of {MOST_SOURCE_TOKENS} tokens in all."
        )
    if any(not 0 <= token < vocab_size for one in found for token in one):
        raise InvalidRequest(f"custom_params.drafts: tokens must be in [0, {vocab_size - 1}].")
    return tuple(map(tuple, found))


def _check_ranges(params: SamplingParams, vocab_size: int) -> None:
    most_new = math.inf if params.max_new_tokens is None else params.max_new_tokens
    limits = (
        (math.isfinite(params.temperature) and params.temperature >= 0.0, "temperature", "non-negative and finite"),
        (0.0 < params.top_p <= 1.0, "top_p", "in (0, 1]"),
        (0.0 <= params.min_p <= 1.0, "min_p", "in [0, 1]"),
        (params.top_k >= 1, "top_k", "-1 (disable) or at least 1"),
        (-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]"),
        (-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]"),
        (0.0 < params.repetition_penalty <= 2.0, "repetition_penalty", "in (0, 2]"),
        (most_new >= 0, "max_new_tokens", "at least 0"),
        (0 <= params.min_new_tokens <= most_new, "min_new_tokens", "in [0, max_new_tokens]"),
        (params.stream_interval >= 1, "stream_interval", "at least 1"),
        (all(0 <= token < vocab_size for token in params.logit_bias), "logit_bias", f"keyed in [0, {vocab_size - 1}]"),
    )
    for holds, name, limit in limits:
        if not holds:
            raise InvalidRequest(f"{name} must be {limit}, got {getattr(params, name)}.")
