"""`shell-router batch` with real models on embedded pairs: the whole command, killed, broken, and
begun again.
"""

import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from tests.fakes.command import running_command, survivors
from tests.fakes.pools import ROOT, write_pool, write_questions

LIMIT_S = 120.0


async def ran(*arguments: str | Path) -> tuple[int, str]:
    """`shell-router batch run` to its end: exit code and what it printed."""
    async with running_command("batch", "run", *map(str, arguments)) as command:
        return await command.ended(limit_s=LIMIT_S)


def results(folder: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]


@pytest.mark.slow
async def test_a_killed_run_begun_again_gives_the_same_results_as_one_that_was_not(
    tmp_path: Path,
) -> None:
    pool, questions = write_pool(tmp_path), write_questions(tmp_path, 40)
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    code, printed = await ran(pool, "--data", questions, "--out", whole)
    assert code == 0, printed

    async with running_command(
        "batch", "run", str(pool), "--data", str(questions), "--out", str(torn)
    ) as command:
        await command.line_with("answers 40 prompts", limit_s=LIMIT_S)
        engines = command.started()
        command.kill()
    assert survivors(engines) == set()
    assert not (torn / "results.jsonl").exists()
    code, printed = await ran(pool, "--data", questions, "--out", torn)
    assert code == 0, printed

    assert [without_confidence(one) for one in results(torn)] == [
        without_confidence(one) for one in results(whole)
    ]
    by = {one["by"] for one in results(whole)}
    assert by == {"proposers", "aggregator"}
    assert sum(one["right"] for one in results(whole)) > 20


def without_confidence(result: dict[str, Any]) -> dict[str, Any]:
    """What engines compute in another batch may differ in a last digit."""
    found = [
        {name: value for name, value in one.items() if name != "confidence"}
        for one in result["proposals"]
    ]
    return {**result, "proposals": found}


@pytest.mark.slow
async def test_a_model_that_does_not_load_costs_its_own_answers_alone(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (ROOT / "models/small").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    models = {name: {"path": str(ROOT / "models" / name)} for name in ("medium", "large")}
    pool = write_pool(
        tmp_path,
        models={**models, "broken": {"path": str(broken)}},
        proposers=["broken", "medium"],
        aggregate=None,
    )
    code, printed = await ran(
        pool, "--data", write_questions(tmp_path, 6), "--out", tmp_path / "run"
    )
    assert code == 0, printed
    assert "6 with an error" in printed
    for one in results(tmp_path / "run"):
        assert one["error"].startswith("broken: ")
        assert one["text"]


@pytest.mark.slow
async def test_a_signal_ends_the_run_and_its_engines(tmp_path: Path) -> None:
    pool, questions = write_pool(tmp_path), write_questions(tmp_path, 40)
    async with running_command(
        "batch", "run", str(pool), "--data", str(questions), "--out", str(tmp_path / "r")
    ) as it:
        await it.line_with("answers 40 prompts", limit_s=LIMIT_S)
        engines = it.started()
        it.signal(signal.SIGTERM)
        code, _ = await it.ended(limit_s=LIMIT_S)
    assert code == 143
    assert survivors(engines) == set()


@pytest.mark.slow
async def test_profiles_are_measured_written_and_used(tmp_path: Path) -> None:
    pool, questions = write_pool(tmp_path), write_questions(tmp_path, 6)
    (tmp_path / "costs.yaml").unlink()
    async with running_command(
        "batch", "profile", str(pool), "--data", str(questions), "--sizes", "1,2"
    ) as command:
        code, printed = await command.ended(limit_s=LIMIT_S)
    assert code == 0, printed
    costs = yaml.safe_load((tmp_path / "costs.yaml").read_text())
    assert set(costs["models"]) == {"small", "medium"}
    for measured in [*costs["models"].values(), costs["aggregator"]]:
        assert measured["load_s"] > 0
        assert [run["prompts"] for run in measured["runs"]] == [1, 1, 2, 2]
    code, printed = await ran(pool, "--data", questions, "--out", tmp_path / "run")
    assert code == 0, printed
