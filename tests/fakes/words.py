"""A tokenizer for tests whose tokens are words, so that text that is still growing visibly changes its last token."""

import re
from collections.abc import Mapping, Sequence


class WordTokenizer:
    """Each run of letters, with the space before it, is one token, as is every other character.

    All tokenizers of one `family` share ids; another family numbers the same words otherwise.
    """

    def __init__(self, family: str = "words") -> None:
        self.fingerprint = family
        self._offset = sum(family.encode()) * 1000
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of the words of `text`."""
        return [self._id(word) for word in _words(text)]

    def encode_stable(self, text: str) -> list[int]:
        """All but the last word's id: it may grow."""
        return [self._id(word) for word in _words(text)[:-1]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that was encoded."""
        words = {number: word for word, number in self._ids.items()}
        return "".join(words[number] for number in ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """`<role>content` for each message, then `<assistant>`."""
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def _id(self, word: str) -> int:
        return self._ids.setdefault(word, self._offset + len(self._ids))


def _words(text: str) -> list[str]:
    return re.findall(r" ?[^\W\d_]+|.", text, flags=re.DOTALL)
