"""Random LoRA adapters as PEFT folders, for benchmarks and tests."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from shell_router.errors import ConfigError

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: str | Path,
    model: str | Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    modules: Sequence[str] = MODULES,
    strength: float = 0.5,
    rank_stabilised: bool = False,
) -> Path:
    """Write an adapter of the model in folder `model` into `folder`, which SGLang loads as well,
    and return it.

    Equal arguments give equal files; another `seed` gives an adapter that answers otherwise. Each
    of `modules` gets, for inputs of size one, an addition of about size `strength`: 1 is about what
    a layer of a random checkpoint gives itself. SGLang scales rank-stabilised adapters as if they
    were not. Raises `ConfigError`.
    """
    shapes = _shapes(Path(model), modules)
    rng = np.random.default_rng(seed)
    scaling = alpha / (rank**0.5 if rank_stabilised else rank)
    weights = {}
    for linear, (outputs, inputs) in shapes.items():
        down = rng.standard_normal((rank, inputs), np.float32) * inputs**-0.5
        up = rng.standard_normal((outputs, rank), np.float32) * (strength / (scaling * rank**0.5))
        weights[f"base_model.model.{linear}.lora_A.weight"] = down.astype(np.float32)
        weights[f"base_model.model.{linear}.lora_B.weight"] = up.astype(np.float32)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "use_rslora": rank_stabilised,
        "bias": "none",
    }
    (target / "adapter_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
    return target


def _shapes(model: Path, modules: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Outputs and inputs of the model's linear layers of these names, by path, in a fixed order."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "np") as weights:
            for name in sorted(weights.keys()):
                linear = name.removesuffix(".weight")
                if linear.rpartition(".")[2] in modules:
                    outputs, inputs = weights.get_slice(name).get_shape()
                    shapes[linear] = (outputs, inputs)
    if missing := set(modules) - {linear.rpartition(".")[2] for linear in shapes}:
        raise ConfigError(
            f"{model} has no weights for {min(missing)}.",
            remedy=(
                f"Name a model folder with safetensors, and modules out of {', '.join(MODULES)}."
            ),
        )
    return shapes
