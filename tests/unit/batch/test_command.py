import json
import re
from pathlib import Path
from typing import get_args

import pytest

from shell_router.batch.planner import HEURISTICS
from shell_router.cli import main
from shell_router.cli.batch import Method

WORKLOAD = Path(__file__).parents[3] / "configs" / "workloads" / "mosaic-mmlu-pro.yaml"
SVG = "{http://www.w3.org/2000/svg}"
SMALL = """
workers: 2
capacity: 2
models:
  - {name: a, prompts: 100, load_s: 5, per_prompt_s: 1}
  - {name: b, prompts: 10, load_s: 5, per_prompt_s: 1}
"""


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "workload.yaml"
    file.write_text(SMALL, encoding="utf-8")
    return file


def test_the_shipped_workload_is_planned_to_the_proven_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["batch", "plan", str(WORKLOAD)]) == 0
    printed = capsys.readouterr().out
    assert "no plan within the same limits is shorter by more than 0.01%" in printed
    slower = float(re.findall(r"round-robin takes ([\d.]+) times as long", printed)[0])
    assert slower > 1.6


@pytest.mark.parametrize("method", ["ilp", "round-robin", "longest-first"])
def test_the_plan_of_every_method_is_written_and_drawn(
    method: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = workload.with_name("plan.json")
    assert main(["batch", "plan", str(workload), "--method", method, "--json", str(plan)]) == 0
    written = json.loads(plan.read_text(encoding="utf-8"))
    assert written["method"] == method
    assert sum(session["prompts"] for session in written["sessions"]) == 110
    assert written["makespan_s"] == max(session["end_s"] for session in written["sessions"])
    assert written["bound_s"] <= written["makespan_s"]
    drawn = [
        line
        for line in capsys.readouterr().out.splitlines()
        if " \u00d7 " in line and "prompts" not in line
    ]
    assert len(drawn) == len(written["sessions"])
    assert all("\u2588" in line for line in drawn), "a bar each"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            ("prompts: 10,", "prompts: -10,"),
            "workload.yaml:6: models[1].prompts must be a whole number at least 0",
        ),
        (
            ("load_s: 5", "load_s: -0.1"),
            "workload.yaml:5: models[0].load_s must be a number at least 0",
        ),
        (("per_prompt_s: 1}", "per_prompt_s: .nan}"), "models[0].per_prompt_s must be"),
        (("workers: 2", "workers: 10000000"), "2 models on 10000000 workers are too many to plan"),
        (("name: b", r'name: "b\u0001"'), "Give it a name of printable characters"),
        (("capacity: 2", "capacity: 2\nspeed: 3"), "workload.yaml:4: Unknown key 'speed'"),
        (("workers: 2", "workers: 0"), "0 workers of 2 models each"),
        (("name: b", "name: a"), "Two models are named 'a'"),
    ],
)
def test_a_wrong_workload_is_reported_with_file_and_line(
    change: tuple[str, str], complaint: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload.write_text(SMALL.replace(*change), encoding="utf-8")
    assert main(["batch", "plan", str(workload)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_reported_before_anything_is_planned(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "plan", str(workload), "--json", str(workload.parent)]) == 2
    said = capsys.readouterr()
    assert "Name a file in a folder that is there" in said.err
    assert not said.out


@pytest.mark.parametrize("seconds", ["0", "1.0e-320"])
def test_what_takes_no_time_is_planned_and_drawn(
    seconds: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = f"load_s: {seconds}, per_prompt_s: {seconds}"
    workload.write_text(SMALL.replace("load_s: 5, per_prompt_s: 1", costs), encoding="utf-8")
    assert main(["batch", "plan", str(workload)]) == 0
    assert "0.0 s in all" in capsys.readouterr().out


def test_names_are_shown_as_they_are(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(SMALL.replace("name: b", "name: 'qwen[int4][/x]'"), encoding="utf-8")
    assert main(["batch", "plan", str(workload)]) == 0
    assert "qwen[int4][/x] \u00d7" in capsys.readouterr().out


def test_the_methods_are_the_program_and_every_baseline() -> None:
    assert ("ilp", *HEURISTICS) == get_args(Method)
