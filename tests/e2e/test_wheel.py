"""The wheel in a fresh environment, outside a clone. Its dependencies are those of the tests'
environment.
"""

import asyncio
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from shell_router import __version__
from tests.fakes.command import ROOT, running_command, survivors

pytestmark = pytest.mark.slow

START_S = 180
ENVIRONMENT: Mapping[str, str] = {
    name: value for name, value in os.environ.items() if name != "PYTHONPATH"
}


@dataclass(frozen=True)
class Installed:
    """An environment that has the wheel, and an empty folder to work in."""

    command: tuple[str, ...]
    python: Path
    folder: Path
    wheel: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One command to its end."""
        command = (*self.command, *arguments)
        return subprocess.run(
            command,
            cwd=self.folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    at = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(at), str(ROOT)],
        check=True,
        env=ENVIRONMENT,
    )
    (wheel,) = at.glob("*.whl")
    venv.create(at / "venv", with_pip=False)
    python = at / "venv" / "bin" / "python"
    install = [*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, env=ENVIRONMENT)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(at / "venv"), "platbase": str(at / "venv")})
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    folder = at / "empty"
    folder.mkdir()
    return Installed((str(at / "venv" / "bin" / "shell-router"),), python, folder, wheel)


def test_it_is_the_wheels_package_that_runs_and_knows_its_version(installed: Installed) -> None:
    assert installed.run("--version").stdout == f"shell-router {__version__}\n"
    show = "import shell_router, shell_router.sglang_plugin as one; print(shell_router.__file__)"
    found = subprocess.run(
        [installed.python, "-c", show],
        cwd=installed.folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(installed.python.parents[1])
    assert installed.wheel.stat().st_size < 10 * 2**20


async def test_the_demo_runs_in_an_empty_folder(installed: Installed) -> None:
    async with running_command(
        "demo", "--rounds", "1", command=installed.command, cwd=installed.folder, env=ENVIRONMENT
    ) as demo:
        await demo.line_with("Asking 1 questions", limit_s=START_S)
        started = demo.started()
        code, output = await demo.ended(limit_s=START_S)
    assert (code, survivors(started)) == (0, set()), output


async def test_it_serves_without_a_file_and_a_copy_of_its_files(installed: Installed) -> None:
    made = await asyncio.to_thread(installed.run, "init", "mine")
    assert (made.returncode, made.stdout.strip()) == (
        0,
        "Next: cd mine && shell-router serve --config configs/embedded.yaml",
    )
    again = await asyncio.to_thread(installed.run, "init", "mine")
    assert (again.returncode, "not there yet" in again.stderr) == (2, True)
    for arguments in ((), ("--config", "mine/configs/embedded.yaml")):
        async with running_command(
            "serve",
            "--port",
            "0",
            *arguments,
            command=installed.command,
            cwd=installed.folder,
            env=ENVIRONMENT,
        ) as server:
            url = (await server.line_with("Serving on", limit_s=START_S)).split()[-1]
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{url}/v1/models") as response,
            ):
                names = {one["id"] for one in (await response.json())["data"]}
    assert names >= {"small", "medium", "large", "tree-9-3-1"}
