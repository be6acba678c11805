"""A pool's batches: its file, its workers and a run's folder brought together."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import yaml

from shell_router.batch.answering import Prompt
from shell_router.batch.asking import Batch
from shell_router.batch.extract import extractor
from shell_router.batch.gate import ALWAYS
from shell_router.batch.journal import Key, Output, opened, write_whole
from shell_router.batch.profile import ModelProfile, PoolProfile
from shell_router.batch.profiling import profiled
from shell_router.batch.questions import Questions, read_questions
from shell_router.batch.results import Result, as_lines, results_of
from shell_router.batch.run import Follow, Planner, Rig, Stage, run_batch
from shell_router.batch.sessions import Workers
from shell_router.config.pool import SEE, Pool, PoolModel
from shell_router.config.read import read_file
from shell_router.core.embedding import Embedder
from shell_router.errors import ConfigError
from shell_router.wiring.adapters import CONFIG as ADAPTER_CONFIG
from shell_router.wiring.embedding import running_embedder
from shell_router.wiring.ray_workers import ray_workers
from shell_router.wiring.recruiting import recruit
from shell_router.wiring.workers import pool_workers


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that has ended: one result per line, and the stages as planned and as run."""

    results: Sequence[Result]
    stages: Sequence[Stage]


def questions_for(pool: Pool, file: Path, limit: int | None = None) -> Questions:
    """The file's questions, the first `limit` of them. Raises DataError."""
    questions = read_questions(file, pool.expert_names)
    return questions if limit is None else questions.first(limit)


async def run_pool(
    pool: Pool, questions: Questions, folder: Path, planner: Planner, follow: Follow, *, seed: int = 0
) -> Finished:
    """Answer the questions, or what is still missing of a run that was begun in `folder`, and write the results there.

    Raises ConfigError and EngineError.
    """
    _require_models(pool)
    batch = _batch(pool, questions, await recruit(pool, questions.asked, seed), seed)
    profile = _profile(pool)
    with opened(folder, _depends_on(pool, questions, seed)) as journal:
        async with _embedder(pool) as embedder, _workers(pool, folder / "logs") as workers:
            rig = _rig(pool, profile, workers, embedder)
            batch, stages = await run_batch(batch, rig, journal, planner, follow)
        results = results_of(batch, questions.refused, journal.get)
    write_whole(folder / "results.jsonl", as_lines(results))
    return Finished(results, stages)


async def profile_pool(pool: Pool, questions: Questions, sizes: Sequence[int], follow: Follow) -> None:
    """Time every expert and the aggregator, and write the pool's profile. Raises ConfigError and EngineError."""
    _require_models(pool)
    if pool.profile is None:
        raise ConfigError("The pool names no profile.", remedy="Name the file to write, as in `profile: costs.yaml`.")
    everyone = {question.id: pool.expert_names for question in questions.asked}
    aggregating = None if pool.aggregate is None else replace(pool.aggregate, tau=ALWAYS)
    batch = replace(_batch(pool, questions, everyone, 0), aggregating=aggregating)
    async with _workers(pool, pool.profile.with_suffix(".logs")) as workers:
        profile = await _measured(pool, batch, sizes, workers, follow)
    write_whole(pool.profile, yaml.safe_dump(profile.as_plain(), sort_keys=False).encode())


def _require_models(pool: Pool) -> None:
    """Here, and not when a session would load it. On a cluster's nodes the folders cannot be seen."""
    for name, model in pool.models.items():
        if pool.ray is None and not model.path.is_dir():
            raise ConfigError(
                f"models.{name}.path: there is no folder {model.path}.",
                remedy="Name the folder that holds the model; a relative path counts from the pool's folder.",
            )
        if model.adapter is not None and not (model.adapter / ADAPTER_CONFIG).is_file():
            raise ConfigError(
                f"models.{name}.adapter: {model.adapter} holds no {ADAPTER_CONFIG}.",
                remedy="Name the folder of an adapter in PEFT's form; a relative path counts from the pool's folder.",
            )


@asynccontextmanager
async def _embedder(pool: Pool) -> AsyncIterator[Embedder | None]:
    """The embedder, where the gate judges by similarity."""
    if pool.aggregate is None or pool.aggregate.confidence != "similarity":
        yield None
        return
    async with running_embedder(pool.embedder) as running:
        yield running.embedder


def _workers(pool: Pool, logs: Path) -> AbstractAsyncContextManager[Workers]:
    return pool_workers(pool, logs) if pool.ray is None else ray_workers(pool, logs)


async def _measured(pool: Pool, batch: Batch, sizes: Sequence[int], workers: Workers, follow: Follow) -> PoolProfile:
    """The experts one after the other, then the aggregator with what they wrote."""
    written: dict[Key, Output] = {}

    async def timed(name: str, prompts: Sequence[Prompt]) -> ModelProfile:
        found, outputs = await profiled(name, prompts, sizes, workers, len(pool.workers), pool.at_once, monotonic)
        written.update({output.key: output for output in outputs})
        follow.tell(f"{name}: {found.load_s:.1f} s to load, {found.token_s * 1000:.2f} ms per token")
        return found

    prompts = batch.expert_prompts()
    models = {name: await timed(name, [one for one in prompts if one.model == name]) for name in pool.expert_names}
    if batch.aggregating is None:
        return PoolProfile(models)
    return PoolProfile(models, await timed(batch.aggregating.model, batch.aggregator_prompts(written.get)))


def _batch(pool: Pool, questions: Questions, experts: Mapping[str, Sequence[str]], seed: int) -> Batch:
    return Batch(
        questions.asked,
        experts,
        pool.sampling,
        pool.aggregate,
        extractor(pool.answers),
        {name: model.system for name, model in pool.models.items() if model.system},
        seed,
    )


def _profile(pool: Pool) -> PoolProfile:
    if pool.profile is None or not pool.profile.exists():
        raise ConfigError(
            f"There is no profile {pool.profile or ''}: what the models cost is not known.",
            remedy="Name the file as `profile` in the pool, and run shell-router batch profile.",
        )
    profile, _ = read_file(pool.profile, PoolProfile, see=SEE)
    assert isinstance(profile, PoolProfile)
    return profile


def _rig(pool: Pool, profile: PoolProfile, workers: Workers, embedder: Embedder | None) -> Rig:
    capacity = pool.capacity or len(pool.expert_names)
    return Rig(workers, len(pool.workers), capacity, pool.at_once, profile, monotonic, embedder)


def _depends_on(pool: Pool, questions: Questions, seed: int) -> dict[str, Any]:
    """What the outputs of a run depend on; the gate and what reads answers may change between two starts."""
    aggregate = pool.aggregate
    return {
        "questions": questions.fingerprint,
        "models": {
            name: {"path": str(model.path.resolve()), "system": model.system, **_adapter(model)}
            for name, model in pool.models.items()
        },
        "experts": pool.expert_names,
        "sampling": asdict(pool.sampling),
        "recruit": {"experts": pool.recruit.experts, "skills": str(pool.recruit.skills or "")},
        "aggregate": None if aggregate is None else {"model": aggregate.model, **asdict(aggregate.sampling)},
        "seed": seed,
    }


def _adapter(model: PoolModel) -> dict[str, str]:
    """Absent without one, so that runs that were begun before go on."""
    return {} if model.adapter is None else {"adapter": str(model.adapter.resolve())}
