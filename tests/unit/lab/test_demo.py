"""The deployment that `demo --real` makes once."""

import sys
from pathlib import Path

import pytest

from shell_router.errors import ConfigError
from shell_router.lab.demo import make_deployment


def test_a_deployment_that_another_demo_makes_meanwhile_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    other = "import os, sys; os.makedirs(sys.argv[2]); os.makedirs(sys.argv[1] + '/the others')"
    make_deployment(folder, (sys.executable, "-c", other, folder))
    assert [at.name for at in tmp_path.rglob("*")] == ["demo", "the others"], "its own is gone"


def test_a_conversion_that_takes_too_long_is_given_up_in_one_line(tmp_path: Path) -> None:
    slow = (sys.executable, "-c", "import signal; signal.pause()")
    with pytest.raises(ConfigError, match=r"not converted within 0\.01 s\. Try again"):
        make_deployment(tmp_path / "demo", slow, limit_s=0.01)
    assert list(tmp_path.iterdir()) == []
