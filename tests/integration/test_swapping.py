"""Eight models in memory for three, behind `shell-router serve`, as clients of OpenAI see them."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
import yaml

from benchmarks.random_checkpoint import make_checkpoint
from tests.fakes.command import RunningCommand, running_command, survivors

pytestmark = pytest.mark.slow

NAMES = [f"m{number}" for number in range(8)]
CUT = "m7"
LIMIT_S = 120.0
PANEL = """
name: panel
defaults: {sampling: {temperature: 0, max_new_tokens: 12}}
agents:
  first: {model: m1}
  second: {model: m6}
  check: {model: m4, precursors: [first, second]}
  answer: {model: m1, precursors: [check]}
"""
PROMPTS = ["the apple", "every bridge", "one castle", "some lantern"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES):
        make_checkpoint(folder / name, seed=seed, context_length=1024)
    return folder


@asynccontextmanager
async def serving(
    models: Path, folder: Path, swapping: Mapping[str, object]
) -> AsyncIterator[tuple[RunningCommand, openai.AsyncOpenAI]]:
    deployment = {
        "models": {
            name: {"path": str(models / name), "embedded": {"dtype": "float64"}} for name in NAMES
        },
        "topologies": [str(folder / "panel.yaml")],
        "embedder": {"model": "none"},
        "listen": {"port": 0},
        **({"swapping": swapping} if swapping else {}),
    }
    (folder / "panel.yaml").write_text(PANEL, encoding="utf-8")
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment), encoding="utf-8")
    async with running_command("serve", "--config", file) as command:
        url = (await command.line_with("Serving on", limit_s=LIMIT_S)).split()[-1]
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            yield command, client


async def answer(client: openai.AsyncOpenAI, model: str, prompt: str) -> str:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=12,
        temperature=0,
        stream=True,
    )
    return "".join(
        [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    )


async def answers(client: openai.AsyncOpenAI, names: Sequence[str]) -> dict[tuple[str, str], str]:
    asked = [(name, prompt) for name in names for prompt in PROMPTS]
    return dict(
        zip(asked, await asyncio.gather(*(answer(client, *one) for one in asked)), strict=True)
    )


async def stopped(command: RunningCommand, *, cut: bool = False) -> str:
    """What it printed until its end; nothing that it started runs then. With `cut`, requests are
    not awaited.
    """
    started = command.started()
    command.signal(signal.SIGTERM)
    if cut:
        await command.line_with("SIGTERM: no new requests", limit_s=LIMIT_S)
        command.signal(signal.SIGTERM)
    code, printed = await command.ended(limit_s=LIMIT_S)
    assert code == 0, printed
    assert not survivors(started)
    return printed


async def test_sixteen_clients_get_each_models_own_answers_and_nothing_runs_after(
    models: Path, tmp_path: Path
) -> None:
    names = [*NAMES, "panel"]
    async with serving(models, tmp_path, {}) as (command, client):
        alone = await answers(client, names)
        await stopped(command)
    assert len({alone[name, PROMPTS[0]] for name in NAMES}) == len(NAMES)

    async with serving(models, tmp_path, {"max_loaded_models": 3, "window_s": 1}) as (
        command,
        client,
    ):

        async def ask(number: int) -> None:
            for step in range(16):
                one = (
                    names[(5 * step + 3 * number) % len(names)],
                    PROMPTS[(step + number) % len(PROMPTS)],
                )
                assert await answer(client, *one) == alone[one]

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as clients:
            for number in range(16):
                clients.create_task(ask(number))
        printed = await stopped(command)
    assert len(set(re.findall(r"the model '(m\d)' is loaded", printed))) == len(NAMES)


async def test_a_model_that_cannot_be_loaded_fails_by_name_and_a_load_is_cut_by_the_end(
    models: Path, tmp_path: Path
) -> None:
    weights = models / CUT / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    try:
        async with serving(models, tmp_path, {"max_loaded_models": 3, "usage": {CUT: 0.5}}) as (
            command,
            client,
        ):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(
                    model=CUT, messages=[{"role": "user", "content": "one"}]
                )
            assert (refused.value.status_code, refused.value.code) == (502, "model_load_failed")
            broken, whole_one = await asyncio.gather(
                answer(client, CUT, PROMPTS[0]),
                answer(client, "m4", PROMPTS[0]),
                return_exceptions=True,
            )
            assert isinstance(broken, openai.APIError) and broken.code == "model_load_failed"
            assert isinstance(whole_one, str)
            weights.write_bytes(whole)
            assert await answer(client, CUT, PROMPTS[0])
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await answer(client, "m5", PROMPTS[0])
                assert await answer(client, "m6", PROMPTS[0])
            asked = [asyncio.create_task(answer(client, name, PROMPTS[0])) for name in NAMES]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            await stopped(command, cut=True)
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(outcome, str | openai.APIError)
    finally:
        weights.write_bytes(whole)
