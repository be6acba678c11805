"""More models than fit: embedded pairs that a pool starts and ends, against transformers' own generation."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shell_router.errors import ComponentFailed, ConfigError
from shell_router.experts.components import (
    ComponentPool,
    Costs,
    Event,
    ExecutorSettings,
    Policies,
    Request,
    Switched,
)
from shell_router.experts.components.engine_components import PairComponents, Prompt, pair_component
from shell_router.launching.random_checkpoint import make_checkpoint
from shell_router.standins.embedded.settings import EmbeddedSettings
from tests.fakes.shared_engines import SharedEngines

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


def pool_on(folder: Path, engines: SharedEngines, events: list[Event], *, room: int) -> ComponentPool:
    catalog = [pair_component(f"m{seed}", settings_of(folder, f"m{seed}"), "tiny", 0.3) for seed in range(3)]
    memory_bytes = room * catalog[0].memory_bytes
    components = PairComponents(lambda name, _: settings_of(folder, name), engines.spawner(), start_limit_s=60)
    executor = ExecutorSettings("cpu", memory_bytes, COSTS, component_share=1.0)
    return ComponentPool(catalog, [executor], components, Policies(), watch=events.append)


def alone(model: Path, prompt: Sequence[int]) -> tuple[int, ...]:
    """What transformers writes."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.inference_mode():
        ids = network.generate(
            torch.tensor([list(prompt)]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    return tuple(ids[0, len(prompt) :].tolist())


async def test_three_models_in_memory_for_two_answer_as_each_does_alone(folder: Path, engines: SharedEngines) -> None:
    events = list[Event]()
    asked = [(f"m{number % 3}", prompt) for number, prompt in enumerate(PROMPTS * 3)]
    async with asyncio.timeout(120), pool_on(folder, engines, events, room=2) as pool:
        requests = [Request(str(number), (name,), Prompt(ids, GREEDY)) for number, (name, ids) in enumerate(asked)]
        answers = await asyncio.gather(*map(pool.ask, requests))
        assert len(pool.loaded()["cpu"]) == 2
    assert [answer.final.ids for answer in answers] == [alone(folder / name, ids) for name, ids in asked]
    assert sum(isinstance(event, Switched) for event in events) == 1


async def test_a_model_that_does_not_start_costs_its_own_requests(folder: Path, engines: SharedEngines) -> None:
    events = list[Event]()
    pool = pool_on(folder, engines, events, room=1)
    weights = folder / "m1" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    try:
        async with asyncio.timeout(120), pool:
            requests = [Request(f"{seed}", (f"m{seed}",), Prompt((1, 2, 3), GREEDY)) for seed in range(3)]
            found = await asyncio.gather(*map(pool.ask, requests), return_exceptions=True)
    finally:
        weights.write_bytes(whole)
    assert [isinstance(one, ComponentFailed) for one in found] == [False, True, False]
    assert "cannot start" in str(found[1])


async def test_a_prompt_longer_than_the_model_takes_costs_that_request_alone(
    folder: Path, engines: SharedEngines
) -> None:
    async with asyncio.timeout(120), pool_on(folder, engines, [], room=1) as pool:
        requests = [Request(str(size), ("m0",), Prompt(tuple([5] * size), GREEDY)) for size in (4, 4000)]
        short, long = await asyncio.gather(*map(pool.ask, requests), return_exceptions=True)
    assert isinstance(long, ComponentFailed) and not isinstance(short, BaseException)


async def test_a_closed_pool_leaves_no_server(folder: Path, engines: SharedEngines) -> None:
    components = PairComponents(lambda name, _: settings_of(folder, name), engines.spawner())
    component = pair_component("m0", settings_of(folder, "m0"), "tiny")
    engines.pair(settings_of(folder, "m1"))  # so that the process runs
    others = _children(engines)
    async with asyncio.timeout(120):
        await components.load(component, "cpu")
        loaded = _children(engines)
        await components.unload(component, "cpu")
    assert len(loaded - others) == 2 and _children(engines) == others
    with pytest.raises(ConfigError, match="host_bytes=0"):
        await components.load(component, "host")


def _children(engines: SharedEngines) -> set[str]:
    pid = engines.spawner_pid
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
