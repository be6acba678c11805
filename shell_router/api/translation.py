"""Chat completions in the forms of other APIs, whose answers are items that follow each other."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from shell_router.api.panels import PANEL
from shell_router.api.streaming import Frames, StreamPosition
from shell_router.core.engine import error_message
from shell_router.core.events import Event
from shell_router.engines.wire import EventSplitter
from shell_router.errors import EngineAborted
from shell_router.moa.requests import Answer
from shell_router.topology import INLINE

Kind = Literal["reasoning", "message", "function_call"]
Events = Sequence[tuple[str, Mapping[str, Any]]]
ABORTED = "The engine ended the answer early. Send the request again."


def join_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a chat's content of these parts, a text if all of them are."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


class ItemTranslation(ABC):
    """Reads a chat completion, or its chunks, as items: thinking, text, calls.

    A subclass writes them: its hooks return the events to send, and keep `items` as the answer has
    them. `reason` and `usage` are the chat's. With a `place` events have ids, and text that the
    client has is left out.
    """

    def __init__(self, sent: Mapping[str, Any]) -> None:
        self.model = sent.get("model") or (INLINE if sent.get("topology") else PANEL)
        self.reason = "stop"
        self.usage: Mapping[str, Any] = {}
        self.place: StreamPosition | None = None
        self.items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._chunks = EventSplitter()
        self._kind: Kind | None = None
        self._call = -1
        self._has_begun = self._has_failed = False

    @abstractmethod
    def _write_begin(self) -> Events:
        """Return the events of the answer's begin."""

    @abstractmethod
    def _write_open(self, kind: Kind, call: Mapping[str, Any]) -> Events:
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
    def _write_failure(self, error: Mapping[str, Any]) -> Events:
        """Return the events of a failure; a router's own `error` has a `code`."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the whole answer."""

    def _number(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the event with its number, in APIs whose events have one."""
        return event

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return an answer that is not streamed; raises EngineAborted."""
        choice = completion["choices"][0]
        self.usage = completion.get("usage") or {}
        self.reason = choice["finish_reason"]
        if self.reason == "abort":
            raise EngineAborted(ABORTED)
        self._delta(choice["message"])
        self._close()
        return self.answer()

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to send for these bytes of a stream."""
        return b"".join(self._frames(payload) for payload in self._chunks.feed(chunk))

    def error(self, envelope: dict[str, Any]) -> bytes:
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
        events = [*self._begin()]
        for choice in chunk.get("choices", ()):
            events += self._delta(choice["delta"])
            self.reason = choice.get("finish_reason") or self.reason
        return self._note_written(events)

    def _begin(self) -> Events:
        if self._has_begun:
            return ()
        self._has_begun = True
        return self._write_begin()

    def _delta(self, delta: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
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

    def _open(self, kind: Kind, call: Mapping[str, Any]) -> Events:
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

    def _frame(self, kind: str, facts: Mapping[str, Any]) -> bytes:
        id_line = b""
        if self.place is not None:
            delta = facts.get("delta")
            had, rest = self.place.rest(delta if isinstance(delta, str) else "\n")
            if not rest:
                return b""
            facts = {**facts, "delta": rest} if had else facts
            id_line = self.place.id
        data = orjson.dumps(self._number({"type": kind, **facts}))
        return b"event: %b\n%bdata: %b\n\n" % (kind.encode(), id_line, data)


class TranslatedFrames:
    """The frames of a chat completion in another API's form."""

    def __init__(self, frames: Frames, translation: ItemTranslation) -> None:
        self._frames = frames
        self._translation = translation
        self.wants = frames.wants

    def whole(self, answer: Answer) -> dict[str, Any]:
        """See `Frames`."""
        return self._translation.whole(self._frames.whole(answer))

    def events(self, events: Sequence[Event]) -> bytes:
        """See `Frames`."""
        return self._translation.feed(self._frames.events(events))

    def answer(self, answer: Answer) -> bytes:
        """See `Frames`."""
        return self._translation.feed(self._frames.answer(answer))

    def error(self, envelope: dict[str, Any]) -> bytes:
        """See `Frames`."""
        return self._translation.error(envelope)
