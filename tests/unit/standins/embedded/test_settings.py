"""Settings, and what the router must not import."""

import subprocess
import sys
from typing import Any

import pytest

from shell_router.files.read import check
from shell_router.standins.embedded.settings import EmbeddedSection


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "int8"}, {"threads": 0}, {"max_total_tokens": -1}, {"max_running_requests": 0}],
)
def test_bad_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    _, (problem,) = check(EmbeddedSection, wrong)
    assert problem.at == tuple(wrong)


def test_launching_loads_no_torch() -> None:
    code = (
        "import sys, shell_router.standins.embedded.fleet;sys.exit(bool({'torch', "
        "'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
