"""What of a request may reach an engine: its sampling parameters, and how long its prompt is. Pure;
for every route.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import orjson

from shell_router.errors import InvalidField, PromptTooLong

MAX_SAMPLING_BYTES = 2**18
"""Of the parameters as JSON: the schema of a large tool set fits."""
MAX_PATTERN_CHARACTERS = 2**14
"""Of a regular expression or a grammar."""
MAX_DEPTH = 64
"""Of nested JSON; engines compile schemas recursively."""
MAX_VALUES = 100_000
"""In nested JSON; large sets of tools have thousands."""
MAX_STOPS = 32
"""SGLang's own limit (MAX_STOP_COUNT): every stop is searched for after every token."""
MAX_STOP_CHARACTERS = 256
"""SGLang's own limit of a regular expression (MAX_STOP_REGEX_LEN)."""
MAX_TOKEN_IDS = 1024
"""In `stop_token_ids` and in `logit_bias`."""
MAX_INTEGER = 2**31 - 1
"""SGLang's scheduler puts most integers into tensors of 32 bits, and ends where one does not fit.
"""
MAX_NUMBER = 1e30
"""For the same reason: of 32-bit floats."""
MOST_CHARACTERS_PER_TOKEN = 16
"""A prompt with more per token of its model's context is refused unread. English has 4; only blanks
have more.
"""
PRIVATE = "__sglang"
"""SGLang's OpenAI routes hand parameters of their own to its scheduler in `custom_params`, under
such names.
"""


def check_sampling(
    params: Mapping[str, Any], vocabulary: int | None = None, path: str = ""
) -> None:
    """Raise InvalidField for what would end an engine, hang it, or hold up the requests of others.

    `params` are SGLang's `sampling_params`, found at `path`. Token ids must lie below `vocabulary`,
    where it is known. Ranges that SGLang refuses by itself are left to it.
    """
    below = inf if vocabulary is None else vocabulary
    is_plain = True  # nothing in it can be long: most requests have numbers alone
    for name, found in params.items():
        rule = _RULES.get(name)
        if rule is not None and found is not None and not rule[0](found, below):
            if vocabulary is None:
                known = "the size of the vocabulary"
            else:
                known = f"{vocabulary}, the size of the vocabulary"
            raise _refusal(path, name, rule[1].replace("{vocabulary}", known), rule[2])
        is_plain = is_plain and isinstance(found, _SHORT)
    if not is_plain:
        check_depth(params, path or "sampling_params")
        if len(orjson.dumps(params, option=orjson.OPT_NON_STR_KEYS)) > MAX_SAMPLING_BYTES:
            raise _refusal(
                path, "", f"take more than {MAX_SAMPLING_BYTES} bytes", "Send a smaller schema."
            )


def check_depth(value: object, path: str) -> None:
    """Raise InvalidField where `value`, parsed JSON found at `path`, nests deeper than MAX_DEPTH.

    So it does for more than MAX_VALUES values, since counting more would hold up an event loop.
    """
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    values = 0
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        values += sum(map(len, level))
        if values > MAX_VALUES:
            raise InvalidField(
                f"{path} holds more than {MAX_VALUES} values.", field=path, remedy="Send fewer."
            )
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    raise InvalidField(
        f"{path} nests deeper than {MAX_DEPTH} levels.",
        field=path,
        remedy="Flatten it, or leave parts of it out.",
    )


def require_possible(characters: int, context_length: int) -> None:
    """Raise PromptTooLong for a text that is too long for any tokenizer to fit it into the
    context."""
    if characters > MOST_CHARACTERS_PER_TOKEN * context_length:
        raise PromptTooLong(
            f"The prompt has {characters} characters; a context of {context_length} tokens takes "
            "fewer than"
            f" {MOST_CHARACTERS_PER_TOKEN} for each.",
            remedy="Shorten it, or choose a model with a longer context.",
        )


def _refusal(path: str, name: str, what: str, remedy: str) -> InvalidField:
    field = ".".join(filter(None, (path, name))) or "sampling_params"
    return InvalidField(f"{field} {what}.", field=field, remedy=remedy)


def _is_integer(found: Any, most: int = MAX_INTEGER) -> bool:
    return type(found) is int and abs(found) <= most


def _is_number(found: Any) -> bool:
    return (
        isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) <= MAX_NUMBER
    )


def _are_ids(found: Any, vocabulary: float, most: float = MAX_TOKEN_IDS) -> bool:
    if not isinstance(found, list | tuple) or len(found) > most:
        return False
    return all(type(one) is int for one in found) and (
        not found or (min(found) >= 0 and max(found) < vocabulary)
    )


def _are_stops(found: Any) -> bool:
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS:
        return False
    return all(isinstance(one, str) and len(one) <= MAX_STOP_CHARACTERS for one in stops)


def _is_bias(found: Any, vocabulary: float) -> bool:
    if (
        not isinstance(found, Mapping)
        or len(found) > MAX_TOKEN_IDS
        or not all(map(_is_number, found.values()))
    ):
        return False
    try:
        return _are_ids([int(token) for token in found], vocabulary)
    except (TypeError, ValueError):
        return False


def _is_schema(found: Any) -> bool:
    """A schema as text nests, too. Text that is no JSON has a meaning of its own to SGLang, or is
    refused there.
    """
    if not isinstance(found, str) or len(found) > MAX_SAMPLING_BYTES:
        return False
    try:
        check_depth(orjson.loads(found), "")
    except orjson.JSONDecodeError as error:
        return "depth limit" not in str(error)
    except InvalidField:
        return False
    return True


def _is_custom(found: Any, vocabulary: float) -> bool:
    if not isinstance(found, Mapping) or any(str(name).startswith(PRIVATE) for name in found):
        return False
    drafts = found.get("drafts")
    if isinstance(drafts, list):
        return all(_are_ids(one, vocabulary, inf) for one in drafts)
    return True


_SHORT = (int, float, type(None))
_IDS = f"token ids (at most {MAX_TOKEN_IDS}), each at least 0 and below {{vocabulary}}"

Rule = tuple[Callable[[Any, float], bool], str, str]
"""Whether a value may be sent, by the size of the vocabulary; what it must be, and the remedy."""

_INTEGER: Rule = (
    lambda found, _: _is_integer(found),
    f"must be a whole number of at most {MAX_INTEGER}",
    "Send such a number.",
)
_NUMBER: Rule = (
    lambda found, _: _is_number(found),
    "must be a number",
    "Send one of moderate size.",
)
_FLAG: Rule = (lambda found, _: isinstance(found, bool), "must be true or false", "Send a boolean.")
_ONE: Rule = (
    # of several samples each server makes ids of its own: decode never ends, and no abort reaches
    # it
    lambda found, _: found == 1 and found is not True,
    "must be 1: a prefill-decode pair cannot serve several samples",
    "Send the request n times.",
)
_STOPS: Rule = (
    lambda found, _: _are_stops(found),
    (
        f"must be a string or an array of at most {MAX_STOPS}, each of at most "
        f"{MAX_STOP_CHARACTERS} "
        "characters"
    ),
    "Send fewer or shorter ones.",
)
_SCHEMA: Rule = (
    lambda found, _: _is_schema(found),
    (
        f"must be text of at most {MAX_SAMPLING_BYTES} characters that nests no deeper than "
        f"{MAX_DEPTH} levels"
    ),
    "Send it as text; flatten it, or leave parts of it out.",
)
_PATTERN: Rule = (
    lambda found, _: isinstance(found, str) and len(found) <= MAX_PATTERN_CHARACTERS,
    f"must be a string of at most {MAX_PATTERN_CHARACTERS} characters",
    "Send a shorter one.",
)
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("top_k", "max_new_tokens", "min_new_tokens"), _INTEGER),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(
        ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
        _FLAG,
    ),
    **dict.fromkeys(("n", "beam_width"), _ONE),
    **dict.fromkeys(("stop", "stop_regex"), _STOPS),
    **dict.fromkeys(("json_schema", "structural_tag"), _SCHEMA),
    **dict.fromkeys(("regex", "ebnf"), _PATTERN),
    "sampling_seed": (
        lambda found, _: _is_integer(found, 2**63 - 1),
        "must be a whole number below 2^63",
        "Send one.",
    ),
    "stream_interval": (
        lambda found, _: _is_integer(found) and found > 0,
        "must be a whole number of at least 1",
        "Leave it out.",
    ),
    "stop_token_ids": (
        _are_ids,
        f"must be an array of {_IDS}",
        "Tokenize for this model, and send fewer.",
    ),
    "logit_bias": (
        _is_bias,
        f"must be an object of numbers of moderate size, by {_IDS}",
        "Tokenize for this model, and send fewer.",
    ),
    "custom_params": (
        _is_custom,
        (
            f"must be an object without SGLang's own {PRIVATE} names, its drafts token ids below "
            f"{{vocabulary}}"
        ),
        "Leave it out.",
    ),
}
