"""The report's title and tables."""

from dataclasses import replace
from typing import Any

from rich.console import Console

from shell_router.lab.evaluation.records import Setting
from shell_router.lab.evaluation.report import Report, build_rows, describe_engines, print_tables
from tests.fakes.evaluations import agent, failed, judged, record

RECORDS = [
    record(
        "tree",
        0,
        True,
        2.0,
        agents=(agent(), agent("large", "early_exit", 4)),
        exits=(judged("c", True, 0.1),),
    ),
    record("small", 0, False, 0.5, agents=(agent(),)),
    failed("large", 0),
]
NAMES = ("small", "large", "tree")


def _report(**changes: Any) -> Report:
    report = Report(
        data="data.jsonl, 1 questions",
        engine="embedded pair, cpu",
        settings=NAMES,
        baseline="tree",
        seeds=(0,),
        concurrency=1,
        sampling={},
        asked=3,
        wanted=3,
        rows=build_rows(RECORDS, NAMES, "tree"),
    )
    return replace(report, **changes)


def _printed(report: Report) -> str:
    console = Console(width=150, force_terminal=False)
    with console.capture() as captured:
        print_tables(report, console)
    return captured.get()


def test_the_title_says_on_what_it_ran() -> None:
    assert _report().title == "Evaluation of data.jsonl, 1 questions\nembedded pair, cpu"


def test_a_partial_report_says_so_in_its_title() -> None:
    report = _report(asked=2)
    assert report.partial
    assert "PARTIAL: interrupted after 2 of 3 answers" in _printed(report)


def test_the_tables_have_a_line_per_setting_with_a_dash_where_nothing_is_known() -> None:
    lines = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in _printed(_report()).splitlines()
    ]
    cells = {name: [line[1:] for line in lines if line[0] == name] for name in NAMES}
    assert cells["small"] == [
        [
            "1",
            "0",
            "0.0% [0.0, 79.3]",
            "-100.0 [-100.0, +51.0]",
            "0.50",
            "0.50",
            "0.25",
            "100",
            "80%",
            "10",
        ],
        ["small 1, 1 of 1", "0.00", "-", "-", "-"],
    ]
    assert cells["large"][0][:2] == ["1", "1"]
    assert cells["large"][0][4:] == ["-"] * 6
    assert cells["tree"][1] == ["small 1, 1 of 1", "1.00", "100%", "100%", "5.0%"]
    assert "large 1, 0 of 1" in _printed(_report())


def test_the_json_says_how_its_intervals_were_made_and_holds_the_rows() -> None:
    found = _report().as_json()
    assert set(found["methods"]) == {"accuracy", "difference"}
    assert [row["setting"] for row in found["rows"]] == list(NAMES)
    assert found["partial"] is False


def test_names_in_the_tables_are_no_markup() -> None:
    rows = build_rows([record("[/x]", 0)], ["[/x]"], "[/x]")
    printed = _printed(_report(rows=rows, data="[red]"))
    assert all(words in printed for words in ("[/x]", "Evaluation of [red]"))


def test_engines_are_those_of_the_models_that_may_be_asked() -> None:
    served = [
        Setting("a", "model", "SGLang 0.5.16"),
        Setting("b", "model", "scripted engine"),
        Setting("t", "topology"),
    ]
    alone, tree = served[0], served[2]
    assert describe_engines([alone], served) == "SGLang 0.5.16"
    assert describe_engines([alone, tree], served) == "SGLang 0.5.16; scripted engine"
    assert "unknown" in describe_engines([tree], [Setting("a", "model"), served[2]])
