"""Clients whose pins conflict with ours: scripts in Python environments of their own, built once."""

import asyncio
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shell-router"
BUILD_LIMIT_S = 900.0
RUN_LIMIT_S = 120.0


def python_with(packages: Sequence[str], alone: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with these packages, and with those `alone` without what
    they need.

    Skips the test where pip cannot install them.
    """
    key = hashlib.sha256(repr((sys.version_info[:2], packages, alone)).encode()).hexdigest()[:12]
    folder = CACHE / f"clients-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            try:
                _build(folder, packages, alone)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"{' '.join([*packages, *alone])}: {error.stderr.strip()[-300:]}")
            (folder / "complete").touch()
    return folder / "bin" / "python"


def _build(folder: Path, packages: Sequence[str], alone: Sequence[str]) -> None:
    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_LIMIT_S)

    run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
    run(*pip, *packages)
    if alone:
        run(*pip, "--no-deps", *alone)


async def answer_of(python: Path, script: str, url: str) -> Any:
    """What the script, which has `url`, prints as JSON on its last line. Raises AssertionError
    where it fails.
    """
    outside = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TOGETHER_NO_BANNER": "1",
    }  # none of them asks the internet
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | outside
    process = await asyncio.create_subprocess_exec(
        str(python),
        *("-c", f"url = {url!r}\n{script}"),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_LIMIT_S):
            said, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, complaint.decode()[-3000:]
    return json.loads(said.splitlines()[-1])
