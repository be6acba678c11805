"""`shell-router batch run` on a Ray cluster of one node: the whole command, with real models on
embedded pairs.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fakes.command import RunningCluster, running_cluster, running_command, survivors
from tests.fakes.pools import ROOT, write_pool, write_questions

LIMIT_S = 180.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster() as running:
        yield running


async def ran(pool: Path, questions: Path, out: Path) -> tuple[int, str]:
    """`shell-router batch run` to its end: exit code and what it printed."""
    async with running_command("batch", "run", pool, "--data", questions, "--out", out) as command:
        return await command.ended(limit_s=LIMIT_S)


def results(folder: Path) -> list[dict[str, Any]]:
    """What was answered, but for confidences: what engines compute in another batch may differ in a
    last digit.
    """
    found = [orjson.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]
    for one in found:
        for proposal in one["proposals"]:
            proposal.pop("confidence", None)
    return found


@pytest.mark.slow
async def test_a_run_on_a_cluster_gives_the_same_results_as_one_on_this_machine(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    questions = write_questions(tmp_path, 12)
    code, printed = await ran(write_pool(tmp_path), questions, tmp_path / "here")
    assert code == 0, printed
    for way, address in (("driver", cluster.address), ("client", cluster.client_address)):
        pool = write_pool(tmp_path, ray={"address": address})
        async with running_command(
            "batch", "run", pool, "--data", questions, "--out", tmp_path / way
        ) as command:
            await command.line_with("answers 12 prompts", limit_s=LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                while len(cluster.workers()) < 2:  # noqa: ASYNC110 # Ray starts the second when it gets to it
                    await asyncio.sleep(0.1)
            code, printed = await command.ended(limit_s=LIMIT_S)
        assert code == 0, printed
        assert results(tmp_path / way) == results(tmp_path / "here")
        assert survivors(cluster.engines()) == set()


@pytest.mark.slow
async def test_what_a_lost_worker_has_not_answered_is_answered_by_the_others(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    pool, out = write_pool(tmp_path, ray={"address": cluster.address}), tmp_path / "run"
    questions = write_questions(tmp_path, 40)
    async with running_command("batch", "run", pool, "--data", questions, "--out", out) as command:
        await command.line_with("answers 40 prompts", limit_s=LIMIT_S)
        os.kill(min(cluster.workers()), signal.SIGKILL)
        code, printed = await command.ended(limit_s=LIMIT_S)
    assert code == 0, printed
    assert "was lost" in printed
    assert [one["error"] for one in results(out)] == [""] * 40


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_the_command_ends_its_engines_on_the_cluster(
    cluster: RunningCluster, tmp_path: Path, number: signal.Signals
) -> None:
    pool = write_pool(tmp_path, ray={"address": cluster.address})
    questions = write_questions(tmp_path, 40)
    async with running_command(
        "batch", "run", pool, "--data", questions, "--out", tmp_path / "run"
    ) as command:
        await command.line_with("answers 40 prompts", limit_s=LIMIT_S)
        engines = cluster.engines() | cluster.workers()
        command.signal(number)
        code, printed = await command.ended(limit_s=LIMIT_S)
    assert code == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[number], printed
    assert engines
    assert survivors(engines, limit_s=60.0) == set()


@pytest.mark.slow
async def test_a_worker_that_no_node_has_room_for_is_refused_with_what_it_needs(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    pool = write_pool(
        tmp_path,
        ray={"address": cluster.address},
        workers=[{"embedded": {}}, {"embedded": {}, "node": "203.0.113.1"}],
        limits={"engine_start_s": 15.0},
    )
    code, printed = await ran(pool, write_questions(tmp_path, 2), tmp_path / "run")
    assert code == 2
    assert "1 CPUs and 0 GPUs on the node 203.0.113.1" in printed
    assert "ray status" in printed


@pytest.mark.slow
async def test_where_no_cluster_is_the_command_says_how_to_start_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    pool = write_pool(tmp_path, ray={"address": address})
    code, printed = await ran(pool, write_questions(tmp_path, 2), tmp_path / "run")
    assert code == 2
    assert f"There is no Ray cluster at {address}" in printed
    assert "ray start --head" in printed


def test_without_ray_the_command_says_how_to_install_it(tmp_path: Path) -> None:
    pool, questions = write_pool(tmp_path, ray={"address": "auto"}), write_questions(tmp_path, 2)
    hidden = "import sys; sys.modules['ray'] = None"  # makes its import fail
    command = ["batch", "run", str(pool), "--data", str(questions), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{hidden}; from shell_router.cli import main; sys.exit(main({command}))",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'shell-router[ray]'" in done.stderr
