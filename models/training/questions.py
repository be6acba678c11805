"""Writes the committed questions: 2000 to test with and 1000 to calibrate with.

    python -m training.questions        (in the folder models)

Training makes up its stories as it goes, and leaves out those that happen to be in these files.
"""

import json
import random
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from training.problems import problems

FOLDER = Path(__file__).parents[1] / "data"
SETS = {"test": 2000, "calibration": 1000}


def held_out() -> frozenset[str]:
    """The questions of both files."""
    lines = [line for name in SETS for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return frozenset(json.loads(line)["question"] for line in lines)


def main() -> None:
    """Write both files; equal seeds write equal files."""
    FOLDER.mkdir(exist_ok=True)
    for name, size in SETS.items():
        lines = [json.dumps(asdict(one)) + "\n" for one in islice(problems(random.Random(name)), size)]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
