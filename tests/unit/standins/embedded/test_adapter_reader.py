"""Adapters into memory: their factors, and what of a folder is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.adapters.made import make_adapter
from benchmarks.random_checkpoint import make_checkpoint
from shell_router.standins.embedded.adapter_files import AdapterRefused
from shell_router.standins.embedded.adapters import AdapterReader

SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }.items()
}
K = "base_model.model.model.layers.1.self_attn.k_proj"


def reader(dtype: torch.dtype = torch.float64, max_rank: int = 8) -> AdapterReader:
    return AdapterReader(shapes=SHAPES, max_rank=max_rank, dtype=dtype, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_adapter(tmp_path / "adapter", model)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Change tensors of the file, or leave those out that are None."""
    found: dict[str, Tensor | None] = {**weights_of(folder), **changes}
    kept = {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}
    save_file(kept, folder / "adapter_model.safetensors")


def test_the_factors_are_a_and_scaled_b_of_every_layer(folder: Path) -> None:
    adapter = reader()("mine", str(folder))
    weights = weights_of(folder)
    assert adapter.factors.keys() == SHAPES.keys()
    down, up = adapter.factors["model.layers.1.self_attn.k_proj"]
    assert torch.equal(down, weights[f"{K}.lora_A.weight"].double())
    assert torch.equal(up, weights[f"{K}.lora_B.weight"].double() * 2.0)


def test_factors_have_the_models_numbers(folder: Path) -> None:
    factors = reader(torch.bfloat16)("mine", str(folder)).factors.values()
    assert {tensor.dtype for pair in factors for tensor in pair} == {torch.bfloat16}


def test_each_loading_is_an_adapter_of_its_own_and_equal_files_have_one_fingerprint(folder: Path, model: Path) -> None:
    read = reader()
    first, again = read("mine", str(folder)), read("mine", str(folder))
    make_adapter(folder, model, seed=9)
    other = read("mine", str(folder))
    assert len({first, again, other}) == 3
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_another_scaling_is_another_fingerprint(folder: Path) -> None:
    first = reader()("mine", str(folder))
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}), encoding="utf-8")
    assert reader()("mine", str(folder)).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{K}.lora_A.weight": None}, "has no lora_A"),
        ({f"{K}.lora_A.weight": torch.zeros(4, 32)}, r"A \[4, 32\] and B \[32, 4\], .* needs \[4, 64\] and \[32, 4\]"),
        ({f"{K}.lora_B.weight": torch.zeros(32, 3)}, r"B \[32, 3\]"),
        ({f"{K}.lora_A.weight": torch.full((4, 64), torch.nan)}, "not finite"),
        ({f"{K}.lora_magnitude_vector": torch.zeros(32)}, "lora_magnitude_vector"),
        ({"base_model.model.lm_head.weight": torch.zeros(3)}, "lm_head"),
        (
            {
                "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.model.layers.7.mlp.up_proj.lora_B.weight": torch.zeros(128, 4),
            },
            r"no layer 'model\.layers\.7\.mlp\.up_proj'",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_their_name(folder: Path, changes: dict[str, Any], words: str) -> None:
    rewrite(folder, changes)
    with pytest.raises(AdapterRefused, match=words):
        reader()("mine", str(folder))


def test_a_scaling_that_is_not_finite_is_refused(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": float("inf")}), "utf-8")
    with pytest.raises(AdapterRefused, match=r"lora_B\.weight has numbers that are not finite"):
        reader()("mine", str(folder))


def test_a_device_that_cannot_take_it_is_a_refusal(folder: Path) -> None:
    nowhere = AdapterReader(shapes=SHAPES, max_rank=8, dtype=torch.float32, device=torch.device("vulkan"))
    with pytest.raises(AdapterRefused, match="cannot be read"):
        nowhere("mine", str(folder))


def test_weights_and_target_modules_must_name_the_same(tmp_path: Path, model: Path) -> None:
    folder = make_adapter(tmp_path, model, modules=("q_proj",))
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    for modules, words in ((["q_proj", "v_proj"], "no weights for v_proj"), (["v_proj"], "v_proj")):
        (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": modules}), "utf-8")
        with pytest.raises(AdapterRefused, match=words):
            reader()("mine", str(folder))


def test_a_rank_over_the_limit_is_refused(folder: Path) -> None:
    with pytest.raises(AdapterRefused, match="rank 4 is over"):
        reader(max_rank=3)("mine", str(folder))


def test_missing_and_torn_files_are_refused(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(AdapterRefused, match="cannot be read"):
        reader()("mine", str(folder))
    weights.unlink()
    with pytest.raises(AdapterRefused, match=r"adapter_model\.safetensors is missing"):
        reader()("mine", str(folder))
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json is missing"):
        reader()("mine", str(folder / "nowhere"))
