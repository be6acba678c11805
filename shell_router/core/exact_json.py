"""JSON with integers of any size: those beyond 64 bits are floats to orjson, or an error."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson

Values = Mapping[str, Any]
"""Plain values by name: a JSON object, a mapping of a file."""
NewValues = dict[str, Any]
"""Values that are being built."""

_SHAPE = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_LONG = b"0" * 19
"""The digits from which an integer may not fit 64 bits, in the text's shape."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text; raises orjson.JSONDecodeError."""
    value = orjson.loads(text)
    written = text.encode() if isinstance(text, str) else text
    if _LONG in written.translate(_SHAPE):
        with suppress(RecursionError, ValueError):  # nested deeply, or of thousands of digits
            return json.loads(text)
    return value


def write_line(value: Any) -> bytes:
    """Return the value as a line of JSON in which no reader of text finds the end of another."""
    line = write_json(value)
    for end in "\x85\u2028\u2029":
        line = line.replace(end.encode(), b"\\u%04x" % ord(end))
    return line + b"\n"


def write_json(value: Any, option: int = 0) -> bytes:
    """Return the value as JSON text; raises orjson.JSONEncodeError."""
    try:
        return orjson.dumps(value, option=option)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            raise
    sorts = bool(option & orjson.OPT_SORT_KEYS)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sorts)
    return text.encode()
