import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from shell_router.batch import BASELINES
from shell_router.cli import main
from shell_router.cli.planning import METHODS

WORKLOAD = Path(__file__).parents[3] / "configs" / "workloads" / "mosaic-mmlu-pro.yaml"
SMALL = """
workers: 2
capacity: 2
experts:
  - {name: a, prompts: 100, load_s: 5, per_prompt_s: 1}
  - {name: b, prompts: 10, load_s: 5, per_prompt_s: 1}
"""


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "workload.yaml"
    file.write_text(SMALL, encoding="utf-8")
    return file


def test_the_shipped_workload_is_planned_to_the_proven_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "plan", str(WORKLOAD)]) == 0
    printed = capsys.readouterr().out
    assert "no plan within the same limits is shorter by more than 0.01%" in printed
    slower = float(re.findall(r"round-robin takes ([\d.]+) times as long", printed)[0])
    assert slower > 1.6


@pytest.mark.parametrize("method", ["ilp", "round-robin", "data-parallel", "longest-first"])
def test_the_plan_of_every_method_is_written_and_drawn(method: str, workload: Path) -> None:
    plan, picture = workload.with_name("plan.json"), workload.with_name("plan.svg")
    assert (
        main(["batch", "plan", str(workload), "--method", method, "--json", str(plan), "--picture", str(picture)]) == 0
    )
    written = json.loads(plan.read_text(encoding="utf-8"))
    assert written["method"] == method
    assert sum(session["prompts"] for session in written["sessions"]) == 110
    assert written["makespan_s"] == max(session["end_s"] for session in written["sessions"])
    assert written["bound_s"] <= written["makespan_s"]
    bars = ET.fromstring(picture.read_text(encoding="utf-8")).findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == len(written["sessions"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("prompts: 10,", "prompts: -10,"), "workload.yaml:6: Expert 'b' has prompts -10. Give a number from 0 to"),
        (("prompts: 10,", f"prompts: {10**400},"), "workload.yaml:6: Expert 'b' has prompts 1"),
        (("load_s: 5", f"load_s: {10**400}"), "workload.yaml:5: the number is too large"),
        (("load_s: 5", "load_s: 1.0e-300"), "workload.yaml:5: Expert 'a' has load_s 1e-300"),
        (("workers: 2", "workers: 10000000"), "2 experts on 10000000 workers are too many to plan"),
        (("prompts: 10,", "prompts: true,"), "expected a whole number, not true. docs/pools.md explains"),
        (("name: b", r'name: "b\u0001"'), "Give it a name of printable characters"),
        (("capacity: 2", "capacity: 2\nspeed: 3"), "workload.yaml:4: unknown setting 'speed'"),
        (("workers: 2", "workers: 0"), "0 workers of 2 experts each"),
        (("capacity: 2", "capacity: 1\nworkers: 1"), "'workers' stands twice"),
        (("name: b", "name: a"), "Two experts are named 'a'"),
        ((", load_s: 5, per_prompt_s: 1}\n  - {name: b", ", per_prompt_s: 1}\n  - {name: b"), "'load_s' is missing"),
    ],
)
def test_a_wrong_workload_is_told_with_file_and_line(
    change: tuple[str, str], complaint: str, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload.write_text(SMALL.replace(*change), encoding="utf-8")
    assert main(["batch", "plan", str(workload)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_is_planned(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", "plan", str(workload), "--picture", str(workload.parent)]) == 2
    said = capsys.readouterr()
    assert "Name a file in a folder that is there" in said.err
    assert not said.out


def test_what_takes_no_time_is_planned_and_drawn(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(SMALL.replace("load_s: 5, per_prompt_s: 1", "load_s: 0, per_prompt_s: 0"), encoding="utf-8")
    assert main(["batch", "plan", str(workload), "--picture", str(workload.with_name("plan.svg"))]) == 0
    assert "0.0 s in all" in capsys.readouterr().out


def test_names_are_shown_as_they_are(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload.write_text(SMALL.replace("name: b", "name: 'qwen[int4][/x]'"), encoding="utf-8")
    assert main(["batch", "plan", str(workload)]) == 0
    assert "qwen[int4][/x] \u00d7" in capsys.readouterr().out


def test_the_methods_are_the_program_and_every_baseline() -> None:
    assert ("ilp", *BASELINES) == METHODS


def test_a_plan_beyond_the_limits_is_said_to_be_so(capsys: pytest.CaptureFixture[str], workload: Path) -> None:
    main(["batch", "plan", str(workload)])
    assert re.search(
        r"data-parallel takes [\d.]+ times as long, loading every expert on every worker", capsys.readouterr().out
    )
