"""A prompt's log probabilities, which the prefill server computes, put into its decode partner's answer.

Decode leaves them empty. A server that does both repeats them in every event of a stream, incremental or not, and so
does this.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from shell_router.engines.wire import EventSplitter, broken_wire

_DONE = b"[DONE]"
_NO_OUTPUT = (orjson.JSONDecodeError, KeyError, TypeError, AttributeError)


def wants_input_logprobs(found: Mapping[str, Any]) -> bool:
    """Whether this native body may get log probabilities of its prompts' tokens; a batch has lists of both fields."""
    asked, starts = _listed(found.get("return_logprob")), _listed(found.get("logprob_start_len"))
    return any(one is True for one in asked) and any(type(start) is int and start >= 0 for start in starts)


class InputLogprobs:
    """What a prefill server's answer says of its prompts' tokens: the `input_*logprobs*` fields of each output.

    Outputs are told apart by their place in the body, not by `id`: for parallel samples each server makes ids of its
    own. `where` names the decode server in errors, which are EngineRejected for what is not its format.
    """

    def __init__(self, prefill: str, answer: bytes) -> None:
        """Read `answer`, whole or a stream to its end; raises EngineRejected, naming `prefill`."""
        try:
            self._fields = {index: _input_fields(output["meta_info"]) for index, output in _outputs(answer)}
        except _NO_OUTPUT as error:
            raise broken_wire(prefill, f"{answer[:200]!r}") from error

    def in_whole(self, where: str, answer: bytes) -> bytes:
        """Decode's answer of one request or of a batch, with these fields; all others keep their values."""
        try:
            found = orjson.loads(answer)
            outputs = found if isinstance(found, list) else [found]
            if len(outputs) != len(self._fields):
                raise broken_wire(where, f"{len(outputs)} outputs of {len(self._fields)} prefilled")
            for index, output in enumerate(outputs):
                output["meta_info"].update(self._fields[index])
        except _NO_OUTPUT as error:
            raise broken_wire(where, f"{answer[:200]!r}") from error
        return orjson.dumps(found)

    def in_event(self, where: str, payload: bytes) -> bytes:
        """The payload of one event of decode's stream, with these fields. Error events and the end are as they were."""
        if payload == _DONE:
            return payload
        try:
            event = orjson.loads(payload)
            if "error" in event:
                return payload
            event["meta_info"].update(self._fields[event.get("index", 0)])
        except _NO_OUTPUT as error:
            raise broken_wire(where, f"{payload[:200]!r}") from error
        return orjson.dumps(event)


class StreamWithInputLogprobs:
    """Decode's stream, rewritten event by event. `where` names the decode server in errors."""

    def __init__(self, found: InputLogprobs, where: str) -> None:
        self._found = found
        self._where = where
        self._events = EventSplitter()

    def feed(self, chunk: bytes) -> bytes:
        """The events that `chunk` completes, as they go to the client; raises EngineRejected."""
        payloads = self._events.feed(chunk)
        return b"".join(b"data: %b\n\n" % self._found.in_event(self._where, payload) for payload in payloads)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _outputs(answer: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Every output with its place in the body. Only a batch's events have an `index`."""
    if answer.startswith(b"data:"):
        events = [orjson.loads(payload) for payload in EventSplitter().feed(answer) if payload != _DONE]
        return [(event.get("index", 0), event) for event in events]
    return list(enumerate(_listed(orjson.loads(answer))))


def _input_fields(meta: Mapping[str, Any]) -> dict[str, orjson.Fragment]:
    """Written once: a stream repeats them in each of its events."""
    return {
        name: orjson.Fragment(orjson.dumps(value))
        for name, value in meta.items()
        if name.startswith("input_") and "logprobs" in name
    }
