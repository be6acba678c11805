#!/usr/bin/env python3
"""Stands for a Python that has SGLang: that of environment.sh, with all that SGLang needs to run
without a GPU.

launch/sglang_cpu/interpreter.py -m sglang.launch_server … [--cores N,N,...]

`--cores` is its own flag: the CPU cores, counted from 0, that the server and all its processes run
on (Linux).
"""

import argparse
import fcntl
import hashlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch.sglang_cpu.environment import (  # noqa: E402 - found by the line above
    BUILD_COMMAND,
    built_environment,
    engine_variables,
    install_plugin,
)


def installed_plugin(folder: Path) -> Path:
    """A folder with this working tree's plugin, made once. The two engines of a pair start at the
    same time.
    """
    contents = [
        (ROOT / file).read_bytes()
        for file in ("pyproject.toml", "launch/sglang_cpu/environment.py")
    ]
    tree = hashlib.sha256(b"".join((bytes(ROOT), *contents))).hexdigest()
    site = folder / f"plugin-{tree[:12]}"
    site.mkdir(exist_ok=True)
    with (site / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (site / "complete").exists():
            install_plugin(site)
            (site / "complete").touch()
    return site


def main() -> None:
    venv = built_environment()
    if venv is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cores", type=lambda text: {int(core) for core in text.split(",")})
    own, arguments = parser.parse_known_args()
    if own.cores is not None:
        os.sched_setaffinity(0, own.cores)
    python = venv / "bin" / "python"
    os.execve(python, [str(python), *arguments], engine_variables(installed_plugin(venv.parent)))


if __name__ == "__main__":
    main()
