"""The router's adapters on real SGLang servers: loaded and unloaded while they serve, lost when
they start again.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import CpuPair, cpu_pair, until_ready
from shell_router.engines.address import PairAddress
from shell_router.errors import AdapterFailed
from tests.fakes.pairs_under_test import (
    PairUnderTest,
    a_mixed_load_answers_as_each_adapter_alone,
    an_adapters_updates_warm_its_real_request_alone,
    of_model,
    output,
    pool_of,
    random_adapters,
)

pytestmark = pytest.mark.sglang

PROMPTS = [[(3 * place + at) % 200 + 4 for at in range(60)] for place in range(3)]
LORA = (
    *(
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--max-loras-per-batch",
        "3",
        "--max-loaded-loras",
        "3",
    ),
    *(
        "--lora-target-modules",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ),
    *("--lora-backend", "torch_native"),
)


@pytest.fixture(scope="module")
def servers(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuPair]:
    """A pair of its own, since the others' takes no adapters."""
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {BUILD_COMMAND}")
    with cpu_pair(sglang_model, venv, tmp_path_factory.mktemp("adapters"), options=LORA) as pair:
        yield pair


@pytest.fixture
def adapted(servers: CpuPair, sglang_model: Path) -> PairUnderTest:
    address = PairAddress(
        servers.prefill.url, servers.decode.url, servers.bootstrap_host, servers.bootstrap_port
    )
    return of_model(address, sglang_model)


async def test_a_mixed_load_answers_as_each_adapter_alone(
    adapted: PairUnderTest, tmp_path: Path
) -> None:
    pool = pool_of(adapted, random_adapters(adapted, tmp_path))
    assert await pool.probe() == ("route",)
    await a_mixed_load_answers_as_each_adapter_alone(pool, PROMPTS, requests=40)
    await an_adapters_updates_warm_its_real_request_alone(pool, [5 + at for at in range(90)])
    await pool.aclose()


async def test_what_another_router_left_is_unloaded_and_corrupt_adapters_cost_their_own_requests(
    adapted: PairUnderTest, tmp_path: Path
) -> None:
    pool = pool_of(adapted, random_adapters(adapted, tmp_path))
    await pool.probe()
    weights = tmp_path / "drama" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(AdapterFailed, match="drama"):
        await output(pool, "drama", PROMPTS[0])
    first = await output(pool, "algebra", PROMPTS[0])
    weights.write_bytes(whole)
    assert len(await output(pool, "drama", PROMPTS[0])) == 12
    assert await output(pool, "algebra", PROMPTS[0]) == first
    await pool.aclose()


async def test_adapters_are_loaded_again_after_a_server_was_started_again(
    servers: CpuPair, adapted: PairUnderTest, tmp_path: Path
) -> None:
    pool = pool_of(adapted, random_adapters(adapted, tmp_path))
    await pool.probe()
    before = await output(pool, "algebra", PROMPTS[0])
    servers.decode.kill()
    servers.decode.start()
    until_ready(servers.decode)
    assert await output(pool, "algebra", PROMPTS[0]) == before
    decode = pool.adapters.leases[pool.servers[1]]
    assert (decode.counts.missing, decode.counts.loads.count) == (1, 2)
    await pool.aclose()
