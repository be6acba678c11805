"""Examples as token ids: what is read, and what is to be said."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from benchmarks.random_checkpoint import TURN_END, TURN_START
from shell_router.topology.prompting import AGGREGATOR


@dataclass(frozen=True, slots=True)
class Example:
    """`prompt` is read, `target` is learned, its end of turn included."""

    prompt: list[int]
    target: list[int]


class Lessons:
    """Writes examples as the router writes prompts: the same templates, the same ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.token_to_id(TURN_END)
        self._words: dict[str, list[int]] = {}

    def question(self, question: str) -> list[int]:
        """What a proposer reads."""
        return self._ids(f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n")

    def drafts(self, question: str, drafts: Sequence[Sequence[int]]) -> list[int]:
        """What an aggregator reads: the question and the token ids that others wrote, without their
        ends.
        """
        ids = self._ids(f"{TURN_START}user\n" + AGGREGATOR.prefix.format(question=question))
        for index, draft in enumerate(drafts, 1):
            ids = [*ids, *self._often(AGGREGATOR.slot.format(index=index, output="")), *draft]
        return [*ids, *self._often(f"{AGGREGATOR.suffix}{TURN_END}\n{TURN_START}assistant\n")]

    def example(self, prompt: list[int], solution: str) -> Example:
        """`solution` is what shall be said."""
        return Example(prompt, [*self._ids(solution), self._end])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _often(self, text: str) -> list[int]:
        if text not in self._words:
            self._words[text] = self._ids(text)
        return self._words[text]
