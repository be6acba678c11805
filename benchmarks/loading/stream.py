"""A stream of requests: who asks which model, when, with what of a prompt, and how much comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

IDS = 256
"""Token ids are below it, which every vocabulary here exceeds."""
FREQUENT = 4
"""The first user asks so many times as often as any other."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of users asks: tokens that all prompts of one user begin with, others in the mean, and of outputs."""

    shared: int
    own: int
    output: int


KINDS: Mapping[str, Kind] = {
    "question": Kind(40, 60, 48),
    "chat": Kind(600, 60, 64),
    "document": Kind(0, 1200, 32),
}
USERS: Mapping[str, str] = {
    **{f"asks {number}": "question" for number in range(5)},
    **{f"talks {number}": "chat" for number in range(3)},
    **{f"reads {number}": "document" for number in range(2)},
}
"""By user the kind."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: at so many gaps of the mean after the first, by a user, of a model, with tokens as in Kind."""

    at: float
    user: str
    model: str
    shared: int
    own: int
    output: int

    def ids(self, number: int, salt: str) -> list[int]:
        """Its prompt as the `number`-th of a run; runs of another `salt` share nothing with it."""
        begins, goes_on = Random(f"{salt}/{self.user}"), Random(f"{salt}/{number}")
        return begins.choices(range(IDS), k=self.shared) + goes_on.choices(range(IDS), k=self.own)


def stream(count: int, models: Mapping[str, float], scale: float, seed: int) -> list[Asked]:
    """So many requests, Poisson, of models by their shares; lengths are `scale` times those of KINDS."""
    draws, at, found = Random(f"stream/{seed}"), 0.0, list[Asked]()
    users = list(USERS)
    often = [float(FREQUENT)] + [1.0] * (len(users) - 1)
    for _ in range(count):
        at += draws.expovariate(1.0)
        (user,) = draws.choices(users, often)
        (model,) = draws.choices(list(models), list(models.values()))
        found.append(_asked(at, user, model, scale, draws))
    return found


def alone(models: Sequence[str], scale: float) -> list[Asked]:
    """One request of every kind and model, of the mean lengths."""
    by_kind = {kind: user for user, kind in USERS.items()}
    return [
        Asked(0.0, user, model, round(scale * one.shared), round(scale * one.own), round(scale * one.output))
        for kind, user in by_kind.items()
        for model in models
        for one in (KINDS[kind],)
    ]


def _asked(at: float, user: str, model: str, scale: float, draws: Random) -> Asked:
    kind = KINDS[USERS[user]]
    own = max(1, round(scale * kind.own * draws.uniform(0.5, 1.5)))
    return Asked(
        at, user, model, round(scale * kind.shared), own, max(2, round(scale * kind.output * draws.uniform(0.5, 1.5)))
    )
