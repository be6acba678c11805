"""A model as the router sees it: an alias, the engine that serves it, and its tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shell_router.core.generation import Engine


class Tokenizer(Protocol):
    """Text to token ids and chats to text, as the model's own tokenizer does it."""

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean the same vocabulary and merges: token ids may be exchanged."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special tokens are added, those written in the text are recognised."""
        ...

    def encode_stable(self, text: str) -> list[int]:
        """The leading ids of `encode(text)` that no continuation of `text` is expected to change."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's text for `messages` (role, content), ending where the assistant speaks."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name. `context_length` counts prompt and output tokens together.

    An adapter is a model too; `base` is then the alias of the model that it adapts.
    """

    alias: str
    engine: Engine
    tokenizer: Tokenizer
    context_length: int
    base: str | None = None
