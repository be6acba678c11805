"""Messages as text and ids, for models whose servers take messages and give no ids.

A chat's text holds its messages behind FRAMEs, and an id is four bytes of UTF-8. So slots are
filled as in any other prompt, the number of ids estimates that of tokens, and the engine finds the
messages again in the ids.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from shell_router.core.control_text import BREAK, ControlText
from shell_router.core.engine import NO_OPTIONS
from shell_router.core.exact_json import NewValues, Values, parse_json, write_json

FRAME = "\ufdd1"
"""Stands before each part of a chat; like BREAK and CALL it is a noncharacter, in no text."""
CALL = "\ufdd2"
"""The mark before a tool call in an output."""
VOCABULARY = 2**32

_PAD = b"\xff"  # no byte of UTF-8
_REMOVED = dict.fromkeys(map(ord, (BREAK, FRAME, CALL)))
_FIELDS = ("tool_calls", "tool_call_id")


def remove_marks(text: str) -> str:
    """Return the text without this module's marks."""
    return text.translate(_REMOVED)


def encode_bytes(data: bytes) -> tuple[int, ...]:
    """Return the ids of the bytes, the last one padded."""
    return tuple(array("I", data + _PAD * (-len(data) % 4)))


def decode_text(ids: Sequence[int]) -> str:
    """Return the text that the ids spell."""
    return array("I", ids).tobytes().replace(_PAD, b"").decode("utf-8", "replace")


class _FrameText(ControlText):
    """Keeps texts from spelling the marks."""

    def quote(self, text: str) -> str:
        return remove_marks(text)


class MessageTokenizer:
    """A `core.engine.Tokenizer` of messages; `options` are sent unless a request overrides them."""

    fingerprint = "messages"

    def __init__(self, options: Values) -> None:
        self.control: ControlText = _FrameText()
        self._options = options

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return [*encode_bytes(text.encode("utf-8", "replace"))]

    def encode_stable(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stable`; never asked for, as nothing is prefilled."""
        return self.encode(text)[:-1]

    def render_chat(
        self, messages: Sequence[Values], tools: Sequence[Any] = (), options: Values = NO_OPTIONS
    ) -> str:
        """Return the text that `read_chat` reads."""
        head: NewValues = {}
        if tools:
            head["tools"] = list(tools)
        if variables := {**self._options, **options}:
            head["chat_template_kwargs"] = variables
        parts = ["", _write(head)]
        for message in messages:
            fields: NewValues = {"role": message["role"]}
            fields |= {name: message[name] for name in _FIELDS if message.get(name)}
            parts += [_write(fields), remove_marks(message["content"])]
        return FRAME.join(parts)


def _write(fields: Values) -> str:
    return remove_marks(write_json(fields).decode())


def read_chat(ids: Sequence[int]) -> NewValues:
    """Return the fields of a chat completion's body; a prompt of its own is a user's message."""
    text = decode_text(ids)
    if not text.startswith(FRAME):
        return {"messages": [{"role": "user", "content": text}]}
    _, head, *parts = text.split(FRAME)
    messages = [
        _complete(parse_json(fields), content)
        for fields, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    return {**parse_json(head), "messages": messages}


def _complete(fields: NewValues, content: str) -> NewValues:
    """Return the message with its content, and its calls' arguments as text."""
    calls = [_write_arguments(call) for call in fields.get("tool_calls") or ()]
    if not calls:
        return {**fields, "content": content}
    return {**fields, "content": content or None, "tool_calls": calls}


def _write_arguments(call: Mapping[str, Any]) -> NewValues:
    function = call["function"]
    arguments = write_json(function["arguments"]).decode()
    return {**call, "function": {**function, "arguments": arguments}}
