"""Which experts answer a question: those that were right about questions like it (MOSAIC, section 3; Symbolic-MoE)."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shell_router.errors import ConfigError

Floats = NDArray[np.float64]
NEIGHBOURS = 32
LEAST = 0.01
"""What an expert that was never right still weighs, so that a few questions do not rule it out for good."""


def skills_alike(asked: Sequence[frozenset[str]], known: Sequence[frozenset[str]]) -> Floats:
    """[asked, known]: the skills that two questions share, as a share of all that they have (Jaccard)."""
    return np.array([[len(one & other) / (len(one | other) or 1) for other in known] for one in asked])


def texts_alike(asked: Floats, known: Floats) -> Floats:
    """[asked, known]: cosine of embeddings [asked, dimensions] and [known, dimensions], nearest neighbours alone."""
    alike = np.clip(_unit(asked) @ _unit(known).T, 0.0, None)
    if alike.shape[1] > NEIGHBOURS:
        least = np.partition(alike, -NEIGHBOURS, axis=1)[:, -NEIGHBOURS, None]
        return np.where(alike >= least, alike, 0.0)
    return alike


def _unit(vectors: Floats) -> Floats:
    lengths: Floats = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def skill_scores(alike: Floats, known: Floats) -> Floats:
    """[asked, experts]: the mean of each expert's scores `known` [known, experts], each 0 to 1.

    Known questions are weighed by how `alike` [asked, known] they are; a question that is like none gets the mean.
    """
    total = alike.sum(axis=1, keepdims=True)
    weighed = (alike @ known) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, weighed, known.mean(axis=0))


def recruited(scores: Mapping[str, float], number: int, rng: random.Random) -> tuple[str, ...]:
    """`number` different experts, drawn one after the other by their scores, in the order of `scores`.

    ConfigError where there are not as many.
    """
    if not 1 <= number <= len(scores):
        raise ConfigError(
            f"{number} experts cannot be recruited of {len(scores)}", remedy=f"Give a number from 1 to {len(scores)}."
        )
    left = {name: max(score, LEAST) for name, score in scores.items()}
    drawn: set[str] = set()
    for _ in range(number):
        (one,) = rng.choices(list(left), list(left.values()))
        drawn.add(one)
        del left[one]
    return tuple(name for name in scores if name in drawn)
