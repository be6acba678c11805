"""`shell-router batch run` on two real SGLang workers, which are started with one model after the
other.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from benchmarks.random_checkpoint import make_checkpoint
from launch.sglang_cpu.pair import free_ports
from shell_router.batch.pool import PoolModel, load_pool
from shell_router.batch.profile import Load
from shell_router.batch.prompts import BatchPrompt
from shell_router.batch.sessions import answer_prompt
from shell_router.batch.workers import open_workers
from tests.fakes.command import running_command, survivors
from tests.fakes.pools import ROOT, write_costs, write_questions

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

POOL = ROOT / "configs/pools/word-problems-sglang-cpu.yaml"
LIMIT_S = 900.0
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
PROMPT = BatchPrompt(
    "q", "proposer", "", [{"role": "user", "content": "Why is the river silver?"}], GREEDY
)


def shipped_pool(folder: Path) -> Path:
    """The pool that is shipped, with two of its proposers and a tensor-parallel aggregator, with
    made-up costs.
    """
    pool = yaml.safe_load(POOL.read_text(encoding="utf-8"))
    for model in pool["models"].values():
        model["path"] = str((POOL.parent / model["path"]).resolve())
    pool["launch"]["python"] = str((POOL.parent / pool["launch"]["python"]).resolve())
    for worker in pool["workers"]:
        prefill, decode, bootstrap = free_ports(3)
        urls = {"prefill": f"http://127.0.0.1:{prefill}", "decode": f"http://127.0.0.1:{decode}"}
        worker["pair"] |= {**urls, "bootstrap_port": bootstrap, "launch": {}}
    pool["aggregate"]["parallel"] = "tensor"
    pool |= {"proposers": ["small", "medium"], "profile": str(write_costs(folder, *pool["models"]))}
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump(pool), encoding="utf-8")
    return file


def results(folder: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]


async def test_a_batch_is_planned_run_and_gated_and_leaves_no_engine(tmp_path: Path) -> None:
    pool, out = shipped_pool(tmp_path), tmp_path / "run"
    asked = write_questions(tmp_path, 16)
    async with running_command(
        "batch", "run", pool, "--data", asked, "--out", out, "--tau", "1"
    ) as command:
        await command.line_with("answers 16 prompts", limit_s=LIMIT_S)
        engines = command.started()
        code, printed = await command.ended(limit_s=LIMIT_S)
    assert code == 0, printed
    print("\n".join(line for line in printed.splitlines() if "planned" in line or "right" in line))
    assert len(engines) >= 2 * len(load_pool(pool).workers), (
        "a prefill and a decode server for each"
    )
    assert survivors(engines) == set()
    assert {one["by"] for one in results(out)} == {"proposers", "aggregator"}
    logs = [log.read_bytes() for log in (out / "logs" / "spanning").rglob("*.log")]
    assert [b"'tp_size': 2," in log for log in logs] == [True, True]
    assert all(len(one["proposals"]) == 2 and not one["error"] for one in results(out))
    assert sum(one["right"] for one in results(out)) >= 8


async def test_an_engine_stays_up_for_a_model_of_the_same_shape_which_answers_as_it_does_alone(
    tmp_path: Path,
) -> None:
    pool = load_pool(shipped_pool(tmp_path))
    for seed, name in enumerate("ab"):
        make_checkpoint(tmp_path / name, seed=seed, context_length=2048)
    pool = replace(
        pool,
        models={name: PoolModel(tmp_path / name) for name in "ab"},
        proposers=(),
        aggregate=None,
    )
    loads_s: list[tuple[Load, float]] = []
    texts: list[str] = []
    for names in ("aba", "b"):
        async with open_workers(pool, tmp_path / "logs") as workers:
            for name in names:
                begun_s = time.monotonic()
                async with workers.session(0, name) as (model, load):
                    loads_s.append((load, time.monotonic() - begun_s))
                    texts.append((await answer_prompt(model, PROMPT)).text)
    print("; ".join(f"{load} in {load_s:.1f} s" for load, load_s in loads_s))
    assert [load for load, _ in loads_s] == [
        "engine started",
        "weights swapped",
        "weights swapped",
        "engine started",
    ]
    assert texts[0] == texts[2] != texts[1] == texts[3]
