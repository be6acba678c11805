"""One request's output: when it ends and what each token adds to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from shell_router.engines.embedded.detokenize import Detokenizer
from shell_router.engines.embedded.sampler import Draw


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds: at most one token, its text, and the reason if it is the last.

    `finish_reason` is SGLang's dict; `input_logprobs` are those of the prompt's last tokens, from a prefill. Ids run
    through the stop token; text does not (SGLang's `output_ids_through_stop` and `trim_matched_stop`).
    """

    token_id: int | None = None
    logprob: float | None = None
    text: str = ""
    finish_reason: dict[str, Any] | None = None
    input_logprobs: Sequence[float | None] = ()


def abort_reason(message: str = "Aborted", status_code: int | None = None) -> dict[str, Any]:
    """SGLang's finish reason of a request that was aborted."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}


class Output:
    """Collects one request's tokens into pieces. Not thread-safe."""

    def __init__(self, draw: Draw, tokenizer: Tokenizer, *, max_new_tokens: int) -> None:
        self.draw = draw
        self._max_new_tokens = max_new_tokens
        self._detokenizer = Detokenizer(tokenizer, draw.prompt_ids, skip_special_tokens=draw.params.skip_special_tokens)
        self._held = ""

    def accept(self, token_id: int, logprob: float | None) -> Piece:
        """Take the next token and say what it adds."""
        if self._max_new_tokens == 0:
            return Piece(finish_reason={"type": "length", "length": 0})
        self.draw.output_ids.append(token_id)
        is_stop = token_id in self.draw.stop_ids
        text = self._held
        if not is_stop or self.draw.params.no_stop_trim:
            text += self._detokenizer.feed(token_id)
        full = len(self.draw.output_ids) >= self._max_new_tokens
        if is_stop or full:
            text += self._detokenizer.finish()
        cut = self._stop_string(text) if self.draw.params.stop else None
        if cut is not None:
            return Piece(token_id, logprob, cut[0], {"type": "stop", "matched": cut[1]})
        if is_stop:
            return Piece(token_id, logprob, text, {"type": "stop", "matched": token_id})
        if full:
            return Piece(token_id, logprob, text, {"type": "length", "length": self._max_new_tokens})
        return Piece(token_id, logprob, self._hold_back(text) if self.draw.params.stop else text)

    def _stop_string(self, text: str) -> tuple[str, str] | None:
        """The text before the first stop string, and that string."""
        found = [(text.find(stop), stop) for stop in self.draw.params.stop if stop in text]
        if not found:
            return None
        at, stop = min(found)
        return text[: at + len(stop)] if self.draw.params.no_stop_trim else text[:at], stop

    def _hold_back(self, text: str) -> str:
        """Give all but a tail that may be the beginning of a stop string."""
        held = max((_overlap(text, stop) for stop in self.draw.params.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
