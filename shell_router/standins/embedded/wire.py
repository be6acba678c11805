"""SGLang's `/generate` body, read and checked: names, defaults, limits, and refusals' wording."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated

from pydantic import ConfigDict, Field, with_config
from tokenizers import Tokenizer
from typing_extensions import TypedDict

from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.sampling import check_sampling
from shell_router.core.validation import Array, JsonObject, drop_nulls, field_error, parse_object
from shell_router.errors import InvalidRequest

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
WHOLE_VOCABULARY = 1 << 30
GREEDY_BELOW = 1e-6
GRAMMARS = ("json_schema", "regex", "ebnf")
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
"""SGLang's fields that are absent here; refused if set, because they would change the answer."""


IDENTIFIER_LIMIT = 2**63


@with_config(ConfigDict(extra="allow"))
class GenerateBody(TypedDict, total=False):
    """The fields of `/generate` that are read here."""

    rid: str
    text: str
    input_ids: Array[int]
    sampling_params: NewValues
    stream: bool
    return_logprob: bool
    return_text_in_logprobs: bool
    logprob_start_len: int
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: Annotated[int, Field(ge=0, lt=IDENTIFIER_LIMIT)]
    extra_key: str
    priority: int


GENERATE = JsonObject(GenerateBody)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one request. `max_new_tokens` None means: up to the context length.

    `drafts` are texts that its output may repeat, besides its prompt; None asks for no drafts.
    `grammar` is the kind and the text of the grammar that the output must follow.
    """

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
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
        """Whether the likeliest token is always taken."""
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
    """A checked request. `input_ids` were sent, or tokenized from `text`.

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
        """Whether SGLang's fake host asks to prefill without a decode partner."""
        return self.bootstrap_host == FAKE_BOOTSTRAP_HOST

    @property
    def stream_interval(self) -> int:
        """The tokens of an event after the first one; all of them where nothing is streamed."""
        return self.sampling.stream_interval if self.stream else max(1, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of a server in tokens; `max_total_tokens` bounds one request too."""

    context_length: int
    max_total_tokens: int
    vocab_size: int


def parse_body(raw: bytes) -> GenerateBody:
    """Return a request's fields without nulls; raises InvalidRequest for one of a wrong type."""
    return GENERATE.read(parse_object(raw))


def read_request(body: Values, tokenizer: Tokenizer, limits: RequestLimits) -> GenerateRequest:
    """Check a parsed body in full; raises InvalidRequest where SGLang answers 400."""
    unsupported = next((name for name in UNSUPPORTED if body.get(name)), None)
    if unsupported is not None:
        raise InvalidRequest(
            f"The embedded engine has no {unsupported}.", remedy="Leave it out, or use SGLang."
        )
    raw_sampling = body.get("sampling_params") or {}
    sampling = parse_sampling_params(raw_sampling, limits.vocab_size)
    input_ids = _input_ids(body, tokenizer, limits.vocab_size)
    # Only what was asked for is checked; SGLang silently cuts its default to what is left.
    _check_lengths(len(input_ids), raw_sampling.get("max_new_tokens"), limits)
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
        scored_from=_read_score_start(body, len(input_ids)),
        bootstrap_host=body.get("bootstrap_host"),
        bootstrap_port=body.get("bootstrap_port"),
        bootstrap_room=body.get("bootstrap_room"),
        extra_key=body.get("extra_key") or None,
    )


def _input_ids(body: Values, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    text = body.get("text")
    sent_ids = body.get("input_ids")
    if text is None and sent_ids is None:
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.")
    if sent_ids is not None:
        ids = tuple(sent_ids)
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


def _check_lengths(prompt: int, new_tokens: int | None, limits: RequestLimits) -> None:
    """Refuse lengths beyond the limits, in SGLang's wording, which clients read."""
    context = limits.context_length
    if prompt >= context:
        raise InvalidRequest(
            f"The input ({prompt} tokens) is longer than the model's context length ({context} "
            "tokens)."
        )
    if new_tokens is not None and prompt + new_tokens > context:
        raise InvalidRequest(
            f"Requested token count exceeds the model's maximum context length of {context} "
            f"tokens. You requested a total of {prompt + new_tokens} tokens: {prompt} tokens from "
            f"the input messages and {new_tokens} tokens for the completion. Please reduce the "
            "number of tokens in the input messages or the completion to fit within the limit."
        )
    if prompt >= limits.max_total_tokens:
        raise InvalidRequest(
            f"Input length ({prompt} tokens) exceeds the maximum allowed length "
            f"({limits.max_total_tokens} tokens). "
            "Use a shorter input or start the engine with more --max-total-tokens."
        )


def _read_score_start(body: Values, prompt: int) -> int | None:
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


WITHOUT_EFFECT = ("n", "spaces_between_special_tokens")
SENT = {each.name for each in fields(SamplingParams)} - {"drafts", "grammar"}
KNOWN = SENT.union(WITHOUT_EFFECT, GRAMMARS, ("custom_params",))
"""The names of `sampling_params` that the embedded engine has."""


def parse_sampling_params(raw: Values, vocab_size: int) -> SamplingParams:
    """Read `sampling_params`; nulls mean defaults. Raises InvalidRequest as SGLang refuses."""
    path = "sampling_params"
    sent: NewValues = drop_nulls(raw)
    for name in sent.keys() - KNOWN:
        raise field_error(f"{path}.{name}", "is unknown here")
    check_sampling(sent, vocab_size, path)
    params = {name: sent[name] for name in sent.keys() & SENT}
    if "max_new_tokens" in raw:
        params.setdefault("max_new_tokens", None)
    grammars = [kind for kind in GRAMMARS if kind in sent]
    if grammars:
        params["grammar"] = grammars[0], sent[grammars[0]]
    _check_lengths_of_output(params, grammars)
    stop = params.get("stop", ())
    stops = [stop] if isinstance(stop, str) else stop
    if params.get("top_k") == -1:
        params["top_k"] = WHOLE_VOCABULARY
    if params.get("temperature", 1.0) < GREEDY_BELOW:
        params |= {"temperature": 1.0, "top_k": 1}
    params |= {
        "stop": tuple(text for text in stops if text),
        "stop_token_ids": frozenset(params.get("stop_token_ids", ())),
        "logit_bias": {int(token): bias for token, bias in params.get("logit_bias", {}).items()},
    }
    drafts = sent.get("custom_params", {}).get("drafts")
    if isinstance(drafts, list):
        params["drafts"] = tuple(map(tuple, drafts))
    return SamplingParams(**params)


def _check_lengths_of_output(params: Values, grammars: Sequence[str]) -> None:
    least = params.get("min_new_tokens", 0)
    most = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    others = [*grammars[1:], *(["min_new_tokens"] if least else [])]
    if grammars and others:
        raise InvalidRequest(
            f"{grammars[0]} cannot go with {others[0]} here.", remedy="Send only one of them."
        )
    if most is not None and least > most:
        raise InvalidRequest(f"min_new_tokens must be in [0, max_new_tokens], got {least}.")
