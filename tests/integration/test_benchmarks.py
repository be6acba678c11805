"""Every benchmark runs, and ends with the JSON object that readers of its figures rely on."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap.measure import tokens_by_model
from shell_router.app import load_config
from shell_router.lab.simulation.summary import count_prefilled_tokens

ROOT = Path(__file__).parents[2]
SHORT = {
    "auto": (
        "--questions",
        "8",
        "--block",
        "4",
        "--clients",
        "2",
        "--slacks",
        "1",
        "--worths",
        "1",
    ),
    "agent_cache_cost": ("--rounds", "1", "--chunks", "50"),
    "batch": ("--rounds", "1", "--questions", "6", "--sizes", "1,2"),
    "chimera": ("--tasks", "10", "--per-s", "8", "--seeds", "2"),
    "coserve": ("--images", "200", "--seeds", "1"),
    "drafts": ("--questions", "2", "--clients", "2"),
    "early_exit_answers": ("--learn", "20", "--ask", "5"),
    "early_exit_cost": ("--rounds", "1"),
    "expert_placement": ("--layers", "3", "--tokens", "400", "--gpus", "4"),
    "faster_moa": ("--requests", "1", "--programs", "2", "--seeds", "1", "--outputs", "16"),
    "faults": ("--table", "remote", "--only", "an error event"),
    "fleet": ("--pairs", "8", "--routers", "1"),
    "frameworks": ("--questions", "1", "--context", "0", "--new-tokens", "16"),
    "gimbal": ("--requests", "30", "--seeds", "1", "--decisions", "50"),
    "mosaic": ("--rounds", "1", "--limit-s", "0.5"),
    "overlap": ("--rounds", "1", "--new-tokens", "8", "--question-tokens", "20"),
    "page_load": ("--agents", "4", "--seconds", "1"),
    "programs": ("--seeds", "1", "--table", "classes"),
    "router_overhead": ("--quick",),
    "stalls": (),
    "swapping": ("--rounds", "1", "--requests", "16", "--clients", "4", "--tokens", "4"),
    "tenants": ("--rounds", "1", "--seconds", "1", "--only", "stop ids,flood of chats"),
    "under_load": (
        "--rounds",
        "1",
        "--requests",
        "12",
        "--policies",
        "scored",
        "--orders",
        "no queue",
    ),
    "tool_loops": ("--rounds", "1", "--new-tokens", "8", "--question-tokens", "20"),
    "simulation_error": ("--rounds", "1", "--turns", "1", "--clients", "1", "--new-tokens", "16"),
}
LIMIT_S = 240.0


def test_every_benchmark_without_a_venv_of_its_own_is_run_here() -> None:
    found = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    assert found == SHORT.keys() | {"random_checkpoint", "report", "servers"}


async def test_a_fault_that_does_not_exist_is_refused_with_those_that_do() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "benchmarks/faults.py",
        *("--only", "router on fire"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, complaint = await process.communicate()
    assert process.returncode == 2
    assert "decode killed mid-stream" in complaint.decode()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("overlap", (), "Build it with: launch/sglang_cpu/environment.sh\n"),
        ("drafts", ("--config", "nowhere.yaml"), "drafts.py: nowhere.yaml"),
    ],
)
async def test_on_sglang_it_says_what_is_missing_the_environment_or_the_named_deployment(
    tmp_path: Path, name: str, options: Sequence[str], said: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        f"benchmarks/{name}.py",
        *("--engine", "sglang", *options),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, complaint = await process.communicate()
    assert process.returncode == 2
    assert said in complaint.decode()


def test_tokens_are_late_unless_an_update_with_them_had_ended_with_the_inputs() -> None:
    updates = [
        {"name": "prefill_increment", "end_s": 1.0, "prompt_tokens": 40, "cached_tokens": 8},
        {"name": "prefill_increment", "end_s": 2.0, "prompt_tokens": 60, "cached_tokens": 40},
    ]
    agent = {"cached_tokens": 60, "spans": [{"name": "queue", "end_s": 0.0}, *updates]}
    assert [count_prefilled_tokens(agent, at_s) for at_s in (0.5, 1.5, 2.0)] == [8, 40, 60]
    assert count_prefilled_tokens({"cached_tokens": 24, "spans": []}, 1.0) == 24


def test_outputs_have_different_lengths_only_where_one_pair_serves_all_sizes() -> None:
    shared = load_config(ROOT / "configs" / "sglang-cpu.yaml", {})
    apart = load_config(ROOT / "configs" / "sglang-one-gpu.yaml", {})
    assert tokens_by_model(shared, 64) == {"small": 32, "medium": 48, "large": 64}
    assert tokens_by_model(apart, 64) == {"small": 64, "medium": 64, "large": 64}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
async def test_a_benchmark_ends_with_its_rows_as_json(name: str) -> None:
    if name == "page_load":
        pytest.importorskip("playwright")
        if shutil.which("chromium") is None:
            pytest.skip("needs Chromium: apt-get install --no-install-recommends chromium")
    build_rows(await printed_by(name, *SHORT[name]))


@pytest.mark.slow
async def test_batches_on_engines_that_are_kept_and_that_are_restarted_share_one_table() -> None:
    amount = ("--questions", "6", "--sizes", "1,2", "--rounds", "2", "--restarts", "1")
    rows = build_rows(await printed_by("batch", "--live", "models/small", *amount))
    assert [(row["path"], row["rounds"], row["plan"]) for row in rows] == [
        ("engines kept", 2, "ilp"),
        ("engines kept", 2, "round-robin"),
        ("engines restarted", 1, "ilp"),
        ("engines restarted", 1, "round-robin"),
    ]
    assert {row["errors"] for row in rows} == {0}


@pytest.mark.slow
async def test_children_of_a_session_prefill_their_prefix_once_on_embedded_pairs() -> None:
    options = ("--engine", "embedded", "--table", "children", "--seeds", "1")
    rows = build_rows(await printed_by("programs", *options))
    by_request, by_session = (row["prefilled p50"] for row in rows[:2])
    assert by_session < 0.7 * by_request


@pytest.mark.slow
async def test_a_judge_prefills_a_remote_models_text_while_that_is_written() -> None:
    options = ("--measure", "remote", "--shape", "3-1", "--settings", "2", "--chunks", "8")
    rows = build_rows(
        await printed_by("overlap", *options, *SHORT["overlap"], "--new-tokens", "64")
    )
    late = {row["setting"]: row["late_share"] for row in rows}
    assert late["in chunks of 8, one remote"] < 0.7 * late["tree, one remote"]


@pytest.mark.slow
async def test_a_process_with_a_real_expert_pool_grows_by_no_more_than_the_pools_budget() -> None:
    rows = build_rows(
        await printed_by("coserve", "--table", "real", "--images", "200", "--seeds", "1")
    )
    most = 1.05  # threads and images take memory, too
    assert [row["system"] for row in rows if row["grown_mb"] > most * row["budget_mb"]] == []


async def printed_by(name: str, *options: str) -> bytes:
    """What a benchmark prints with these options; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        f"benchmarks/{name}.py",
        *options,
        "--json",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            printed, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()  # it ends what it started
            await process.wait()
    assert process.returncode == 0, complaints.decode()
    return printed


def build_rows(printed: bytes) -> list[dict[str, Any]]:
    """The rows of the JSON object that ends it."""
    found = json.loads(printed.splitlines()[-1])
    assert found.keys() == {"title", "engine", "simulated", "rows"}
    assert found["rows"] and all(row.keys() == found["rows"][0].keys() for row in found["rows"])
    assert all(
        value is None or isinstance(value, str | int | float)
        for row in found["rows"]
        for value in row.values()
    )
    rows: list[dict[str, Any]] = found["rows"]
    return rows
