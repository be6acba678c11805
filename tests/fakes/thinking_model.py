"""A model whose chat template knows thinking and tools as Qwen3's does."""

import json
from pathlib import Path

TEMPLATE = Path(__file__).with_name("qwen3.jinja").read_text(encoding="utf-8")


def with_template(folder: Path, opening: str = "") -> Path:
    """Give the model in `folder` the template, which has the assistant begin with `opening`; return
    it.
    """
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["chat_template"] = TEMPLATE + opening
    file.write_text(json.dumps(settings), encoding="utf-8")
    return folder
