from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from shell_router.batch.report import outcome, trial_table
from shell_router.batch.results import Proposal, Result, as_lines, choose, read_results, trials
from shell_router.errors import DataError


def result(answers: str, right: bool, by: str = "aggregator", error: str = "") -> Result:
    """Proposers that answer one letter each, of which r is right; the aggregator is `right`."""
    proposers = tuple(
        Proposal(f"m{n}", None if one == "." else one, 0.5, 3, one == "r") for n, one in enumerate(answers)
    )
    said = [one for one in answers if one != "."]
    most = max((said.count(one) for one in said), default=0)
    winner = max((n for n, one in enumerate(answers) if one != "." and said.count(one) == most), default=None)
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


def test_every_tau_is_judged_by_what_it_skips_and_what_that_costs() -> None:
    found = trials(RUN, "plurality")
    assert [round(one.tau, 4) for one in found] == [2.0, 1.0, 0.6667, 0.3333]
    assert [one.skipped for one in found] == [0, 2 / 8, 5 / 8, 7 / 8]
    assert [one.accuracy.value for one in found] == [5 / 8, 5 / 8, 5 / 8, 5 / 8]
    # below 2/3 `xyr` answers r, the last, and `xyz` z: as right as the aggregator; at 2/3 one is lost and one is won
    assert [one.loss.value for one in found] == [0, 0, 0, 0]


def test_agreement_is_measured_as_in_the_run_unless_set_otherwise() -> None:
    run = [replace(one, confidence=0.25 * place) for place, one in enumerate(RUN[:3], 1)]
    assert [(one.tau, one.skipped) for one in trials(run)] == [(2, 0), (0.75, 1 / 3), (0.5, 2 / 3), (0.25, 1)]


def test_the_loss_is_in_points() -> None:
    found = trials([*RUN[:5], result("xxr", True)], "plurality")
    assert [one.loss.value for one in found] == pytest.approx([0, 0, 100 * 2 / 6, 100 * 2 / 6])
    assert all(one.loss.low <= one.loss.value <= one.loss.high for one in found)


def test_the_lowest_tau_within_the_bound_is_chosen_and_none_below_one_that_is_not() -> None:
    run = [result("rrr", True), result("xxr", True), result("xyr", False), result("yxr", False)]
    found = trials(run, "plurality")
    assert [one.loss.value for one in found] == [0, 0, 25, -25]
    assert choose(found, 0.5).tau == 1
    assert choose(found, 30).tau == pytest.approx(1 / 3, abs=1e-3)
    assert choose(found, -1) is found[0]


def test_sure_experts_weigh_more_by_the_other_measure() -> None:
    opinions = (
        Proposal("m0", "r", 0.9, 3, True),
        Proposal("m1", "r", 0.6, 3, True),
        Proposal("m2", "x", 0.5, 3, False),
    )
    found = trials([replace(RUN[2], proposals=opinions, winner=1)], "probability")
    assert [one.tau for one in found] == [2.0, 0.75]
    assert [one.skipped for one in found] == [0, 1]


def test_a_run_whose_gate_spared_the_aggregator_tells_nothing() -> None:
    with pytest.raises(DataError, match=r"The aggregator was not asked everything\. Run it with --tau 2"):
        trials([*RUN, result("rrr", True, by="proposers")], "plurality")


def test_questions_on_which_the_aggregator_failed_are_left_out() -> None:
    failed = result("xxx", False, by="proposers", error="The aggregator did not answer: no")
    assert trials([*RUN, failed], "plurality") == trials(RUN, "plurality")


@pytest.mark.parametrize("run", [[], [Result(1, "1", error="bad")], [replace(RUN[0], right=None)]])
def test_a_run_without_right_answers_tells_nothing(run: list[Result]) -> None:
    with pytest.raises(DataError, match="No right answers are known in this run"):
        trials(run, "plurality")


def test_where_no_model_answers_the_aggregator_is_always_asked() -> None:
    (only,) = trials([result("...", True), result("...", False)], "plurality")
    assert (only.tau, only.skipped, only.accuracy.value) == (2.0, 0, 0.5)


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(as_lines([*RUN, Result(9, None, error="bad")]))
    found = read_results(tmp_path)
    assert as_lines(found) == as_lines([*RUN, Result(9, None, error="bad")])
    assert trials(found, "plurality") == trials(RUN, "plurality")


@pytest.mark.parametrize(
    "line",
    [b"{", b"5", b"null", b"[]", b"{}", b'{"proposers": 5}', b'{"proposers": [5]}', b'{"proposers": [{"name": "x"}]}'],
)
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
    with pytest.raises(DataError, match=r"No such file or directory\. Name the folder of a run that has ended"):
        read_results(tmp_path)


def test_an_outcome_tells_who_answered_how_right_and_what_failed() -> None:
    bad = Result(7, None, error="this is not JSON")
    lines = outcome([*RUN, result("rrr", True, by="proposers"), bad], [])
    assert lines[0] == "10 lines: 1 answered by proposers alone, 8 by the aggregator."
    assert lines[1] == "1 with an error; the first, line 7: this is not JSON"
    assert lines[2].startswith("66.7% of 9 right (")


def test_the_chosen_tau_is_marked() -> None:
    found = trials(RUN, "plurality")
    table = trial_table(found, found[1])
    assert list(table.columns[-1].cells) == ["", "chosen", "", ""]
    assert list(table.columns[0].cells)[:2] == ["always asked", "1"]


def test_of_hundreds_of_taus_some_are_shown_and_the_chosen_one_always() -> None:
    run = [replace(RUN[0], confidence=0.5 + place / 1000) for place in range(400)]
    found = trials(run)
    table = trial_table(found, found[7])
    taus = [str(cell) for cell in table.columns[0].cells]
    assert len(taus) < 25
    assert f"{found[7].tau:.3g}" in taus
    assert (taus[0], taus[-1]) == ("always asked", "0.5")
    assert [str(cell) for cell in table.columns[-1].cells].count("chosen") == 1
