"""A pool's batch: its file, its workers and a run's folder brought together."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import yaml

from shell_router.app.services import running_embedder
from shell_router.batch.api.storage import on_disk
from shell_router.batch.journal import Key, Output, open_journal, replace_file
from shell_router.batch.pool import ALWAYS, SEE, Pool
from shell_router.batch.profile import (
    Load,
    ModelProfile,
    PoolProfile,
    at_their_dearest,
    with_starts,
)
from shell_router.batch.prompts import Batch, Prompt, as_lines, read_results
from shell_router.batch.questions import Question, Questions, read_questions
from shell_router.batch.recruit import (
    answered_by_all,
    recruited,
    skill_scores,
    skill_similarity,
    text_similarity,
)
from shell_router.batch.run import Finished, Follow, run_batch
from shell_router.batch.sessions import Planner, Spanning, load_on_all, profiled
from shell_router.batch.workers import open_workers
from shell_router.config.read import read_file
from shell_router.config.write import plain
from shell_router.core.statistics import Floats
from shell_router.errors import ConfigError, require

ADAPTER_CONFIG = "adapter_config.json"


async def recruit(
    pool: Pool, questions: Sequence[Question], seed: int
) -> Mapping[str, tuple[str, ...]]:
    """Per question the proposers that its line names, or those that are drawn for it. Raises
    ConfigError.
    """
    names = pool.proposer_names
    number = min(pool.recruit.proposers, len(pool.proposer_names))
    unnamed = await asyncio.to_thread(
        lambda: [question for question in questions if not question.proposers]
    )
    scores = np.ones((len(unnamed), len(names)))
    if unnamed and number < len(names) and pool.recruit.skills is not None:
        scores = await _scores(pool, unnamed, pool.recruit.skills)

    def drawn() -> Mapping[str, tuple[str, ...]]:
        found = {question.id: question.proposers for question in questions}
        for question, row in zip(unnamed, scores.tolist(), strict=True):
            rng = random.Random(f"{seed}/{question.id}")
            found[question.id] = recruited(dict(zip(names, row, strict=True)), number, rng)
        return found

    return await asyncio.to_thread(drawn)


async def _scores(pool: Pool, asked: Sequence[Question], run: Path) -> Floats:
    """[asked, proposers], by the skills that all lines name and some of the run do, or else by the
    questions' texts.
    """
    known = answered_by_all(await asyncio.to_thread(read_results, run), pool.proposer_names)
    rights = [
        {proposal.model: bool(proposal.right) for proposal in result.proposals} for result in known
    ]
    scored = np.array([[one[name] for name in pool.proposer_names] for one in rights], dtype=float)
    if all(question.skills for question in asked) and any(one.skills for one in known):
        alike = skill_similarity(
            [one.skills for one in asked], [frozenset(one.skills) for one in known]
        )
        return skill_scores(alike, scored)
    async with running_embedder(pool.embedder) as (embedder, _):
        if embedder is None:
            raise ConfigError(
                "embedder.model is none, and not all questions name skills.",
                remedy="Name an embedding model.",
            )
        texts = [*(one.text for one in asked), *(one.question for one in known)]
        vectors = np.array(
            [(await embedder.embed(text)).mean(axis=0) for text in texts], dtype=float
        )
    alike = await asyncio.to_thread(text_similarity, vectors[: len(asked)], vectors[len(asked) :])
    return skill_scores(alike, scored)


def questions_for(pool: Pool, file: Path, limit: int | None = None) -> Questions:
    """The file's questions, the first `limit` of them. Raises DataError."""
    questions = read_questions(file, pool.proposer_names)
    if limit is None:
        return questions
    return questions.first(limit)


async def run_pool(
    pool: Pool,
    questions: Questions,
    folder: Path,
    planner: Planner,
    follow: Follow,
    *,
    seed: int = 0,
) -> Finished:
    """Answer the questions, or what is still missing of a run that was begun in `folder`, and write
    the results there.

    Raises ConfigError and EngineError.
    """
    _require_models(pool)
    batch = Batch(pool, questions, await recruit(pool, questions.asked, seed), seed)
    profile = await asyncio.to_thread(_profile, pool)
    with ExitStack() as stack:
        journal = await on_disk(
            stack.enter_context, open_journal(folder, _depends_on(pool, questions, seed))
        )
        async with open_workers(pool, folder / "logs") as workers:
            finished = await run_batch(batch, workers, profile, journal, planner, follow, monotonic)
    await on_disk(lambda: _write(folder / "results.jsonl", as_lines(finished.results)))
    return finished


async def profile_pool(
    pool: Pool, questions: Questions, sizes: Sequence[int], follow: Follow
) -> None:
    """Time every proposer in turn and then the aggregator, with what they wrote, and write the
    pool's profile.

    Raises ConfigError and EngineError.
    """
    _require_models(pool)
    if pool.profile is None:
        raise ConfigError(
            "The pool names no profile.",
            remedy="Name the file to write, as in `profile: costs.yaml`.",
        )
    every = {question.id: pool.proposer_names for question in questions.asked}
    batch = Batch(pool.with_tau(ALWAYS if pool.aggregate else None), questions, every)
    written: dict[Key, Output] = {}
    count = len(pool.workers)
    logs = pool.profile.with_suffix(".logs")
    names = pool.proposer_names

    async def timed(
        name: str, prompts: Sequence[Prompt], *, spans: bool = False
    ) -> tuple[ModelProfile, Load]:
        on, number, width = (Spanning(workers), 1, count) if spans else (workers, count, 1)
        found, outputs, load = await profiled(
            name, prompts, sizes, on, number, width * pool.concurrency, monotonic
        )
        written.update({output.key: output for output in outputs})
        follow.on_progress(
            f"{name}: {load} in {found.load_s:.1f} s, {found.token_s * 1000:.2f} ms per token"
        )
        return found, load

    async with open_workers(pool, logs) as workers:
        asked = batch.proposer_prompts()
        found = [await timed(name, [one for one in asked if one.model == name]) for name in names]
        start_s = found[0][0].load_s
        one_shape = {load for _, load in found[1:]} == {"weights swapped"}
        if one_shape:  # the first was loaded by a start: here it takes the place of the last
            swap_s, _ = await load_on_all(names[0], workers, count, monotonic)
            found[0] = replace(found[0][0], load_s=swap_s), "weights swapped"
        if pool.aggregate is not None:
            prompts = batch.aggregator_prompts(written.get)
            spans = pool.spanning is not None
            found.append(await timed(pool.aggregate.model, prompts, spans=spans))
            if found[-1][1] == "model kept":
                found[-1] = replace(found[-1][0], load_s=found[0][0].load_s), "weights swapped"
    if one_shape:
        profiles = [one for one, _ in found]
    else:
        profiles = at_their_dearest(found)
    profile = PoolProfile(
        dict(zip(names, profiles, strict=False)), profiles[-1] if pool.aggregate else None
    )
    if one_shape:
        alone_s = start_s
        if count > 1:
            async with open_workers(pool, logs) as workers:
                alone_s, _ = await load_on_all(names[0], workers, 1, monotonic)
        profile = with_starts(profile, alone_s, start_s, count)
        more = (
            f"{profile.first_s:.1f} s longer, {profile.together_s:.1f} s more for each other "
            "worker in use"
        )
        follow.on_progress(f"the first load of a worker: {more}")
    _write(pool.profile, yaml.safe_dump(plain(asdict(profile)), sort_keys=False).encode())


def _write(file: Path, content: bytes) -> None:
    try:
        replace_file(file, content)
    except OSError as error:
        remedy = "Free disk space there, and run the same command again."
        raise ConfigError(f"{file}: {error.strerror}.", remedy=remedy) from error


def _require_models(pool: Pool) -> None:
    """Raise ConfigError for a model or adapter that is not there; folders on a cluster's nodes
    cannot be seen.
    """
    for name, model in pool.models.items():
        require(
            pool.ray is not None or model.path.is_dir(),
            f"models.{name}.path: there is no folder {model.path}.",
            "Name the folder that holds the model; a relative path counts from the pool's folder.",
        )
        require(
            model.adapter is None or (model.adapter / ADAPTER_CONFIG).is_file(),
            f"models.{name}.adapter: {model.adapter} holds no {ADAPTER_CONFIG}.",
            (
                "Name the folder of an adapter in PEFT's form; a relative path counts from the "
                "pool's folder."
            ),
        )


def _profile(pool: Pool) -> PoolProfile:
    if pool.profile is None or not pool.profile.exists():
        raise ConfigError(
            f"There is no profile {pool.profile or ''}: what the models cost is not known.",
            remedy="Name the file as `profile` in the pool, and run shell-router batch profile.",
        )
    return read_file(pool.profile, PoolProfile, see=SEE)[0]


def _depends_on(pool: Pool, questions: Questions, seed: int) -> dict[str, Any]:
    """What the outputs of a run depend on; the gate and what reads answers may change between two
    starts.
    """
    aggregate = pool.aggregate
    return {
        "questions": questions.fingerprint,
        "models": {
            name: {
                "path": str(model.path.resolve()),
                "system": model.system,
                "adapter": model.adapter and str(model.adapter.resolve()),
            }
            for name, model in pool.models.items()
        },
        "proposers": pool.proposer_names,
        "sampling": asdict(pool.sampling),
        "recruit": {"proposers": pool.recruit.proposers, "skills": str(pool.recruit.skills or "")},
        "aggregate": None
        if aggregate is None
        else {"model": aggregate.model, **asdict(aggregate.sampling)},
        "seed": seed,
    }
