"""What is asked: lengths of prompts and outputs from traces, and conversations."""

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
    """One request: when it comes, its user, how long prompt and output are, and how much of the
    prompt is the user's.

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
    return (
        draws.uniform(1, sixth) if draws.random() < 0.5 else draws.uniform(LONGEST - sixth, LONGEST)
    )


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
    """`count` requests, Poisson at `per_s`, each of a user of its own, with lengths of `pool` where
    that is given.
    """
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
        pairs = (
            (int(row["Request tokens"]), int(row["Response tokens"]))
            for row in csv.DictReader(rows)
        )
        return [(prompt, output) for prompt, output in pairs if prompt and output]


TURNS, MESSAGE, ANSWER, PAUSE_S, LONGEST_CONVERSATION = 4, 150, 250, 20.0, 8000


def conversations(count: int, per_s: float, seed: int) -> list[Request]:
    """`count` requests of as many users as that takes, `per_s` of them a second in the mean."""
    draws, found, begun_s = Random(f"conversations/{seed}"), list[Request](), 0.0
    while len(found) < count:
        begun_s += draws.expovariate(per_s / TURNS)
        found += _conversation(f"user-{len(found)}", begun_s, draws)
    return sorted(found, key=lambda one: one.at_s)[:count]


SIBLINGS, SHARED, OWN, OUTPUT = 8, 16_000, 200, 300


def fan_outs(count: int, per_s: float, seed: int) -> list[Request]:
    """`count` bursts, Poisson at `per_s`, of siblings that share the beginning of their prompts."""
    draws, found, at_s = Random(f"fan-outs/{seed}"), list[Request](), 0.0
    for number in range(count):
        at_s += draws.expovariate(per_s)
        sibling = Request(at_s, f"burst-{number}", SHARED + OWN, OUTPUT, old=SHARED)
        found += [sibling] * SIBLINGS
    return found


def _conversation(user: str, at_s: float, draws: Random) -> list[Request]:
    turns, said = list[Request](), 0
    while said < LONGEST_CONVERSATION:
        prompt, answer = (
            said + 1 + round(log_normal(draws, MESSAGE)),
            1 + round(log_normal(draws, ANSWER)),
        )
        turns.append(Request(at_s, user, prompt, answer, old=prompt))
        if draws.random() < 1 / TURNS:
            break
        said, at_s = prompt + answer, at_s + draws.expovariate(1 / PAUSE_S)
    return turns
