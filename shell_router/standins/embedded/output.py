"""One request's output: its tokens' text, its end, and the answer that they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tokenizers import Tokenizer

from shell_router.core.exact_json import NewValues
from shell_router.standins.embedded.model import CausalLm
from shell_router.standins.embedded.sampling import Draw, Grammar
from shell_router.standins.embedded.wire import GenerateRequest

REPLACEMENT = "\ufffd"
# No character has more bytes than four; more pending tokens than this are not an incomplete one but
# broken bytes.
MOST_PENDING = 8
CONTEXT_TOKENS = 5


class Detokenizer:
    """Turns the tokens of one output into text, one by one.

    It decodes a short tail twice, without and with the new token, and returns the difference: the
    tail carries what earlier tokens mean for spacing. An incomplete character gives no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._read = 0
        self._advance()

    def feed(self, token_id: int) -> str:
        """Return the text that became certain with `token_id`; empty within a character."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, self._skip)
        incomplete = text.endswith(REPLACEMENT) and len(self._ids) - self._read < MOST_PENDING
        if incomplete or len(text) <= len(self._known_text):
            return ""
        new_text = text[len(self._known_text) :]
        self._advance()
        return new_text

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD."""
        return self._tokenizer.decode(self._ids, self._skip)[len(self._known_text) :]

    def _advance(self) -> None:
        """Forget tokens whose text was returned, but for the last group, which gives context."""
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._known_text = self._tokenizer.decode(self._ids, self._skip)


@dataclass(frozen=True, slots=True)
class Piece:
    """One step's part of an output: at most one token, its text, and the reason if it is the last.

    Ids run through the stop token; text does not (SGLang's `output_ids_through_stop` and
    `trim_matched_stop`).

    Attributes:
        finish_reason: SGLang's dict.
        input_logprobs: Log-probabilities of the prompt's last tokens, from a prefill.
        drafted: Tokens that the pass verified; on its first piece.
        accepted: Drafted tokens that are part of the output; on its first piece.
    """

    token_id: int | None = None
    logprob: float | None = None
    text: str = ""
    finish_reason: NewValues | None = None
    input_logprobs: Sequence[float | None] = ()
    drafted: int = 0
    accepted: int = 0


def abort_reason(message: str = "Aborted", status_code: int | None = None) -> NewValues:
    """Return SGLang's finish reason of a request that was aborted."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}


class DecodedOutput:
    """One request's tokens, made into pieces. Not thread-safe."""

    def __init__(self, draw: Draw, tokenizer: Tokenizer, *, max_new_tokens: int) -> None:
        self.draw = draw
        self._max_new_tokens = max_new_tokens
        self._detokenizer = Detokenizer(
            tokenizer, draw.prompt_ids, skip_special_tokens=draw.params.skip_special_tokens
        )
        self._held = ""

    @classmethod
    def of(cls, request: GenerateRequest, lm: CausalLm, grammar: Grammar | None = None) -> Self:
        """Return the request's output before its first token.

        An output that follows a grammar ends where the grammar does.
        """
        params = request.sampling
        stop_ids = (
            (frozenset())
            if (params.ignore_eos and grammar is None)
            else (params.stop_token_ids | lm.eos_ids)
        )
        draw = Draw(params, request.input_ids, stop_ids, grammar=grammar)
        return cls(draw, lm.tokenizer, max_new_tokens=request.max_new_tokens)

    def accept(self, token_id: int, logprob: float | None) -> Piece:
        """Take the next token and return its piece."""
        if self._max_new_tokens == 0:
            return Piece(finish_reason={"type": "length", "length": 0})
        if self.draw.grammar is not None and self.draw.grammar.error:
            return Piece(
                finish_reason=abort_reason(
                    f"The grammar cannot be followed: {self.draw.grammar.error}", 400
                )
            )
        self.draw.output_ids.append(token_id)
        is_stop = token_id in self.draw.stop_ids
        text = self._held
        if not is_stop or self.draw.params.no_stop_trim:
            text += self._detokenizer.feed(token_id)
        full = len(self.draw.output_ids) >= self._max_new_tokens
        if is_stop or full:
            text += self._detokenizer.finish()
        cut = self._stop_string(text)
        if cut is not None:
            return Piece(token_id, logprob, cut[0], {"type": "stop", "matched": cut[1]})
        if is_stop:
            return Piece(token_id, logprob, text, {"type": "stop", "matched": token_id})
        if full:
            return Piece(
                token_id, logprob, text, {"type": "length", "length": self._max_new_tokens}
            )
        return Piece(token_id, logprob, self._hold_back(text))

    def _stop_string(self, text: str) -> tuple[str, str] | None:
        """Return the text before the first stop string, and that string."""
        matches = [(text.find(stop), stop) for stop in self.draw.params.stop if stop in text]
        if not matches:
            return None
        at, stop = min(matches)
        return text[: at + len(stop)] if self.draw.params.no_stop_trim else text[:at], stop

    def _hold_back(self, text: str) -> str:
        """Return all but a tail that may be the beginning of a stop string."""
        stops = self.draw.params.stop
        end = next(
            (at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)),
            len(text),
        )
        self._held = text[end:]
        return text[:end]


class EmbeddedAnswer:
    """One output's answer, as SGLang's dict.

    A cumulative answer repeats all so far with every rendering. An incremental one has text, ids
    and log-probabilities since the last.
    """

    def __init__(
        self, request: GenerateRequest, tokenizer: Tokenizer, *, incremental: bool
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._incremental = incremental and request.stream
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._input_logprobs: list[list[Any]] = []
        self._completion_tokens = 0
        self._verified = self._drafted = self._accepted = 0
        self.finish_reason: NewValues | None = None

    def add(self, pieces: Sequence[Piece]) -> None:
        """Take further pieces, and ignore those after a last one."""
        for piece in pieces:
            if self.finish_reason is not None:
                return
            self.finish_reason = piece.finish_reason
            self._text.append(piece.text)
            if piece.drafted:
                self._verified += 1
                self._drafted += piece.drafted
                self._accepted += piece.accepted
            if piece.input_logprobs:
                scored = self._request.input_ids[-len(piece.input_logprobs) :]
                self._input_logprobs = [
                    self._row(*each) for each in zip(piece.input_logprobs, scored, strict=True)
                ]
            if piece.token_id is not None:
                self._ids.append(piece.token_id)
                self._completion_tokens += 1
                if self._request.return_logprob:
                    self._logprobs.append(self._row(piece.logprob, piece.token_id))

    def render(self, cached_tokens: int) -> NewValues:
        """Return the dict for the pieces that have come."""
        meta: NewValues = {
            "id": self._request.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self._request.input_ids),
            "completion_tokens": self._completion_tokens,
            "cached_tokens": cached_tokens,
        }
        if self._request.return_logprob:
            meta["input_token_logprobs"] = self._input_logprobs
            meta["output_token_logprobs"] = self._logprobs
        if self._verified:
            meta["spec_verify_ct"] = self._verified
            meta["spec_num_proposed_drafts"] = self._drafted
            meta["spec_num_correct_drafts"] = self._accepted
        answer = {"text": "".join(self._text), "output_ids": self._ids, "meta_info": meta}
        if self._incremental:
            self._text = []
            self._ids = []
            self._logprobs = []
        return answer

    def _row(self, logprob: float | None, token_id: int) -> list[Any]:
        if self._request.return_text_in_logprobs:
            text = self._tokenizer.decode([token_id], False)
        else:
            text = None
        return [logprob, token_id, text]
