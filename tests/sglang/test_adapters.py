"""Adapters that real SGLang is started with, more of them than a batch takes.

What the servers must say is what merged weights say: W + alpha / r * B A, merged by hand and run
by transformers.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from shell_router.core.engine import Generation, Tokens
from shell_router.engines.sglang import SglangPair, random_rid
from shell_router.errors import AdapterMissing
from tests.fakes.pairs_under_test import address_of
from tests.fakes.scripted_pair import collect
from tests.fakes.tiny_models import merge, plain
from tests.sglang.conftest import AdaptedPair

pytestmark = pytest.mark.sglang

NAMES = ("algebra", "biology", "chemistry", "drama")
OF_OTHER_SHAPES = ("history", "poems")
PROMPTS = [[(3 * place + at) % 200 + 4 for at in range(60)] for place in range(3)]
_unique = count(1)


def prompt(length: int) -> list[int]:
    """A prompt that shares no prefix with any other of this module."""
    salt = next(_unique)
    return [210, 20 + salt, *(20 + (salt * 31 + at * 7) % 150 for at in range(length - 2))]


@pytest.fixture
async def pool(adapted_sglang: AdaptedPair) -> AsyncIterator[SglangPair]:
    """The router's client of the pair, told of the adapters and of one that is not there."""
    names = (*adapted_sglang.adapters, "zoology")
    client = SglangPair(address_of(adapted_sglang.servers), adapters=names)
    assert await client.fleet.probe() == ("route",)
    yield client
    await client.aclose()


async def output(
    pool: SglangPair, adapter: str | None, ids: Sequence[int], tokens: int = 12
) -> list[int]:
    """The greedy output of the adapter."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    events, _ = await collect(pool, Generation(random_rid(), list(ids), sampling, adapter=adapter))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


async def cached_tokens(pool: SglangPair, adapter: str | None, ids: Sequence[int]) -> int:
    """The tokens of the prompt that the adapter found cached."""
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    _, finish = await collect(pool, Generation(random_rid(), list(ids), sampling, adapter=adapter))
    return finish.cached_tokens


def compute_greedy(network: Any, ids: Sequence[int], tokens: int) -> list[int]:
    """The output of a network that transformers runs."""
    text = list(ids)
    for _ in range(tokens):
        text.append(int(network(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


async def test_requests_of_all_adapters_together_say_what_merged_weights_say(
    adapted_sglang: AdaptedPair, sglang_model: Path, pool: SglangPair
) -> None:
    networks = {None: plain(sglang_model)}
    for name in ("algebra", *OF_OTHER_SHAPES):
        networks[name] = merge(sglang_model, adapted_sglang.adapters[name])
    requests = [(name, prompt(20 + 9 * place)) for place, name in enumerate([*networks] * 2)]
    outputs = await asyncio.gather(*(output(pool, *request, tokens=10) for request in requests))
    assert outputs == [compute_greedy(networks[name], ids, 10) for name, ids in requests]


async def test_a_mixed_load_answers_as_each_adapter_alone(pool: SglangPair) -> None:
    alone = {}
    for adapter in (None, *NAMES):
        for place, ids in enumerate(PROMPTS):
            alone[adapter, place] = await output(pool, adapter, ids)
    assert len({tuple(alone[adapter, 0]) for adapter in (None, *NAMES)}) == 1 + len(NAMES)
    draw = random.Random(0)
    requests = [(draw.choice((None, *NAMES)), draw.randrange(len(PROMPTS))) for _ in range(40)]
    outputs = await asyncio.gather(
        *(output(pool, adapter, PROMPTS[place]) for adapter, place in requests)
    )
    assert outputs == [alone[request] for request in requests]


async def test_a_prefix_is_cached_for_its_own_adapter_alone(pool: SglangPair) -> None:
    ids = prompt(60)
    names = (None, "algebra", "history")
    first = [await cached_tokens(pool, name, ids) for name in names]
    assert max(first) <= 1  # prompts begin with a token that others had, too
    again = [await cached_tokens(pool, name, ids) for name in names]
    assert min(again) >= 58


async def test_an_adapters_updates_warm_its_real_request_alone(pool: SglangPair) -> None:
    ids = prompt(90)
    for end in (45, 89):
        await pool.prefill(Generation(random_rid(), ids[:end], adapter=NAMES[0]))
    assert await cached_tokens(pool, NAMES[0], ids) >= 88
    assert await cached_tokens(pool, NAMES[1], ids) <= 1


async def test_an_adapter_that_it_was_not_started_with_is_named_with_the_remedy(
    pool: SglangPair,
) -> None:
    with pytest.raises(AdapterMissing, match=r"zoology.*--lora-paths"):
        await output(pool, "zoology", PROMPTS[0])
    with pytest.raises(AdapterMissing, match="zoology"):
        await pool.prefill(Generation(random_rid(), PROMPTS[0], adapter="zoology"))
    _, finish = await collect(pool, Generation(random_rid(), PROMPTS[0]))
    assert finish.prompt_tokens == len(PROMPTS[0])


async def test_an_adapter_that_was_never_loaded_is_refused_by_both_servers(
    adapted_sglang: AdaptedPair, session: aiohttp.ClientSession
) -> None:
    servers = adapted_sglang.servers
    body = {
        "input_ids": prompt(40),
        "lora_path": "unknown",
        "bootstrap_host": servers.bootstrap_host,
        "bootstrap_port": servers.bootstrap_port,
        "bootstrap_room": 1,
    }
    for server in (servers.prefill, servers.decode):
        async with session.post(f"{server.url}/generate", json=body) as response:
            assert response.status == 400
            assert "unknown" in (await response.json())["error"]["message"]
