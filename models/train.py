"""Trains a family of tiny models from nothing, and says how good each one is.

    python models/train.py [sizes | specialists] [--work FOLDER] [--out FOLDER]

About an hour on two CPU cores for the sizes. State is saved in the work folder; started again, it
goes on where it was.

1. solve      every size learns to solve problems, along with drills of bare equations
2. samples    every size solves fresh problems as proposers do, at temperature 0.7
3. combine    every size learns to turn those drafts into one answer, and goes on solving
4. measure    accuracy per difficulty on the family's committed test set

Specialists, each of which learns the problems of one topic, only solve.

One process per core, each with one thread, so that the numbers do not depend on how threads share
the work.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[variable] = "1"

from training import stages  # noqa: E402 - after the variables above, which PyTorch reads when it loads
from training.family import FAMILIES  # noqa: E402
from training.measuring import as_table  # noqa: E402
from training.questions import FOLDER  # noqa: E402

HERE = Path(__file__).parent
CORES = 2
PLACES = {
    "sizes": (HERE, FOLDER / "test.jsonl"),
    "specialists": (HERE / "specialists", FOLDER / "specialists.jsonl"),
}
"""Per family where its folders are written, and what it is tested with."""


def main() -> None:
    """Run all stages, the longest first."""
    parser = argparse.ArgumentParser(description="Train a family of tiny models.")
    parser.add_argument(
        "family", nargs="?", choices=FAMILIES, default="sizes", help="(default: sizes)"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE / "work", help="where unfinished state is kept"
    )
    parser.add_argument(
        "--out", type=Path, help="where the model folders are written (default: where they are)"
    )
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    family, (place, test) = FAMILIES[chosen.family], PLACES[chosen.family]
    out = chosen.out or place
    longest_first = sorted(
        family, key=lambda name: -family[name].hidden * family[name].solve_tokens
    )
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for stage in (stages.solve, stages.sample, stages.combine):
            _each(pool, stage, longest_first, chosen.work)
        _each(pool, stages.publish, longest_first, chosen.work, out)
        measured = _each(pool, stages.measure, longest_first, out, test)
    by_name = dict(zip(longest_first, measured, strict=True))
    report = {name: by_name[name] for name in family}
    (out / "measured.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(as_table(report))


def _each(
    pool: ProcessPoolExecutor, stage: Callable[..., Any], names: Sequence[str], *arguments: Path
) -> list[Any]:
    return [done.result() for done in [pool.submit(stage, name, *arguments) for name in names]]


if __name__ == "__main__":
    main()
