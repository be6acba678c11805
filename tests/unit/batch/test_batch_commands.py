"""`shell-router batch profile` and `run`: what they refuse, and what needs no engine."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest
import yaml
from rich.console import Console

from shell_router.batch.journal import Output
from shell_router.batch.planner import BatchPlan, ModelWork, Session, Workload, schedule_sessions
from shell_router.batch.profile import ModelProfile, PoolProfile
from shell_router.batch.queues import WorkerQueues
from shell_router.batch.report import follow_on_screen, summarize_run
from shell_router.batch.sessions import Follow, Sessions, Stage
from shell_router.cli import main
from shell_router.files.write import plain
from tests.fakes.pools import ScriptedWorkers

POOL = """
models: {a: {path: a}, b: {path: b}, "c[/x]": {path: c}}
workers:
  - &worker {pair: {prefill: "http://127.0.0.1:1", decode: "http://127.0.0.1:2", launch: {}}}
  - *worker
recruit: {proposers: 3}
aggregate: {model: b, tau: 0.67}
profile: costs.yaml
"""
COST = ModelProfile(5.0, 10.0, 20.0, 1.0, 0.01, 0.02)
EXPERTS = ("a", "b", "c[/x]")
ANSWERS = {"1": "111", "2": "112", "3": "123", "4": "222"}
"""What the proposers say to each question, whose right answer is 1; the aggregator says 1, and 3 to
the second.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pool, its profile and four questions; of its models only the folders."""
    for model in "abcz":
        (tmp_path / model).mkdir()
    (tmp_path / "pool.yaml").write_text(POOL, encoding="utf-8")
    profile = PoolProfile(dict.fromkeys(EXPERTS, COST), COST)
    (tmp_path / "costs.yaml").write_text(yaml.safe_dump(plain(asdict(profile))), encoding="utf-8")
    lines = [orjson.dumps({"question": f"Q{number}?", "answer": "1"}) for number in ANSWERS]
    (tmp_path / "questions.jsonl").write_bytes(b"\n".join(lines))
    return tmp_path


def written(folder: Path) -> Path:
    """A run of which all outputs are there, and nothing else."""
    outputs = [
        Output(question, "proposer", model, f"Answer: {said}.", 0.5)
        for question, answers in ANSWERS.items()
        for model, said in zip(EXPERTS, answers, strict=True)
    ]
    outputs += [
        Output(question, "aggregator", "b", f"Answer: {3 if question == '2' else 1}.")
        for question in ANSWERS
    ]
    run = folder / "run"
    run.mkdir()
    (run / "outputs.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in outputs))
    return run


def batch(folder: Path, command: str, *options: object) -> int:
    data = ("--data", folder / "questions.jsonl")
    return main(["batch", command, str(folder / "pool.yaml"), *map(str, (*data, *options))])


def results(run: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in (run / "results.jsonl").read_bytes().splitlines()]


def test_a_run_that_lacks_only_its_results_writes_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(folder)
    assert batch(folder, "run", "--out", run, "--method", "longest-first") == 0
    assert [(one["id"], one["by"], one["answer"]) for one in results(run)] == [
        ("1", "proposers", "1"),
        ("2", "proposers", "1"),
        ("3", "aggregator", "1"),
        ("4", "proposers", "2"),
    ]
    said = capsys.readouterr().out
    assert "4 lines: 3 answered by proposers alone, 1 by the aggregator." in said
    assert "75.0% of 4 right" in said


CHANGES = {
    ("path: a}", "path: z}"): "models",
    ("{path: b}", "{path: b, system: Think.}"): "models",
    ("profile:", "proposers: [b]\nprofile:"): "proposers",
    ("profile:", "sampling: {top_p: 0.5}\nprofile:"): "sampling",
    ("proposers: 3", "proposers: 2"): "recruit",
    ("model: b", "model: a"): "aggregate",
}


def test_a_change_of_the_inputs_of_a_run_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(folder)
    assert batch(folder, "run", "--out", run) == 0
    for options, other in ((("--seed", "5"), "seed"), (("--limit", "2"), "questions")):
        assert batch(folder, "run", "--out", run, *options) == 2
        assert f"holds a run with other {other}." in capsys.readouterr().err
    for change, other in CHANGES.items():
        (folder / "pool.yaml").write_text(POOL.replace(*change), encoding="utf-8")
        assert batch(folder, "run", "--out", run) == 2
        assert f"holds a run with other {other}." in capsys.readouterr().err


def test_a_change_of_the_gate_or_of_how_answers_are_read_is_not_refused(folder: Path) -> None:
    run = written(folder)
    assert batch(folder, "run", "--out", run) == 0
    changed = POOL.replace("tau: 0.67", "tau: 0.4, confidence: probability").replace(
        "profile:", "concurrency: 2\nprofile:"
    )
    (folder / "pool.yaml").write_text(changed + "answers: {pattern: '[34]'}\n", encoding="utf-8")
    assert batch(folder, "run", "--out", run, "--tau", "2") == 0
    assert [one["by"] for one in results(run)] == ["aggregator"] * 4


@pytest.mark.parametrize(
    ("command", "options", "complaint"),
    [
        ("run", ("--limit-s", "0"), "A plan cannot be searched for 0.0 s. Give a positive number."),
        (
            "run",
            ("--data", "absent.jsonl"),
            "absent.jsonl: No such file or directory. Name a JSONL file",
        ),
        ("profile", ("--sizes", "8,8"), "needs sessions of two sizes or more"),
        (
            "profile",
            ("--sizes", "0,8"),
            "needs sessions of two sizes or more, each of a prompt or more",
        ),
        (
            "profile",
            ("--sizes", "1,2"),
            "Sessions of 1, 2 prompts on 2 workers need 6 questions, and there are 4.",
        ),
    ],
)
def test_bad_input_is_reported_and_nothing_is_started(
    folder: Path,
    command: str,
    options: Sequence[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ("--out", folder / "run") if command == "run" else ()
    assert batch(folder, command, *out, *options) == 2
    assert complaint in capsys.readouterr().err
    assert not list(folder.glob("**/*logs*"))


@pytest.mark.parametrize("options", [("--limit", "0"), ("--method", "guess"), ()])
def test_an_option_that_cannot_be_is_refused_by_name(
    folder: Path, options: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", folder / "run") if options else ()
    assert batch(folder, "run", *out, *options) == 2
    assert (options[0] if options else "--out") in capsys.readouterr().err


def test_a_pool_without_a_profile_gets_the_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "costs.yaml").unlink()
    assert batch(folder, "run", "--out", folder / "run") == 2
    assert (
        "what the models cost is not known. Name the file as `profile`" in capsys.readouterr().err
    )
    (folder / "pool.yaml").write_text(POOL.replace("profile: costs.yaml", ""), encoding="utf-8")
    assert batch(folder, "profile") == 2
    assert "The pool names no profile. Name the file to write" in capsys.readouterr().err


def test_a_model_whose_folder_is_not_there_is_reported_before_any_other_is_started(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c").rmdir()
    for command, out in (("run", ("--out", folder / "run")), ("profile", ("--sizes", "1,1"))):
        assert batch(folder, command, *out) == 2
        assert f"models.c[/x].path: there is no folder {folder / 'c'}." in capsys.readouterr().err
    assert not list(folder.glob("**/*logs*"))


def test_a_corrupt_profile_is_reported_by_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = (
        (folder / "costs.yaml")
        .read_text(encoding="utf-8")
        .replace("mean_tokens: 10.0", "mean_tokens: many")
    )
    (folder / "costs.yaml").write_text(spoiled, encoding="utf-8")
    assert batch(folder, "run", "--out", folder / "run") == 2
    assert (
        "costs.yaml:4: aggregator.mean_tokens must be a number at least 0, not 'many'"
        in capsys.readouterr().err
    )


def test_a_pool_without_an_aggregator_takes_no_tau(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pool.yaml").write_text(POOL.replace("aggregate:", "# aggregate:"), encoding="utf-8")
    assert batch(folder, "run", "--out", folder / "run", "--tau", "1") == 2
    assert (
        "tau needs an aggregator, and the pool has none. Add `aggregate` to it"
        in capsys.readouterr().err
    )


def test_the_last_lines_say_how_many_prompts_went_to_another_worker_than_the_plans_and_why() -> (
    None
):
    session = Session(0, "a", 4, 0.0, 5.0)
    stage = Stage("proposer", BatchPlan("ilp", (session,), 0.0), (session,), {"taken": 3})
    assert (
        summarize_run([], [stage])[0]
        == "proposer: 5.0 s, planned 5.0 s. 3 prompts were taken by idle workers."
    )


def test_the_screen_shows_names_as_they_are_and_counts_outputs() -> None:
    console = Console(width=120, record=True, file=None, quiet=False)
    proposer = ModelWork("c[/x]", 2, 1.0, 1.0)
    work = Workload((proposer,), 1, 1)
    stage = Stage("proposer", BatchPlan("ilp", schedule_sessions(work, [{"c[/x]": 2}]), 0.0))
    queues = WorkerQueues((proposer,), {"c[/x]": []}, stage.plan, 1)
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    sessions = Sessions(queues, ScriptedWorkers(), ignore, Follow(), 1, lambda: 0.0)
    with follow_on_screen(console) as follow:
        follow.on_stage(stage, sessions)
        follow.on_progress("worker 0: c[/x] answers 2 prompts")
        follow.on_output(Output("1", "proposer", "c[/x]"))
    shown = console.export_text()
    assert "worker 0: c[/x] answers 2 prompts" in shown
    assert "proposers" in shown
    assert "1/2" in shown
    assert re.search(r"c\[/x\] × 2 .* 0\.0 .* 3\.0 .*█", shown)


def test_a_profile_needs_no_run_that_tells_skills_as_every_expert_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = POOL.replace("proposers: 3", "proposers: 2, skills: runs/absent")
    (folder / "pool.yaml").write_text(changed, encoding="utf-8")
    assert batch(folder, "run", "--out", folder / "run") == 2
    assert "Name the folder of a run that has ended" in capsys.readouterr().err
    assert batch(folder, "profile", "--sizes", "1,2") == 2
    assert "Sessions of 1, 2 prompts on 2 workers need 6 questions" in capsys.readouterr().err
