"""Weights of a pair's servers that are replaced: which reach them, and what a server that lost them
costs.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.core.engine import Finish, Generation
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair
from shell_router.errors import ModelFailed, WeightsLost
from shell_router.swapping.places import Places, SwappedPairs, WeightPair
from tests.fakes.http_engines import SwappingEngine, served
from tests.fakes.moa import WordTokenizer
from tests.fakes.scripted_engine import Script, ScriptedEngine

NAMES = ("a", "b", "c", "cut", "rope", "stops", "words", "large", "none")
DIFFERING = {
    "rope": ("config.json", "rope_theta"),
    "stops": ("generation_config.json", "eos_token_id"),
    "words": ("tokenizer.json", "version"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one shape; one that is cut off, three with other settings, one that is larger,
    and none.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(NAMES[:7]):
        make_checkpoint(folder / name, hidden=32, layers=1, vocab_size=512, seed=seed)
    for name, (file, field) in DIFFERING.items():
        settings = folder / name / file
        settings.write_text(json.dumps({**json.loads(settings.read_text()), field: 5}))
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    make_checkpoint(folder / "large", hidden=64, layers=1, vocab_size=512)
    return folder


class Pair:
    """A pair's two servers, what serves their models, and the places under test: this pair."""

    def __init__(
        self, folder: Path, clients: SglangPair, prefill: SwappingEngine, decode: SwappingEngine
    ) -> None:
        self.prefill, self.decode = prefill, decode
        engine = ScriptedEngine(
            WordTokenizer(), lambda _: Script(self.decode.folder.name, piece_words=1)
        )
        self.weights = WeightPair(engine, clients.fleet.servers, 30.0)
        self.places = Places(
            SwappedPairs({name: folder / name for name in NAMES}, [self.weights]).open
        )

    async def answered(self, name: str) -> str:
        """What the model says, loaded for this request."""
        await self.places.load(name)
        try:
            async with aclosing(
                self.places.engine(name).generate(Generation("r", (1, 2)))
            ) as events:
                return "".join(
                    [event.text async for event in events if not isinstance(event, Finish)]
                )
        finally:
            await self.places.unload(name)


@pytest_asyncio.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    first, second = SwappingEngine(folder / "a"), SwappingEngine(folder / "a")
    async with (
        served(first) as one,
        served(second) as other,
        asyncio.timeout(30),
        aclosing(SglangPair(PairAddress(one, other, "", 0))) as clients,
    ):
        found = Pair(folder, clients, first, second)
        await found.weights.begin()
        yield found


async def test_both_servers_get_each_models_weights_and_those_that_are_there_are_not_read_again(
    pair: Pair,
) -> None:
    assert [await pair.answered(name) for name in "abbac"] == list("abbac")
    assert pair.prefill.swaps == pair.decode.swaps == pair.decode.flushed == ["b", "a", "c"]


@pytest.mark.parametrize("name", NAMES[3:])
async def test_a_checkpoint_that_is_cut_off_missing_or_differs_in_more_than_weights_reaches_no_server(
    pair: Pair, name: str
) -> None:
    with pytest.raises(ModelFailed, match=name):
        await pair.places.load(name)
    assert await pair.answered("a") == "a"
    assert pair.prefill.swaps == pair.decode.swaps == []


async def test_after_a_swap_that_one_server_failed_both_get_the_weights_again(pair: Pair) -> None:
    pair.decode.broken = True
    with pytest.raises(ModelFailed, match="out of memory"):
        await pair.places.load("b")
    pair.decode.broken = False
    assert await pair.answered("a") == "a"
    assert (pair.prefill.swaps, pair.decode.swaps) == (["b", "a"], ["a"])


async def test_a_server_that_was_started_again_answers_nothing_until_it_has_the_weights(
    pair: Pair,
) -> None:
    assert await pair.answered("b") == "b"
    pair.decode.restart()
    with pytest.raises(WeightsLost):
        await pair.answered("b")
    assert await pair.answered("b") == "b"


async def test_what_other_weights_wrote_does_not_end_as_an_answer(pair: Pair) -> None:
    await pair.places.load("b")
    async with aclosing(pair.places.engine("b").generate(Generation("r", (1, 2)))) as events:
        await anext(events)
        pair.prefill.restart()
        with pytest.raises(WeightsLost):
            async for _ in events:
                pass


async def test_a_server_that_is_still_busy_is_asked_until_it_has_dropped_its_kv(pair: Pair) -> None:
    pair.decode.busy = 3
    assert await pair.answered("b") == "b"
    assert (pair.decode.busy, pair.decode.flushed) == (0, ["b"])
