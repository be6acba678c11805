"""LoRA adapters on the wire, asked of real SGLang.

What it must say is what merged weights say: W + alpha / r * B A, merged by hand and run by
transformers.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
import torch

from benchmarks.random_checkpoint import make_checkpoint
from launch.sglang_cpu.environment import built_environment
from launch.sglang_cpu.pair import cpu_pair
from shell_router.engines.address import PairAddress
from tests.conformance.test_wire import Wire, prompt
from tests.fakes.pairs_under_test import PairUnderTest, of_model
from tests.fakes.random_adapter import make_adapter
from tests.fakes.tiny_models import merge, plain

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.sglang]
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "algebra": {"seed": 1},
    "history": {"seed": 2, "rank": 8, "alpha": 4.0},
    "poems": {"seed": 3, "rank": 1, "modules": ("q_proj", "v_proj"), "strength": 1.0},
}


@dataclass(frozen=True)
class Adapted:
    """A pair that was started with all the adapters, and the networks that say what is right."""

    wire: Wire
    networks: Mapping[str | None, Any]

    @property
    def urls(self) -> tuple[str, str]:
        return self.wire.address.prefill_url, self.wire.address.decode_url

    async def ask(self, ids: list[int], name: str | None, new_tokens: int = 10) -> dict[str, Any]:
        """Decode's answer."""
        return (await self.wire.pair(self.wire.body(ids, new_tokens, lora_path=name)))[1]

    def right(self, ids: list[int], name: str | None, new_tokens: int = 10) -> list[int]:
        said = list(ids)
        for _ in range(new_tokens):
            said.append(int(self.networks[name](torch.tensor([said])).logits[0, -1].argmax()))
        return said[len(ids) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in `model`, and each adapter under its name."""
    folder = tmp_path_factory.mktemp("sglang-lora")
    model = make_checkpoint(folder / "model", context_length=2048)
    for name, arguments in ADAPTERS.items():
        make_adapter(folder / name, model, **arguments)
    return folder


@pytest.fixture(scope="module")
def under_test(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairUnderTest]:
    venv = built_environment()
    if venv is None:
        pytest.skip("real SGLang is not built for these tests")
    model = folder / "model"
    named = [f"{name}={folder / name}" for name in ADAPTERS]
    options = ("--enable-lora", "--lora-paths", *named, "--lora-backend", "torch_native")
    with cpu_pair(model, venv, tmp_path_factory.mktemp("sglang"), options=options) as pair:
        urls = (pair.prefill.url, pair.decode.url)
        yield of_model(PairAddress(*urls, pair.bootstrap_host, pair.bootstrap_port), model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(under_test: PairUnderTest, folder: Path) -> AsyncIterator[Adapted]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as session:
        model = folder / "model"
        networks = {None: plain(model)}
        for name in ADAPTERS:
            networks[name] = merge(model, folder / name)
        yield Adapted(Wire(under_test, session), networks)


async def test_requests_of_all_adapters_together_say_what_merged_weights_say(
    adapted: Adapted,
) -> None:
    asked = [
        (prompt(20 + 9 * at), name) for at, name in enumerate((None, *ADAPTERS, None, *ADAPTERS))
    ]
    answers = await asyncio.gather(*(adapted.ask(*each) for each in asked))
    assert [answer["output_ids"] for answer in answers] == [adapted.right(*each) for each in asked]


async def test_a_prefix_is_cached_for_its_own_adapter_alone(adapted: Adapted) -> None:
    ids = prompt(60)
    names = (None, "algebra", "history", None, "algebra", "history")
    found = [(await adapted.ask(ids, name))["meta_info"]["cached_tokens"] for name in names]
    assert all(
        cached <= 1 for cached in found[:3]
    )  # prompts begin with a token that others had, too
    assert all(cached >= 58 for cached in found[3:])


async def test_an_adapter_that_was_never_loaded_is_refused_by_both(adapted: Adapted) -> None:
    body = adapted.wire.body(prompt(), lora_path="unknown")
    for url in adapted.urls:
        status, answer = await adapted.wire.post(url, "generate", body)
        assert status == 400
        assert "unknown" in orjson.loads(answer)["error"]["message"]
