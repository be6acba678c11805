"""The commands `batch run` and `batch profile`: a pool, its workers and a run's folder."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import yaml

from shell_router.app.services import run_embedder
from shell_router.batch.api.storage import on_disk
from shell_router.batch.journal import Key, Output, open_journal, replace_file
from shell_router.batch.pool import ALWAYS, SEE, Pool
from shell_router.batch.profile import (
    Load,
    ModelProfile,
    PoolProfile,
    add_starts,
    charge_starts,
)
from shell_router.batch.prompts import Batch, BatchPrompt, as_lines, read_results
from shell_router.batch.questions import Question, Questions
from shell_router.batch.recruit import (
    compare_skills,
    compare_texts,
    draw_proposers,
    list_graded,
    weigh_scores,
)
from shell_router.batch.run import BatchReport, PoolRun
from shell_router.batch.sessions import (
    Follow,
    Planner,
    Spanning,
    Workers,
    load_on_workers,
    profile_model,
)
from shell_router.batch.workers import open_workers
from shell_router.core.statistics import Floats
from shell_router.errors import ConfigError, require
from shell_router.files.read import read_file
from shell_router.files.write import plain

ADAPTER_CONFIG = "adapter_config.json"

_Timed = tuple[ModelProfile, Load]


async def recruit(
    pool: Pool, questions: Sequence[Question], seed: int
) -> Mapping[str, tuple[str, ...]]:
    """Choose the proposers of each question: those that its line names, or random ones.

    With `recruit.skills` proposers are drawn by their skill. Raises ConfigError.
    """
    scores = await _score_proposers(pool, questions)
    return await asyncio.to_thread(_draw_all, pool, questions, scores, seed)


def _draw_all(
    pool: Pool, questions: Sequence[Question], scores: Mapping[str, Sequence[float]], seed: int
) -> Mapping[str, tuple[str, ...]]:
    names = pool.proposer_names
    number = min(pool.recruit.proposers, len(names))
    equal = [1.0] * len(names)
    drawn = {}
    for question in questions:
        weights = dict(zip(names, scores.get(question.id, equal), strict=True))
        rng = random.Random(f"{seed}/{question.id}")
        drawn[question.id] = question.proposers or draw_proposers(weights, number, rng)
    return drawn


async def _score_proposers(
    pool: Pool, questions: Sequence[Question]
) -> Mapping[str, Sequence[float]]:
    """Return the proposers' scores per question that names none, if `recruit.skills` is set.

    Scores come from the skills that the questions and the earlier run name, or else from the
    similarity of texts.
    """
    run = pool.recruit.skills
    if run is None or pool.recruit.proposers >= len(pool.proposer_names):
        return {}
    unnamed = [question for question in questions if not question.proposers]
    if not unnamed:
        return {}
    results = await asyncio.to_thread(read_results, run)
    graded = list_graded(results, pool.proposer_names)
    rights = []
    for result in graded:
        right = {proposal.model: float(bool(proposal.right)) for proposal in result.proposals}
        rights.append([right[name] for name in pool.proposer_names])
    if all(question.skills for question in unnamed) and any(result.skills for result in graded):
        skills = [question.skills for question in unnamed]
        similarity = compare_skills(skills, [frozenset(result.skills) for result in graded])
    else:
        texts = [question.text for question in unnamed]
        similarity = await _compare_texts(pool, texts, [result.question for result in graded])
    scores = weigh_scores(similarity, np.array(rights)).tolist()
    return {question.id: row for question, row in zip(unnamed, scores, strict=True)}


async def _compare_texts(pool: Pool, texts: Sequence[str], others: Sequence[str]) -> Floats:
    """Return the similarity of texts [texts, others] by their embeddings."""
    async with run_embedder(pool.embedder) as (embedder, _):
        if embedder is None:
            raise ConfigError(
                "embedder.model is none, and not all questions name skills.",
                remedy="Name an embedding model.",
            )
        vectors = []
        for text in (*texts, *others):
            tokens = await embedder.embed(text)
            vectors.append(tokens.mean(axis=0))
    stacked = np.array(vectors, dtype=float)
    return await asyncio.to_thread(compare_texts, stacked[: len(texts)], stacked[len(texts) :])


async def run_pool(
    pool: Pool,
    questions: Questions,
    folder: Path,
    planner: Planner,
    follow: Follow,
    *,
    seed: int = 0,
) -> BatchReport:
    """Answer the questions and write the results to `folder`; continue a run that was begun there.

    Raises ConfigError and EngineError.
    """
    _require_models(pool)
    batch = Batch(pool, questions, await recruit(pool, questions.asked, seed), seed)
    profile = await asyncio.to_thread(_read_profile, pool)
    inputs = _describe_inputs(pool, questions, seed)
    with ExitStack() as stack:
        journal = await on_disk(stack.enter_context, open_journal(folder, inputs))
        async with open_workers(pool, folder / "logs") as workers:
            run = PoolRun(batch, workers, profile, journal, planner, follow, monotonic)
            report = await run.run()
    await on_disk(lambda: _write(folder / "results.jsonl", as_lines(report.results)))
    return report


async def profile_pool(
    pool: Pool, questions: Questions, sizes: Sequence[int], follow: Follow
) -> None:
    """Time each proposer and then the aggregator on their outputs, and write the pool's profile.

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
    profile = await _Profiling(batch, sizes, follow, pool.profile.with_suffix(".logs")).run()
    _write(pool.profile, yaml.safe_dump(plain(asdict(profile)), sort_keys=False).encode())


@dataclass(slots=True)
class _Profiling:
    """A run of `batch profile`. SGLang's logs go to the folder `logs`."""

    batch: Batch
    sizes: Sequence[int]
    follow: Follow
    logs: Path
    outputs: dict[Key, Output] = field(default_factory=dict)

    async def run(self) -> PoolProfile:
        """Return the costs of the pool's models."""
        pool = self.batch.pool
        count = len(pool.workers)
        async with open_workers(pool, self.logs) as workers:
            timed = await self._time_proposers(workers)
            start_s = timed[0][0].load_s
            one_shape = {load for _, load in timed[1:]} == {"weights swapped"}
            if one_shape:
                # the first model was loaded by a start: a swap takes the place of its load
                first = pool.proposer_names[0]
                swap_s, _ = await load_on_workers(first, workers, count, monotonic)
                timed[0] = _replace_load(timed[0], swap_s)
            if pool.aggregate is not None:
                aggregator = await self._time_aggregator(workers, pool.aggregate.model)
                if aggregator[1] == "model kept":
                    aggregator = _replace_load(aggregator, timed[0][0].load_s)
                timed.append(aggregator)
        if not one_shape:
            return self._build_profile(charge_starts(timed))
        alone_s = start_s
        if count > 1:
            alone_s = await self._time_start()
        profile = self._build_profile([model for model, _ in timed])
        profile = add_starts(profile, alone_s, start_s, count)
        self.follow.on_progress(
            f"the first load of a worker: {profile.first_s:.1f} s longer, "
            f"{profile.together_s:.1f} s more for each other worker in use"
        )
        return profile

    async def _time_proposers(self, workers: Workers) -> list[_Timed]:
        prompts = self.batch.proposer_prompts()
        timed = []
        for name in self.batch.pool.proposer_names:
            its = [prompt for prompt in prompts if prompt.model == name]
            count = len(self.batch.pool.workers)
            timed.append(await self._time(name, its, workers, count, self.batch.pool.concurrency))
        return timed

    async def _time_aggregator(self, workers: Workers, name: str) -> _Timed:
        prompts = self.batch.aggregator_prompts(self.outputs.get)
        count = len(self.batch.pool.workers)
        concurrency = self.batch.pool.concurrency
        if self.batch.pool.spanning is None:
            return await self._time(name, prompts, workers, count, concurrency)
        return await self._time(name, prompts, Spanning(workers), 1, count * concurrency)

    async def _time(
        self,
        name: str,
        prompts: Sequence[BatchPrompt],
        workers: Workers,
        count: int,
        concurrency: int,
    ) -> _Timed:
        profile, outputs, load = await profile_model(
            name, prompts, self.sizes, workers, count, concurrency, monotonic
        )
        self.outputs.update({output.key: output for output in outputs})
        self.follow.on_progress(
            f"{name}: {load} in {profile.load_s:.1f} s, {profile.token_s * 1000:.2f} ms per token"
        )
        return profile, load

    async def _time_start(self) -> float:
        """Return the seconds in which one worker's engine starts alone."""
        async with open_workers(self.batch.pool, self.logs) as workers:
            first = self.batch.pool.proposer_names[0]
            start_s, _ = await load_on_workers(first, workers, 1, monotonic)
        return start_s

    def _build_profile(self, models: Sequence[ModelProfile]) -> PoolProfile:
        names = self.batch.pool.proposer_names
        aggregator = models[-1] if self.batch.pool.aggregate else None
        return PoolProfile(dict(zip(names, models, strict=False)), aggregator)


def _replace_load(timed: _Timed, swap_s: float) -> _Timed:
    return replace(timed[0], load_s=swap_s), "weights swapped"


def _write(file: Path, content: bytes) -> None:
    try:
        replace_file(file, content)
    except OSError as error:
        remedy = "Free disk space there, and run the same command again."
        raise ConfigError(f"{file}: {error.strerror}.", remedy=remedy) from error


def _require_models(pool: Pool) -> None:
    """Raise ConfigError if a model or adapter is missing; a cluster's folders cannot be seen."""
    for name, model in pool.models.items():
        require(
            pool.ray is not None or model.path.is_dir(),
            f"models.{name}.path: there is no folder {model.path}.",
            "Name the folder that holds the model; a relative path counts from the pool's folder.",
        )
        require(
            model.adapter is None or (model.adapter / ADAPTER_CONFIG).is_file(),
            f"models.{name}.adapter: {model.adapter} holds no {ADAPTER_CONFIG}.",
            "Name the folder of an adapter in PEFT's form; a relative path counts from the pool's "
            "folder.",
        )


def _read_profile(pool: Pool) -> PoolProfile:
    if pool.profile is None or not pool.profile.exists():
        raise ConfigError(
            f"There is no profile {pool.profile or ''}: what the models cost is not known.",
            remedy="Name the file as `profile` in the pool, and run shell-router batch profile.",
        )
    return read_file(pool.profile, PoolProfile, see=SEE)[0]


def _describe_inputs(pool: Pool, questions: Questions, seed: int) -> dict[str, Any]:
    """Return the inputs of a run's outputs; the gate and `answers` may change between starts."""
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
