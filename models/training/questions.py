"""Writes the committed questions: 2000 to test with, 1000 to calibrate with, and 1000 to test
specialists with.

    python -m training.questions        (in the folder models)

Training makes up its stories as it goes, and leaves out those that happen to be in these files.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from training.problems import TOPICS, Problem, Topic, problems

FOLDER = Path(__file__).parents[1] / "data"
SETS: Mapping[str, tuple[int, Sequence[Topic]]] = {
    "test": (2000, ()),
    "calibration": (1000, ()),
    "specialists": (1000, TOPICS),
}


def held_out() -> frozenset[str]:
    """The questions of all files."""
    lines = [
        line
        for name in SETS
        for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return frozenset(json.loads(line)["question"] for line in lines)


def as_line(problem: Problem) -> str:
    """One line of a data file; a topic is a label, so that `shell-router eval` sends it along."""
    found = asdict(problem)
    topic = found.pop("topic")
    return json.dumps({**found, "metadata": {"topic": topic}} if topic else found) + "\n"


def read_problems(file: Path) -> list[Problem]:
    """What `as_line` wrote."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Problem(**{**one.pop("metadata", {}), **one}) for one in lines]


def main() -> None:
    """Write the files; equal seeds write equal files."""
    FOLDER.mkdir(exist_ok=True)
    for name, (size, topics) in SETS.items():
        lines = [as_line(one) for one in islice(problems(random.Random(name), topics=topics), size)]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
