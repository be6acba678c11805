"""LoRA adapters as PEFT folders: their configuration, read and checked. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shell_router.errors import InvalidRequest

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a Qwen3 or Llama block that an adapter may change."""
ALL_LINEAR = "all-linear"

# Each changes what is computed in a way that is not done here; SGLang refuses the first and overlooks most others.
UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


class AdapterRefused(InvalidRequest):
    """An adapter cannot be loaded, or is not there to be unloaded."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a folder says of its adapter: W becomes W + scaling * B A, A having `rank` rows and B as many columns.

    `modules` names what it changes, None where it names all linear layers.
    """

    rank: int
    scaling: float
    modules: tuple[str, ...] | None


def read_adapter_config(folder: Path, *, max_rank: int) -> AdapterConfig:
    """Read and check the folder's configuration. Raises `AdapterRefused`."""
    path = folder / "adapter_config.json"
    config = _json(path)
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise AdapterRefused(f"{path}: peft_type {config['peft_type']!r} is no LoRA.", remedy="Load a LoRA adapter.")
    found = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append("bias")
    if found:
        raise AdapterRefused(
            f"{path}: {found[0]} = {config[found[0]]!r} is not supported.", remedy="Train the adapter without it."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise AdapterRefused(f"{path}: r is {rank!r}, no rank.", remedy="It must be a whole number above zero.")
    if rank > max_rank:
        raise AdapterRefused(
            f"{path}: rank {rank} is over the server's limit of {max_rank}.",
            remedy="Start the server with a higher max_rank (--max-lora-rank).",
        )
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise AdapterRefused(f"{path}: lora_alpha is {alpha!r}, no number.", remedy="Save the adapter anew.")
    # the root where the adapter was trained rank-stabilised
    scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return AdapterConfig(rank, scaling, _modules(path, config.get("target_modules")))


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise AdapterRefused(f"{path} is missing.", remedy="Name the folder of an adapter that PEFT saved.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterRefused(f"{path} cannot be read: {error}.", remedy="Save the adapter anew.") from error
    if not isinstance(content, dict):
        raise AdapterRefused(f"{path} is not a JSON object.", remedy="Save the adapter anew.")
    return content


def _modules(path: Path, targets: Any) -> tuple[str, ...] | None:
    if targets == ALL_LINEAR:
        return None
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
        raise AdapterRefused(
            f"{path}: target_modules is {targets!r}.", remedy=f"Name modules in a list, or write {ALL_LINEAR!r}."
        )
    names = tuple(each.rpartition(".")[2] for each in targets)
    if unknown := [name for name in names if name not in MODULES]:
        raise AdapterRefused(
            f"{path}: target module {unknown[0]!r} is not supported.", remedy=f"Supported are {', '.join(MODULES)}."
        )
    return names
