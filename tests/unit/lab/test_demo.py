"""The deployment that `demo --real` makes once, and the table of effects."""

import sys
from pathlib import Path
from typing import Any

import pytest

from shell_router.errors import ConfigError
from shell_router.lab.demo import compare_latencies, make_deployment, measure_costs
from shell_router.lab.evaluation.records import Reply


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


def reply(overlap_share: float | None = None, **agent: Any) -> Reply:
    trace = {
        "agents": {"a": {"state": "finished", "spans": [], **agent}},
        "overlap": {"overlap_share": overlap_share},
    }
    return Reply("", 1.0, 1, 1, (), (), trace)


@pytest.mark.parametrize(
    ("name", "acting", "words"),
    [
        ("tree-incremental", reply(0.5, spans=[{"name": "prefill_increment"}]), "50% of the"),
        ("full", reply(state="skipped"), "1 aggregators skipped"),
        ("full-drafts", reply(drafted_tokens=5, accepted_tokens=0), "0 tokens drafted right, 5"),
    ],
)
def test_a_mechanism_that_did_nothing_claims_nothing(name: str, acting: Reply, words: str) -> None:
    assert measure_costs(name, reply(), acting).startswith(words)
    assert measure_costs(name, acting, reply()) == ""


def test_a_mechanisms_share_comes_with_the_range_over_questions() -> None:
    assert compare_latencies([1.0, 2.0, 4.0], [0.5, 2.0, 6.0]) == "1.00 (0.50 to 1.50)"
    assert compare_latencies([2.0], [1.0]) == "0.50"
