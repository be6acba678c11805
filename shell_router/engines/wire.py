"""Read SGLang's native wire format: server-sent events, outputs and errors. No I/O."""

import math
import re
from dataclasses import replace
from itertools import chain

import orjson

from shell_router.core.engine import (
    Finish,
    FinishReason,
    Generation,
    Prefilled,
    Tokens,
    error_message,
)
from shell_router.core.exact_json import NewValues, Values, write_json
from shell_router.errors import (
    AdapterMissing,
    EngineAborted,
    EngineRejected,
    PromptTooLong,
    ShellRouterError,
)

MAX_EVENT_BYTES = 32 * 2**20
"""A longer event is taken for a broken stream. A cumulative event repeats the whole output."""

_ABORTED = "Aborted by AbortReq"
"""SGLang's words for an abort before the first token, which it reports as a failed transfer with
status 500.
"""

_TOO_LONG = re.compile(
    r"context (?:length|size)|maximum allowed length|longer than the model", re.IGNORECASE
)

_TOTAL = re.compile(
    r"maximum context length of (\d+) tokens\. You requested a total of (\d+) tokens"
)
"""SGLang's words for an output limit that is too high after the prompt."""

_NO_ADAPTER = re.compile(
    r"LoRA adapters? (that has never been|are not) loaded|LoRA is not enabled", re.IGNORECASE
)
"""SGLang's words for a `lora_path` that it was not started with."""


def body_fields(request: Generation) -> NewValues:
    """Return the fields of a `/generate` body that the request decides."""
    ids = request.input_ids
    sampling = request.sampling
    fields: NewValues = {
        "rid": request.rid,
        "input_ids": ids if isinstance(ids, list) else list(ids),
        "sampling_params": sampling if isinstance(sampling, dict) else dict(sampling),
    }
    if request.logprobs:
        fields["return_logprob"] = True
    if request.adapter is not None:
        fields["lora_path"] = request.adapter  # SGLang's field for an adapter's name
    if request.cache_key is not None:
        fields["extra_key"] = request.cache_key
    return fields


def leg_bodies(request: Generation, fields: Values) -> tuple[bytes, bytes]:
    """Encode the `/generate` bodies of the prefill and the decode leg.

    The prefill leg is not streamed, so its errors come as HTTP statuses.

    Args:
        request: The request.
        fields: The bootstrap fields that both legs need.
    """
    body = write_json({**body_fields(request), **fields})[:-1]
    return body + b',"stream":false}', body + b',"stream":true}'


Refusal = AdapterMissing | EngineAborted | EngineRejected | PromptTooLong
"""The errors that an engine's error becomes."""


_INDEX = re.compile(rb'"index": ?([0-9]{1,4})\}\s*$')


def index_of(event: bytes) -> int:
    """Return the number of the event's output in its batch.

    SGLang writes it last, and not for a single request.
    """
    index = _INDEX.search(event[-32:])
    return int(index[1]) if index else 0


class EventSplitter:
    """Cuts a byte stream into the payloads of its `data:` lines, wherever the network cut it.

    SGLang writes each event as one line of JSON, so every `data:` line is an event. `where` names
    the engine in errors.
    """

    __slots__ = ("_line_bytes", "_pieces", "_where")

    def __init__(self, where: str = "engine") -> None:
        self._where = where
        self._pieces: list[bytes] = []
        self._line_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the payloads of the lines that `chunk` completes, in order.

        Raises EngineRejected for a line of more than MAX_EVENT_BYTES.
        """
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if self._pieces or rest:
            self._keep(lines, rest)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def _keep(self, lines: list[bytes], rest: bytes) -> None:
        """Join the kept pieces to the first of `lines`, and keep `rest` for the next chunk."""
        self._line_bytes += len(lines[0] if lines else rest)
        if self._line_bytes > MAX_EVENT_BYTES:
            raise wire_error(self._where, f"an event of more than {MAX_EVENT_BYTES} bytes")
        if lines:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces = []
            self._line_bytes = len(rest)
        if rest:
            self._pieces.append(rest)


class OutputReader:
    """Turns the events of one `/generate` stream into new tokens and, at its end, a Finish.

    Reads incremental and cumulative streams alike: `completion_tokens` counts all ids so far, so an
    event whose ids number as many is cumulative.
    """

    __slots__ = (
        "_events",
        "_logprobs",
        "_seen_characters",
        "_seen_ids",
        "_where",
        "error",
        "finish",
    )

    def __init__(self, where: str, *, logprobs: bool) -> None:
        self._where = where
        self._logprobs = logprobs
        self._events = EventSplitter(where)
        self._seen_ids = 0
        self._seen_characters = 0
        self.finish: Finish | None = None
        self.error: ShellRouterError | None = None

    def feed(self, chunk: bytes) -> Tokens | None:
        """Return the new tokens of all events that `chunk` completes, if any.

        If tokens came before an error in the same chunk, they are returned and `error` is set.

        Raises:
            EngineRejected: An event is an error, or no event of SGLang's.
            PromptTooLong: The engine says so.
        """
        parts: list[Tokens] = []
        for payload in self._events.feed(chunk):
            try:
                tokens = self.take(payload)
            except ShellRouterError as error:
                if not parts:
                    raise
                self.error = error
                break
            if tokens is not None:
                parts.append(tokens)
        if len(parts) < 2:
            return parts[0] if parts else None
        ids = chain.from_iterable([part.ids for part in parts])
        logprobs = chain.from_iterable([part.logprobs for part in parts])
        return Tokens(tuple(ids), "".join([part.text for part in parts]), tuple(logprobs))

    def take(self, payload: bytes) -> Tokens | None:
        """Return the new tokens of an event, if any; raises as `feed` does."""
        if payload == b"[DONE]":
            return None
        try:
            event = orjson.loads(payload)
            if "error" in event:
                error = event["error"]
                code = error.get("code") if isinstance(error, dict) else None
                status = code if isinstance(code, int) else 500
                raise refusal_error(self._where, status, error_message(payload))
            return self._new_tokens(event, event["meta_info"])
        except (
            orjson.JSONDecodeError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            ValueError,
        ) as error:
            raise wire_error(self._where, f"{payload[:200]!r}") from error

    def _new_tokens(self, event: NewValues, meta: NewValues) -> Tokens | None:
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise abort_error(self._where, reason)
        ids, text = self._advance(event, meta["completion_tokens"])
        # a stop string has no id; a stop token is the last of `ids`
        stopped = (
            reason is not None
            and isinstance(reason.get("matched"), int)
            and ids[-1:] == [reason["matched"]]
        )
        matched = 1 if stopped else 0
        logprobs: tuple[float, ...] = ()
        if self._logprobs and ids:
            entries = meta["output_token_logprobs"][-len(ids) :]
            # JSON has no -inf: SGLang writes null
            logprobs = tuple(
                -math.inf if entry[0] is None else float(entry[0]) for entry in entries
            )
            logprobs = logprobs[: len(ids) - matched]
        if reason is not None:
            counts = [
                meta[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
            ]
            drafts = [
                meta.get(name) or 0
                for name in ("spec_num_proposed_drafts", "spec_num_correct_drafts")
            ]
            kind: FinishReason = reason["type"]
            if not isinstance(kind, str) or {*map(type, counts + drafts)} != {int}:
                raise TypeError("not a finish")
            self.finish = Finish(kind, *counts, *drafts)
            if isinstance(stop := reason.get("matched"), str):  # not a stop token's id
                self.finish = replace(self.finish, matched=stop)
        kept = tuple(ids[: len(ids) - matched])
        if kept or text:
            return Tokens(kept, text, logprobs)
        return None

    def _advance(self, event: NewValues, completion_tokens: int) -> tuple[list[int], str]:
        ids: list[int] = event["output_ids"]
        text: str = event.get("text") or ""
        if not isinstance(text, str) or not {*map(type, ids)} <= {int}:
            raise TypeError("not ids and text")
        if len(ids) == completion_tokens and self._seen_ids:
            ids = ids[self._seen_ids :]
            text = text[self._seen_characters :]
        elif self._seen_ids + len(ids) != completion_tokens:
            raise ValueError(
                f"{self._seen_ids} + {len(ids)} ids, but completion_tokens {completion_tokens}"
            )
        self._seen_ids += len(ids)
        self._seen_characters += len(text)
        return ids, text


def read_prefilled(where: str, payload: bytes) -> Prefilled:
    """Read the counts of a prefill server's answer; raise EngineRejected without them."""
    try:
        meta = orjson.loads(payload)["meta_info"]
        return Prefilled(
            prompt_tokens=int(meta["prompt_tokens"]), cached_tokens=int(meta["cached_tokens"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise wire_error(where, f"{payload[:200]!r}") from error


def require_not_aborted(where: str, answer: bytes, *, streamed: bool) -> None:
    """Raise EngineRejected or PromptTooLong if a whole answer ended as an error or an abort."""
    if streamed:
        reader = OutputReader(where, logprobs=False)
        for payload in EventSplitter(where).feed(answer):
            if b'"error"' in payload or b'"abort"' in payload:
                reader.take(payload)
        return
    if b'"abort"' not in answer:
        return
    try:
        outputs = orjson.loads(answer)
        if not isinstance(outputs, list):
            outputs = [outputs]
        reasons = [output["meta_info"]["finish_reason"] for output in outputs]
        aborts = [reason for reason in reasons if reason and reason["type"] == "abort"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise wire_error(where, f"{answer[:200]!r}") from error
    if aborts:
        raise abort_error(where, aborts[0])


def refusal_error(where: str, status: int, message: str) -> Refusal:
    """Make the error for an engine's error status.

    A 400 about the context length becomes the client's PromptTooLong.
    """
    if _ABORTED in message:
        return _ended(where, message)
    if _NO_ADAPTER.search(message):
        words = message.strip().splitlines()[0].removesuffix(".")
        return AdapterMissing(
            f"The {where} does not have the adapter: {words}.",
            remedy="Start it with --lora-paths NAME=FOLDER for each adapter of the model.",
        )
    if status == 400 and _TOO_LONG.search(message):
        too_long = PromptTooLong(message, remedy="Shorten the prompt or ask for fewer new tokens.")
        if total := _TOTAL.search(message):
            too_long.excess = int(total[2]) - int(total[1])
        return too_long
    return EngineRejected(f"The {where} answered {status}: {message}", status=status)


def abort_error(where: str, reason: NewValues) -> Refusal:
    """Make the error for an output that was aborted, though not by this router.

    With a status the engine itself gave up; without, another client aborted it.
    """
    message = reason.get("message") or "aborted"
    status = reason.get("status_code")
    if status is None:
        return _ended(where, message)
    return refusal_error(where, status, message)


def _ended(where: str, message: str) -> EngineAborted:
    words = message.removesuffix(".")
    return EngineAborted(
        f"The {where} ended the request: {words}.", remedy="Ask again, unless an operator ended it."
    )


def wire_error(where: str, content: str) -> EngineRejected:
    """Make the error for an answer that is not SGLang's wire format."""
    return EngineRejected(
        f"The {where} sent what is not SGLang's native format: {content}.",
        status=502,
        remedy="Check that the URL is an SGLang server of a supported version.",
    )
