"""The oldest and the newest SGLang that we support: flags of our files, and names that the plugin
needs.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.sglang_cpu.environment import built_environment, engine_variables
from tests.fakes.command import COMMAND

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

ROOT = Path(__file__).parents[2]
FILES = sorted(
    file
    for file in (ROOT / "configs").glob("*.yaml")
    if re.search(r"^\s*(launch|.*, launch): *\{", file.read_text(encoding="utf-8"), re.MULTILINE)
)
MACHINES = {"sglang-two-machines.yaml": ("10.0.0.1", "10.0.0.2")}
OLDEST = "0.5.16"
NEWEST = next(
    line.removeprefix("sglang==")
    for line in (ROOT / "launch/sglang_cpu/pins.txt").read_text(encoding="utf-8").split()
    if line.startswith("sglang==")
)


def output(*command: str | Path, text: str = "", environ: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def planned(version: str) -> str:
    """The engines' commands of all deployments with `launch`; those for the CPU have one version."""
    lines = []
    for file in FILES:
        if version == OLDEST and file.name.startswith("sglang-cpu"):
            continue
        for machine in MACHINES.get(file.name, ("",)):
            only = ("--machine", machine) if machine else ()
            lines += output(*COMMAND, "launch", "--config", file, "--dry-run", *only).splitlines()
    return "".join(f"{line}\n" for line in lines if "sglang.launch_server" in line)


def scripted(folder: Path) -> str:
    """The commands of the scripts that start engines."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "$*"\n', encoding="utf-8")
    python.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return output("launch/gpu/pairs.sh", "0", "model", environ=environ) + output(
        "launch/sglang-pair.sh", "model", "--", "--mem-fraction-static", "0.85", environ=environ
    )


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_sglang_takes_our_flags_and_has_what_the_plugin_hooks_into(
    version: str, tmp_path: Path
) -> None:
    environment = built_environment()
    assert environment is not None
    python = environment / "bin" / "python"
    old = tmp_path / "old"
    if version == OLDEST:
        package = f"sglang=={OLDEST}"
        output(python, "-m", "pip", "install", "-q", "--no-deps", "--target", old, package)
    variables = engine_variables(ROOT)
    commands = planned(version) + scripted(tmp_path)
    assert commands.count("sglang.launch_server") > 20, FILES
    parsed = output(
        python,
        "tests/sglang/parse_flags.py",
        text=commands,
        environ={**variables, "PYTHONPATH": f"{old}:{variables['PYTHONPATH']}"},
    )
    assert parsed.splitlines()[-1].split() == [version]
