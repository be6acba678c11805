"""A stream of requests for many adapters, some of which are wanted far more often than others."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

OUTPUT_TOKENS = (8, 40)
PROMPT_TOKENS = (20, 120)
FIRST_ID = 4
"""Below it lie the tokens that models use for themselves."""


@dataclass(frozen=True)
class Amount:
    """How many requests come from how many clients at a time, for how many adapters, `room` of them loaded."""

    requests: int
    clients: int
    adapters: int
    room: int


@dataclass(frozen=True)
class Asked:
    """One request: its adapter, its prompt and the length of its output."""

    adapter: str
    prompt: Sequence[int]
    tokens: int


def stream(amount: Amount, vocabulary: int, seed: int) -> list[Asked]:
    """Adapter k of n is wanted as often as 1 / k says (Zipf); hardly two prompts begin alike."""
    draw = random.Random(seed)
    weights = list(accumulate(1 / (place + 1) for place in range(amount.adapters)))
    found = []
    for _ in range(amount.requests):
        (number,) = draw.choices(range(amount.adapters), cum_weights=weights)
        prompt = [draw.randrange(FIRST_ID, vocabulary) for _ in range(draw.randint(*PROMPT_TOKENS))]
        found.append(Asked(f"adapter-{number}", prompt, draw.randint(*OUTPUT_TOKENS)))
    return found
