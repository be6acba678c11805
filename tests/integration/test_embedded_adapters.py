"""LoRA adapters on the embedded pair over HTTP, in SGLang's words, against merged weights run by transformers."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from benchmarks.adapters.made import make_adapter
from shell_router.standins.embedded.settings import EmbeddedSettings, LoraSettings
from tests.fakes.shared_engines import SharedEngines
from tests.fakes.tiny_models import merge, plain
from tests.integration.test_embedded_pair import GREEDY, LIMIT_S, Client, Json, Reference, prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("algebra", "history", "poems", "law")


@dataclass(frozen=True)
class Adapters:
    """A running pair with room for three adapters, the folders of four, and each merged by hand (and none)."""

    client: Client
    folders: Mapping[str, Path]
    references: Mapping[str | None, Reference]

    @property
    def urls(self) -> tuple[str, str]:
        return self.client.pair.address.prefill_url, self.client.pair.address.decode_url

    async def ask(self, url: str, route: str, **body: Any) -> tuple[int, Any]:
        return await self.client.post(f"{url}/{route}", body)

    async def load(self, *names: str) -> None:
        """Load adapters on both servers."""
        for name in names:
            for url in self.urls:
                status, answer = await self.ask(
                    url, "load_lora_adapter", lora_name=name, lora_path=str(self.folders[name])
                )
                assert status == 200, answer

    async def unload(self, name: str) -> None:
        for url in self.urls:
            status, answer = await self.ask(url, "unload_lora_adapter", lora_name=name)
            assert status == 200, answer

    async def loaded(self, url: str) -> list[str]:
        async with self.client.http.get(f"{url}/v1/models") as response:
            return [card["id"] for card in (await response.json())["data"] if card["parent"]]

    async def cached(self, input_ids: list[int], name: str | None) -> int:
        """Prefill the prompt alone; returns how much of it was cached."""
        status, answer = await self.ask(
            self.client.pair.address.prefill_url, "prefill_only", input_ids=input_ids, lora_path=name
        )
        assert status == 200, answer
        return answer["meta_info"]["cached_tokens"]  # type: ignore[no-any-return]

    async def says(self, input_ids: list[int], name: str | None, count: int) -> list[int]:
        answer = await self.client.generate(
            input_ids=input_ids, lora_path=name, sampling_params={**GREEDY, "max_new_tokens": count}
        )
        return answer["output_ids"]  # type: ignore[no-any-return]

    async def evictable(self) -> int:
        """Tokens in the prefix cache."""
        async with self.client.http.get(f"{self.urls[0]}/server_info") as response:
            return (await response.json())["internal_states"][0]["evictable_tokens"]  # type: ignore[no-any-return]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(engines: SharedEngines, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Adapters]]:
    root = tmp_path_factory.mktemp("adapters")
    model, wide = engines.model(seed=5), engines.model(hidden=256)
    folders = {name: make_adapter(root / name, model, seed=at, rank=2 * at + 1) for at, name in enumerate(NAMES)}
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    networks = {None: plain(model), **{name: merge(model, folder) for name, folder in folders.items()}}
    references = {name: Reference(network, tokenizer) for name, network in networks.items()}
    lora = LoraSettings(max_loaded_adapters=3, max_rank=8)
    pairs = {
        "adapted": EmbeddedSettings(str(model), dtype="float64", chunked_prefill_size=64, lora=lora),
        "plain": EmbeddedSettings(str(model)),
        "roomy": EmbeddedSettings(str(wide), dtype="float64", lora=LoraSettings(max_loaded_adapters=2, max_rank=64)),
    }
    async with aiohttp.ClientSession() as http:
        yield {
            alias: Adapters(Client(http, engines.pair(settings)), folders, references)
            for alias, settings in pairs.items()
        }


@pytest_asyncio.fixture(loop_scope="module")
async def adapters(fleet: dict[str, Adapters]) -> AsyncIterator[Adapters]:
    yield fleet["adapted"]
    for url in fleet["adapted"].urls:
        for name in await fleet["adapted"].loaded(url):
            await fleet["adapted"].ask(url, "unload_lora_adapter", lora_name=name)


async def test_loading_and_unloading_answer_as_sglang_does(adapters: Adapters) -> None:
    for url in adapters.urls:
        path = str(adapters.folders["poems"])
        loaded = await adapters.ask(url, "load_lora_adapter", lora_name="poems", lora_path=path, pinned=True)
        assert loaded == (200, {**NOTHING, "success": True, "loaded_adapters": {"poems": path}})
        assert await adapters.loaded(url) == ["poems"]
        unloaded = await adapters.ask(url, "unload_lora_adapter", lora_name="poems")
        assert unloaded == (200, {**NOTHING, "success": True, "loaded_adapters": {}})
        assert await adapters.loaded(url) == []


NOTHING = {"rid": None, "http_worker_ipc": None, "error_message": ""}


async def test_what_cannot_be_loaded_is_refused_and_says_what_is_loaded(adapters: Adapters, tmp_path: Path) -> None:
    await adapters.load("algebra", "history")
    wide = make_adapter(tmp_path / "wide", adapters.client.pair.settings.model_path, rank=9)
    torn = make_adapter(tmp_path / "torn", adapters.client.pair.settings.model_path)
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    cases = [
        ("wide", wide, "rank 9 is over the server's limit of 8"),
        ("torn", torn, "cannot be read"),
        ("gone", tmp_path / "gone", "adapter_config.json is missing"),
        ("algebra", adapters.folders["algebra"], "already loaded"),
    ]
    for url in adapters.urls:
        for name, folder, words in cases:
            status, answer = await adapters.ask(url, "load_lora_adapter", lora_name=name, lora_path=str(folder))
            assert (status, answer["success"]) == (400, False)
            assert words in answer["error_message"]
            assert list(answer["loaded_adapters"]) == ["algebra", "history"]


async def test_more_than_there_is_room_for_is_refused(adapters: Adapters) -> None:
    await adapters.load(*NAMES[:3])
    for url in adapters.urls:
        path = str(adapters.folders["law"])
        status, answer = await adapters.ask(url, "load_lora_adapter", lora_name="law", lora_path=path)
        assert status == 400
        assert "at most 3" in answer["error_message"]
        assert sorted(answer["loaded_adapters"]) == sorted(NAMES[:3])


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("load_lora_adapter", {"lora_name": "a"}),
        ("load_lora_adapter", {"lora_path": "a"}),
        ("load_lora_adapter", {"lora_name": 1, "lora_path": "a"}),
        ("unload_lora_adapter", {}),
    ],
)
async def test_bodies_that_lack_a_field_are_refused(adapters: Adapters, route: str, body: Json) -> None:
    for url in adapters.urls:
        status, answer = await adapters.ask(url, route, **body)
        assert (status, answer["object"], answer["code"]) == (400, "error", 400)
        assert "expected a string" in answer["message"]


async def test_an_adapter_that_is_not_loaded_is_400_on_both_servers(adapters: Adapters) -> None:
    await adapters.load("algebra")
    body = adapters.client.body(input_ids=[5], lora_path="poems")
    for leg in (adapters.client.prefill, adapters.client.decode):
        status, answer = await leg(body)
        assert status == 400
        assert "not loaded: poems. Loaded adapters: algebra." in answer["error"]["message"]
    for url in adapters.urls:
        status, answer = await adapters.ask(url, "unload_lora_adapter", lora_name="poems")
        assert status == 400
        assert "poems does not exist" in answer["error_message"]
    async with adapters.client.http.post(f"{adapters.urls[1]}/generate", json={**body, "stream": True}) as response:
        event = json.loads((await response.text()).split("\n\n", maxsplit=1)[0].removeprefix("data: "))
    assert "not loaded: poems" in event["error"]["message"]


async def test_without_lora_every_adapter_is_refused(fleet: dict[str, Adapters]) -> None:
    off = fleet["plain"]
    for url in off.urls:
        for route in ("load_lora_adapter", "unload_lora_adapter"):
            status, answer = await off.ask(url, route, lora_name="a", lora_path="a")
            assert (status, answer["success"]) == (400, False)
            assert "LoRA is not enabled" in answer["error_message"]
    for leg in (off.client.prefill, off.client.decode):
        status, answer = await leg(off.client.body(input_ids=[5], lora_path="a"))
        assert status == 400
        assert "LoRA is not enabled" in answer["error"]["message"]


async def test_requests_of_several_adapters_decode_together_each_as_its_merged_model(adapters: Adapters) -> None:
    await adapters.load(*NAMES[:3])
    kinds: list[str | None] = [None, *NAMES[:3]]
    asked = [(prompt(200 + at, 5 + 17 * at % 150), kinds[at * 7 % 4], 3 + 13 * at % 40) for at in range(24)]
    together = await asyncio.gather(*(adapters.says(*each) for each in asked))
    expected = [adapters.references[name].continue_greedily(ids, count) for ids, name, count in asked]
    assert together == expected
    alone = [await adapters.says(*each) for each in asked[:8]]
    assert alone == expected[:8]


async def test_each_adapter_says_something_of_its_own(adapters: Adapters) -> None:
    await adapters.load(*NAMES[:3])
    said = [tuple(await adapters.says(prompt(1, 30), name, 12)) for name in (None, *NAMES[:3])]
    assert len(set(said)) == 4


async def test_what_one_adapter_prefilled_serves_no_other(adapters: Adapters) -> None:
    await adapters.load("algebra", "history")
    input_ids = prompt(2, 200)
    found = [
        await adapters.cached(input_ids, name) for name in ("algebra", None, "history", "algebra", None, "history")
    ]
    assert found == [0, 0, 0, 199, 199, 199]
    for name in (None, "algebra", "history"):
        assert await adapters.says(input_ids, name, 20) == adapters.references[name].continue_greedily(input_ids, 20)


async def test_growing_prefill_only_requests_warm_their_own_adapter(adapters: Adapters) -> None:
    await adapters.load("poems")
    input_ids = prompt(3, 300)
    assert [await adapters.cached(input_ids[:count], "poems") for count in (100, 200, 290)] == [0, 100, 200]
    answer = await adapters.client.generate(
        input_ids=input_ids, lora_path="poems", sampling_params={**GREEDY, "max_new_tokens": 20}
    )
    assert answer["meta_info"]["cached_tokens"] == 290
    assert answer["output_ids"] == adapters.references["poems"].continue_greedily(input_ids, 20)


async def test_other_weights_under_an_old_name_use_none_of_its_kv(adapters: Adapters) -> None:
    await adapters.load("algebra")
    input_ids = prompt(4, 150)
    before = await adapters.evictable()
    await adapters.says(input_ids, "algebra", 5)
    await adapters.unload("algebra")
    assert await adapters.evictable() == before
    for url in adapters.urls:
        path = str(adapters.folders["history"])
        assert (await adapters.ask(url, "load_lora_adapter", lora_name="algebra", lora_path=path))[0] == 200
    assert await adapters.cached(input_ids, "algebra") == 0
    assert await adapters.says(input_ids, "algebra", 20) == adapters.references["history"].continue_greedily(
        input_ids, 20
    )


async def test_different_weights_on_the_two_servers_are_an_error_not_a_mixture(adapters: Adapters) -> None:
    for url, folder in zip(adapters.urls, ("algebra", "history"), strict=True):
        await adapters.ask(url, "load_lora_adapter", lora_name="both", lora_path=str(adapters.folders[folder]))
    body = adapters.client.body(input_ids=prompt(5, 20), lora_path="both", sampling_params=GREEDY)
    _, (status, answer) = await asyncio.gather(adapters.client.prefill(body), adapters.client.decode(body))
    assert status == 500
    assert "other weights as LoRA adapter both" in answer["message"]
    await adapters.client.until_idle()


async def test_unloading_waits_for_the_requests_that_use_it(adapters: Adapters) -> None:
    await adapters.load("algebra")
    client, decode_url = adapters.client, adapters.urls[1]
    params = {**GREEDY, "max_new_tokens": 7000}
    body = client.body(input_ids=prompt(6, 20), rid="long", stream=True, lora_path="algebra", sampling_params=params)
    prefill = asyncio.create_task(client.prefill(body))
    async with asyncio.timeout(LIMIT_S), client.http.post(f"{decode_url}/generate", json=body) as response:
        await response.content.readuntil(b"\n\n")
        unloading = asyncio.create_task(adapters.ask(decode_url, "unload_lora_adapter", lora_name="algebra"))
        while await adapters.loaded(decode_url):
            pass
        status, answer = await client.decode({**body, "rid": "late", "stream": False})
        assert status == 400
        assert "not loaded: algebra" in answer["error"]["message"]
        assert (await client.load(decode_url))["num_running_reqs"] == 1
        assert not unloading.done()
        await client.abort(decode_url, "long")
        assert (await unloading)[0] == 200
    await prefill
    await client.until_idle()


async def test_what_decodes_goes_on_undisturbed_while_adapters_come_and_go(adapters: Adapters) -> None:
    await adapters.load("algebra")
    input_ids = prompt(7, 40)
    saying = asyncio.create_task(adapters.says(input_ids, "algebra", 300))
    for _ in range(3):
        await adapters.load("history", "poems")
        for name in ("history", "poems"):
            assert len(await adapters.says(prompt(8, 10), name, 3)) == 3
            await adapters.unload(name)
    assert await saying == adapters.references["algebra"].continue_greedily(input_ids, 300)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_adapters_that_went_leave_no_memory_behind(fleet: dict[str, Adapters], tmp_path: Path) -> None:
    roomy = fleet["roomy"]
    folder = make_adapter(tmp_path, roomy.client.pair.settings.model_path, rank=64)
    weights = 2 * (folder / "adapter_model.safetensors").stat().st_size  # float32 on the disk
    adapters = Adapters(roomy.client, {"big": folder}, {})
    pids = [roomy.client.pair.prefill.pid, roomy.client.pair.decode.pid]
    resident: list[list[int]] = []
    for turns in (5, 40):
        for _ in range(turns):
            await adapters.load("big")
            await adapters.says(prompt(9, 20), "big", 2)
            await adapters.unload("big")
        resident.append([resident_bytes(pid) for pid in pids])
    grown = [after - before for before, after in zip(*resident, strict=True)]
    assert max(grown) < 10 * weights, (grown, weights)


def resident_bytes(pid: int) -> int:
    """The process's memory (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
