"""The router's adapters on an embedded pair: a real model, real LoRA weights, and a deployment that says so."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.adapters.made import make_adapter
from shell_router.app import running_server
from shell_router.config import AdaptersSection, Config, EmbedderSettings, Listen, ModelSettings
from shell_router.engines.sglang import SglangPair
from shell_router.errors import AdapterFailed
from shell_router.standins.embedded.settings import LoraSettings
from tests.fakes.pairs_under_test import (
    NAMES,
    PairUnderTest,
    a_mixed_load_answers_as_each_adapter_alone,
    an_adapters_updates_warm_its_real_request_alone,
    embedded,
    output,
    pool_of,
    random_adapters,
)
from tests.fakes.shared_engines import SharedEngines

PROMPTS = [[(3 * place + at) % 200 + 4 for at in range(60)] for place in range(3)]


@pytest.fixture(scope="module")
def pair(engines: SharedEngines) -> PairUnderTest:
    """Room for two adapters of rank 8."""
    return embedded(engines, incremental=True, lora=LoraSettings(max_loaded_adapters=2, max_rank=8))


@pytest_asyncio.fixture
async def pool(pair: PairUnderTest, tmp_path: Path) -> AsyncIterator[SglangPair]:
    pool = pool_of(pair, random_adapters(pair, tmp_path))
    await pool.probe(vocabulary=pair.vocabulary)
    yield pool
    await pool.aclose()


async def test_a_mixed_load_answers_as_each_adapter_alone(pool: SglangPair) -> None:
    await a_mixed_load_answers_as_each_adapter_alone(pool, PROMPTS)


async def test_an_adapters_updates_warm_its_real_request_alone(pool: SglangPair) -> None:
    await an_adapters_updates_warm_its_real_request_alone(pool, PROMPTS[0])


async def test_an_adapter_that_is_not_for_this_pair_costs_its_own_requests(
    pair: PairUnderTest, pool: SglangPair, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "drama", pair.needs_model(), rank=16)
    with pytest.raises(AdapterFailed, match="drama"):
        await output(pool, "drama", PROMPTS[0])
    assert len(await output(pool, "algebra", PROMPTS[0])) == 12


@pytest.mark.parametrize("older", ["prefill", "decode"])
async def test_an_adapter_whose_files_changed_between_its_loads_is_loaded_again_on_both_servers(
    pair: PairUnderTest, pool: SglangPair, tmp_path: Path, older: str
) -> None:
    before = await output(pool, "algebra", PROMPTS[0])
    make_adapter(tmp_path / "algebra", pair.needs_model(), seed=9)
    newer = pool.servers[older == "prefill"]
    for other in ("biology", "chemistry", "algebra"):
        (await pool.adapters.lease(newer, other)).close()
    found = await output(pool, "algebra", PROMPTS[0])
    assert len(found) == 12 and found != before
    assert not any(server.breaker.open or server.failures for server in pool.servers)


async def test_a_deployment_of_embedded_pairs_gives_them_room_for_their_adapters(
    pair: PairUnderTest, tmp_path: Path
) -> None:
    random_adapters(pair, tmp_path)
    model = ModelSettings(pair.needs_model(), adapters=AdaptersSection(tmp_path, max_loaded_adapters=2))
    config = Config({"tiny": model}, embedder=EmbedderSettings("none"), listen=Listen(port=0))
    async with running_server(config) as url, aiohttp.ClientSession() as client:
        answers = set()
        for name in ("tiny", *(f"tiny:{adapter}" for adapter in NAMES)):
            messages = [{"role": "user", "content": "Say something."}]
            body = {"model": name, "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                found = await answer.json()
            assert answer.status == 200, found
            answers.add(found["choices"][0]["message"]["content"])
        assert len(answers) == 1 + len(NAMES)
