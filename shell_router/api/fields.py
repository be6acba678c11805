"""Reading a request's body: JSON fields with errors that name their path, and sampling
parameters."""

import asyncio
import difflib
from collections.abc import Callable, Collection, Container, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import orjson

from shell_router.api.services import SETTINGS
from shell_router.core.sampling import MAX_STOPS, MAX_TOKEN_IDS, check_depth
from shell_router.errors import InvalidField, InvalidRequest
from shell_router.http.app import Request

N = TypeVar("N", int, float)
T = TypeVar("T")
SHOWN_CHARACTERS = 40
ALIKE = 0.8
"""The similarity (difflib's ratio) from which an unknown field is taken for a misspelt one."""
CHECKED_NAMES = 16
CHECKED_CHARACTERS = 64


class Fields:
    """A JSON object being read. A field that is null counts as absent. Remembers what was never
    asked for.
    """

    def __init__(self, value: Mapping[str, Any], path: str = "") -> None:
        self._value = value
        self._path = path
        self._asked: set[str] = set()

    @property
    def unread(self) -> tuple[str, ...]:
        """Fields that are set and were not read."""
        return tuple(
            [
                name
                for name, value in self._value.items()
                if name not in self._asked and value is not None
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """All fields, to be sent on."""
        return dict(self._value)

    def given(self, names: Container[str]) -> list[str]:
        """Those of `names` that are set, in the body's order."""
        return [name for name, value in self._value.items() if value is not None and name in names]

    def check_spelling(self, known: Collection[str] = ()) -> None:
        """Raises InvalidField for an unread field whose name is nearly one that was read, or one of
        `known`.
        """
        unknown = [name for name in self.unread if name not in known]
        for name in unknown[:CHECKED_NAMES]:
            if meant := difflib.get_close_matches(
                name[:CHECKED_CHARACTERS], {*self._asked, *known}, 1, ALIKE
            ):
                raise self.refuse(name, "is unknown", f"Did you mean {self.path(meant[0])}?")

    def path(self, name: str) -> str:
        """The path of field `name` from the body's root."""
        if self._path:
            return f"{self._path}.{name}"
        return name

    def raw(self, name: str) -> Any:
        """The field as parsed; None where absent."""
        self._asked.add(name)
        return self._value.get(name)

    def refuse(self, name: str, what: str, remedy: str = "") -> InvalidField:
        """The error that says `what` is wrong with field `name`."""
        return refused(self.path(name), what, remedy)

    def refuse_unless(self, nothing: Mapping[str, Collection[Any]], what: str) -> None:
        """Raise InvalidField, saying `what`, for a field with another value than those that ask for
        nothing.
        """
        for name in self.given(nothing):
            if self.raw(name) not in nothing[name]:
                raise self.refuse(name, what, f"Leave {name} out.")

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self.refuse(name, f"must be a string, not {shown(value)}")

    def required_text(self, name: str) -> str:
        """A string that is there and not empty."""
        value = self.text(name)
        if not value:
            raise self.refuse(name, "is missing", "Set it to a non-empty string.")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A string, or an array of several different ones; there, and nothing of it empty."""
        value = self.raw(name)
        if isinstance(value, str) and value:
            return (value,)
        if not isinstance(value, list):
            return (self.required_text(name),)
        if (
            not value
            or not all(isinstance(one, str) and one for one in value)
            or len(set(value)) < len(value)
        ):
            raise self.refuse(
                name, "must be a string or an array of different strings", "Name each once."
            )
        return tuple(value)

    def one_of(self, name: str) -> str:
        """The string, or the only one of an array; empty where it is anything else, which `names`
        may refuse.
        """
        value = self.raw(name)
        if isinstance(value, list) and len(value) == 1:
            only = value[0]
        else:
            only = value
        return only if isinstance(only, str) else ""

    def flag(self, name: str) -> bool:
        """A boolean; False where absent."""
        self._asked.add(name)
        value = self._value.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.refuse(name, f"must be true or false, not {shown(value)}")

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`."""
        return self._numeric(name, low, high, "a number", (int, float))

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        return self._numeric(name, low, high, "a whole number", (int,))

    def _numeric(self, name: str, low: N, high: N, kind: str, types: Any) -> N | None:
        value: N | None = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, types):
            raise self.refuse(name, f"must be {kind}, not {shown(value)}")
        if not low <= value <= high:
            raise self.refuse(name, f"must be from {low} to {high}, not {value}")
        return value

    def listed(self, name: str) -> list[Any] | None:
        """An array."""
        value = self.raw(name)
        if value is None or isinstance(value, list):
            return value
        raise self.refuse(name, f"must be an array, not {shown(value)}")

    def objects(self, name: str) -> "list[Fields]":
        """An array of objects, to be read in turn; empty where absent."""
        path = self.path(name)
        return [as_object(one, f"{path}[{at}]") for at, one in enumerate(self.listed(name) or ())]

    def parts(
        self, name: str, read: "Callable[[Fields], T]", called: str = "parts"
    ) -> str | list[T]:
        """A string, or an array of objects, each as it is `read`."""
        value = self.raw(name)
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise self.refuse(name, f"must be a string or an array of {called}, not {shown(value)}")
        return [read(one) for one in self.objects(name)]

    def object(self, name: str) -> "Fields | None":
        """An object, to be read in turn."""
        self._asked.add(name)
        value = self._value.get(name)
        if value is None:
            return None
        return as_object(value, self.path(name))


def refused(path: str, what: str, remedy: str = "") -> InvalidField:
    """The error that says `what` is wrong at `path`."""
    return InvalidField(f"{path} {what}.", field=path, remedy=remedy)


def as_object(value: Any, path: str) -> Fields:
    """`value`, found at `path`, as an object."""
    if not isinstance(value, dict):
        raise refused(path, f"must be an object, not {shown(value)}")
    return Fields(value, path)


def query_number(query: Mapping[str, str], name: str, default: float, most: float) -> float:
    """The number that the query sets, from 0 to `most`. Raises InvalidField."""
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise refused(name, f"must be a number from 0 to {most:g}")
    return value


def parse_body(body: bytes) -> Fields:
    """A request's body, which must be a JSON object."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not JSON: {error}.", remedy="Send one JSON object."
        ) from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {shown(parsed)}.")
    return Fields(parsed)


def as_json(body: Mapping[str, Any], option: int = 0) -> bytes:
    """A client's body as JSON; raises InvalidRequest where it nests deeper than what can be
    written.
    """
    try:
        return orjson.dumps(body, option=option)
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(
            f"The body cannot be kept or sent on: {error}.", remedy="Flatten it."
        ) from None


def shown(value: Any) -> str:
    """The value as an error names it: a short one itself, a longer one by its type."""
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case str() if len(value) > SHOWN_CHARACTERS:
            return "a string"
    return orjson.dumps(value).decode()


LONG_BODY_BYTES = 2**18
"""From here on a body's values are counted before they are parsed: parsing and reading them takes 1
µs for each.
"""
MAX_BODY_VALUES = 50_000
MAX_BODY_NUMBERS = 1_000_000


async def read_body(request: Request) -> bytes:
    """All of the JSON body; aiohttp itself refuses one over `max_body_bytes`. Raises
    InvalidRequest.
    """
    limit_s = request.app[SETTINGS].body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            body = await request.read()
    except TimeoutError:
        raise InvalidRequest(
            f"The body did not arrive within {limit_s:g} s.", remedy="Send it at once."
        ) from None
    if len(body) > LONG_BODY_BYTES:
        await asyncio.to_thread(check_few, body)
    return body


def check_few(body: bytes, times: int = 1) -> None:
    """Raise InvalidRequest where reading the body `times` times would hold up the event loop."""
    marks = body.count(b'"') // 2 + body.count(b"{") + body.count(b"[")
    commas = body.count(b",")
    if times * marks <= MAX_BODY_VALUES and times * commas <= MAX_BODY_NUMBERS:
        return  # also if none of them stands in a string
    values, numbers = values_in(body)
    if times * values > MAX_BODY_VALUES or times * numbers > MAX_BODY_NUMBERS:
        most = f"{MAX_BODY_VALUES} strings, arrays and objects, or {MAX_BODY_NUMBERS} commas"
        if times > 1:
            of = f", times {times} choices"
        else:
            of = ""
        raise InvalidRequest(
            f"The body holds more than {most}{of}.", remedy="Send fewer values at a time."
        )


def values_in(body: bytes) -> tuple[int, int]:
    """How many strings (keys too), arrays and objects JSON text holds, and how many commas between
    values.
    """
    found = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    quotes = found == ord('"')
    outside = ~np.bitwise_xor.accumulate(quotes)
    opening = (found | 0x20 == ord("{")) & outside  # 0x20 makes "{" of "["
    commas = (found == ord(",")) & outside
    return int(np.count_nonzero(quotes) // 2 + np.count_nonzero(opening)), int(
        np.count_nonzero(commas)
    )


MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**63 - 1

NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
}
INTEGERS: dict[str, tuple[str, int, int]] = {
    "top_k": ("top_k", -1, MAX_TOKENS),
    "min_tokens": ("min_new_tokens", 0, MAX_TOKENS),
    "max_tokens": ("max_new_tokens", 1, MAX_TOKENS),
    "max_completion_tokens": ("max_new_tokens", 1, MAX_TOKENS),
    "seed": ("sampling_seed", -MAX_SEED - 1, MAX_SEED),
}
FLAGS = ("ignore_eos", "no_stop_trim", "skip_special_tokens")
END_USER = ("prompt_cache_key", "user")
CONSTRAINTS = ("regex", "ebnf", "json_schema", "response_format")


def read_sampling(body: Fields) -> dict[str, Any]:
    """The `sampling_params` that the body's fields ask for; raises InvalidField."""
    params: dict[str, Any] = {}
    constraint = ""
    for name in body.given(SAMPLING):
        native, read = SAMPLING[name]
        if (value := read(body)) is None:
            continue
        if name in CONSTRAINTS:  # at most one way to constrain the output
            if constraint:
                raise body.refuse(name, f"cannot go with {constraint}", "Send only one of them.")
            constraint = name
        elif params.get(native, value) != value:
            raise body.refuse(
                "max_tokens", "differs from max_completion_tokens", "Send only one of them."
            )
        params[native] = value
    return params


MAX_TEMPLATE_BYTES = 2**14
"""Of the variables of a chat template as JSON: it may write one for every message."""


def read_end_user(body: Fields) -> str | None:
    """The tenant's own user: OpenAI's `prompt_cache_key`, else `user`, which it replaces. A digest:
    short, no name.
    """
    found = [body.text(name) for name in END_USER]
    key = next((one for one in found if one), None)
    if key is None:
        return None
    return blake2b(key.encode(), digest_size=16).hexdigest()


def read_template_kwargs(body: Fields) -> Mapping[str, Any]:
    """The body's `chat_template_kwargs`; raises InvalidField."""
    if body.object("chat_template_kwargs") is None:
        return {}
    found: Mapping[str, Any] = body.raw("chat_template_kwargs")
    check_depth(found, "chat_template_kwargs")
    if found and len(orjson.dumps(found)) > MAX_TEMPLATE_BYTES:
        raise body.refuse(
            "chat_template_kwargs", f"takes more than {MAX_TEMPLATE_BYTES} bytes", "Send fewer."
        )
    return found


def _stop(body: Fields) -> str | list[str]:
    value = body.raw("stop")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise body.refuse("stop", f"must be a string or an array of strings, not {shown(value)}")
    for place, one in enumerate(
        value[: MAX_STOPS + 1]
    ):  # more are refused where the run is planned
        if not isinstance(one, str):
            raise body.refuse(f"stop[{place}]", f"must be a string, not {shown(one)}")
    return value


def _stop_token_ids(body: Fields) -> list[int] | None:
    ids = body.listed("stop_token_ids")
    if ids is None or all(type(one) is int and one >= 0 for one in ids[: MAX_TOKEN_IDS + 1]):
        return ids
    raise body.refuse("stop_token_ids", "must be an array of token ids")


def _schema(named: Fields, name: str) -> str:
    """An object as JSON text."""
    check_depth(named.raw(name), named.path(name))
    return orjson.dumps(named.raw(name)).decode()


def _json_schema(body: Fields) -> str | None:
    given = body.raw("json_schema")
    if isinstance(given, dict):
        return _schema(body, "json_schema")
    return body.text("json_schema")


def _response_format(body: Fields) -> str | None:
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
            named = wanted.object("json_schema")
            if named is None or named.object("schema") is None:
                raise wanted.refuse(
                    "json_schema", "must be an object with the schema in its field 'schema'"
                )
            return _schema(named, "schema")
        case other:
            raise wanted.refuse("type", f"must be text, json_object or json_schema, not {other!r}")


SAMPLING: Mapping[str, tuple[str, Callable[[Fields], Any]]] = {
    **{
        name: (name, partial(Fields.number, name=name, low=low, high=high))
        for name, (low, high) in NUMBERS.items()
    },
    **{
        name: (native, partial(Fields.integer, name=name, low=low, high=high))
        for name, (native, low, high) in INTEGERS.items()
    },
    **{name: (name, partial(Fields.flag, name=name)) for name in FLAGS},
    **{name: (name, partial(Fields.text, name=name)) for name in ("regex", "ebnf")},
    "stop": ("stop", _stop),
    "stop_token_ids": ("stop_token_ids", _stop_token_ids),
    "json_schema": ("json_schema", _json_schema),
    "response_format": ("json_schema", _response_format),
}
"""By the field's name, SGLang's name for it, and what reads it."""
