"""Chat completions in the forms of other APIs, whose answers are items that follow each other."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import orjson

from shell_router.api.panels import PANEL
from shell_router.api.replies import join_warnings
from shell_router.api.services import OWN_NAMES
from shell_router.api.streaming import DONE, Frames, StreamPosition, data_frame
from shell_router.core.engine import error_message
from shell_router.core.events import Event
from shell_router.core.exact_json import NewValues, Values, write_json
from shell_router.engines.wire import EventSplitter
from shell_router.errors import EngineAborted, InvalidField
from shell_router.http.app import Request
from shell_router.moa.requests import Answer
from shell_router.topology import INLINE


@contextmanager
def name_own_fields(
    request: Request, names: Mapping[str, str], places: Sequence[str]
) -> Iterator[None]:
    """Have errors and warnings name fields of the client's body instead of its chat's.

    Args:
        request: The client's.
        names: The client's fields, by the chat's.
        places: The path of what each message of the chat was made from.
    """
    request[OWN_NAMES] = names
    try:
        yield
    except InvalidField as error:
        field = _name_own_field(error.field, names, places)
        message = error.args[0].replace(error.field, field)
        raise InvalidField(message, field=field, remedy=error.remedy) from None


def _name_own_field(field: str, names: Mapping[str, str], places: Sequence[str]) -> str:
    message = re.fullmatch(r"messages\[(\d+)\](\.(?:role|content)\b.*)?.*", field)
    if message is not None and int(message[1]) < len(places):
        return places[int(message[1])] + (message[2] or "")
    if field.startswith("tool"):
        return field.replace(".function", "")
    name = re.match(r"\w+", field)
    if name is None or name[0] not in names:
        return field
    return names[name[0]] + field[name.end() :].removeprefix(".json_schema")


Kind = Literal["reasoning", "message", "function_call"]
Events = Sequence[tuple[str, Values]]
ABORTED = "The engine ended the answer early. Send the request again."


def read_costs(usage: Values) -> NewValues:
    """Return the cost of a chat's usage, and that of each model."""
    return {name: usage[name] for name in ("cost", "models") if name in usage}


def count_reasoning(usage: Values) -> int:
    """Return the tokens of a chat's usage that its answer does not show."""
    details = usage.get("completion_tokens_details") or {}
    return usage.get("reasoning_tokens") or details.get("reasoning_tokens") or 0


class ItemTranslation(ABC):
    """Reads a chat completion, or its chunks, as items: thinking, text, calls.

    A subclass writes them: its hooks return the events to send, and keep `items` as the answer has
    them. `reason`, the `matched` stop, `usage` and `warnings` are the chat's. With a `place` events
    have ids, and text that the client has is left out.
    """

    def __init__(self, sent: Values, warnings: Mapping[str, list[str]]) -> None:
        self.model = sent.get("model") or (INLINE if sent.get("topology") else PANEL)
        self.reason = "stop"
        self.matched: str | None = None
        self.usage: Values = {}
        self.warnings = dict(warnings)
        self.place: StreamPosition | None = None
        self.items: list[NewValues] = []
        self._texts: list[str] = []
        self._chunks = EventSplitter()
        self._kind: Kind | None = None
        self._call = -1
        self._has_begun = self._has_failed = False

    @abstractmethod
    def _write_begin(self) -> Events:
        """Return the events of the answer's begin."""

    @abstractmethod
    def _write_open(self, kind: Kind, call: Values) -> Events:
        """Begin an item and return its events; a call has an `id` and a `name`."""

    @abstractmethod
    def _write_growth(self, text: str) -> Events:
        """Return the events of more text of the last item, a call's arguments."""

    @abstractmethod
    def _write_close(self, text: str) -> Events:
        """Complete the last item with its whole text and return its events."""

    @abstractmethod
    def _write_end(self) -> Events:
        """Return the events of the answer's end."""

    @abstractmethod
    def _write_failure(self, error: Values) -> Events:
        """Return the events of a failure; a router's own `error` has a `code`."""

    @abstractmethod
    def answer(self) -> NewValues:
        """Return the whole answer."""

    def _number(self, event: NewValues) -> NewValues:
        """Return the event with its number, in APIs whose events have one."""
        return event

    def whole(self, completion: NewValues) -> NewValues:
        """Return an answer that is not streamed; raises EngineAborted."""
        choice = completion["choices"][0]
        self.usage = completion.get("usage") or {}
        self.warnings = join_warnings(self.warnings, completion)
        self.reason = choice["finish_reason"]
        self.matched = choice.get("matched_stop")
        if self.reason == "abort":
            raise EngineAborted(ABORTED)
        self._delta(choice["message"])
        self._close()
        return self.answer()

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to send for these bytes of a stream."""
        return b"".join(self._frames(payload) for payload in self._chunks.feed(chunk))

    def error(self, envelope: NewValues) -> bytes:
        """Return the last frame of a stream that failed."""
        self._has_failed = True
        if self.place is not None:
            self.place.after = 0
        return self._note_written([*self._begin(), *self._write_failure(envelope["error"])])

    def _frames(self, payload: bytes) -> bytes:
        if self._has_failed:
            return b""
        if payload == b"[DONE]":
            if self.reason == "abort":
                return self.error({"error": {"message": ABORTED}})
            last = self._note_written([*self._begin(), *self._close(), *self._write_end()])
            if self.place is not None:
                self.place.require_reached()
            return last
        chunk = orjson.loads(payload)
        if "error" in chunk:
            return self.error({"error": {"message": error_message(payload)}})
        self.usage = chunk.get("usage") or self.usage
        if "warnings" in chunk:
            self.warnings = join_warnings(self.warnings, chunk)
        events = [*self._begin()]
        for choice in chunk.get("choices", ()):
            events += self._delta(choice["delta"])
            self.reason = choice.get("finish_reason") or self.reason
            self.matched = choice.get("matched_stop")
        return self._note_written(events)

    def _begin(self) -> Events:
        if self._has_begun:
            return ()
        self._has_begun = True
        return self._write_begin()

    def _delta(self, delta: Values) -> list[tuple[str, Values]]:
        events = [
            *self._text("reasoning", delta.get("reasoning_content")),
            *self._text("message", delta.get("content")),
        ]
        for place, call in enumerate(delta.get("tool_calls") or ()):
            function = call.get("function") or {}
            index = call.get("index", place)
            if (self._kind, self._call) != ("function_call", index):
                self._call = index
                events += self._open(
                    "function_call", {"id": call.get("id"), "name": function.get("name")}
                )
            events += self._text("function_call", function.get("arguments"))
        return events

    def _text(self, kind: Kind, text: str | None) -> Events:
        if not text:
            return ()
        opened = () if self._kind == kind else self._open(kind, {})
        self._texts.append(text)
        return [*opened, *self._write_growth(text)]

    def _open(self, kind: Kind, call: Values) -> Events:
        closed = self._close()
        self._kind = kind
        self._texts = []
        return [*closed, *self._write_open(kind, call)]

    def _close(self) -> Events:
        if self._kind is None:
            return ()
        self._kind = None
        return self._write_close("".join(self._texts))

    def _note_written(self, events: Events) -> bytes:
        return b"".join([self._frame(kind, facts) for kind, facts in events])

    def _frame(self, kind: str, facts: Values) -> bytes:
        id_line = b""
        if self.place is not None:
            delta = facts.get("delta")
            had, rest = self.place.rest(delta if isinstance(delta, str) else "\n")
            if not rest:
                return b""
            facts = {**facts, "delta": rest} if had else facts
            id_line = self.place.id
        data = write_json(self._number({"type": kind, **facts}))
        return b"event: %b\n%bdata: %b\n\n" % (kind.encode(), id_line, data)


class CompletionTranslation:
    """A chat completion, or the chunks of one, as a completion of a prompt."""

    def whole(self, completion: NewValues) -> NewValues:
        """Return an answer that is not streamed, or a chunk."""
        for choice in completion["choices"]:
            message = choice.pop("message", None) or choice.pop("delta")
            choice["text"] = message.get("content") or ""
        return {**completion, "object": "text_completion"}

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to send for whole events of a stream."""
        frames = b""
        for payload in EventSplitter().feed(chunk):
            ends = payload == b"[DONE]"
            frames += DONE if ends else data_frame(self.whole(orjson.loads(payload)))
        return frames

    error = staticmethod(data_frame)


Translation = ItemTranslation | CompletionTranslation


class TranslatedFrames:
    """The frames of a chat completion in another API's form."""

    def __init__(self, frames: Frames, translation: Translation) -> None:
        self._frames = frames
        self._translation = translation
        self.wants = frames.wants
        self.error = translation.error

    def whole(self, answer: Answer) -> NewValues:
        """See `Frames`."""
        return self._translation.whole(self._frames.whole(answer))

    def events(self, events: Sequence[Event]) -> bytes:
        """See `Frames`."""
        return self._translation.feed(self._frames.events(events))

    def answer(self, answer: Answer) -> bytes:
        """See `Frames`."""
        return self._translation.feed(self._frames.answer(answer))
