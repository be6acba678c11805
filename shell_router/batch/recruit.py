"""Which models answer a question: those that were right about questions like it (MOSAIC, section 3;
Symbolic-MoE).
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from shell_router.batch.prompts import Result
from shell_router.core.statistics import Floats
from shell_router.errors import ConfigError

NEIGHBORS = 32
LEAST_WEIGHT = 0.01
"""Of a model that was never right, so that a few questions do not rule it out for good."""


def skill_similarity(asked: Sequence[frozenset[str]], known: Sequence[frozenset[str]]) -> Floats:
    """[asked, known]: the skills that two questions share, as a share of all that they have
    (Jaccard).
    """
    return np.array(
        [[len(one & other) / (len(one | other) or 1) for other in known] for one in asked]
    )


def text_similarity(asked: Floats, known: Floats) -> Floats:
    """[asked, known]: cosine of embeddings [asked, dimensions] and [known, dimensions], nearest
    neighbors alone.
    """
    alike = np.clip(_unit(asked) @ _unit(known).T, 0.0, None)
    if alike.shape[1] > NEIGHBORS:
        least = np.partition(alike, -NEIGHBORS, axis=1)[:, -NEIGHBORS, None]
        return np.where(alike >= least, alike, 0.0)
    return alike


def _unit(vectors: Floats) -> Floats:
    lengths: Floats = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def skill_scores(alike: Floats, known: Floats) -> Floats:
    """[asked, models]: the mean of each model's scores `known` [known, models], each 0 to 1.

    Known questions are weighed by how `alike` [asked, known] they are; a question that is like none
    gets the mean.
    """
    total = alike.sum(axis=1, keepdims=True)
    weighed = (alike @ known) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, weighed, known.mean(axis=0))


def recruited(scores: Mapping[str, float], number: int, rng: random.Random) -> tuple[str, ...]:
    """`number` different models, at most all, drawn one after the other by their scores, in the
    order of `scores`.
    """
    left = {name: max(score, LEAST_WEIGHT) for name, score in scores.items()}
    drawn: set[str] = set()
    for _ in range(number):
        (one,) = rng.choices(list(left), list(left.values()))
        drawn.add(one)
        del left[one]
    return tuple(name for name in scores if name in drawn)


def answered_by_all(results: Sequence[Result], names: Sequence[str]) -> list[Result]:
    """The questions that all models answered, and of which the right answer is known. Raises
    ConfigError.
    """
    found = [
        result
        for result in results
        if set(names)
        <= {proposal.model for proposal in result.proposals if proposal.right is not None}
    ]
    if not found:
        raise ConfigError(
            (
                "recruit.skills: in that run no question with a known answer was answered by all "
                "proposers."
            ),
            remedy=(
                "Run questions that have an answer, with recruit.proposers as many as there are."
            ),
        )
    return found
