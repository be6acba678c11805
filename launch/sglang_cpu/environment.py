"""The virtual environment that environment.sh builds, and how a process in it finds the router's
plugin.
"""

import os
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

from shell_router import __version__

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD_COMMAND = "launch/sglang_cpu/environment.sh"
PLUGINS = "sglang.srt.plugins"
MOST_RANKS = 8


def built_environment() -> Path | None:
    """The environment of these pins where it is complete, else None: BUILD_COMMAND builds it."""
    done = subprocess.run(
        [HERE / "environment.sh", "--path"], capture_output=True, text=True, check=True, timeout=30
    )
    venv = Path(done.stdout.strip())
    return venv if (venv / "complete").exists() else None


def engine_variables(site: Path) -> Mapping[str, str]:
    """The environment variables of an SGLang process on a CPU. `site` is where the plugin is
    installed.
    """
    return {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "MC_FORCE_TCP": "1",
        "OMP_NUM_THREADS": "1",
        # for --tp-size: by default SGLang wants a NUMA node for each rank, and takes the NCCL that
        # its PyTorch brings
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
            str(rank % (os.cpu_count() or 1)) for rank in range(MOST_RANKS)
        ),
        "SGLANG_NCCL_SO_PATH": "none",
        # decode forgets a dead prefill after two missed heartbeats; by default (5 s) one that is
        # restarted sooner than that is taken for the old one, and every later transfer hangs
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "PYTHONPATH": os.pathsep.join((str(HERE / "stand_in"), str(site))),
    }


def install_plugin(site: Path) -> None:
    """Make this working tree's plugin, and of the rest only what it drafts and places with,
    importable from `site`.

    The plugin of stand_in/ is discoverable there too; it does nothing unless one of its variables
    is set. Done for each pair instead of once in the environment, which several working trees
    share.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = site / f"{project['name'].replace('-', '_')}-{__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    package = site / "shell_router"
    package.mkdir(exist_ok=True)
    for name in ("__init__.py", "core", "errors.py", "experts", "sglang_plugin"):
        (package / name).unlink(missing_ok=True)
        (package / name).symlink_to(ROOT / "shell_router" / name)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {__version__}\n",
        encoding="utf-8",
    )
    groups = {**project["entry-points"]}
    groups[PLUGINS] = {**groups[PLUGINS], "cpu_kernels": "cpu_kernels:register"}
    (metadata / "entry_points.txt").write_text(_entry_points(groups), encoding="utf-8")


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    return "\n".join(lines) + "\n"
