"""A tiny model with an adapter merged by hand."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_torch_file
from transformers import AutoModelForCausalLM


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
    weights = {
        name: tensor.double()
        for name, tensor in load_torch_file(folder / "adapter_model.safetensors").items()
    }
    for name, down in weights.items():
        if name.endswith(".lora_A.weight"):
            linear = network.get_submodule(
                name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            )
            linear.weight.data += scaling * weights[name.replace("lora_A", "lora_B")] @ down
    return network
