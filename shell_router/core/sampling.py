"""What of a request may reach an engine: its sampling parameters, and how long its prompt is. Pure; for every route."""

from collections.abc import Callable, Mapping
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
"""SGLang's scheduler puts most integers into tensors of 32 bits, and ends where one does not fit."""
MAX_NUMBER = 1e30
"""For the same reason: of 32-bit floats."""
MOST_CHARACTERS_PER_TOKEN = 16
"""A prompt with more per token of its model's context is refused unread. English has 4; only blanks have more."""
PRIVATE = "__sglang"
"""SGLang's OpenAI routes hand parameters of their own to its scheduler in `custom_params`, under such names."""


def check_sampling(params: Mapping[str, Any], vocabulary: int | None = None, path: str = "") -> None:
    """Raise InvalidField for what would end an engine, hang it, or hold up the requests of others.

    `params` are SGLang's `sampling_params`, found at `path`. Token ids must lie below `vocabulary`, where it is known.
    Ranges that SGLang refuses by itself are left to it.
    """
    is_plain = True  # nothing in it can be long: most requests have numbers alone
    for name, found in params.items():
        rule = _RULES.get(name)
        if rule is not None and found is not None and (wrong := rule(found, vocabulary)):
            raise _refusal(path, name, *wrong)
        is_plain = is_plain and isinstance(found, _SHORT)
    if not is_plain:
        check_depth(params, path or "sampling_params")
        if len(orjson.dumps(params, option=orjson.OPT_NON_STR_KEYS)) > MAX_SAMPLING_BYTES:
            raise _refusal(path, "", f"take more than {MAX_SAMPLING_BYTES} bytes", "Send a smaller schema.")


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
            raise InvalidField(f"{path} holds more than {MAX_VALUES} values.", field=path, remedy="Send fewer.")
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    raise InvalidField(
        f"{path} nests deeper than {MAX_DEPTH} levels.", field=path, remedy="Flatten it, or leave parts of it out."
    )


def require_possible(characters: int, context_length: int) -> None:
    """Raise PromptTooLong for a text that is too long for any tokenizer to fit it into the context."""
    if characters > MOST_CHARACTERS_PER_TOKEN * context_length:
        raise PromptTooLong(
            f"The prompt has {characters} characters; a context of {context_length} tokens takes fewer than"
            f" {MOST_CHARACTERS_PER_TOKEN} for each.",
            remedy="Shorten it, or choose a model with a longer context.",
        )


Wrong = tuple[str, str] | None
"""What is wrong with a value, and the remedy."""


_SHORT = (int, float, type(None))


def _refusal(path: str, name: str, what: str, remedy: str) -> InvalidField:
    field = ".".join(filter(None, (path, name))) or "sampling_params"
    return InvalidField(f"{field} {what}.", field=field, remedy=remedy)


def _one(found: Any, _: int | None) -> Wrong:
    # of several samples each server makes ids of its own: decode never ends, and no abort reaches it
    if found == 1 and found is not True:
        return None
    return "must be 1: a prefill-decode pair cannot serve several samples", "Send the request n times."


def _integer(found: Any, _: int | None, most: int = MAX_INTEGER) -> Wrong:
    if type(found) is int and abs(found) <= most:
        return None
    return f"must be a whole number of at most {most}", "Send such a number."


def _seed(found: Any, _: int | None) -> Wrong:
    return _integer(found, _, 2**63 - 1)


def _interval(found: Any, _: int | None) -> Wrong:
    return _integer(found, _) or (None if found > 0 else ("must be at least 1", "Leave it out."))


def _number(found: Any, _: int | None) -> Wrong:
    return None if _is_number(found) else ("must be a number", "Send one of moderate size.")


def _flag(found: Any, _: int | None) -> Wrong:
    return None if isinstance(found, bool) else ("must be true or false", "Send a boolean.")


def _stops(found: Any, _: int | None) -> Wrong:
    stops = [found] if isinstance(found, str) else found
    if isinstance(stops, list | tuple) and len(stops) > MAX_STOPS:
        return f"has {len(stops)} entries; at most {MAX_STOPS} are served", "Send fewer."
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) for one in stops):
        return "must be a string or an array of strings", "Send strings."
    if max(map(len, stops), default=0) > MAX_STOP_CHARACTERS:
        return f"has an entry of more than {MAX_STOP_CHARACTERS} characters", "Send shorter ones."
    return None


def _stop_ids(found: Any, vocabulary: int | None) -> Wrong:
    if isinstance(found, list | tuple) and len(found) > MAX_TOKEN_IDS:
        return f"has {len(found)} token ids; at most {MAX_TOKEN_IDS} are served", "Send fewer."
    if not isinstance(found, list | tuple) or not all(type(one) is int for one in found):
        return "must be an array of token ids", "Send whole numbers."
    return _within(found, vocabulary)


def _bias(found: Any, vocabulary: int | None) -> Wrong:
    if isinstance(found, Mapping) and len(found) > MAX_TOKEN_IDS:
        return f"has {len(found)} token ids; at most {MAX_TOKEN_IDS} are served", "Send fewer."
    if not isinstance(found, Mapping) or not all(_is_number(one) for one in found.values()):
        return "must be an object of numbers by token id", "Send numbers."
    try:
        return _within([int(token) for token in found], vocabulary)
    except (TypeError, ValueError):
        return "must be keyed by token ids", "Send whole numbers as keys."


def _is_number(found: object) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) <= MAX_NUMBER


def _within(ids: Any, vocabulary: int | None) -> Wrong:
    if ids and (min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary)):
        below = "" if vocabulary is None else f" and below {vocabulary}, the model's vocabulary"
        return f"must hold token ids of at least 0{below}", "Tokenize for this model."
    return None


def _pattern(found: Any, _: int | None) -> Wrong:
    if not isinstance(found, str):
        return "must be a string", "Send it as text."
    if len(found) > MAX_PATTERN_CHARACTERS:
        return f"has more than {MAX_PATTERN_CHARACTERS} characters", "Send a shorter one."
    return None


def _schema(found: Any, _: int | None) -> Wrong:
    """A schema as text nests, too. Text that is no JSON has a meaning of its own to SGLang, or is refused there."""
    if not isinstance(found, str):
        return "must be a string", "Send the schema as text."
    if len(found) > MAX_SAMPLING_BYTES:
        return f"has more than {MAX_SAMPLING_BYTES} characters", "Send a smaller schema."
    try:
        check_depth(orjson.loads(found), "")
    except orjson.JSONDecodeError as error:
        return ("nests too deep", "Flatten it.") if "depth limit" in str(error) else None
    except InvalidField:
        return f"nests deeper than {MAX_DEPTH} levels", "Flatten it, or leave parts of it out."
    return None


def _custom(found: Any, vocabulary: int | None) -> Wrong:
    if not isinstance(found, Mapping):
        return "must be an object", "Leave it out."
    if private := [name for name in found if str(name).startswith(PRIVATE)]:
        return f"names {str(private[0])[:40]}, which SGLang keeps to itself", "Leave it out."
    drafts = found.get("drafts")
    for one in drafts if isinstance(drafts, list) else ():
        ids = one if isinstance(one, list) and all(type(token) is int for token in one) else [-1]
        if ids and (min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary)):
            return "has drafts that are no lists of the model's token ids", "Tokenize for this model."
    return None


_RULES: Mapping[str, Callable[[Any, int | None], Wrong]] = {
    **dict.fromkeys(("top_k", "max_new_tokens", "min_new_tokens"), _integer),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _number),
    **dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"), _flag),
    "sampling_seed": _seed,
    "stream_interval": _interval,
    "n": _one,
    "beam_width": _one,
    "stop": _stops,
    "stop_regex": _stops,
    "stop_token_ids": _stop_ids,
    "logit_bias": _bias,
    "json_schema": _schema,
    "structural_tag": _schema,
    "regex": _pattern,
    "ebnf": _pattern,
    "custom_params": _custom,
}
