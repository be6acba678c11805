"""One client of a pair, many adapters: what a pair has to hold under a mixed load, whatever pair it is."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from shell_router.core.generation import Generation, Tokens
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.embedded.adapter_checkpoint import make_adapter
from shell_router.engines.pool import PairPool, random_rid
from tests.fakes.pairs_under_test import PairUnderTest
from tests.fakes.scripted_pair import collect

NAMES = ("algebra", "biology", "chemistry", "drama")


def random_adapters(pair: PairUnderTest, folder: Path) -> Mapping[str, Path]:
    """Four adapters of the pair's model, each of which answers otherwise."""
    model = pair.needs_model()
    return {name: make_adapter(folder / name, model, seed=place) for place, name in enumerate(NAMES)}


def pool_of(pair: PairUnderTest, folders: Mapping[str, Path], room: int = 2) -> PairPool:
    """The router's client, with room for two of the adapters at a time."""
    return PairPool(pair.address, adapters=AdapterSettings(folders, room=room))


async def output(pool: PairPool, adapter: str | None, prompt: Sequence[int], tokens: int = 12) -> tuple[int, ...]:
    """What the adapter writes after the prompt, greedily."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    events, _ = await collect(pool, Generation(random_rid(), list(prompt), sampling, adapter=adapter))
    return tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)


async def a_mixed_load_answers_as_each_adapter_alone(
    pool: PairPool, prompts: Sequence[Sequence[int]], requests: int = 60
) -> None:
    """Adapters and none, in a stream in which all are in use at once, beside answers that were asked one at a time."""
    alone = {}
    for adapter in (None, *NAMES):
        for place, prompt in enumerate(prompts):
            alone[adapter, place] = await output(pool, adapter, prompt)
    assert len({alone[adapter, 0] for adapter in (None, *NAMES)}) == 1 + len(NAMES)
    draw = random.Random(0)
    asked = [(draw.choice((None, *NAMES)), draw.randrange(len(prompts))) for _ in range(requests)]
    found = await asyncio.gather(*(output(pool, adapter, prompts[place]) for adapter, place in asked))
    assert found == [alone[one] for one in asked]
    assert all(len(leases.loaded) <= 2 and not leases.waiting for leases in pool.adapters.leases.values())


async def an_adapters_updates_warm_its_real_request_alone(pool: PairPool, prompt: Sequence[int]) -> None:
    """Incremental prefill with an adapter: what its updates prefilled is cached for it, and for no other."""
    for end in (len(prompt) // 2, len(prompt) - 1):
        await pool.prefill(Generation(random_rid(), list(prompt[:end]), adapter=NAMES[0]))
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    cached = {}
    for adapter in NAMES[:2]:
        _, finish = await collect(pool, Generation(random_rid(), list(prompt), sampling, adapter=adapter))
        cached[adapter] = finish.cached_tokens
    assert cached[NAMES[0]] >= len(prompt) - 2
    assert cached[NAMES[1]] <= 1
