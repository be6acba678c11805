"""Which experts of a pool answer which questions."""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from shell_router.batch.questions import Question
from shell_router.batch.recruit import Floats, recruited, skill_scores, skills_alike, texts_alike
from shell_router.batch.results import Result, read_results
from shell_router.config.pool import Pool
from shell_router.errors import ConfigError
from shell_router.wiring.embedding import running_embedder


async def recruit(pool: Pool, questions: Sequence[Question], seed: int) -> Mapping[str, tuple[str, ...]]:
    """Per question the experts that its line names, or those that are drawn for it. Raises ConfigError."""
    names, number = pool.expert_names, min(pool.recruit.experts, len(pool.expert_names))
    open_to = [question for question in questions if not question.experts]
    scores = np.ones((len(open_to), len(names)))
    if open_to and number < len(names) and pool.recruit.skills is not None:
        scores = await _scores(pool, open_to, _answered(read_results(pool.recruit.skills), names))
    drawn = {
        question.id: recruited(
            dict(zip(names, map(float, row), strict=True)), number, random.Random(f"{seed}/{question.id}")
        )
        for question, row in zip(open_to, scores, strict=True)
    }
    return {question.id: question.experts or drawn[question.id] for question in questions}


def _answered(results: Sequence[Result], names: Sequence[str]) -> list[Result]:
    """Those questions that all experts answered, and of which the right answer is known."""
    found = [
        result
        for result in results
        if set(names) <= {expert.model for expert in result.experts if expert.right is not None}
    ]
    if not found:
        raise ConfigError(
            "recruit.skills: in that run no question with a known answer was answered by all experts.",
            remedy="Run questions that have an answer, with recruit.experts as many as there are.",
        )
    return found


async def _scores(pool: Pool, asked: Sequence[Question], known: Sequence[Result]) -> Floats:
    """[asked, experts], by the skills that lines name, or where these or those of the run name none by their texts."""
    rights = [{expert.model: bool(expert.right) for expert in result.experts} for result in known]
    scored = np.array([[one[name] for name in pool.expert_names] for one in rights], dtype=float)
    if all(question.skills for question in asked) and any(one.skills for one in known):
        alike = skills_alike([one.skills for one in asked], [frozenset(one.skills) for one in known])
        return skill_scores(alike, scored)
    async with running_embedder(pool.embedder) as running:
        if running.embedder is None:
            raise ConfigError(
                "embedder.model is none, and not all questions name skills.", remedy="Name an embedding model."
            )
        texts = [*(one.text for one in asked), *(one.question for one in known)]
        vectors = np.array([(await running.embedder.embed(text)).mean(axis=0) for text in texts], dtype=float)
    return skill_scores(texts_alike(vectors[: len(asked)], vectors[len(asked) :]), scored)
