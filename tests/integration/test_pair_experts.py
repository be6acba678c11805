"""More models than fit: embedded pairs that a pool starts and ends, against transformers' own generation."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from shell_router.engines.embedded.checkpoint import make_checkpoint
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.embedded.shared_spawner import SharedSpawner
from shell_router.engines.pair_experts import PairExperts, pair_expert
from shell_router.engines.prompted import Prompt
from shell_router.errors import ConfigError, ExpertFailed
from shell_router.expert_pools import Costs, Event, ExecutorSettings, ExpertPool, Policies, Request, Switched

pytestmark = pytest.mark.slow
COSTS = {"tiny": Costs(0.01, 0.05, 8, 0, 1.0, 1.0)}
PROMPTS = [tuple(range(10 + number, 30 + 2 * number)) for number in range(4)]
NEW_TOKENS = 6
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed in range(3):
        make_checkpoint(folder / f"m{seed}", hidden=32, layers=1, vocab_size=512, context_length=512, seed=seed)
    return folder


def settings_of(folder: Path, name: str) -> EmbeddedSettings:
    return EmbeddedSettings(str(folder / name), dtype="float64", max_total_tokens=512)


@pytest_asyncio.fixture
async def spawner() -> AsyncIterator[SharedSpawner]:
    async with SharedSpawner() as spawner:
        yield spawner


def pool_on(folder: Path, spawner: SharedSpawner, events: list[Event], *, room: int) -> ExpertPool:
    catalogue = [pair_expert(f"m{seed}", settings_of(folder, f"m{seed}"), "tiny", 0.3) for seed in range(3)]
    memory_bytes = room * catalogue[0].memory_bytes
    experts = PairExperts(lambda name, _: settings_of(folder, name), spawner.lend, start_limit_s=60)
    executor = ExecutorSettings("cpu", memory_bytes, COSTS, expert_share=1.0)
    return ExpertPool(catalogue, [executor], experts, Policies(), watch=events.append)


def alone(model: Path, prompt: Sequence[int]) -> tuple[int, ...]:
    """What transformers writes."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.inference_mode():
        ids = network.generate(
            torch.tensor([list(prompt)]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    return tuple(ids[0, len(prompt) :].tolist())


async def test_three_models_in_memory_for_two_answer_as_each_does_alone(folder: Path, spawner: SharedSpawner) -> None:
    events = list[Event]()
    asked = [(f"m{number % 3}", prompt) for number, prompt in enumerate(PROMPTS * 3)]
    async with asyncio.timeout(120), pool_on(folder, spawner, events, room=2) as pool:
        requests = [Request(str(number), (name,), Prompt(ids, GREEDY)) for number, (name, ids) in enumerate(asked)]
        answers = await asyncio.gather(*map(pool.ask, requests))
        assert len(pool.loaded()["cpu"]) == 2
    assert [answer.final.ids for answer in answers] == [alone(folder / name, ids) for name, ids in asked]
    assert sum(isinstance(event, Switched) for event in events) == 1


async def test_a_model_that_does_not_start_costs_its_own_requests(folder: Path, spawner: SharedSpawner) -> None:
    events = list[Event]()
    pool = pool_on(folder, spawner, events, room=1)
    weights = folder / "m1" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    try:
        async with asyncio.timeout(120), pool:
            requests = [Request(f"{seed}", (f"m{seed}",), Prompt((1, 2, 3), GREEDY)) for seed in range(3)]
            found = await asyncio.gather(*map(pool.ask, requests), return_exceptions=True)
    finally:
        weights.write_bytes(whole)
    assert [isinstance(one, ExpertFailed) for one in found] == [False, True, False]
    assert "cannot start" in str(found[1])


async def test_a_prompt_longer_than_the_model_takes_costs_that_request_alone(
    folder: Path, spawner: SharedSpawner
) -> None:
    async with asyncio.timeout(120), pool_on(folder, spawner, [], room=1) as pool:
        requests = [Request(str(size), ("m0",), Prompt(tuple([5] * size), GREEDY)) for size in (4, 4000)]
        short, long = await asyncio.gather(*map(pool.ask, requests), return_exceptions=True)
    assert isinstance(long, ExpertFailed) and not isinstance(short, BaseException)


async def test_a_closed_pool_leaves_no_server(folder: Path, spawner: SharedSpawner) -> None:
    experts = PairExperts(lambda name, _: settings_of(folder, name), spawner.lend)
    expert = pair_expert("m0", settings_of(folder, "m0"), "tiny")
    async with asyncio.timeout(120):
        await experts.load(expert, "cpu")
        children = _children(spawner)
        await experts.unload(expert, "cpu")
    assert len(children) == 2 and _children(spawner) == set()
    with pytest.raises(ConfigError, match="host_bytes=0"):
        await experts.load(expert, "host")


def _children(spawner: SharedSpawner) -> set[str]:
    pid = spawner.client.pid
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
