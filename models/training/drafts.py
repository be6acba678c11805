"""What proposers wrote, and what of it an aggregator gets to read."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.problems import Problem

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Drafted:
    """A problem, and per size what its proposers wrote, as token ids without the end of turn."""

    problem: Problem
    drafts: Mapping[str, Sequence[Ids]]


def draw_drafts(rng: random.Random, drafted: Drafted) -> list[Ids]:
    """One to three rounds of every size, as clusters and layers have them; in a third of the cases
    without some.
    """
    rounds = rng.choice((1, 1, 1, 1, 2, 3))
    order = list(drafted.drafts)
    if rng.random() < 0.25:
        rng.shuffle(order)
    orders = {
        size: rng.sample(range(len(drafts)), rounds) for size, drafts in drafted.drafts.items()
    }
    drawn = [drafted.drafts[size][orders[size][at]] for at in range(rounds) for size in order]
    if rng.random() < 0.35:
        kept = sorted(rng.sample(range(len(drawn)), rng.randint(1, len(drawn) - 1)))
        drawn = [drawn[at] for at in kept]
    return drawn


def write_drafts(file: Path, drafts: Sequence[Sequence[Ids]]) -> None:
    """One line per problem."""
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(one) + "\n" for one in drafts), encoding="utf-8")
    part.replace(file)


def read_drafts(file: Path) -> list[list[Ids]]:
    """What `write_drafts` wrote."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
