"""The sampling parameters that a model has where neither a topology nor a request sets them."""

import json
from pathlib import Path
from typing import Any

import pytest

from shell_router.app.model_files import read_files
from shell_router.config import Config, ModelSettings, read_config
from shell_router.errors import ConfigError, ShellRouterError
from tests.fakes.tokenizers_of_every_kind import write_folder

FILE = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": [1]}


def model_folder(folder: Path, generation: Any = None) -> Path:
    write_folder(folder, "gpt2")
    config = {"vocab_size": 500, "max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        file = folder / "generation_config.json"
        file.write_text(json.dumps(generation), encoding="utf-8")
    return folder


def deployment(folder: Path, model: dict[str, Any]) -> Config:
    file = folder / "deployment.yaml"
    file.write_text(json.dumps({"models": {"m": model}}), encoding="utf-8")
    return read_config(file, {})


@pytest.mark.parametrize(
    ("generation", "setting", "right"),
    [
        (None, {}, {}),
        (FILE, {}, {"temperature": 0.6, "top_k": 20}),
        (FILE, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 20}),
        ({"top_k": 0}, {"top_k": -1}, {"top_k": -1}),
        (None, {"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ],
    ids=["none", "the file's", "the setting above it", "a wrong file corrected", "the setting's"],
)
def test_the_models_file_is_read_below_the_deployments_setting(
    tmp_path: Path, generation: Any, setting: dict[str, Any], right: dict[str, Any]
) -> None:
    folder = model_folder(tmp_path, generation)
    config = deployment(tmp_path, {"path": str(folder), "sampling": setting})
    assert read_files(config.models)["m"].sampling == right


@pytest.mark.parametrize("generation", [{"top_k": 0}, {"temperature": "hot"}])
def test_a_file_that_engines_would_refuse_is_named_with_a_remedy(
    tmp_path: Path, generation: Any
) -> None:
    folder = model_folder(tmp_path, generation)
    with pytest.raises(ShellRouterError, match=r"generation_config\.json .*models\.m\.sampling"):
        read_files({"m": ModelSettings(folder)})


@pytest.mark.parametrize("setting", [{"temprature": 1}, {"max_new_tokens": 5}])
def test_a_setting_that_no_model_has_is_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.sampling"):
        deployment(tmp_path, {"path": "m", "sampling": setting})
