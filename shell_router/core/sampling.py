"""The limits of what requests may ask of an engine: sampling parameters and the prompt's length.

Nothing here does I/O. `RANGES` holds for the API's fields, topology files, native bodies and the
embedded engine.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import annotated_types
import orjson

from shell_router.core.exact_json import write_json
from shell_router.core.json_schema import allows_long_numbers, refers_to_itself
from shell_router.core.patterns import bound_steps
from shell_router.errors import InvalidField, PromptTooLong

MAX_SAMPLING_BYTES = 2**18
"""The most bytes of the parameters as JSON: the schema of a large tool set fits."""
MAX_PATTERN_CHARACTERS = 2**14
"""The most characters of a regular expression or a grammar."""
MAX_DEPTH = 64
"""The most levels of nested JSON: engines compile schemas recursively."""
MAX_VALUES = 100_000
"""The most values in nested JSON: large sets of tools have thousands."""
MAX_OPTIONAL = 2**15
"""The most squares of objects' numbers of optional properties together: 181 in one object. xgrammar
0.2.7 compiles 100 in 0.3 s, and 300 in 9 s.
"""
SCHEMA_LIMITS = "nothing that refers to itself alone, and no `enum` or `const` of over 64 bits"
MAX_STOPS = 32
"""SGLang's own limit (MAX_STOP_COUNT): every stop is searched for after every token."""
MAX_STOP_CHARACTERS = 256
"""SGLang's own limit of a regular expression (MAX_STOP_REGEX_LEN)."""
MAX_STOP_STEPS = 2**12
"""The most steps of `stop_regex` from one character: they take about a millisecond a token."""
MAX_TOKEN_IDS = 1024
"""The most token ids in `stop_token_ids` and in `logit_bias`."""
MAX_INTEGER = 2**31 - 1
"""SGLang's scheduler puts most integers into 32-bit tensors, and crashes if one does not fit."""
MAX_NUMBER = 1e30
"""The largest number of a parameter: SGLang's tensors hold 32-bit floats."""
MOST_CHARACTERS_PER_TOKEN = 16
"""A prompt with more characters per token of its model's context is refused without tokenizing it.
English has about 4; only runs of blanks have more than 16.
"""
PRIVATE = "__sglang"
"""The prefix of names in `custom_params` under which SGLang's OpenAI routes pass parameters to its
scheduler.
"""


@dataclass(frozen=True, slots=True)
class Range:
    """The values of a parameter: from `low` (above it, if `open`) to `high`, never `but`.

    Pydantic reads it as the limits of a type: `Annotated[float, RANGES["top_p"]]`.
    """

    low: float
    high: float
    whole: bool = False
    open: bool = False
    but: int | None = None

    @property
    def __is_annotated_types_grouped_metadata__(self) -> Literal[True]:
        return True

    def __iter__(self) -> Iterator[object]:
        """Yield the limits as `annotated_types`."""
        yield annotated_types.Gt(self.low) if self.open else annotated_types.Ge(self.low)
        yield annotated_types.Le(self.high)
        if self.but is not None:
            yield annotated_types.Predicate(lambda value: value != self.but)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        low = "above" if self.open else "from"
        without = "" if self.but is None else f", but not {self.but}"
        return f"{kind} {low} {self.low} to {self.high}{without}"

    def allows(self, value: object) -> bool:
        """Return whether `value` is a number of this range."""
        if type(value) is not int and (self.whole or type(value) is not float):
            return False
        if self.open and value == self.low:
            return False
        return self.low <= value <= self.high and value != self.but


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, MAX_NUMBER),
    "top_p": Range(0, 1, open=True),
    "min_p": Range(0, 1),
    "top_k": Range(-1, MAX_INTEGER, whole=True, but=0),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, open=True),
    "max_new_tokens": Range(0, MAX_INTEGER, whole=True),
    "min_new_tokens": Range(0, MAX_INTEGER, whole=True),
    "sampling_seed": Range(-(2**63), 2**63 - 1, whole=True),
    "stream_interval": Range(1, MAX_INTEGER, whole=True),
}
"""The ranges that SGLang 0.5.23 checks in `SamplingParams.verify`, by its names. Numbers must also
fit into 32 bits, except seeds.
"""
LEAST_TOP_P = 1e-6
"""Stands for OpenAI's `top_p: 0`, which SGLang refuses: the most probable token alone."""


def check_sampling(
    params: Mapping[str, Any], vocabulary: int | None = None, path: str = ""
) -> None:
    """Raise InvalidField for values that an engine refuses, or that crash, hang or block it.

    Args:
        params: SGLang's `sampling_params`, found at `path`.
        vocabulary: The limit of token ids, where it is known.
        path: The parameters' path in the body.
    """
    below = inf if vocabulary is None else vocabulary
    is_plain = True  # no value can be long; so for most requests, which have only numbers
    for name, value in params.items():
        rule = _RULES.get(name) or _INTERNAL.get(name)
        if rule is not None and value is not None and not rule[0](value, below):
            size = "the size of the vocabulary"
            if vocabulary is not None:
                size = f"{vocabulary}, {size}"
            raise _build_refusal(path, name, rule[1].replace("{vocabulary}", size), rule[2])
        is_plain = is_plain and isinstance(value, _SHORT)
    if not is_plain:
        check_depth(params, path or "sampling_params")
        if len(write_json(params, orjson.OPT_NON_STR_KEYS)) > MAX_SAMPLING_BYTES:
            raise _build_refusal(
                path, "", f"take more than {MAX_SAMPLING_BYTES} bytes", "Send a smaller schema."
            )


def check_depth(value: object, path: str) -> None:
    """Raise InvalidField if the JSON value at `path` nests deeper than MAX_DEPTH.

    The same holds for more than MAX_VALUES values: counting more would block an event loop; and for
    schemas that engines compile for too long.
    """
    name = path or "The value"
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    values = optional = 0
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        values += sum(map(len, level))
        if values > MAX_VALUES:
            raise InvalidField(
                f"{name} holds more than {MAX_VALUES} values.", field=path, remedy="Send fewer."
            )
        optional += sum(_count_optional(schema) ** 2 for schema in level)
        if optional > MAX_OPTIONAL:
            raise InvalidField(
                f"{name} has objects of too many optional properties.",
                field=path,
                remedy="Require some, or leave some out.",
            )
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    raise InvalidField(
        f"{name} nests deeper than {MAX_DEPTH} levels.",
        field=path,
        remedy="Flatten it, or leave parts of it out.",
    )


def _count_optional(schema: Any) -> int:
    match schema:
        case {"properties": dict(properties), "required": list(required)}:
            return len(properties.keys() - {name for name in required if isinstance(name, str)})
        case {"properties": dict(properties)}:
            return len(properties)
    return 0


def require_possible(characters: int, context_length: int) -> None:
    """Raise PromptTooLong for a text that no tokenizer can fit into the context."""
    if characters > MOST_CHARACTERS_PER_TOKEN * context_length:
        raise PromptTooLong(
            f"The prompt has {characters} characters; a context of {context_length} tokens holds "
            f"at most {MOST_CHARACTERS_PER_TOKEN} for each.",
            remedy="Shorten it, or choose a model with a longer context.",
        )


def check_schema(schema: Any, path: str) -> None:
    """Raise InvalidField for a schema at `path` that engines do not compile within their limits."""
    check_depth(schema, path)
    if refers_to_itself(schema) or allows_long_numbers(schema):
        raise _build_refusal(path, "", f"must hold {SCHEMA_LIMITS}", "Leave such parts out.")


def _build_refusal(path: str, name: str, what: str, remedy: str) -> InvalidField:
    field = ".".join(filter(None, (path, name))) or "sampling_params"
    return InvalidField(f"{field} {what}.", field=field, remedy=remedy)


def are_ids(value: Any, vocabulary: float, most: float = MAX_TOKEN_IDS) -> bool:
    """Return whether `value` is an array of at most `most` token ids below `vocabulary`."""
    if not isinstance(value, list | tuple) or len(value) > most:
        return False
    if not {*map(type, value)} <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) < vocabulary)


def _are_stops(value: Any, _: float) -> bool:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS:
        return False
    return all(isinstance(stop, str) and len(stop) <= MAX_STOP_CHARACTERS for stop in stops)


def _are_stop_patterns(value: Any, below: float) -> bool:
    patterns = [value] if isinstance(value, str) else value
    return _are_stops(value, below) and sum(map(bound_steps, patterns)) <= MAX_STOP_STEPS


def _is_bias(value: Any, vocabulary: float) -> bool:
    if not isinstance(value, Mapping) or len(value) > MAX_TOKEN_IDS:
        return False
    if not all(map(_BIAS.allows, value.values())):
        return False
    try:
        return are_ids([int(token) for token in value], vocabulary)
    except (TypeError, ValueError):
        return False


def _is_schema(value: Any, _: float) -> bool:
    """Return whether `value` is a schema as text that engines compile within their limits.

    Text that is no JSON has a meaning of its own to SGLang, or is refused there.
    """
    if not isinstance(value, str) or len(value) > MAX_SAMPLING_BYTES:
        return False
    try:
        check_schema(orjson.loads(value), "")
    except orjson.JSONDecodeError as error:
        return "depth limit" not in str(error)
    except InvalidField:
        return False
    return True


def _is_pattern(value: Any, _: float) -> bool:
    return isinstance(value, str) and len(value) <= MAX_PATTERN_CHARACTERS


def _is_custom(value: Any, vocabulary: float) -> bool:
    if not isinstance(value, Mapping) or any(str(name).startswith(PRIVATE) for name in value):
        return False
    drafts = value.get("drafts")
    if isinstance(drafts, list):
        return all(are_ids(draft, vocabulary, inf) for draft in drafts)
    return True


_BIAS = Range(-MAX_NUMBER, MAX_NUMBER)
_SHORT = (int, float, type(None))
_IDS = f"token ids (at most {MAX_TOKEN_IDS}), each at least 0 and below {{vocabulary}}"

Rule = tuple[Callable[[Any, float], bool], str, str]
"""A test of a value, given the size of the vocabulary; the requirement in words; and the remedy."""


def _range_rule(limits: Range) -> Rule:
    return lambda value, _: limits.allows(value), f"must be {limits}", "Send such a number."


_FLAG: Rule = (lambda value, _: isinstance(value, bool), "must be true or false", "Send a boolean.")
_ONLY_1: Rule = (
    # each server would give several samples ids of its own: decode would never end, and no abort
    # would reach it
    lambda value, _: value == 1 and value is not True,
    "must be 1: a prefill-decode pair cannot serve several samples",
    "Send the request n times.",
)
_STOPS: Rule = (
    _are_stops,
    f"must be a string or an array of at most {MAX_STOPS}, each of at most {MAX_STOP_CHARACTERS} "
    "characters",
    "Send fewer or shorter ones.",
)
_STOP_PATTERNS: Rule = (
    _are_stop_patterns,
    f"must be at most {MAX_STOPS} regular expressions of bounded length that match in at most "
    f"{MAX_STOP_STEPS} steps: without *, +, [^a], look-around and references",
    "Bound what repeats, as in a{0,9} for a*, and repeat less; write [^ab] for [^a].",
)
_SCHEMA: Rule = (
    _is_schema,
    f"must be text of at most {MAX_SAMPLING_BYTES} characters that nests no deeper than "
    f"{MAX_DEPTH} levels, with short names, few optional properties in an object, {SCHEMA_LIMITS}",
    "Send it as text; flatten it, or leave parts of it out.",
)
_PATTERN: Rule = (
    _is_pattern,
    f"must be a string of at most {MAX_PATTERN_CHARACTERS} characters",
    "Send a shorter one.",
)
_RULES: Mapping[str, Rule] = {
    **{name: _range_rule(limits) for name, limits in RANGES.items()},
    **dict.fromkeys(
        ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
        _FLAG,
    ),
    **dict.fromkeys(("n", "beam_width"), _ONLY_1),
    "stop": _STOPS,
    "stop_regex": _STOP_PATTERNS,
    **dict.fromkeys(("json_schema", "structural_tag"), _SCHEMA),
    **dict.fromkeys(("regex", "ebnf"), _PATTERN),
    "stop_token_ids": (
        are_ids,
        f"must be an array of {_IDS}",
        "Tokenize for this model, and send fewer.",
    ),
    "logit_bias": (
        _is_bias,
        f"must map {_IDS}, to numbers from {-MAX_NUMBER:g} to {MAX_NUMBER:g}",
        "Tokenize for this model, and send fewer.",
    ),
    "custom_params": (
        _is_custom,
        f"must be an object without names that begin with {PRIVATE}, and its drafts must be token "
        "ids below {vocabulary}",
        "Leave it out.",
    ),
}


_INTERNAL: Mapping[str, Rule] = dict.fromkeys(
    (
        "is_normalized",
        "stop_strs",
        "stop_str_max_len",
        "stop_regex_strs",
        "stop_regex_max_len",
        "ebnf_full_assistant",
    ),
    (lambda value, _: False, "is a field that SGLang sets itself", "Leave it out."),
)
"""Fields of SGLang's `SamplingParams` that are not for clients, but taken from them, too: with
`is_normalized` it checks no others.
"""

SAMPLING_NAMES = tuple(_RULES)
"""The names of SGLang's sampling parameters."""

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters that let an engine decode only what a grammar allows."""

MODEL_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that SGLang's chats take from a model's `generation_config.json`."""

PLAIN = _RULES.keys() - {*GRAMMARS, "stop_regex"}
"""Sampling parameters by whose values no server is known to die."""

OUTPUT_FORMS = (*GRAMMARS, "stop", "stop_token_ids", "stop_regex", "min_new_tokens")
"""Sampling parameters that constrain what an output looks like."""
