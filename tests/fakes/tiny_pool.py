"""A pool of the tiny models on embedded workers, and questions for it."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COSTS = {"load_s": 1.0, "mean_tokens": 30.0, "max_tokens": 96.0, "start_s": 0.0, "step_s": 0.0}


def write_pool(folder: Path, **changed: Any) -> Path:
    """Two experts and an aggregator on two workers, greedy, with costs that nobody has measured."""
    models = {name: {"path": str(ROOT / "models" / name)} for name in ("small", "medium", "large")}
    greedy = {"temperature": 0, "max_new_tokens": 96}
    pool = {
        "models": models,
        "experts": ["small", "medium"],
        "workers": [{"embedded": {}}, {"embedded": {}}],
        "sampling": greedy,
        "aggregate": {"model": "large", "tau": 1, "sampling": greedy},
        "profile": "costs.yaml",
        **changed,
    }
    write_costs(folder, *pool["models"])
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump(pool))
    return file


def write_costs(folder: Path, *models: str) -> Path:
    """A profile that nobody has measured; each model is slower than the one before."""
    costs = {name: {**COSTS, "token_s": 0.001 * (1 + place)} for place, name in enumerate(models)}
    file = folder / "costs.yaml"
    file.write_text(yaml.safe_dump({"models": costs, "aggregator": costs["large"]}))
    return file


def write_questions(folder: Path, number: int) -> Path:
    """A file of the first test questions."""
    file = folder / "questions.jsonl"
    lines = (ROOT / "models/data/test.jsonl").read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:number]))
    return file
