"""Folders of LoRA adapters."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_adapters(folder: Path, names: Iterable[str], rank: int = 8) -> Mapping[str, Path]:
    """A PEFT folder without weights for each, which is all that a scripted server looks at."""
    found = {}
    for name in names:
        at = folder / name
        at.mkdir(parents=True)
        (at / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
        )
        found[name] = at
    return found
