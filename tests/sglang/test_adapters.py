"""Adapters that real SGLang servers are started with, more of them than a batch takes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import cpu_pair
from shell_router.core.engine import Generation
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair, random_rid
from shell_router.errors import AdapterMissing
from tests.fakes.pairs_under_test import (
    NAMES,
    a_mixed_load_answers_as_each_adapter_alone,
    an_adapters_updates_warm_its_real_request_alone,
    output,
    random_adapters,
)
from tests.fakes.scripted_pair import collect

pytestmark = pytest.mark.sglang

PROMPTS = [[(3 * place + at) % 200 + 4 for at in range(60)] for place in range(3)]


@pytest.fixture(scope="module")
def address(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairAddress]:
    """A pair of its own, since the others' takes no adapters."""
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {BUILD_COMMAND}")
    folder = tmp_path_factory.mktemp("adapters")
    adapters = random_adapters(sglang_model, folder / "adapters")
    options = (
        "--enable-lora",
        "--lora-paths",
        *(f"{name}={at}" for name, at in adapters.items()),
        *("--max-loras-per-batch", "2", "--lora-backend", "torch_native"),
    )
    with cpu_pair(sglang_model, venv, folder, options=options) as pair:
        yield PairAddress(
            pair.prefill.url, pair.decode.url, pair.bootstrap_host, pair.bootstrap_port
        )


async def test_a_mixed_load_answers_as_each_adapter_alone(address: PairAddress) -> None:
    pool = SglangPair(address, adapters=NAMES)
    assert await pool.fleet.probe() == ("route",)
    await a_mixed_load_answers_as_each_adapter_alone(pool, PROMPTS, requests=40)
    await an_adapters_updates_warm_its_real_request_alone(pool, [5 + at for at in range(90)])
    await pool.aclose()


async def test_an_adapter_that_it_was_not_started_with_is_named_with_the_remedy(
    address: PairAddress,
) -> None:
    pool = SglangPair(address, adapters=("zoology",))
    with pytest.raises(AdapterMissing, match=r"zoology.*--lora-paths"):
        await output(pool, "zoology", PROMPTS[0])
    with pytest.raises(AdapterMissing, match="zoology"):
        await pool.prefill(Generation(random_rid(), PROMPTS[0], adapter="zoology"))
    _, finish = await collect(pool, Generation(random_rid(), PROMPTS[0]))
    assert finish.prompt_tokens == len(PROMPTS[0])
    await pool.aclose()
