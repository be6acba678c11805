"""Trains the family of tiny models from nothing, and says how good each one is.

    python models/train.py [--work FOLDER] [--out FOLDER]

About an hour on two CPU cores. State is saved in the work folder; started again, it goes on where it was.

1. solve      every size learns to solve problems, along with drills of bare equations
2. samples    every size solves fresh problems as proposers do, at temperature 0.7
3. combine    every size learns to turn those drafts into one answer, and goes on solving
4. measure    accuracy per difficulty on the committed test set

One process per core, each with one thread, so that the numbers do not depend on how threads share the work.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[variable] = "1"

from training import stages  # noqa: E402 - after the variables above, which PyTorch reads when it loads
from training.family import SIZES  # noqa: E402
from training.measuring import as_table  # noqa: E402

HERE = Path(__file__).parent
LONGEST_FIRST = ("large", "medium", "small")
CORES = 2


def main() -> None:
    """Run all stages."""
    parser = argparse.ArgumentParser(description="Train the tiny model family.")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="where unfinished state is kept")
    parser.add_argument("--out", type=Path, default=HERE, help="where the three model folders are written")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for stage in (stages.solve, stages.sample, stages.combine):
            _each(pool, stage, chosen.work)
        _each(pool, stages.publish, chosen.work, chosen.out)
        measured = _each(pool, stages.measure, chosen.out, HERE / "data" / "test.jsonl")
    by_size = dict(zip(LONGEST_FIRST, measured, strict=True))
    report = {size: by_size[size] for size in SIZES}
    (chosen.out / "measured.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(as_table(report))


def _each(pool: ProcessPoolExecutor, stage: Callable[..., Any], *arguments: Path) -> list[Any]:
    return [done.result() for done in [pool.submit(stage, size, *arguments) for size in LONGEST_FIRST]]


if __name__ == "__main__":
    main()
