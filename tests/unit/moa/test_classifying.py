"""Classifiers with more examples than are embedded in a moment."""

import asyncio

import pytest

from shell_router.core.predictors import TokenStates
from shell_router.engines.embedding import HashEmbedder
from shell_router.errors import EngineUnreachable
from shell_router.moa.steps import Classes
from shell_router.topology.rules import Classifier

MANY = Classifier("many", {"a": tuple(f"a{number}" for number in range(50)), "b": ("b",)})


class LimitedEmbedder:
    """Embeds `let` texts, each in a turn of its own. Of those after, one fails if `fails`, and the
    rest hang.
    """

    def __init__(self, let: int, *, fails: bool = False) -> None:
        self._embedder = HashEmbedder()
        self._fails = fails
        self.let = let
        self.embedded: list[str] = []
        self.at_work = self.most_at_work = 0
        self.hangs = asyncio.Event()

    async def embed(self, text: str) -> TokenStates:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            await self._turn()
            self.embedded.append(text)
            return await self._embedder.embed(text)
        finally:
            self.at_work -= 1

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        self.let -= 1
        if self.let >= 0:
            return
        if self._fails:
            self._fails = False
            raise EngineUnreachable("the embedder is gone")
        self.hangs.set()
        await asyncio.Event().wait()


async def test_who_leaves_while_examples_are_embedded_leaves_what_is_done_to_the_next() -> None:
    embedder = LimitedEmbedder(40)
    classes = Classes(embedder)
    leaves = asyncio.create_task(classes.classify("t", MANY, "a7"))
    await embedder.hangs.wait()
    leaves.cancel()
    await asyncio.wait({leaves})
    embedder.let = 1000
    assert [(await classes.classify("t", MANY, text)).name for text in ("a7", "a49", "b")] == [
        "a",
        "a",
        "b",
    ]
    again = [text for text in set(embedder.embedded) if embedder.embedded.count(text) > 1]
    assert (
        len(again) <= 16 + 3
    )  # the texts that were at work then, and the three that are classified


async def test_examples_are_embedded_a_few_at_a_time_so_that_none_waits_for_all_others() -> None:
    embedder = LimitedEmbedder(1000)
    await Classes(embedder).classify("t", MANY, "a7")
    assert embedder.most_at_work == 16


async def test_an_example_that_fails_leaves_no_other_at_work() -> None:
    embedder = LimitedEmbedder(40, fails=True)
    with pytest.raises(EngineUnreachable):
        await Classes(embedder).classify("t", MANY, "a7")
    assert embedder.at_work == 0


async def test_a_classifier_that_has_changed_under_its_name_is_asked_anew() -> None:
    classes = Classes(HashEmbedder())
    for name in ("before", "after", "before"):
        assert (await classes.classify("t", Classifier("c", {name: ("x",)}), "x")).name == name
