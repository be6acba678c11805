"""Workers of a pool whose SGLang pair stays up between models; embedded servers by SGLang's command
line stand in.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import yaml

from benchmarks.random_checkpoint import make_checkpoint
from launch.sglang_cpu.pair import free_ports
from shell_router.batch.planner import plan_longest_first
from shell_router.batch.pool import ALWAYS, Aggregating, Pool, load_pool
from shell_router.batch.pool_run import profile_pool, run_pool
from shell_router.batch.profile import Load, PoolProfile
from shell_router.batch.prompts import BatchPrompt
from shell_router.batch.questions import read_questions
from shell_router.batch.sessions import SPANNING, Follow, answer_prompt
from shell_router.batch.workers import open_workers
from shell_router.core.engine import ServedModel
from shell_router.errors import EngineError
from shell_router.files.read import read_file
from tests.fakes import embedded_as_sglang
from tests.fakes.command import descendants
from tests.fakes.fake_engine import interpreter

pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` and `b` have one shape, `large` another; `cut` is of theirs and not whole."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("a", "b", "cut")):
        make_checkpoint(folder / name, hidden=32, layers=1, vocab_size=512, seed=seed)
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    make_checkpoint(folder / "large", hidden=64, layers=1, vocab_size=512)
    return folder


def pair_pool(folder: Path, checkpoints: Path, models: Sequence[str], workers: int = 1) -> Pool:
    """The models on pairs that this machine starts."""
    places = []
    for _ in range(workers):
        prefill, decode, bootstrap = free_ports(3)
        urls = {"prefill": f"http://127.0.0.1:{prefill}", "decode": f"http://127.0.0.1:{decode}"}
        places.append({"pair": {**urls, "bootstrap_port": bootstrap, "launch": {}}})
    pool = {
        "models": {name: {"path": str(checkpoints / name)} for name in models},
        "workers": places,
        "sampling": {"temperature": 0, "max_new_tokens": 12},
        "profile": "costs.yaml",
        "launch": {"python": str(interpreter(folder, Path(embedded_as_sglang.__file__)))},
    }
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump(pool), encoding="utf-8")
    return load_pool(file)


def prompt(text: str) -> BatchPrompt:
    return BatchPrompt(text, "proposer", "", [{"role": "user", "content": text}], GREEDY)


async def said(model: ServedModel) -> str:
    return (await answer_prompt(model, prompt("Why is the river silver?"))).text


def servers() -> set[int]:
    """The processes of this one's embedded servers."""
    return {
        pid
        for pid in descendants(os.getpid())
        if b"embedded_as_sglang" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def spanning_servers() -> int:
    """Those of them that are tensor-parallel; the others are not up then."""
    flags = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in servers()]
    assert len(flags) == 2 or b"--tp-size" not in b"".join(flags)
    return sum(b"--tp-size" in one for one in flags)


async def test_an_engine_takes_the_weights_of_the_next_model_where_shapes_match_and_starts_anew_elsewhere(
    tmp_path: Path, checkpoints: Path
) -> None:
    pool = pair_pool(tmp_path, checkpoints, ("a", "b", "large", "cut"))
    loads: list[Load] = []
    texts: dict[str, set[str]] = {}
    pids: list[set[int]] = []
    async with open_workers(pool, tmp_path / "logs") as workers:
        for name in ("a", "b", "b", "a", "large", "b"):
            async with workers.session(0, name) as (model, load):
                texts.setdefault(name, set()).add(await said(model))
                loads.append(load)
                pids.append(servers())
        with pytest.raises(EngineError):
            async with workers.session(0, "cut"):
                pass
        async with workers.session(0, "b") as (model, load):
            texts["b"].add(await said(model))
            loads.append(load)
    assert loads == [
        "engine started",
        "weights swapped",
        "model kept",
        "weights swapped",
        "engine started",
        "engine started",
        "engine started",
    ]
    assert all(len(found) == 1 for found in texts.values()), (
        "a model says the same, however it was loaded"
    )
    assert len(set.union(*texts.values())) == 3, "each says something else"
    assert pids[0] == pids[1] == pids[2] == pids[3]
    assert not pids[3] & pids[4] and not pids[4] & pids[5]
    assert not servers()


async def test_an_engine_that_died_after_a_swap_does_not_come_back_with_the_weights_of_its_start(
    tmp_path: Path, checkpoints: Path
) -> None:
    pool = pair_pool(tmp_path, checkpoints, ("a", "b"))
    async with open_workers(pool, tmp_path / "logs") as workers:
        async with workers.session(0, "a") as (model, _):
            of_a = await said(model)
        async with workers.session(0, "b") as (model, load):
            assert load == "weights swapped"
            of_b = await said(model)
            for pid in servers():
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await said(model)
        async with workers.session(0, "b") as (model, load):
            assert load == "engine started"
            assert await said(model) == of_b != of_a


async def test_the_profile_of_models_of_one_shape_has_swaps_and_starts_which_the_plan_counts(
    tmp_path: Path, checkpoints: Path
) -> None:
    pool = pair_pool(tmp_path, checkpoints, ("a", "b"), workers=2)
    file = tmp_path / "questions.jsonl"
    file.write_bytes(
        b"".join(orjson.dumps({"question": f"How many, {n}?"}) + b"\n" for n in range(8))
    )
    questions = read_questions(file, pool.proposer_names)
    await profile_pool(pool, questions, (1, 2), Follow())
    costs, _ = read_file(tmp_path / "costs.yaml", PoolProfile)
    for model in costs.models.values():
        assert 0 < model.load_s < costs.first_s
    finished = await run_pool(pool, questions, tmp_path / "run", plan_longest_first, Follow())
    (stage,) = finished.stages
    assert min(one.end_s for one in stage.plan.sessions) > costs.first_s
    assert [one.error for one in finished.results] == [""] * 8


async def test_the_worker_that_spans_all_is_up_alone_and_the_others_start_again_after_it(
    tmp_path: Path, checkpoints: Path
) -> None:
    pool = pair_pool(tmp_path, checkpoints, ("a", "b"), workers=2)
    pool = replace(pool, aggregate=Aggregating("b", parallel="tensor"))
    loads: list[Load] = []
    async with open_workers(pool, tmp_path / "logs") as workers:
        for worker in (0, 1, SPANNING, 0):
            async with workers.session(worker, "a") as (model, load):
                loads.append(load)
                assert spanning_servers() == (2 if worker == SPANNING else 0)
                assert await said(model)
    assert loads == ["engine started"] * 4
    assert not servers()


async def test_a_batch_with_a_tensor_parallel_aggregator_is_profiled_and_run(
    tmp_path: Path, checkpoints: Path
) -> None:
    pool = pair_pool(tmp_path, checkpoints, ("a", "b"), workers=2)
    pool = replace(
        pool, aggregate=Aggregating("b", ALWAYS, sampling=pool.sampling, parallel="tensor")
    )
    file = tmp_path / "questions.jsonl"
    file.write_bytes(
        b"".join(orjson.dumps({"question": f"What is {n} and {n}?"}) + b"\n" for n in range(6))
    )
    questions = read_questions(file, pool.proposer_names)
    await profile_pool(pool, questions, (1, 2), Follow())
    finished = await run_pool(pool, questions, tmp_path / "run", plan_longest_first, Follow())
    assert {result.by for result in finished.results} == {"aggregator"}
    (aggregator,) = (stage for stage in finished.stages if stage.role == "aggregator")
    assert {one.worker for one in aggregator.sessions} == {0}
    assert not servers()
