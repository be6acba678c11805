"""Every benchmark runs, and ends with the JSON object that readers of its figures rely on."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = {
    "agent_cache_cost": ("--rounds", "1", "--chunks", "50"),
    "early_exit_cost": ("--rounds", "1"),
    "overlap": ("--rounds", "1", "--new-tokens", "8", "--question-tokens", "20"),
    "router_overhead": ("--quick",),
}
LIMIT_S = 240.0


def test_every_benchmark_is_run_here() -> None:
    assert {file.stem for file in (ROOT / "benchmarks").glob("*.py")} == SHORT.keys() | {"report"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
async def test_a_benchmark_ends_with_its_rows_as_json(name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        f"benchmarks/{name}.py",
        *SHORT[name],
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
    found = json.loads(printed.splitlines()[-1])
    assert found.keys() == {"title", "engine", "simulated", "rows"}
    assert found["rows"] and all(row.keys() == found["rows"][0].keys() for row in found["rows"])
    assert all(value is None or isinstance(value, str | int | float) for row in found["rows"] for value in row.values())
