r"""Find the leading tokens of a text that no continuation changes.

A tokenizer first cuts text at the added tokens written in it, then into pre-tokens, and only inside
a pre-token does it merge. So further text can only change the pre-tokens near the end. From the
end, these are held back:

1. characters that are not whole yet (U+FFFD), a run that may become an added token, trailing
whitespace and digits, because the usual patterns look to the end of such runs (`\s*[\r\n]+`,
`\s+(?!\S)`, digits grouped from the right);

2. two more pre-tokens, because a contraction (`'re`) joins up to two, and a combining mark changes
the one before it.

Without a splitting pre-tokenizer (SentencePiece-like models) a word boundary is as good if no token
of the vocabulary reaches across one: no merge can then cross it. If neither holds, all text between
two added tokens counts as one pre-token.
"""

import unicodedata
from collections.abc import Mapping, Sequence

from tokenizers import Encoding

from shell_router.core.exact_json import Values

_WORD_MARK = "▁"
_HELD_WORDS = 2


class StablePrefix:
    """Counts stable tokens for one tokenizer.

    `splits` is False if the tokenizer has no boundary that is known to be safe.
    """

    def __init__(self, definition: Values) -> None:
        self._added = tuple(token["content"] for token in definition.get("added_tokens") or ())
        self._by_pre_tokens = _splits_words(definition.get("pre_tokenizer"))
        vocabulary = (definition.get("model") or {}).get("vocab") or ()
        if isinstance(vocabulary, Mapping):
            pieces = list(vocabulary)
        else:
            pieces = [piece for piece, _ in vocabulary]
        marked = any(piece.startswith(_WORD_MARK) for piece in pieces)
        crossed = any(
            _WORD_MARK in piece.lstrip(_WORD_MARK) for piece in pieces
        )  # a mark after another character
        self._by_marks = not self._by_pre_tokens and marked and not crossed
        self.splits = self._by_pre_tokens or self._by_marks

    def tokens(self, text: str, encoding: Encoding) -> int:
        """Count the leading tokens of `encoding`, made of `text`, that no continuation changes."""
        starts = self._word_starts(encoding)
        limit = self._certain_characters(text)
        offsets = encoding.offsets
        count = len(offsets)
        while count and offsets[count - 1][1] > limit:
            count -= 1
        inside = [start for start in starts if start < count]
        cut_short = count < len(offsets) and count not in starts
        held = _HELD_WORDS + cut_short
        return inside[-held] if len(inside) >= held else 0

    def _word_starts(self, encoding: Encoding) -> list[int]:
        """Return token positions at which a pre-token, a marked word or an added token starts."""
        if self._by_marks:
            return _find_marked_starts(encoding.tokens, encoding.word_ids)
        words = encoding.word_ids
        return [
            at
            for at in range(len(words))
            if at == 0 or words[at] != words[at - 1] or words[at] is None
        ]

    def _certain_characters(self, text: str) -> int:
        """Count the characters before all that rule 1 holds back."""
        end = len(text.rstrip("\ufffd"))
        end = self._before_partial_token(text, end)
        end = len(text[:end].rstrip())
        while end and unicodedata.category(text[end - 1])[0] in "NM":
            end -= 1
        return len(text[:end].rstrip())

    def _before_partial_token(self, text: str, end: int) -> int:
        """Return where the longest tail of `text[:end]` that begins a token starts, or `end`."""
        longest = max(map(len, self._added), default=0)
        tail = text[max(0, end - longest + 1) : end]
        for start in range(len(tail)):
            rest = tail[start:]
            if any(len(token) > len(rest) and token.startswith(rest) for token in self._added):
                return end - len(rest)
        return end


def _splits_words(pre_tokenizer: Values | None) -> bool:
    if pre_tokenizer is None:
        return False
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return any(map(_splits_words, pre_tokenizer["pretokenizers"]))
    if kind == "ByteLevel":
        return bool(pre_tokenizer.get("use_regex", True))
    if kind == "Metaspace":
        return bool(pre_tokenizer.get("split", True))
    return True


def _find_marked_starts(tokens: Sequence[str], words: Sequence[int | None]) -> list[int]:
    """Return the positions of tokens that open a word or a run of word marks.

    Tokens next to an added token are included.
    """
    return [
        at
        for at, token in enumerate(tokens)
        if at == 0
        or words[at] != words[at - 1]
        or (token.startswith(_WORD_MARK) and not tokens[at - 1].endswith(_WORD_MARK))
    ]
