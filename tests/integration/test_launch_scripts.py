"""The launchers without a supervisor, as far as they go without GPUs and without a Ray cluster."""

import json
import shlex
import socket
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "sglang-two-machines.yaml"


def output(*command: str | Path, path: str = "", **environ: str) -> list[str]:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={"PATH": f"{path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environ},
    )
    return done.stdout.splitlines()


@cache
def ray(*options: str) -> list[list[str]]:
    return [
        shlex.split(line)
        for line in output(sys.executable, "launch/ray/launch.py", CONFIG, "--dry-run", *options)
    ]


def test_ray_gets_one_job_per_machine_pinned_there_with_its_gpus() -> None:
    for command, host in zip(ray(), ("10.0.0.1", "10.0.0.2"), strict=True):
        given = dict(pairwise(command))
        assert command[:3] == ["ray", "job", "submit"]
        assert list(json.loads(given["--entrypoint-resources"])) == [f"node:{host}"]
        assert given["--entrypoint-num-gpus"] == "3"
        entrypoint = command[command.index("--") + 1 :]
        assert entrypoint == [
            *(
                "shell-router",
                "launch",
                "--config",
                str(CONFIG),
                "--machine",
                host,
                "--engines-only",
            )
        ]


def test_ray_stops_the_jobs_that_it_started() -> None:
    started = [command[command.index("--submission-id") + 1] for command in ray()]
    assert [command[-1] for command in ray("--stop")] == started


@pytest.fixture
def commands_of_python(tmp_path: Path) -> Path:
    """A folder with a `python` that prints what it is asked to run, and which GPU, and ends."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*"\n', encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


def test_several_pairs_share_one_gpu_on_ports_of_their_own(commands_of_python: Path) -> None:
    lines = output(
        "launch/gpu/pairs.sh", "1", "only-model", "--", "--quiet", path=str(commands_of_python)
    )
    assert lines
    for line in lines:
        assert line.startswith("1 -m sglang.launch_server --model-path only-model ")
        assert line.endswith("--max-total-tokens 32768 --cuda-graph-max-bs-decode 16 --quiet")


def test_a_pair_is_not_started_on_a_port_that_another_process_has(commands_of_python: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(subprocess.CalledProcessError) as refused,
    ):
        port = taken.getsockname()[1]
        command = ("launch/sglang-pair.sh", "model", "0", "1", str(port - 2))
        output(*command, path=str(commands_of_python))
    assert f"port {port} of 127.0.0.1 is taken" in refused.value.stderr
    assert refused.value.stdout == ""


@pytest.mark.parametrize(
    ("password", "read"),
    [("", ""), ("geheim", 'requirepass "geheim"'), ('a "b\\', 'requirepass "a \\"b\\\\"')],
)
def test_redis_gets_a_password_that_its_command_line_does_not_show(
    tmp_path: Path, password: str, read: str
) -> None:
    redis = tmp_path / "redis-server"
    redis.write_text('#!/bin/sh\necho "$*"\ncat\n', encoding="utf-8")
    redis.chmod(0o755)
    arguments, given = output(
        "launch/redis.sh", "7000", path=str(tmp_path), REDIS_PASSWORD=password
    )
    assert arguments.startswith("- --bind 127.0.0.1 --port 7000 ") and not (
        password and password in arguments
    )
    assert given == read


@pytest.mark.parametrize(
    "script", ["gpu/pairs.sh", "gpu/measure.sh", "sglang-pair.sh", "router.sh", "redis.sh"]
)
def test_a_script_says_how_it_is_used(script: str) -> None:
    assert output(f"launch/{script}", "--help")[0].startswith(f"usage: launch/{script} ")
