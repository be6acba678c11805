from pathlib import Path

import orjson
import pytest

from shell_router.batch.prompts import Proposal, Result, as_lines, read_results
from shell_router.batch.report import summarize_run
from shell_router.errors import DataError


def result(answers: str, right: bool, by: str = "aggregator", error: str = "") -> Result:
    """Proposers that answer one letter each, of which r is right; the aggregator is `right`."""
    proposers = tuple(
        Proposal(f"m{n}", None if one == "." else one, 0.5, 3, one == "r")
        for n, one in enumerate(answers)
    )
    said = [one for one in answers if one != "."]
    most = max((said.count(one) for one in said), default=0)
    winner = max(
        (n for n, one in enumerate(answers) if one != "." and said.count(one) == most), default=None
    )
    return Result(1, "1", by=by, right=right, winner=winner, proposals=proposers, error=error)  # type: ignore[arg-type]


RUN = [
    result("rrr", True),
    result("xxx", False),
    result("xxr", True),
    result("rrx", True),
    result("xyr", True),
    result("xyz", False),
    result("...", True),
    result("rry", False),
]


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(as_lines([*RUN, Result(9, None, error="bad")]))
    found = read_results(tmp_path)
    assert as_lines(found) == as_lines([*RUN, Result(9, None, error="bad")])


@pytest.mark.parametrize("line", [b"{", b"5", b"[]", b"{}", b'{"proposals": [5]}'])
def test_a_file_of_another_kind_or_version_is_reported(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "results.jsonl").write_bytes(as_lines(RUN) + line + b"\n")
    with pytest.raises(DataError, match=r"results\.jsonl is not what a run writes: .*Run it again"):
        read_results(tmp_path)


def test_results_with_settings_that_this_version_does_not_know_are_reported(tmp_path: Path) -> None:
    found = orjson.loads(as_lines(RUN[:1]))
    (tmp_path / "results.jsonl").write_bytes(orjson.dumps({**found, "mood": "good"}))
    with pytest.raises(DataError, match="mood"):
        read_results(tmp_path)


def test_a_folder_without_results_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"No such file or directory\. Name the folder of a run that has ended"
    ):
        read_results(tmp_path)


def test_an_outcome_tells_who_answered_how_right_and_what_failed() -> None:
    bad = Result(7, None, error="this is not JSON")
    lines = summarize_run([*RUN, result("rrr", True, by="proposers"), bad], [])
    assert lines[0] == "10 lines: 1 answered by proposers alone, 8 by the aggregator."
    assert lines[1] == "1 with an error; the first, line 7: this is not JSON"
    assert lines[2].startswith("66.7% of 9 right (")
