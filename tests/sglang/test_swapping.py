"""Models that take turns on real SGLang: eight on one pair, next to each alone; and what a CPU
cannot do.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import openai
import pytest

from benchmarks.random_checkpoint import make_checkpoint
from launch.sglang_cpu.environment import built_environment
from launch.sglang_cpu.pair import CpuPair, cpu_pair
from shell_router.app import serve_deployment
from shell_router.app.pairs import address_of
from shell_router.config import (
    Config,
    EmbedderSettings,
    Listen,
    ModelSettings,
    PairSettings,
    SwappingSettings,
)
from shell_router.engines.sglang import SglangPair
from shell_router.errors import EngineRejected
from shell_router.swapping.sleep import fall_asleep, wake

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

NAMES = [f"m{number}" for number in range(8)]
PROMPTS = [
    "the apple and every bridge before one castle",
    "the apple and every bridge before one meadow",
]
"""They share their first tokens, so that KV of other weights would be found, were it still there.
"""


@asynccontextmanager
async def clients(
    models: Path, pair: CpuPair, names: Sequence[str], *, swaps: bool
) -> AsyncIterator[openai.AsyncOpenAI]:
    settings = PairSettings(
        pair.prefill.url, pair.decode.url, pair.bootstrap_port, pair.bootstrap_host
    )
    config = Config(
        {name: ModelSettings(models / name, pairs=() if swaps else (settings,)) for name in names},
        swapping=SwappingSettings(pairs=(settings,), window_s=1.0) if swaps else None,
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
    )
    async with (
        serve_deployment(config) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def answer(client: openai.AsyncOpenAI, name: str, prompt: str) -> str:
    found = await client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": prompt}], max_tokens=16, temperature=0
    )
    return found.choices[0].message.content or ""


async def answers(
    client: openai.AsyncOpenAI, names: Sequence[str], times: int = 1
) -> dict[tuple[str, str], set[str]]:
    """Per model and prompt all that it answered, `times` times at the same time."""
    asked = [(name, prompt) for _ in range(times) for prompt in PROMPTS for name in names]
    found: dict[tuple[str, str], set[str]] = {}
    for one, text in zip(
        asked, await asyncio.gather(*(answer(client, *one) for one in asked)), strict=True
    ):
        found.setdefault(one, set()).add(text)
    return found


async def test_each_model_answers_as_it_does_alone_and_a_damaged_one_leaves_the_others_be(
    tmp_path: Path,
) -> None:
    for seed, name in enumerate(NAMES):
        make_checkpoint(tmp_path / name, seed=seed, context_length=2048)
    damaged = tmp_path / NAMES[7] / "model.safetensors"
    whole = damaged.read_bytes()
    venv = built_environment()
    assert venv is not None
    alone = {}
    with cpu_pair(tmp_path / NAMES[0], venv, tmp_path / "pair") as pair:
        await sleeps_by_its_mark_and_is_refused_on_a_cpu(tmp_path / NAMES[0], pair)
        async with clients(tmp_path, pair, NAMES[:1], swaps=False) as client:
            alone |= await answers(client, NAMES[:1])
        async with clients(tmp_path, pair, NAMES, swaps=True) as client:
            first = await answers(client, NAMES)
            for prompt in PROMPTS:
                assert len({frozenset(first[name, prompt]) for name in NAMES}) == len(NAMES)
            found = await answers(client, NAMES, times=2)
            assert found == first and first.items() >= alone.items()
            damaged.write_bytes(whole[:-1000])
            assert await answer(client, NAMES[1], PROMPTS[0]) in first[NAMES[1], PROMPTS[0]]
            with pytest.raises(openai.APIStatusError) as refused:
                await answer(client, NAMES[7], PROMPTS[0])
            assert (refused.value.status_code, refused.value.code) == (502, "model_load_failed")
            damaged.write_bytes(whole)
            assert {await answer(client, NAMES[7], PROMPTS[0])} == first[NAMES[7], PROMPTS[0]]


async def sleeps_by_its_mark_and_is_refused_on_a_cpu(model: Path, pair: CpuPair) -> None:
    """SGLang keeps what the router notes in its weight version, and serves on; asked to sleep, it
    would end here.
    """
    settings = PairSettings(
        pair.prefill.url, pair.decode.url, pair.bootstrap_port, pair.bootstrap_host
    )
    config = Config(
        {"alone": ModelSettings(model, pairs=(settings,))},
        swapping=SwappingSettings(max_loaded_models=1),
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
    )
    with pytest.raises(EngineRejected, match="cannot sleep") as refused:
        async with serve_deployment(config):
            raise AssertionError("it serves")
    assert "start it on a GPU" in str(refused.value.remedy)
    async with aclosing(SglangPair(address_of(settings))) as client:
        for version in ("default (asleep)", "default (unsettled)", "default"):
            for server in client.fleet.servers:
                body = json.dumps({"new_version": version, "abort_all_requests": False}).encode()
                await server.post("update_weight_version", body, limit_s=30)
                assert (await server.info("model_info"))["weight_version"] == version
                if version.endswith("(asleep)"):
                    await fall_asleep(server, 30)
                elif version.endswith("(unsettled)"):
                    with pytest.raises(EngineRejected, match="between sleeping and waking"):
                        await wake(server, 30)
        await client.fleet.probe()  # it was awake all the time, and serves
