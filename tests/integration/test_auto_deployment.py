"""From graded answers and recorded traces to a deployment that chooses: as a user would go."""

from pathlib import Path

import aiohttp
import orjson
import pytest

from shell_router.app import load_config, serve_deployment
from shell_router.cli import main
from shell_router.errors import ConfigError, DataError
from shell_router.lab.evaluation.records import EvaluationOptions, read_graded
from shell_router.lab.evaluation.run import run_evaluation
from tests.fakes.api_server import api
from tests.fakes.evaluations import adding_moa, write_sums
from tests.unit.prediction.test_teaching import tiny_encoder

LIMITS = {"small": 15, "medium": 5, "large": 40}
MODELS = Path(__file__).parents[2] / "models"
DEPLOYMENT = f"""
models:
  small: {{path: {MODELS}/small}}
  large: {{path: {MODELS}/large}}
listen: {{port: 0}}
embedder: {{model: none}}
auto: {{policy: best_score}}
prediction: {{scores: router, limit_s: 30}}
record: {{folder: traces, prompts: true}}
"""


async def graded_sums(folder: Path) -> tuple[Path, Path]:
    """Questions, and records of what models that add up to a limit answered."""
    data, records = write_sums(folder, *range(1, 41)), folder / "records.jsonl"
    async with api(adding_moa(LIMITS)) as served:
        settings = ("small", "large", "duo", "auto")
        options = EvaluationOptions(data, url=served.url, settings=settings, records=records)
        await run_evaluation(options)
    return data, records


async def test_auto_is_asked_as_a_model_and_only_plain_models_teach(tmp_path: Path) -> None:
    data, records = await graded_sums(tmp_path)
    found = read_graded([records], data)
    assert len(found) == 2 * 40
    assert {one.model for one in found} == {"small", "large"}
    assert all(
        one.right == (int(one.question.split()[2]) + 1 <= LIMITS[one.model]) for one in found
    )


async def test_records_of_other_questions_are_named(tmp_path: Path) -> None:
    _, records = await graded_sums(tmp_path)
    with pytest.raises(DataError, match=r"records\.jsonl:\d+: this is no record of a question"):
        read_graded([records], write_sums(tmp_path, 1, 2))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ConfigError, match="no answer of a plain model"):
        read_graded([empty], write_sums(tmp_path, 1, 2))


@pytest.mark.slow
async def test_a_deployment_chooses_by_what_was_trained_and_records_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, records = await graded_sums(tmp_path)
    encoder = str(tiny_encoder(tmp_path / "bert"))
    trained = ["train", "router", str(records), "--data", str(data), "--encoder", encoder, "--out"]
    assert main([*trained, str(tmp_path / "router")]) == 0
    assert "mAP" in capsys.readouterr().out
    (tmp_path / "router.yaml").write_text(DEPLOYMENT, encoding="utf-8")
    config = load_config(tmp_path / "router.yaml", {})
    async with serve_deployment(config) as url, aiohttp.ClientSession() as client:
        await answering(client, url)
        body = {
            "model": "auto",
            "messages": [{"role": "user", "content": "What is 29 + 1?"}],
            "max_tokens": 4,
        }
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-model-choice"].endswith("best_score: best_score")
            trace_id = response.headers["x-trace-id"]
        async with client.get(f"{url}/v1/traces/{trace_id}") as response:
            choice = (await response.json())["choices"][0]
        async with client.get(f"{url}/metrics") as response:
            metrics = await response.text()
    assert set(choice["scores"]) == {"small", "large"}
    assert choice["model"] == max(choice["scores"], key=choice["scores"].get)
    assert (
        f'shell_router_model_choices_total{{model="{choice["model"]}",policy="best_score"'
        in metrics
    )
    lines = recorded(tmp_path / "traces")
    assert [(line["topology"], line["model"], line["user"]) for line in lines] == [
        ("plain request", choice["model"], "What is 29 + 1?")
    ]


async def answering(client: aiohttp.ClientSession, url: str) -> None:
    """Return once the predictor can be asked: until then the router is ready, but degraded."""
    while True:
        async with client.get(f"{url}/ready") as response:
            assert response.status == 200
            if not (await response.json())["degraded"]:
                return


def recorded(folder: Path) -> list[dict[str, object]]:
    return [
        orjson.loads(line)
        for file in folder.glob("*.jsonl")
        for line in file.read_bytes().splitlines()
    ]


def test_names_that_auto_cannot_choose_from_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("models: {auto: {path: m}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="a model is named 'auto'"):
        load_config(file, {})
    file.write_text("models: {small: {path: m}}\nauto: {models: [big]}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'big', which is not among the models"):
        load_config(file, {})
