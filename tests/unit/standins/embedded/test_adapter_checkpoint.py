"""Made-up adapters: deterministic, varied, and in PEFT's form."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.adapters.made import make_adapter
from benchmarks.random_checkpoint import make_checkpoint
from shell_router.errors import ConfigError

ROOT = Path(__file__).parents[4]


def test_equal_arguments_give_equal_files_and_another_seed_other_weights(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    first, again, other = (
        make_adapter(tmp_path / name, model, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_shapes_follow_the_model_and_the_arguments(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, ROOT / "models/large", rank=3, modules=("q_proj", "down_proj"))
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["target_modules"]) == (3, ["q_proj", "down_proj"])
    with safe_open(folder / "adapter_model.safetensors", "np") as weights:
        assert len(list(weights.keys())) == 4 * 2 * 2
        down = "base_model.model.model.layers.3.mlp.down_proj"
        assert weights.get_tensor(f"{down}.lora_A.weight").shape == (3, 576)
        assert weights.get_tensor(f"{down}.lora_B.weight").shape == (192, 3)


def test_modules_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qkv_proj"):
        make_adapter(tmp_path / "adapter", make_checkpoint(tmp_path / "model"), modules=("qkv_proj",))
