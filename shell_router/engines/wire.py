"""SGLang's native wire format, read: server-sent events, `/generate` outputs and error bodies. No I/O."""

import math
import re
from typing import Any

import orjson

from shell_router.core.engine_errors import error_message
from shell_router.core.generation import Finish, Generation, Prefilled, Tokens
from shell_router.errors import AdapterMissing, EngineAborted, EngineRejected, PromptTooLong

MAX_EVENT_BYTES = 256 * 2**20
"""A single event longer than this is taken for a broken stream (a cumulative event repeats the whole output)."""

_ABORTED = "Aborted by AbortReq"
"""What an abort before the first token is called, as a transfer that failed with status 500."""

_TOO_LONG = re.compile(r"context length|maximum allowed length|longer than the model", re.IGNORECASE)

_NO_ADAPTER = re.compile(
    r"LoRA adapters? (that has never been|are not) loaded|prefill holds other weights as LoRA adapter", re.IGNORECASE
)
"""SGLang's words for a `lora_path` that it does not have, after a restart or an unloading; and an embedded decode's for
one that prefill has read from other files."""


def body_fields(request: Generation) -> dict[str, Any]:
    """The fields of a `/generate` body that the request decides."""
    fields: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.input_ids if isinstance(request.input_ids, list) else list(request.input_ids),
        "sampling_params": request.sampling if isinstance(request.sampling, dict) else dict(request.sampling),
    }
    if request.logprobs:
        fields["return_logprob"] = True
    if request.adapter is not None:
        fields["lora_path"] = request.adapter  # SGLang's field for an adapter's name
    if request.priority is not None:
        fields["priority"] = request.priority
    return fields


Refusal = AdapterMissing | EngineAborted | EngineRejected | PromptTooLong
"""What an engine's error may be."""


class EventSplitter:
    """Cuts a byte stream into the payloads of its `data:` lines, wherever the network cut the stream.

    SGLang writes each event as one line of JSON, so every `data:` line is an event.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the lines that `chunk` completes, in order; raises EngineRejected for an endless line."""
        lines = (self._rest + chunk if self._rest else chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise broken_wire("the engine", f"an event longer than {MAX_EVENT_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class OutputReader:
    """Turns the events of one `/generate` stream into new tokens and, at its end, a Finish.

    Reads incremental and cumulative streams alike: `completion_tokens` counts all ids so far, so an event whose
    ids number as many is cumulative.
    """

    __slots__ = ("_logprobs", "_seen_characters", "_seen_ids", "_where", "finish")

    def __init__(self, where: str, *, logprobs: bool) -> None:
        self._where = where
        self._logprobs = logprobs
        self._seen_ids = 0
        self._seen_characters = 0
        self.finish: Finish | None = None

    def take(self, payload: bytes) -> Tokens | None:
        """New tokens in this event, if any. Raises EngineRejected or PromptTooLong for what is not an output."""
        if payload == b"[DONE]":
            return None
        try:
            event = orjson.loads(payload)
            if "error" in event:
                raise rejected_event(self._where, event)
            return self._new_tokens(event, event["meta_info"])
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise broken_wire(self._where, f"{payload[:200]!r}") from error

    def _new_tokens(self, event: dict[str, Any], meta: dict[str, Any]) -> Tokens | None:
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise aborted(self._where, reason)
        ids, text = self._advance(event, meta["completion_tokens"])
        matched = 0 if reason is None else _stop_tokens(ids, reason.get("matched"))
        logprobs: tuple[float, ...] = ()
        if self._logprobs and ids:
            entries = meta["output_token_logprobs"][-len(ids) :]
            # JSON has no -inf: SGLang writes null
            logprobs = tuple(-math.inf if entry[0] is None else float(entry[0]) for entry in entries)
            logprobs = logprobs[: len(ids) - matched]
        if reason is not None:
            self.finish = Finish(
                reason["type"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]
            )
        kept = tuple(ids[: len(ids) - matched])
        return Tokens(kept, text, logprobs) if kept or text else None

    def _advance(self, event: dict[str, Any], completion_tokens: int) -> tuple[list[int], str]:
        ids: list[int] = event["output_ids"]
        text: str = event.get("text") or ""
        if len(ids) == completion_tokens and self._seen_ids:
            ids = ids[self._seen_ids :]
            text = text[self._seen_characters :]
        elif self._seen_ids + len(ids) != completion_tokens:
            raise ValueError(f"{self._seen_ids} + {len(ids)} ids, but completion_tokens {completion_tokens}")
        self._seen_ids += len(ids)
        self._seen_characters += len(text)
        return ids, text


def _stop_tokens(ids: list[int], matched: object) -> int:
    """1 if the last of `ids` is the stop token that ended the output, else 0 (a stop string has no id)."""
    return int(isinstance(matched, int) and ids[-1:] == [matched])


def read_prefilled(where: str, payload: bytes) -> Prefilled:
    """The counts in a prefill server's answer; raises EngineRejected when there are none."""
    try:
        meta = orjson.loads(payload)["meta_info"]
        return Prefilled(prompt_tokens=meta["prompt_tokens"], cached_tokens=meta["cached_tokens"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise broken_wire(where, f"{payload[:200]!r}") from error


def refuse_errors(where: str, payloads: list[bytes]) -> None:
    """Raise EngineRejected or PromptTooLong if one of these stream events is an error or an abort."""
    for payload in payloads:
        if b'"error"' in payload or b'"abort"' in payload:
            OutputReader(where, logprobs=False).take(payload)


def refuse_aborted(where: str, answer: bytes) -> None:
    """Raise if this whole answer, of one request or of a batch, ended as aborted."""
    if b'"abort"' not in answer:
        return
    try:
        found = orjson.loads(answer)
        reasons = [one["meta_info"]["finish_reason"] for one in (found if isinstance(found, list) else [found])]
        ended_as_aborted = [reason for reason in reasons if reason and reason["type"] == "abort"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise broken_wire(where, f"{answer[:200]!r}") from error
    if ended_as_aborted:
        raise aborted(where, ended_as_aborted[0])


def rejected(where: str, status: int, message: str) -> Refusal:
    """The error for an engine's error status; a 400 about the context length is the client's PromptTooLong."""
    if _ABORTED in message:
        return _ended(where, message)
    if tells_missing_adapter(message):
        return missing_adapter(where, message)
    if status == 400 and _TOO_LONG.search(message):
        return PromptTooLong(message, remedy="Shorten the prompt or ask for fewer new tokens.")
    return EngineRejected(f"The {where} answered {status}: {message}", status=status)


def tells_missing_adapter(message: str) -> bool:
    """Whether the engine says that it does not have the request's adapter, or not the one that its partner has."""
    return _NO_ADAPTER.search(message) is not None


def missing_adapter(where: str, message: str) -> AdapterMissing:
    """The error for a request whose adapter the engine does not have."""
    told = message.strip().splitlines()[0].removesuffix(".")
    return AdapterMissing(f"The {where} does not have the adapter: {told}.", remedy="Ask again: it is loaded anew.")


def rejected_event(where: str, event: dict[str, Any]) -> Refusal:
    """The error for an error event inside a stream."""
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return rejected(where, code if isinstance(code, int) else 500, error_message(orjson.dumps(event)))


def aborted(where: str, reason: dict[str, Any]) -> Refusal:
    """The error for an output that ended as aborted although nobody here asked for that.

    With a status the engine itself gave up; without, somebody asked it to.
    """
    message, status = reason.get("message") or "aborted", reason.get("status_code")
    if status is None:
        return _ended(where, message)
    return rejected(where, status, message)


def _ended(where: str, message: str) -> EngineAborted:
    told = message.removesuffix(".")
    return EngineAborted(f"The {where} ended the request: {told}.", remedy="Ask again, unless an operator ended it.")


def broken_wire(where: str, found: str) -> EngineRejected:
    """The error for an answer that is not SGLang's wire format."""
    return EngineRejected(
        f"The {where} sent what is not SGLang's native format: {found}.",
        status=502,
        remedy="Check that the URL is an SGLang server of a supported version.",
    )
