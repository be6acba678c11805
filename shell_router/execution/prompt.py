"""Prompts with holes: rendered once, filled while other agents write, turned into token ids piece by piece."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from shell_router.core.model import Tokenizer


@dataclass(frozen=True, slots=True)
class Slot:
    """A hole that one agent's output fills, with the text written around it."""

    agent: str
    before: str = ""
    after: str = ""


Part = str | Slot

Mark = tuple[int, str]
"""A place in a growing prompt: how many ids were decided, and the text after them."""


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message whose content may have holes."""

    role: str
    parts: tuple[Part, ...]


def render(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[Part, ...]:
    """Put messages through the chat template and find the holes again.

    Each hole goes through the template as a mark that occurs in no message, so the template may move content about
    but the text around a hole is what the template made of it.
    """
    slots = [part for message in messages for part in message.parts if isinstance(part, Slot)]
    mark = _unused_mark([part for message in messages for part in message.parts if isinstance(part, str)])
    numbers = iter(range(len(slots)))
    chat = [
        {
            "role": message.role,
            "content": "".join(
                part if isinstance(part, str) else f"{mark}{next(numbers)}{mark}" for part in message.parts
            ),
        }
        for message in messages
    ]
    pieces = tokenizer.render_chat(chat).split(mark)
    parts: list[Part] = [slots[int(piece)] if i % 2 else piece for i, piece in enumerate(pieces)]
    return tuple(part for part in parts if part != "")


def _unused_mark(texts: Sequence[str]) -> str:
    """A string of private-use characters, to which no template gives a meaning, that no text holds."""
    candidates = (f"\ue000{number}\ue001" for number in count())
    return next(mark for mark in candidates if not any(mark in text for text in texts))


class GrowingPrompt:
    """Token ids of a prompt that is still being written.

    Text is tokenized with all text it touches, so a run of text between two outputs in token mode has the ids it would
    have on its own; output ids are taken as they are. The final ids therefore depend on what was added, never on how
    it was cut or when it came.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._texts: list[str] = []

    def add_text(self, text: str) -> None:
        """Append text."""
        self._texts.append(text)

    def add_ids(self, ids: Sequence[int]) -> None:
        """Append ids that another model with this tokenizer wrote; no ids change nothing."""
        if ids:
            self._ids.extend(self._tokenizer.encode("".join(self._texts)))
            self._texts.clear()
            self._ids.extend(ids)

    @property
    def undecided(self) -> int:
        """Characters at its end whose ids are not decided."""
        return sum(map(len, self._texts))

    def stable_ids(self) -> list[int]:
        """The ids that nothing added later is expected to change."""
        return self._with(self._tokenizer.encode_stable)

    def final_ids(self) -> list[int]:
        """The ids if nothing more is added."""
        return self._with(self._tokenizer.encode)

    def _with(self, encode: Callable[[str], list[int]]) -> list[int]:
        return [*self._ids, *encode("".join(self._texts))] if self._texts else self._ids.copy()

    def mark(self) -> Mark:
        """How far it has come."""
        return len(self._ids), "".join(self._texts)

    def back_to(self, mark: Mark) -> None:
        """Forget all that was added since."""
        decided, text = mark
        del self._ids[decided:]
        self._texts = [text]
