"""Requests of batches that online work preempts, and that go on."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shell_router.core.engine import Finish, Generation, Hints, Tokens
from shell_router.core.events import AgentPreempted
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.preemption import generate_preemptibly
from tests.fakes.moa import Recorder, ScriptedMoa, WordTokenizer, ask
from tests.fakes.scripted_engine import Script
from tests.unit.moa.test_journal import TEXTS, going_on, tree

TEXT = TEXTS["a"]


class Interrupted:
    """Preempts every request before each of its pieces named in `at`, once each."""

    def __init__(self, *at: int) -> None:
        self.at = list(at)
        self.moa = ScriptedMoa(pace=self.pace)
        going_on(self.moa, {name: Script(text, piece_words=2) for name, text in TEXTS.items()})

    async def pace(self, rid: str, piece: int) -> None:
        await asyncio.sleep(0)
        if self.at and piece == self.at[0]:
            del self.at[0]
            for engine in self.moa.engines.values():
                for request in engine.generated:
                    if request.rid == rid:
                        assert request.hints.on_preempt is not None
                        for _ in ("prefill", "decode"):  # either may preempt it
                            request.hints.on_preempt()
            await asyncio.sleep(3600)

    async def generate(
        self, tokenizer: WordTokenizer | None = None, **sampling: Any
    ) -> tuple[list[Tokens], Finish, list[int]]:
        model = self.moa.models["small"]
        model = replace(model, tokenizer=tokenizer or model.tokenizer)
        lost = list[int]()
        ids = self.moa.tokenizers["small"].encode("Q: What is it?")
        sampling = {"max_new_tokens": 50, **sampling}
        request = Generation("run.0.a", ids, sampling, hints=Hints(tier="batch"))
        events = [item async for item in generate_preemptibly(model, request, lost.append)]
        *pieces, finish = events
        assert isinstance(finish, Finish) and not self.moa.running
        return [piece for piece in pieces if isinstance(piece, Tokens)], finish, lost

    @property
    def asked(self) -> list[Generation]:
        return list(self.moa.engines["small"].generated)


async def test_a_preempted_output_goes_on_from_its_tokens() -> None:
    engine = Interrupted(2, 1)
    pieces, finish, lost = await engine.generate()
    words = len(engine.moa.tokenizers["small"].encode(TEXT))
    assert "".join(piece.text for piece in pieces) == TEXT
    assert finish.completion_tokens == words == sum(len(piece.ids) for piece in pieces)
    first, second, third = engine.asked
    assert finish.prompt_tokens == len(first.input_ids)
    assert [len(one.input_ids) - len(first.input_ids) for one in (second, third)] == [4, 6]
    assert [one.sampling["max_new_tokens"] for one in engine.asked] == [50, 46, 44]
    assert lost == [0, 0] and len({one.rid for one in engine.asked}) == 3
    assert not any(one.rid.startswith(first.rid) for one in (second, third)), "aborts are by prefix"


@pytest.mark.parametrize("constraint", [{"regex": ".*"}, {"stop": ["no"]}])
async def test_an_output_that_cannot_go_on_begins_again_and_its_tokens_are_lost(
    constraint: dict[str, Any],
) -> None:
    engine = Interrupted(2)
    pieces, finish, lost = await engine.generate(**constraint)
    assert "".join(piece.text for piece in pieces) == TEXT and lost == [4]
    assert finish.completion_tokens == sum(len(piece.ids) for piece in pieces)
    first, second = engine.asked
    assert (second.input_ids, second.sampling) == (first.input_ids, first.sampling)


class InCharacter(WordTokenizer):
    """Takes the first piece's end for the middle of a character."""

    def encode(self, text: str) -> list[int]:
        return [] if text == "one two" else super().encode(text)


async def test_an_output_does_not_go_on_within_a_character() -> None:
    engine = Interrupted(1, 2)
    pieces, _, lost = await engine.generate(InCharacter())
    assert "".join(piece.text for piece in pieces) == TEXT
    assert lost == [2, 0]


def test_a_preempted_tree_answers_as_ever_and_its_times_teach_nothing() -> None:
    async def live() -> None:
        engine = Interrupted(1, 0, 2, 1, 0, 0)
        events = Recorder()
        request = ask(tier="batch", timeout_s=1e6)
        answer = await engine.moa.executor.run(tree(), request, events.emit)
        assert answer.text == TEXTS["root"] and len(events.of(AgentPreempted)) == 6
        assert not any(engine.prefilled for engine in engine.moa.engines.values())
        assert engine.moa.executor.estimates.get_token_s("small") is None
        assert not engine.moa.running

    run_virtual(live())
