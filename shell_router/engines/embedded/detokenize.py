"""Text from tokens, as they come."""

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# No character has more bytes than four; more pending tokens than this are not an incomplete one but broken bytes.
MOST_PENDING = 8
CONTEXT_TOKENS = 5


class Detokenizer:
    """The text that each further token of one output adds.

    Decodes a short tail twice, without and with the new token, and gives the difference: the tail carries what
    earlier tokens mean for spacing. While a character is incomplete nothing is given.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._read = 0
        self._advance()

    def feed(self, token_id: int) -> str:
        """The text that became certain with `token_id`; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, self._skip)
        incomplete = text.endswith(REPLACEMENT) and len(self._ids) - self._read < MOST_PENDING
        if incomplete or len(text) <= len(self._known_text):
            return ""
        new_text = text[len(self._known_text) :]
        self._advance()
        return new_text

    def finish(self) -> str:
        """What is left, incomplete characters as U+FFFD."""
        return self._tokenizer.decode(self._ids, self._skip)[len(self._known_text) :]

    def _advance(self) -> None:
        """Forget tokens whose text was given, but for the last group, which the next one may lean on."""
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._known_text = self._tokenizer.decode(self._ids, self._skip)
