"""Bodies of OpenAI's chat completions, and their streamed answers as tokens. No I/O."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from shell_router.core.engine import Finish, FinishReason, Generation, Tokens, error_message
from shell_router.core.exact_json import NewValues, Values, parse_json, write_json
from shell_router.core.marks import ReasoningMarks
from shell_router.core.sampling import GRAMMARS
from shell_router.core.validation import field_error
from shell_router.engines.messages import CALL, encode_bytes, read_chat, remove_marks
from shell_router.engines.wire import EventSplitter, refusal_error
from shell_router.errors import EngineAborted, EngineRejected, EngineUnreachable

NOT_SENT = ("stop_regex", "stop_token_ids", "logit_bias", *GRAMMARS[1:])
"""Sampling parameters without a place in these bodies."""
READ_HERE = frozenset({"max_new_tokens", "json_schema", "custom_params", "stream_interval"})
NAMES = {"sampling_seed": "seed", "min_new_tokens": "min_tokens"}
"""OpenAI's and other servers' names of parameters that differ from SGLang's."""
CHOICE = ("tool_choice", "parallel_tool_calls")
"""Fields that `moa.calls` puts into `custom_params`; clients' topologies may set others there."""
OBJECT_SCHEMA = '{"type": "object"}'
"""The schema that stands for OpenAI's `json_object`."""


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The form in which a model's server wants its chats.

    Attributes:
        model: Its name there.
        context_length: An output that may fill it is sent without a limit.
        limit_field: The name of the output's limit.
        logprobs: Whether it gives the log-probabilities of tokens.
        body: Fields of all bodies.
        marks: The marks around thinking for the router.
    """

    model: str
    context_length: int
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    logprobs: bool = False
    body: Values = field(default_factory=dict)
    marks: ReasoningMarks = field(default_factory=ReasoningMarks)


def write_chat(request: Generation, form: ChatForm) -> bytes:
    """Return the body of the request.

    Raises:
        InvalidField: A sampling parameter cannot be sent.
    """
    sampling = {name: value for name, value in request.sampling.items() if value is not None}
    for name in NOT_SENT:
        if name in sampling:
            what = f"is not served by {form.model!r}, whose server has OpenAI's API"
            raise field_error(name, what, "Leave it out, or ask a model on SGLang.")
    body: NewValues = {
        **form.body,
        **read_chat(request.input_ids),
        "model": form.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    choice = sampling.get("custom_params") or {}
    body |= {name: choice[name] for name in CHOICE if name in choice}
    for name in sampling.keys() - READ_HERE:
        body[NAMES.get(name, name)] = sampling[name]
    limit = sampling.get("max_new_tokens")
    if limit is not None and limit + len(request.input_ids) < form.context_length:
        body[form.limit_field] = limit
    if request.logprobs and form.logprobs:
        body["logprobs"] = True
    if schema := sampling.get("json_schema"):
        body["response_format"] = _write_format(schema)
    return write_json(body)


def _write_format(schema: str) -> Values:
    if schema == OBJECT_SCHEMA:
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": parse_json(schema)},
    }


@dataclass(slots=True)
class _Call:
    """A tool call whose arguments still come."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatReader:
    """Turns the events of one streamed chat completion into tokens and, at its end, a Finish.

    Thinking stands between its marks, and each call behind a CALL.

    Args:
        where: Names the engine in errors.
        form: The server's way.
        hide: Takes secrets out of messages.
    """

    def __init__(self, where: str, form: ChatForm, hide: Callable[[str], str]) -> None:
        self._where = where
        self._marks = form.marks
        self._hide = hide
        self._events = EventSplitter(where)
        self._calls: dict[object, _Call] = {}
        self._thinks = False
        self._rest = b""  # bytes that do not fill an id yet
        self._written = 0
        self._usage: Any = None
        self._reason: str | None = None
        self.is_done = False

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete, and only counts are missing."""
        return self.is_done or self._reason is not None

    def feed(self, chunk: bytes) -> list[Tokens]:
        """Return the new tokens of all events that `chunk` completes.

        Raises:
            EngineError: An event is an error, or none of a chat completion's.
            PromptTooLong: The server says so.
        """
        return [tokens for payload in self._events.feed(chunk) for tokens in self._take(payload)]

    def _take(self, payload: bytes) -> list[Tokens]:
        if payload == b"[DONE]":
            self.is_done = True
            return []
        try:
            event = orjson.loads(payload)
            if error := event.get("error"):
                code = error.get("code") if isinstance(error, dict) else None
                status = code if isinstance(code, int) else 500
                raise refusal_error(self._where, status, self._hide(error_message(payload)))
            self._usage = event.get("usage") or self._usage
            choices = event.get("choices") or ()
            return self._read_choice(choices[0]) if choices else []
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.make_error(payload) from error

    def make_error(self, content: bytes) -> EngineRejected:
        """Return the error for content that is no chat completion's."""
        words = self._hide(content[:200].decode("utf-8", "replace"))
        return EngineRejected(
            f"The {self._where} sent what is no event of a chat completion: {words!r}.",
            status=502,
            remedy="Check that the URL is that of an OpenAI-compatible API, as http://HOST:PORT/v1.",
        )

    def _read_choice(self, choice: NewValues) -> list[Tokens]:
        delta = choice.get("delta") or {}
        tokens = []
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            if not self._thinks:
                tokens.append(self._make_mark(self._marks.start))
            self._thinks = True
            tokens.append(self._make_tokens(remove_marks(thought)))
        if text := delta.get("content") or delta.get("refusal"):
            tokens += self._end_thinking()
            logprobs = (choice.get("logprobs") or {}).get("content") or ()
            numbers = tuple(_read_logprob(entry["logprob"]) for entry in logprobs)
            tokens.append(self._make_tokens(remove_marks(text), numbers))
        for piece in delta.get("tool_calls") or ():
            self._add_call(piece)
        self._reason = choice.get("finish_reason") or self._reason
        return tokens

    def _end_thinking(self) -> list[Tokens]:
        if not self._thinks:
            return []
        self._thinks = False
        return [self._make_mark(self._marks.end)]

    def _make_mark(self, mark: str) -> Tokens:
        """Return a mark with all ids up to it, so that no id belongs to both of its sides."""
        ids = encode_bytes(self._rest + mark.encode())
        self._rest = b""
        return Tokens(ids, mark)

    def _make_tokens(self, text: str, logprobs: tuple[float, ...] = ()) -> Tokens:
        """Return the text with the ids that it fills; a longer text fills those of its rest."""
        data = text.encode("utf-8", "replace")
        self._written += len(data)
        data = self._rest + data
        whole = len(data) // 4 * 4
        self._rest = data[whole:]
        return Tokens(encode_bytes(data[:whole]), text, logprobs)

    def _add_call(self, piece: NewValues) -> None:
        """Add a piece of a call; servers that number none begin each with another id."""
        function = piece.get("function") or {}
        place = piece.get("index", len(self._calls))
        call = self._calls.get(place)
        name = piece.get("id") or ""
        if call is not None and name not in ("", call.id):
            place = name  # all calls have one number
            call = None
        if call is None:
            call = self._calls[place] = _Call(name)
        call.name += function.get("name") or ""
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):
            arguments = write_json(arguments).decode()
        call.arguments += arguments
        self._written += len(arguments)

    def finish(self, prompt_tokens: int) -> list[Tokens | Finish]:
        """End the output; return the calls and the Finish.

        Raises:
            EngineError: The output is not complete, or an end that is none.
        """
        if not self.has_ended:
            raise EngineUnreachable(
                f"The stream of the {self._where} ended before its answer.", remedy="Ask again."
            )
        if self._reason in ("content_filter", "error"):
            raise EngineAborted(
                f"The {self._where} ended the output: {self._reason}.", remedy="Change the prompt."
            )
        ended: list[Tokens | Finish] = []
        calls = "".join(self._write_call(call) for call in self._calls.values())
        if calls:
            ended += self._end_thinking()
        if calls or self._rest:
            ended.append(Tokens(encode_bytes(self._rest + calls.encode()), calls))
        reason: FinishReason = "length" if self._reason == "length" else "stop"
        return [*ended, self._count(reason, prompt_tokens)]

    def _write_call(self, call: _Call) -> str:
        """Return the call as text; empty for one that was cut."""
        arguments = call.arguments.strip() or "{}"
        try:
            is_object = isinstance(parse_json(arguments), dict)
        except orjson.JSONDecodeError:
            is_object = False
        if is_object and call.name:
            name = write_json(call.name).decode()
            return remove_marks(f'{{"name":{name},"arguments":{arguments}}}').join((CALL, ""))
        if self._reason == "length":
            return ""
        raise EngineRejected(
            f"The {self._where} called {self._hide(call.name)!r} with arguments that are no JSON "
            "object.",
            status=502,
            remedy="Ask again, or check the server's parser of tool calls.",
        )

    def _count(self, reason: FinishReason, prompt_tokens: int) -> Finish:
        """Return the end with the server's counts, or with estimates where they cannot be."""
        usage = self._usage
        details: Any = None
        counts: list[Any] = []
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
        is_right = [*map(type, counts)] == [int, int] and counts[0] > 0
        if not is_right or counts[1] < bool(self._written):
            written = math.ceil(self._written / 4)
            return Finish(reason, prompt_tokens, written, 0, estimated=True)
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        if type(cached) is not int or not 0 <= cached <= counts[0]:
            cached = 0
        return Finish(reason, counts[0], counts[1], cached)


def _read_logprob(value: Any) -> float:
    number = float(value)
    if math.isnan(number):
        raise ValueError("a log-probability is not a number")
    return number
