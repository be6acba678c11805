"""SGLang's `sampling_params`: names, defaults, limits, and the wording of refusals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shell_router.errors import InvalidRequest

WHOLE_VOCABULARY = 1 << 30
GREEDY_BELOW = 1e-6

# Known to SGLang, absent here; refused when set, because ignoring them would change what the caller gets.
UNSUPPORTED = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "beam_width", "watermark", "choice")
IGNORED = ("spaces_between_special_tokens", "custom_params")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. `max_new_tokens` None means: up to the context length."""

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

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def shapes_logits(self) -> bool:
        """Whether the logits must be changed before temperature and truncation."""
        penalised = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        return bool(penalised or self.logit_bias or self.min_new_tokens)


def parse_sampling_params(raw: Any, vocab_size: int) -> SamplingParams:
    """Read a request's `sampling_params`; nulls mean defaults. Raises `InvalidRequest` as SGLang refuses."""
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, Mapping):
        raise InvalidRequest("sampling_params must be one JSON object.", remedy="Send one request per body.")
    given = {name: value for name, value in raw.items() if value is not None and name not in IGNORED}
    _refuse_unsupported(given)
    _check_types(given)
    params = SamplingParams(**{name: _normal(name, value) for name, value in given.items()})
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        params = _replace(params, max_new_tokens=None)
    if 0.0 <= params.temperature < GREEDY_BELOW:
        params = _replace(params, temperature=1.0, top_k=1)
    if params.top_k == -1:
        params = _replace(params, top_k=WHOLE_VOCABULARY)
    _check_ranges(params, vocab_size)
    return params


def _replace(params: SamplingParams, **changes: Any) -> SamplingParams:
    names = SamplingParams.__dataclass_fields__
    return SamplingParams(**{**{name: getattr(params, name) for name in names}, **changes})


def _refuse_unsupported(given: dict[str, Any]) -> None:
    if given.pop("n", 1) != 1:
        raise InvalidRequest("The embedded engine answers one completion per request.", remedy="Send n = 1.")
    for name in UNSUPPORTED:
        if given.pop(name, None):
            raise InvalidRequest(f"The embedded engine has no {name}.", remedy="Leave it out, or use SGLang.")
    unknown = sorted(given.keys() - SamplingParams.__dataclass_fields__.keys())
    if unknown:
        raise InvalidRequest(f"sampling_params: unknown field {unknown[0]!r}.", remedy="Leave it out.")


def _check_types(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if not _TYPES[name](value):
            raise InvalidRequest(f"sampling_params.{name}: {value!r} has the wrong type.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _is_text_or_list(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _is_integer_list(value: Any) -> bool:
    return isinstance(value, list) and all(_is_integer(each) for each in value)


def _is_bias(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(str(key).lstrip("-").isdigit() and _is_number(bias) for key, bias in value.items())


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_TYPES = {
    "max_new_tokens": _is_integer,
    "min_new_tokens": _is_integer,
    "temperature": _is_number,
    "top_p": _is_number,
    "top_k": _is_integer,
    "min_p": _is_number,
    "frequency_penalty": _is_number,
    "presence_penalty": _is_number,
    "repetition_penalty": _is_number,
    "stop": _is_text_or_list,
    "stop_token_ids": _is_integer_list,
    "ignore_eos": _is_flag,
    "skip_special_tokens": _is_flag,
    "no_stop_trim": _is_flag,
    "logit_bias": _is_bias,
    "sampling_seed": _is_integer,
    "stream_interval": _is_integer,
}


def _normal(name: str, value: Any) -> Any:
    if name == "stop":
        return tuple(stop for stop in ([value] if isinstance(value, str) else value) if stop)
    if name == "stop_token_ids":
        return frozenset(value)
    if name == "logit_bias":
        return {int(token): float(bias) for token, bias in value.items()}
    if name == "stream_interval":
        return value or 1
    return value


def _check_ranges(params: SamplingParams, vocab_size: int) -> None:
    limits = (
        (math.isfinite(params.temperature) and params.temperature >= 0.0, "temperature", "non-negative and finite"),
        (0.0 < params.top_p <= 1.0, "top_p", "in (0, 1]"),
        (0.0 <= params.min_p <= 1.0, "min_p", "in [0, 1]"),
        (params.top_k >= 1, "top_k", "-1 (disable) or at least 1"),
        (-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]"),
        (-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]"),
        (0.0 < params.repetition_penalty <= 2.0, "repetition_penalty", "in (0, 2]"),
        (params.max_new_tokens is None or params.max_new_tokens >= 0, "max_new_tokens", "at least 0"),
        (0 <= params.min_new_tokens <= _most_new(params), "min_new_tokens", "in [0, max_new_tokens]"),
        (params.stream_interval >= 1, "stream_interval", "at least 1"),
        (all(0 <= token < vocab_size for token in params.logit_bias), "logit_bias", f"keyed in [0, {vocab_size - 1}]"),
    )
    for holds, name, limit in limits:
        if not holds:
            raise InvalidRequest(f"{name} must be {limit}, got {getattr(params, name)}.")


def _most_new(params: SamplingParams) -> float:
    return math.inf if params.max_new_tokens is None else params.max_new_tokens
