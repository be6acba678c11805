"""Recruiting: models that were right about similar questions (MOSAIC, section 3; Symbolic-MoE)."""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from shell_router.batch.prompts import Result
from shell_router.core.statistics import Floats
from shell_router.errors import ConfigError

NEIGHBORS = 32
LEAST_WEIGHT = 0.01
"""The weight of a model that was never right: a few questions do not rule it out for good."""


def compare_skills(new: Sequence[frozenset[str]], graded: Sequence[frozenset[str]]) -> Floats:
    """Return the Jaccard similarity [new, graded] of the questions' skills."""

    def compare(skills: frozenset[str], other: frozenset[str]) -> float:
        return len(skills & other) / (len(skills | other) or 1)

    return np.array([[compare(skills, other) for other in graded] for skills in new])


def compare_texts(new: Floats, graded: Floats) -> Floats:
    """Return the cosine similarity [new, graded], 0 beyond the nearest `NEIGHBORS`.

    Args:
        new: Embeddings [new, dimensions].
        graded: Embeddings [graded, dimensions].
    """
    similarity = np.clip(_normalize(new) @ _normalize(graded).T, 0.0, None)
    if similarity.shape[1] > NEIGHBORS:
        least = np.partition(similarity, -NEIGHBORS, axis=1)[:, -NEIGHBORS, None]
        return np.where(similarity >= least, similarity, 0.0)
    return similarity


def _normalize(vectors: Floats) -> Floats:
    lengths: Floats = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def weigh_scores(similarity: Floats, graded: Floats) -> Floats:
    """Return each model's score [new, models]: the mean over graded questions, by similarity.

    A question that is like no other gets the plain mean.

    Args:
        similarity: Similarity [new, graded] of the questions.
        graded: Scores [graded, models] from 0 to 1.
    """
    total = similarity.sum(axis=1, keepdims=True)
    weighed = (similarity @ graded) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, weighed, graded.mean(axis=0))


def draw_proposers(scores: Mapping[str, float], number: int, rng: random.Random) -> tuple[str, ...]:
    """Draw `number` models without replacement, by their scores; return them in `scores`' order."""
    left = {name: max(score, LEAST_WEIGHT) for name, score in scores.items()}
    drawn: set[str] = set()
    for _ in range(number):
        (name,) = rng.choices(list(left), list(left.values()))
        drawn.add(name)
        del left[name]
    return tuple(name for name in scores if name in drawn)


def list_graded(results: Sequence[Result], names: Sequence[str]) -> list[Result]:
    """Return the results in which all models' answers are graded. Raises ConfigError if none is."""
    graded = []
    for result in results:
        models = {proposal.model for proposal in result.proposals if proposal.right is not None}
        if models.issuperset(names):
            graded.append(result)
    if not graded:
        raise ConfigError(
            "recruit.skills: in that run no question with a known answer was answered by all "
            "proposers.",
            remedy="Run questions that have an answer, and set recruit.proposers to all of them.",
        )
    return graded
