"""An adapter's configuration: what is read of it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from shell_router.standins.embedded.adapter_files import AdapterConfig, AdapterRefused, read_adapter_config

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


def read(folder: Path, config: Any) -> AdapterConfig:
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_adapter_config(folder, max_rank=16)


def test_the_scaling_is_alpha_over_the_rank(tmp_path: Path) -> None:
    assert read(tmp_path, PLAIN) == AdapterConfig(4, 2.0, ("q_proj", "v_proj"))


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_its_rank(tmp_path: Path) -> None:
    assert read(tmp_path, {**PLAIN, "use_rslora": True}).scaling == 4.0


def test_modules_may_be_named_by_path_or_be_all(tmp_path: Path) -> None:
    assert read(tmp_path, {**PLAIN, "target_modules": ["layers.0.mlp.up_proj"]}).modules == ("up_proj",)
    assert read(tmp_path, {**PLAIN, "target_modules": "all-linear"}).modules is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 17}, "rank 17 is over the server's limit of 16"),
        ({"r": 0}, "r is 0"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head'"),
        ({"target_modules": ".*_proj"}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterRefused, match=named):
        read(tmp_path, {**PLAIN, **changes})


def test_a_file_that_is_missing_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json is missing"):
        read_adapter_config(tmp_path, max_rank=16)
    (tmp_path / "adapter_config.json").write_bytes(b"\xff{")
    with pytest.raises(AdapterRefused, match="cannot be read"):
        read_adapter_config(tmp_path, max_rank=16)
    with pytest.raises(AdapterRefused, match="not a JSON object"):
        read(tmp_path, [1])
