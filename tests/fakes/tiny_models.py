"""A tiny mixture-of-experts checkpoint, and a model with an adapter merged by hand."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file
from transformers import AutoModelForCausalLM

from benchmarks.random_checkpoint import make_checkpoint

LAYERS, EXPERTS, TOP_K = 4, 16, 4


def make_moe_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """`LAYERS` layers, each of `EXPERTS` experts of which a token chooses `TOP_K`; some are chosen far more often."""
    make_checkpoint(folder, layers=LAYERS, seed=seed, context_length=2048)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config["hidden_size"] // 2
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {name: value for name, value in load_file(folder / "model.safetensors").items() if ".mlp." not in name}
    draw = np.random.default_rng(seed)
    for layer in range(LAYERS):
        weights |= _experts(f"model.layers.{layer}.mlp", config["hidden_size"], inner, draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _experts(prefix: str, hidden: int, inner: int, draw: np.random.Generator) -> dict[str, np.ndarray]:
    def drawn(rows: int, columns: int, scale: float) -> np.ndarray:
        return (scale * draw.standard_normal((rows, columns))).astype(np.float32)

    loudness = draw.lognormal(0, 0.5, (EXPERTS, 1)).astype(np.float32)
    weights = {f"{prefix}.gate.weight": loudness * drawn(EXPERTS, hidden, hidden**-0.5)}
    for expert in range(EXPERTS):
        of = f"{prefix}.experts.{expert}"
        weights[f"{of}.gate_proj.weight"] = drawn(inner, hidden, hidden**-0.5)
        weights[f"{of}.up_proj.weight"] = drawn(inner, hidden, hidden**-0.5)
        weights[f"{of}.down_proj.weight"] = drawn(hidden, inner, inner**-0.5)
    return weights


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that share a busy machine make tiny products a hundred times as slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def plain(model: Path) -> Any:
    """The network of the model in that folder, in float64."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()


def merge(model: Path, folder: Path) -> Any:
    """The same with the adapter in `folder` merged."""
    network = plain(model)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    weights = {name: tensor.double() for name, tensor in load_torch_file(folder / "adapter_model.safetensors").items()}
    for name, down in weights.items():
        if name.endswith(".lora_A.weight"):
            linear = network.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            linear.weight.data += scaling * weights[name.replace("lora_A", "lora_B")] @ down
    return network
