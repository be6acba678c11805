"""Predictors in their processes: asked together, slow, dead, and absent."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from shell_router.cli import main
from shell_router.config import PredictionSettings
from shell_router.core.predictors import Prospect
from shell_router.errors import ConfigError
from shell_router.prediction.service import Predictions, PredictionService
from tests.unit.prediction.test_lengths import line, write

ASKED = Prospect(
    "plain request", "1", "please write many many lines", 0, 2, 5, ("small", "large"), scored=True
)
PATIENT, HASTY = PredictionSettings(limit_s=30.0), PredictionSettings(limit_s=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `shell-router train lengths` made of recorded traces."""
    place = tmp_path_factory.mktemp("predictor")
    traces = [
        line(
            f"p{number}",
            "a",
            20 * size * (1 + (model == "large")),
            topology="plain request",
            model=model,
            user=f"please write {'many ' * size} lines",
            user_tokens=size,
        )
        for number in range(300)
        for size, model in [(1 + number % 5, ("small", "large")[number % 2])]
    ]
    write(place / "traces.jsonl", *traces)
    out = place / "lengths"
    assert main(["train", "lengths", str(place / "traces.jsonl"), "--out", str(out)]) == 0
    return out


@pytest.fixture
async def services(folder: Path) -> AsyncIterator[dict[str, PredictionService]]:
    async with AsyncExitStack() as opened:
        made = {
            name: PredictionService("lengths", folder, of)
            for name, of in (("patient", PATIENT), ("hasty", HASTY))
        }
        for service in made.values():
            opened.push_async_callback(service.aclose)
        yield made


async def test_many_that_ask_at_once_all_get_their_own_answer(
    services: dict[str, PredictionService],
) -> None:
    predictor = Predictions(None, services["patient"])
    answers = await asyncio.gather(*(predictor.forecast([ASKED] * number) for number in range(5)))
    assert [len(forecasts.each) for forecasts in answers] == [0, 1, 2, 3, 4]
    forecast = answers[1].each[0]
    assert forecast.own_tokens["large"] > forecast.own_tokens["small"] > 0
    assert forecast.scores == {} and answers[1].trouble == {}


async def test_one_that_does_not_answer_costs_its_limit_and_answers_again_once_it_can(
    services: dict[str, PredictionService],
) -> None:
    service = services["hasty"]
    predictor = Predictions(None, service)
    await service.start()
    assert service.pid is not None
    os.kill(service.pid, signal.SIGSTOP)
    late = await predictor.forecast([ASKED])
    assert late.each[0].own_tokens == {}
    assert set(late.trouble) == {"lengths"}
    os.kill(service.pid, signal.SIGCONT)
    assert await answered(predictor)


async def test_one_that_hangs_is_killed_and_started_anew(folder: Path) -> None:
    service = PredictionService("lengths", folder, HASTY, hang_s=1.0)
    try:
        await service.start()
        hung = service.pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        assert await answered(Predictions(None, service))
        assert service.pid not in (None, hung)
    finally:
        await service.aclose()


async def test_a_dead_one_costs_requests_their_forecasts_until_it_is_there_again(
    services: dict[str, PredictionService],
) -> None:
    service = services["hasty"]
    predictor = Predictions(None, service)
    await service.start()
    killed = service.pid
    assert killed is not None and await service.answers()
    os.kill(killed, signal.SIGKILL)
    assert await answered(predictor)
    assert service.pid not in (None, killed)


async def answered(predictor: Predictions, limit_s: float = 30.0) -> bool:
    """Ask until there is an answer; every other answer has its trouble."""
    async with asyncio.timeout(limit_s):
        while not (answers := await predictor.forecast([ASKED])).each[0].own_tokens:
            assert answers.trouble["lengths"]
    return True


def test_a_folder_without_a_predictor_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prediction\.scores: .* holds no router\.json"):
        PredictionService("scores", tmp_path, PATIENT)
