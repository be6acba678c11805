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

from benchmarks.adapters.made import MODULES, make_adapter
from benchmarks.random_checkpoint import make_checkpoint
from launch.sglang_cpu.environment import built_environment
from launch.sglang_cpu.pair import cpu_pair
from shell_router.engines.address import PairAddress
from tests.conformance.test_wire import Wire, prompt
from tests.fakes.pairs_under_test import PairUnderTest, of_model
from tests.fakes.tiny_models import merge, plain

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.sglang]
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "algebra": {"seed": 1},
    "history": {"seed": 2, "rank": 8, "alpha": 4.0},
    "poems": {"seed": 3, "rank": 1, "modules": ("q_proj", "v_proj"), "strength": 1.0},
}
SGLANG_FLAGS = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native"),
    *("--max-loras-per-batch", "4", "--lora-target-modules", *MODULES),
)


@dataclass(frozen=True)
class Adapted:
    """A pair that has all the adapters loaded, and the networks that say what is right."""

    wire: Wire
    folders: Mapping[str, Path]
    networks: Mapping[str | None, Any]

    @property
    def urls(self) -> tuple[str, str]:
        return self.wire.address.prefill_url, self.wire.address.decode_url

    async def change(self, url: str, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
        status, answer = await self.wire.post(url, route, body)
        return status, orjson.loads(answer)

    async def ask(self, ids: list[int], name: str | None, new_tokens: int = 10) -> dict[str, Any]:
        """Decode's answer."""
        return (await self.wire.pair(self.wire.body(ids, new_tokens, lora_path=name)))[1]

    def right(self, ids: list[int], name: str | None, new_tokens: int = 10) -> list[int]:
        said = list(ids)
        for _ in range(new_tokens):
            said.append(int(self.networks[name](torch.tensor([said])).logits[0, -1].argmax()))
        return said[len(ids) :]


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairUnderTest]:
    venv = built_environment()
    if venv is None:
        pytest.skip("real SGLang is not built for these tests")
    model = make_checkpoint(tmp_path_factory.mktemp("sglang-lora-model"), context_length=2048)
    with cpu_pair(
        model, venv, tmp_path_factory.mktemp("sglang-lora"), options=SGLANG_FLAGS
    ) as pair:
        yield of_model(
            PairAddress(
                pair.prefill.url, pair.decode.url, pair.bootstrap_host, pair.bootstrap_port
            ),
            model,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(
    under_test: PairUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Adapted]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as session:
        model, root = under_test.needs_model(), tmp_path_factory.mktemp("adapters")
        folders = {
            name: make_adapter(root / name, model, **arguments)
            for name, arguments in ADAPTERS.items()
        }
        networks = {
            None: plain(model),
            **{name: merge(model, folder) for name, folder in folders.items()},
        }
        found = Adapted(Wire(under_test, session), folders, networks)
        for url in found.urls:
            for name, folder in folders.items():
                status, answer = await found.change(
                    url, "load_lora_adapter", lora_name=name, lora_path=str(folder)
                )
                assert status == 200, answer
        yield found


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


async def test_a_change_that_is_refused_is_400_and_says_why(
    adapted: Adapted, tmp_path: Path
) -> None:
    wide = make_adapter(tmp_path / "wide", adapted.wire.under_test.needs_model(), rank=9)
    cases = [
        (
            "load_lora_adapter",
            {"lora_name": "algebra", "lora_path": str(adapted.folders["algebra"])},
            "already loaded",
        ),
        ("load_lora_adapter", {"lora_name": "wide", "lora_path": str(wide)}, "rank 9"),
        ("unload_lora_adapter", {"lora_name": "unknown"}, "LoRA with name unknown does not exist"),
    ]
    for url in adapted.urls:
        for route, body, words in cases:
            status, answer = await adapted.change(url, route, **body)
            assert (status, answer["success"]) == (400, False)
            assert words in answer["error_message"]
        status, answer = await adapted.change(url, "load_lora_adapter", lora_name="nameless")
        assert (status, answer["object"]) == (400, "error")


async def test_an_adapter_goes_and_another_comes_under_its_name(adapted: Adapted) -> None:
    ids = prompt(50)
    assert (await adapted.ask(ids, "poems"))["output_ids"] == adapted.right(ids, "poems")
    for url in adapted.urls:
        status, answer = await adapted.change(url, "unload_lora_adapter", lora_name="poems")
        assert (status, answer["success"]) == (200, True)
        assert set(answer["loaded_adapters"]) == {"algebra", "history"}
        path = str(adapted.folders["history"])
        status, answer = await adapted.change(
            url, "load_lora_adapter", lora_name="poems", lora_path=path
        )
        assert (status, answer["success"]) == (200, True)
        assert answer["loaded_adapters"]["poems"] == path
    answer = await adapted.ask(ids, "poems")
    assert answer["output_ids"] == adapted.right(ids, "history")
    assert answer["meta_info"]["cached_tokens"] <= 1


async def test_both_list_their_adapters_with_the_models(adapted: Adapted) -> None:
    for url in adapted.urls:
        cards = (await adapted.wire.get(url, "v1/models"))["data"]
        assert {card["id"] for card in cards if card["parent"]} == set(ADAPTERS)
        assert {card["parent"] for card in cards if card["parent"]} == {cards[0]["id"]}
