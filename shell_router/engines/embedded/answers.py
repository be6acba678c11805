"""SGLang's answers: the dict of one output, whole or in parts, and the shapes of errors."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web
from tokenizers import Tokenizer

from shell_router.engines.embedded.output import Piece
from shell_router.engines.embedded.wire import GenerateRequest

STREAM_END = b"data: [DONE]\n\n"


class Answer:
    """Grows with the pieces of one output and renders SGLang's dict.

    Cumulative: every rendering repeats all so far. Incremental: text, ids and log-probabilities since the last.
    """

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, *, incremental: bool) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._incremental = incremental and request.stream
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._input_logprobs: list[list[Any]] = []
        self._completion_tokens = 0
        self.finish_reason: dict[str, Any] | None = None

    def add(self, pieces: Sequence[Piece]) -> None:
        """Take further pieces; what follows a last one is ignored."""
        for piece in pieces:
            if self.finish_reason is not None:
                return
            self._add(piece)

    def render(self, cached_tokens: int, latency_s: float) -> dict[str, Any]:
        """The dict for what has come; `latency_s` since the request's arrival goes with the last one."""
        meta = self._meta(cached_tokens)
        if self.finish_reason is not None:
            meta["e2e_latency"] = latency_s
        answer = {"text": "".join(self._text), "output_ids": self._ids, "meta_info": meta}
        if self._incremental:
            self._text, self._ids, self._logprobs = [], [], []
        return answer

    def _add(self, piece: Piece) -> None:
        self.finish_reason = piece.finish_reason
        if piece.input_logprobs:
            scored = self._request.input_ids[-len(piece.input_logprobs) :]
            self._input_logprobs = [self._row(*each) for each in zip(piece.input_logprobs, scored, strict=True)]
        if piece.text:
            self._text.append(piece.text)
        if piece.token_id is None:
            return
        self._ids.append(piece.token_id)
        self._completion_tokens += 1
        if self._request.return_logprob:
            self._logprobs.append(self._row(piece.logprob, piece.token_id))

    def _row(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self._tokenizer.decode([token_id], False) if self._request.return_text_in_logprobs else None
        return [logprob, token_id, text]

    def _meta(self, cached_tokens: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._request.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self._request.input_ids),
            "weight_version": "default",
            "num_retractions": 0,
        }
        if self._request.return_logprob:
            meta["input_token_logprobs"] = self._input_logprobs
            meta["output_token_logprobs"] = self._logprobs
            meta["output_token_logprobs_length"] = self._completion_tokens
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = self._completion_tokens
        meta["cached_tokens"] = cached_tokens
        meta["cached_tokens_details"] = {"device": cached_tokens, "host": 0} if cached_tokens else None
        return meta


def sse(event: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


def json_response(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def refusal(message: str) -> web.Response:
    """A request that cannot be served as it stands."""
    return json_response({"error": {"message": message}}, 400)


def contract_refusal(message: str) -> web.Response:
    """A body against the schema."""
    return json_response({"error": message}, 400)


def server_error(message: str, status: int, kind: str | None = None) -> web.Response:
    """The OpenAI-like envelope that SGLang uses for unreadable bodies and failures of its own."""
    kind = kind or str(status)
    return json_response({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


def malformed(message: str) -> web.Response:
    return server_error(message, 400, HTTPStatus.BAD_REQUEST.phrase)


def stream_error(message: str) -> dict[str, Any]:
    """The event that ends a stream that was refused after its head was sent."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}
