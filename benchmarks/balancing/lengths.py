"""Requests as in Gimbal's evaluation (section V-A): lengths after BurstGPT, in five distributions, and their arrivals.

BurstGPT itself is a file of 50 MB that does not come along: `from_burstgpt` reads it where it is at hand. Without it
lengths are drawn: prompts of BurstGPT are taken as log-normal with a mean of 800 tokens and a deviation as large, so
that 97.7 % hold at most 3000 (the paper says 97.6 %), and outputs as log-normal with a mean of 300 and a deviation as
large, as in the first rows of the file. The paper shows its five distributions as a picture only; here they are, over
prompts of 1 to 3000 tokens: Random as drawn, Central triangular around the middle, Descending falling linearly, Two-end
half in the shortest and half in the longest sixth, Average uniform.
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

LONGEST = 3000
MEAN_PROMPT, MEAN_OUTPUT = 800, 300
SIGMA = math.sqrt(math.log(2))  # of a log-normal whose deviation is its mean


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes, its user, how long prompt and output are, and how much of the prompt is the user's.

    The rest of a prompt is like no other's.
    """

    at_s: float
    user: str
    prompt: int
    output: int
    old: int = 0


def log_normal(draws: Random, mean: float) -> float:
    """A length whose deviation is its mean."""
    return draws.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)


def _two_end(draws: Random) -> float:
    sixth = LONGEST / 6
    return draws.uniform(1, sixth) if draws.random() < 0.5 else draws.uniform(LONGEST - sixth, LONGEST)


PROMPTS: Mapping[str, Callable[[Random], float]] = {
    "Random": lambda draws: log_normal(draws, MEAN_PROMPT),
    "Central": lambda draws: draws.triangular(1, LONGEST, LONGEST / 2),
    "Descending": lambda draws: draws.triangular(1, LONGEST, 1),
    "Two-end": _two_end,
    "Average": lambda draws: draws.uniform(1, LONGEST),
}
"""A prompt's tokens, by distribution."""


def requests(
    distribution: str, count: int, per_s: float, seed: int, pool: Sequence[tuple[int, int]] = ()
) -> list[Request]:
    """So many requests, Poisson at `per_s`, each of a user of its own, with lengths of `pool` where that is given."""
    draws = Random(f"{distribution}/{seed}")
    found, at_s = [], 0.0
    for number in range(count):
        at_s += draws.expovariate(per_s)
        prompt = max(1, round(PROMPTS[distribution](draws)))
        output = max(1, round(log_normal(draws, MEAN_OUTPUT)))
        if pool:
            prompt, output = nearest(pool, prompt, draws)
        found.append(Request(at_s, f"user-{number}", prompt, output))
    return found


def nearest(pool: Sequence[tuple[int, int]], prompt: int, draws: Random) -> tuple[int, int]:
    """Of twenty of the real requests the one whose prompt is nearest to the wanted length."""
    return min(draws.choices(pool, k=20), key=lambda one: abs(one[0] - prompt))


def from_burstgpt(file: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of the requests in a BurstGPT file that did not fail."""
    with file.open(newline="", encoding="utf-8") as rows:
        pairs = ((int(row["Request tokens"]), int(row["Response tokens"])) for row in csv.DictReader(rows))
        return [(prompt, output) for prompt, output in pairs if prompt and output]
