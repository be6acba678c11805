"""SGLang's `/generate` body, read and checked: names, defaults, limits, and the wording of
refusals.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from tokenizers import Tokenizer

from shell_router.config.read import form_of
from shell_router.core.drafts import MOST_SOURCE_TOKENS, MOST_SOURCES
from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS
from shell_router.errors import InvalidRequest
from shell_router.topology.forms import Block, Either, Form, ListOf, MappingOf, Number, Text

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
WHOLE_VOCABULARY = 1 << 30
GREEDY_BELOW = 1e-6
GRAMMARS = ("json_schema", "regex", "ebnf")
UNSUPPORTED = (
    *(
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "top_logprobs_num",
        "token_ids_logprob",
    ),
    *(
        "return_hidden_states",
        "return_sampling_mask",
        "session_params",
        "custom_logit_processor",
        "lora_path",
    ),
)
"""Known to SGLang, absent here; refused when set, because ignoring them would change what the
caller gets.
"""


@dataclass(frozen=True, slots=True)
class _Flag(Form):
    """`true` or `false`, and nothing else that YAML would take for them."""

    types = (bool,)

    @property
    def noun(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class _TokenIds(Form):
    """A list of integers, looked at in one pass: prompts are long."""

    @property
    def noun(self) -> str:
        return "a list of integers"

    def fits(self, value: object) -> bool:
        return isinstance(value, list) and all(type(each) is int for each in value)


_TEXT = Text("")
_FLAG = _Flag("")
_IDS = _TokenIds("")
_ANY = Form("")
_COUNT = Number("", at_least=0, whole=True)
_PENALTY = Number("", at_least=-2, at_most=2)
_INTEGER = Number("", whole=True, limit=2**64)
_BODY = Block(
    "",
    {
        **dict.fromkeys(("rid", "text", "bootstrap_host", "extra_key"), _TEXT),
        **dict.fromkeys(("stream", "return_logprob", "return_text_in_logprobs"), _FLAG),
        **dict.fromkeys(("logprob_start_len", "priority", "bootstrap_port"), _INTEGER),
        "input_ids": _IDS,
        "sampling_params": Block("", {}, open_to=_ANY),
        "bootstrap_room": Number("", at_least=0, whole=True, limit=2**63),
    },
    open_to=_ANY,
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. `max_new_tokens` None means: up to the context length.

    `drafts` are texts that its output may repeat, besides its prompt; None asks for no drafts.
    `grammar` is what its output must follow: the kind, and the text.
    """

    max_new_tokens: Annotated[int | None, _COUNT] = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: Annotated[int, _COUNT] = 0
    temperature: Annotated[float, Number("", at_least=0)] = 1.0
    top_p: Annotated[float, Number("", above=0, at_most=1)] = 1.0
    top_k: Annotated[int, Number("", at_least=-1, whole=True)] = WHOLE_VOCABULARY
    min_p: Annotated[float, Number("", at_least=0, at_most=1)] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    repetition_penalty: Annotated[float, Number("", above=0, at_most=2)] = 1.0
    stop: Annotated[tuple[str, ...], Either("", (_TEXT, ListOf("", _TEXT)))] = ()
    stop_token_ids: Annotated[frozenset[int], _IDS] = frozenset()
    ignore_eos: Annotated[bool, _FLAG] = False
    skip_special_tokens: Annotated[bool, _FLAG] = True
    no_stop_trim: Annotated[bool, _FLAG] = False
    logit_bias: Annotated[
        Mapping[int, float], MappingOf("", Text("", r"-?\d+", "a token id"), Number(""), 0)
    ] = field(default_factory=dict)
    sampling_seed: Annotated[int | None, _INTEGER] = None
    stream_interval: Annotated[int, Number("", at_least=1, whole=True)] = 1
    drafts: tuple[tuple[int, ...], ...] | None = field(default=None, metadata={"file": False})
    grammar: tuple[str, str] | None = field(default=None, metadata={"file": False})

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def shapes_logits(self) -> bool:
        """Whether the logits must be changed before temperature and truncation."""
        penalised = (
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )
        return bool(penalised or self.logit_bias or self.min_new_tokens or self.grammar)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request, checked; `input_ids` are given or tokenized from `text`.

    `scored_from` is the first prompt token whose log probability is asked for. Only requests of one
    `extra_key` share a prefix cache, as in SGLang.
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
        """How many tokens after its first one are worth an event; all of them where nothing is
        streamed.
        """
        if self.stream:
            return self.sampling.stream_interval
        return max(1, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a server can take. All are tokens; `max_total_tokens` bounds one request too."""

    context_length: int
    max_total_tokens: int
    vocab_size: int


_ONE = Number("", at_least=1, at_most=1, whole=True)
_ELSE = {
    "n": _ONE,
    "spaces_between_special_tokens": _FLAG,
    "custom_params": _ANY,
    **dict.fromkeys(GRAMMARS, _TEXT),
}
_SAMPLING = Block("", {**form_of(SamplingParams).fields, **_ELSE})  # type: ignore[attr-defined]


def _checked(form: Block, given: Mapping[str, Any], *at: str) -> dict[str, Any]:
    """What is given and not null. Raises `InvalidRequest` where it is not of the form."""
    found = {name: value for name, value in given.items() if value is not None}
    for problem in form.problems(found, at):
        raise InvalidRequest(problem.message, remedy=problem.remedy)
    return found


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """The JSON object of a request, without nulls. Raises `InvalidRequest` on a field of a wrong
    type.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not JSON: {error}.", remedy="Send one JSON object."
        ) from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body is not a JSON object.", remedy="Send one JSON object.")
    return _checked(_BODY, body)


def read_request(
    body: Mapping[str, Any], tokenizer: Tokenizer, limits: RequestLimits
) -> GenerateRequest:
    """Check a parsed body in full. Raises `InvalidRequest` where SGLang answers 400."""
    if unsupported := next((name for name in UNSUPPORTED if body.get(name)), None):
        raise InvalidRequest(
            f"The embedded engine has no {unsupported}.", remedy="Leave it out, or use SGLang."
        )
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
        max_new_tokens=left
        if sampling.max_new_tokens is None
        else min(sampling.max_new_tokens, left),
        stream=bool(body.get("stream")),
        return_logprob=bool(body.get("return_logprob")),
        return_text_in_logprobs=bool(body.get("return_text_in_logprobs")),
        scored_from=_scored_from(body, len(input_ids)),
        bootstrap_host=body.get("bootstrap_host"),
        bootstrap_port=body.get("bootstrap_port"),
        bootstrap_room=body.get("bootstrap_room"),
        extra_key=body.get("extra_key") or None,
    )


def _input_ids(body: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    text = body.get("text")
    given = body.get("input_ids")
    if text is None and given is None:
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.")
    if given is not None:
        ids = tuple(given)
    else:
        ids = tuple(tokenizer.encode(text, add_special_tokens=True).ids)
    if not ids:
        raise InvalidRequest("input_ids cannot be empty.")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequest(
            f"The input_ids contain {outside}, which is outside the vocabulary; valid range is "
            f"[0, {vocab_size})."
        )
    return ids


def _check_lengths(prompt: int, wanted: int | None, limits: RequestLimits) -> None:
    """SGLang's wording, so that clients that read it work on both."""
    context = limits.context_length
    if prompt >= context:
        raise InvalidRequest(
            f"The input ({prompt} tokens) is longer than the model's context length ({context} "
            "tokens)."
        )
    if wanted is not None and prompt + wanted > context:
        raise InvalidRequest(
            f"Requested token count exceeds the model's maximum context length of {context} "
            "tokens. "
            f"You requested a total of {prompt + wanted} tokens: {prompt} tokens from the input "
            "messages and "
            f"{wanted} tokens for the completion. Please reduce the number of tokens in the "
            "input messages or the "
            "completion to fit within the limit."
        )
    if prompt >= limits.max_total_tokens:
        raise InvalidRequest(
            f"Input length ({prompt} tokens) exceeds the maximum allowed length "
            f"({limits.max_total_tokens} tokens). "
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
    """Read a request's `sampling_params`; nulls mean defaults. Raises `InvalidRequest` as SGLang
    refuses.
    """
    given = _checked(_SAMPLING, raw, "sampling_params")
    for without_effect in ("n", "spaces_between_special_tokens"):
        given.pop(without_effect, None)
    stop = given.get("stop", ())
    bias = given.get("logit_bias", {})
    most_new = given.get(
        "max_new_tokens", None if "max_new_tokens" in raw else DEFAULT_MAX_NEW_TOKENS
    )
    top_k = given.get("top_k", -1)
    temperature = given.get("temperature", 1.0)
    greedy = temperature < GREEDY_BELOW
    grammars = [(kind, given.pop(kind)) for kind in GRAMMARS if kind in given]
    least_new = given.get("min_new_tokens", 0)
    if len(grammars) > 1 or (grammars and least_new):
        if len(grammars) > 1:
            other = grammars[1][0]
        else:
            other = "min_new_tokens"
        raise InvalidRequest(
            f"{grammars[0][0]} cannot go with {other} here.", remedy="Send only one of them."
        )
    if most_new is not None and least_new > most_new:
        raise InvalidRequest(f"min_new_tokens must be in [0, max_new_tokens], got {least_new}.")
    if top_k == 0:
        raise InvalidRequest("top_k must be -1 (disable) or at least 1, got 0.")
    if outside := [token for token in bias if not 0 <= int(token) < vocab_size]:
        raise InvalidRequest(
            f"logit_bias must be keyed in [0, {vocab_size - 1}], got {outside[0]}."
        )
    normal = {
        "temperature": 1.0 if greedy else temperature,
        "top_k": 1 if greedy else WHOLE_VOCABULARY if top_k == -1 else top_k,
        "grammar": grammars[0] if grammars else None,
        "stop": tuple(each for each in ([stop] if isinstance(stop, str) else stop) if each),
        "stop_token_ids": frozenset(given.get("stop_token_ids", ())),
        "logit_bias": {int(token): float(each) for token, each in bias.items()},
        "drafts": _drafts(given.pop("custom_params", None), vocab_size),
    }
    if "max_new_tokens" in raw and most_new is None:
        unlimited = {"max_new_tokens": None}
    else:
        unlimited = {}
    return SamplingParams(**{**given, **normal, **unlimited})


def _drafts(custom: object, vocab_size: int) -> tuple[tuple[int, ...], ...] | None:
    """What `custom_params` say of drafts, the field that the SGLang plugin reads."""
    if isinstance(custom, dict):
        found = custom.get("drafts")
    else:
        found = None
    if found is None:
        return None
    if not isinstance(found, list) or not all(map(_IDS.fits, found[: MOST_SOURCES + 1])):
        raise InvalidRequest(
            "sampling_params.custom_params.drafts: expected a list of lists of integers."
        )
    if len(found) > MOST_SOURCES or sum(map(len, found)) > MOST_SOURCE_TOKENS:
        raise InvalidRequest(
            f"custom_params.drafts: at most {MOST_SOURCES} lists of {MOST_SOURCE_TOKENS} "
            "tokens "
            "in all."
        )
    if any(not 0 <= token < vocab_size for one in found for token in one):
        raise InvalidRequest(f"custom_params.drafts: tokens must be in [0, {vocab_size - 1}].")
    return tuple(map(tuple, found))
