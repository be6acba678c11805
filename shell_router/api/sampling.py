"""OpenAI's sampling parameters, and SGLang's extras, as SGLang's `sampling_params`."""

from typing import Any

import orjson

from shell_router.api.fields import Fields, shown

MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**63 - 1

NUMBERS: dict[str, tuple[str, float, float]] = {
    "temperature": ("temperature", 0.0, 100.0),
    "top_p": ("top_p", 1e-6, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "frequency_penalty": ("frequency_penalty", -2.0, 2.0),
    "presence_penalty": ("presence_penalty", -2.0, 2.0),
    "repetition_penalty": ("repetition_penalty", 0.0, 2.0),
}
INTEGERS: dict[str, tuple[str, int, int]] = {
    "top_k": ("top_k", -1, MAX_TOKENS),
    "min_tokens": ("min_new_tokens", 0, MAX_TOKENS),
    "seed": ("sampling_seed", -MAX_SEED - 1, MAX_SEED),
}
FLAGS = ("ignore_eos", "no_stop_trim", "skip_special_tokens")
GRAMMARS = ("regex", "ebnf", "json_schema")


def read_sampling(body: Fields) -> dict[str, Any]:
    """The `sampling_params` that the body's fields ask for; raises InvalidField."""
    params: dict[str, Any] = {}
    for name, (native, low, high) in NUMBERS.items():
        params[native] = body.number(name, low, high)
    for name, (native, lowest, highest) in INTEGERS.items():
        params[native] = body.integer(name, lowest, highest)
    for name in FLAGS:
        params[name] = body.flag(name) if body.raw(name) is not None else None
    params["max_new_tokens"] = _max_tokens(body)
    params["stop"] = _stop(body)
    params["stop_token_ids"] = _stop_token_ids(body)
    return {name: value for name, value in params.items() if value is not None} | _grammar(body)


def _max_tokens(body: Fields) -> int | None:
    old = body.integer("max_tokens", 1, MAX_TOKENS)
    new = body.integer("max_completion_tokens", 1, MAX_TOKENS)
    if old is not None and new is not None and old != new:
        raise body.refuse("max_tokens", "differs from max_completion_tokens", "Send only one of them.")
    return old if new is None else new


def _stop(body: Fields) -> str | list[str] | None:
    value = body.raw("stop")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise body.refuse("stop", f"must be a string or an array of strings, not {shown(value)}")
    for place, one in enumerate(value):
        if not isinstance(one, str):
            raise body.refuse(f"stop[{place}]", f"must be a string, not {shown(one)}")
    return value


def _stop_token_ids(body: Fields) -> list[int] | None:
    ids = body.listed("stop_token_ids")
    if ids is None or all(type(one) is int and one >= 0 for one in ids):
        return ids
    raise body.refuse("stop_token_ids", "must be an array of token ids")


def _grammar(body: Fields) -> dict[str, str]:
    """At most one of the ways to constrain the output."""
    found = {name: text for name in GRAMMARS if (text := _grammar_text(body, name)) is not None}
    if (schema := _response_schema(body)) is not None:
        found["response_format"] = schema
    if len(found) > 1:
        raise body.refuse(list(found)[-1], f"cannot go with {next(iter(found))}", "Send only one of them.")
    return {"json_schema" if name == "response_format" else name: text for name, text in found.items()}


def _grammar_text(body: Fields, name: str) -> str | None:
    value = body.raw(name)
    if name == "json_schema" and isinstance(value, dict):
        return orjson.dumps(value).decode()
    return body.text(name)


def _response_schema(body: Fields) -> str | None:
    """The JSON schema that `response_format` asks for, as text."""
    wanted = body.object("response_format")
    if wanted is None:
        return None
    match wanted.text("type"):
        case "text":
            return None
        case "json_object":
            return '{"type": "object"}'
        case "json_schema":
            return _named_schema(wanted)
        case other:
            raise wanted.refuse("type", f"must be text, json_object or json_schema, not {other!r}")


def _named_schema(wanted: Fields) -> str:
    named = wanted.object("json_schema")
    schema = named.object("schema") if named else None
    if named is None or schema is None:
        raise wanted.refuse("json_schema", "must be an object with the schema in its field 'schema'")
    return orjson.dumps(named.raw("schema")).decode()
