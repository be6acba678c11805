"""One request on a scripted server: its tokens, decided by its prompt alone, and the answer it writes."""

import time
import zlib
from array import array
from typing import Any

import orjson

from shell_router.engines.prefill_only import FAKE_BOOTSTRAP_HOST
from shell_router.engines.scripting.http import Exchange
from shell_router.engines.scripting.prefix_cache import pack
from shell_router.engines.scripting.script import Fault, ScriptedSettings


class BadRequest(Exception):
    """What the server answers with 400 and this message."""


def scripted_id(seed: int, position: int, vocabulary: int) -> int:
    """The id at an output position: arithmetic modulo the vocabulary, so that every prompt has its own output."""
    return (seed + (position + 1) * 7919) % vocabulary


class ScriptedRun:
    """One request that has been accepted. Its output is a function of its prompt, its sampling parameters, its adapter.

    `scored_from` is the first prompt token whose log probability is asked for, or the prompt's length for none.
    """

    def __init__(self, exchange: Exchange, body: dict[str, Any], settings: ScriptedSettings) -> None:
        self.exchange = exchange
        self.settings = settings
        self.rid = str(body.get("rid") or id(self))
        self.room: int | None = body.get("bootstrap_room")
        self.fake_host = body.get("bootstrap_host") == FAKE_BOOTSTRAP_HOST
        self.prompt = _packed_prompt(body)
        self.adapter: str | None = body.get("lora_path")
        self.prompt_tokens = len(self.prompt) // 8
        self.cached_tokens = 0
        self.stream = body.get("stream") is True
        self.fault: Fault | None = None
        self.sent = 0
        self.ended = False
        self._logprobs = body.get("return_logprob") is True
        self._logprob_text = body.get("return_text_in_logprobs") is True
        self.scored_from = self._read_start(body.get("logprob_start_len"))
        self._plan(body.get("sampling_params") or {})

    def _plan(self, sampling: dict[str, Any]) -> None:
        self._interval = max(1, int(sampling.get("stream_interval") or 1))
        wanted = sampling.get("max_new_tokens", 128)
        if not isinstance(wanted, int) or wanted < 0:
            raise BadRequest(f"max_new_tokens must be at least 0, got {wanted}.")
        limit = self.settings.context_length
        if self.prompt_tokens >= limit:
            raise BadRequest(
                f"The input ({self.prompt_tokens} tokens) is longer than the model's context length ({limit} tokens)."
            )
        wanted = min(wanted, limit - self.prompt_tokens)
        seed = zlib.crc32((self.adapter or "").encode(), zlib.crc32(self.prompt))
        self.ids = [scripted_id(seed, position, self.settings.vocabulary) for position in range(wanted)]
        self._reason: dict[str, Any] = {"type": "length", "length": wanted}
        stops = sampling.get("stop_token_ids") or ()
        first = next((position for position, token in enumerate(self.ids) if token in stops), None)
        if first is not None:
            self._reason = {"type": "stop", "matched": self.ids[first]}
            del self.ids[first + 1 :]

    def _read_start(self, start: object) -> int:
        if not self._logprobs or start in (None, -1):
            return self.prompt_tokens
        if not isinstance(start, int) or not 0 <= start <= self.prompt_tokens:
            raise BadRequest(f"logprob_start_len must be -1 or at most {self.prompt_tokens}, got {start}.")
        return start

    def output(self, start: int, end: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        """Output tokens `start` to `end` as SGLang writes them."""
        ids = self.ids[start:end]
        shown = ids[:-1] if reason is not None and reason["type"] == "stop" else ids
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": end,
            "cached_tokens": self.cached_tokens,
        }
        if self._logprobs:
            meta["input_token_logprobs"] = self._input_logprobs() if self.settings.role == "prefill" else []
            meta["output_token_logprobs"] = [self._scored(token) for token in ids]
        if self.settings.stamped:
            meta["sent_s"] = time.monotonic()
        return {"text": "".join(map(_text, shown)), "output_ids": ids, "meta_info": meta}

    def _input_logprobs(self) -> list[tuple[float | None, int, str | None]]:
        """As SGLang, which has no log probability for the first."""
        scored = [self._scored(token) for token in array("q", self.prompt)[self.scored_from :]]
        return [(None, token, text) for _, token, text in scored[:1]] + scored[1:]

    def _scored(self, token: int) -> tuple[float | None, int, str | None]:
        return -(token % 97 + 1) / 100, token, _text(token) if self._logprob_text else None

    def events(self, until: int) -> list[bytes]:
        """The stream's events for the tokens not yet sent before `until`, the finish with the last."""
        events: list[bytes] = []
        while not events or self.sent < until:
            end = min(until, self.due)
            events.append(self._event(self.sent, end))
            self.sent = end
        return events

    @property
    def due(self) -> int:
        """Where the next event ends: the first holds one token, each later one `stream_interval` of them."""
        return min(self.sent + self._interval if self.sent else 1, len(self.ids))

    def _event(self, start: int, end: int) -> bytes:
        reason = self._reason if end >= len(self.ids) else None
        return self.framed(self.output(start if self.settings.incremental else 0, end, reason))

    def framed(self, found: dict[str, Any]) -> bytes:
        """An event as it goes over the wire."""
        return b"data: " + orjson.dumps(found) + (b"\r\n\r\n" if self.settings.crlf else b"\n\n")

    def done_mark(self) -> bytes:
        """The stream's last line."""
        return b"data: [DONE]" + (b"\r\n\r\n" if self.settings.crlf else b"\n\n")

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""
        return self.output(0, len(self.ids), self._reason)

    def aborted(self, message: str = "Aborted", status: int | None = None) -> dict[str, Any]:
        """The last output of a request that was aborted after `sent` tokens."""
        reason = {"type": "abort", "message": message, "status_code": status, "err_type": None}
        start = self.sent if self.settings.incremental and self.stream else 0
        return self.output(start, self.sent, reason)

    def first_token_only(self) -> None:
        """A prefill server answers with the first token."""
        del self.ids[1:]
        self._reason = {"type": "length", "length": len(self.ids)}


def _text(token: int) -> str:
    return f" ω{token}"


def _packed_prompt(body: dict[str, Any]) -> bytes:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("Either text or input_ids must be provided, and not both.")
    if ids is not None and not isinstance(ids, list):
        raise BadRequest("input_ids must be a list of integers.")
    try:
        prompt = pack(list(str(text).encode()) if ids is None else ids)
    except (TypeError, OverflowError) as error:
        raise BadRequest(f"input_ids must be integers: {error}") from error
    if not prompt:
        raise BadRequest("The prompt is empty.")
    return prompt
