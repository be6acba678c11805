from dataclasses import replace
from pathlib import Path

import pytest

from shell_router.core.intervals import Interval
from shell_router.early_exit import EarlyExit
from shell_router.errors import ConfigError
from shell_router.evaluation.calibrate import said, write_variants
from shell_router.evaluation.calibration import Choice, check_calibrates, check_thresholds, choose, loss_of, variants
from shell_router.evaluation.records import Record
from shell_router.evaluation.rows import Row, rows_of
from shell_router.topology import load_topology, parse_topology

ROWS = rows_of(
    [Record(0, 0, name, right=True, stated="1", latency_s=1.0) for name in ("base", "other")], ["base", "other"], "base"
)


def losing(points: float, reach: float = 1.0) -> Row:
    middle = -points / 100
    return replace(ROWS[1], difference=Interval(middle, middle - reach / 100, middle + reach / 100))


def test_the_lowest_threshold_within_the_bound_is_chosen() -> None:
    rows = {0.5: losing(2.0), 0.6: losing(0.4), 0.7: losing(0.1), 0.9: losing(0.0)}
    choice = choose(rows, bound=0.5)
    assert choice is not None
    assert choice.threshold == 0.6
    assert choice.loss.value == pytest.approx(0.4)


def test_one_below_a_threshold_that_loses_too_much_is_not_believed() -> None:
    choice = choose({0.5: losing(0.0), 0.6: losing(0.6), 0.7: losing(0.2)}, bound=0.5)
    assert choice is not None
    assert choice.threshold == 0.7


def test_nothing_is_chosen_where_the_most_cautious_loses_too_much() -> None:
    assert choose({0.5: losing(0.0), 0.9: losing(0.6)}, bound=0.5) is None


def test_a_gain_is_no_loss() -> None:
    choice = choose({0.5: losing(-3.0)}, bound=0.0)
    assert choice is not None
    assert choice.loss.value == pytest.approx(-3.0)


def test_the_loss_turns_the_difference_and_its_ends_around() -> None:
    row = replace(ROWS[1], difference=Interval(-0.01, -0.03, 0.005))
    loss = loss_of(row)
    assert (loss.value, loss.low, loss.high) == pytest.approx((1.0, -0.5, 3.0))


def test_a_choice_is_sure_only_where_its_whole_interval_is_within_the_bound() -> None:
    assert Choice(0.5, Interval(0.1, -0.3, 0.5)).within(0.5)
    assert not Choice(0.5, Interval(0.1, -0.3, 0.6)).within(0.5)


DOCUMENT = {
    "name": "mine",
    "tree": {"shape": [3, 1], "models": ["small"]},
    "early_exit": {"policy": "in_flight", "threshold": 0.8},
}


def test_every_threshold_and_no_early_exit_make_a_topology_of_their_own() -> None:
    made = variants(DOCUMENT, "mine", (0.5, 0.75))
    assert [one["name"] for one in made.values()] == ["mine-without-exit", "mine-at-0.5", "mine-at-0.75"]
    assert made[None]["early_exit"] is False
    assert made[0.5]["early_exit"] == {"policy": "in_flight", "threshold": 0.5}
    assert DOCUMENT["early_exit"] == {"policy": "in_flight", "threshold": 0.8}


def test_a_clusters_own_early_exit_is_changed_too() -> None:
    cluster = {"agents": ["a", "b"], "early_exit": {"policy": "threshold", "threshold": 0.9}}
    document = {"agents": {}, "clusters": {"one": cluster, "two": {"agents": ["c"], "early_exit": "off"}}}
    made = variants(document, "mine", (0.5,))
    assert made[0.5]["clusters"]["one"]["early_exit"] == {"policy": "threshold", "threshold": 0.5}
    assert made[0.5]["clusters"]["two"]["early_exit"] == "off"
    assert made[None]["clusters"]["one"]["early_exit"] is False


def test_the_files_written_are_topologies_that_differ_in_their_thresholds_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("tree: {shape: [3, 1], models: [small]}\nearly_exit: {policy: in_flight, min_completed: 1}")
    folder = tmp_path / "variants"
    folder.mkdir()
    names = write_variants(mine, (0.5, 0.75), folder)
    loaded = {one: load_topology(folder / f"{name}.yaml") for one, name in names.items()}
    gates = {one: topology.clusters[0].early_exit for one, topology in loaded.items()}
    assert gates == {None: None, 0.5: EarlyExit("in_flight", threshold=0.5, min_completed=1), 0.75: gates[0.75]}
    assert gates[0.75] == EarlyExit("in_flight", threshold=0.75, min_completed=1)
    assert all(topology.agents == loaded[None].agents for topology in loaded.values())


def test_the_outcome_names_the_threshold_its_loss_and_whether_the_questions_suffice() -> None:
    sure = " ".join(said(Choice(0.6, Interval(0.1, -0.3, 0.4)), 0.5, 1000))
    assert "threshold: 0.6 loses 0.10 points (95 %: -0.30 to 0.40) on 1000 questions" in sure
    assert "whole interval is within the bound" in sure
    assert "cannot rule out a loss of 1.40 points" in " ".join(said(Choice(0.6, Interval(0.1, -0.3, 1.4)), 0.5, 200))


def test_close_thresholds_have_topologies_of_different_names() -> None:
    made = variants(DOCUMENT, "mine", (0.5, 0.50000001, 1e-07))
    assert len({one["name"] for one in made.values()}) == 4


def test_a_topology_in_which_a_draw_decides_some_clusters_is_refused_by_the_clusters_name() -> None:
    text = """
agents:
  a: {model: small}
  b: {model: small}
  c: {model: small}
  d: {model: small}
  root: {model: small, precursors: [a, b, c, d]}
clusters:
  sure: {agents: [a, b], early_exit: {policy: in_flight}}
  drawn: {agents: [c, d], early_exit: {policy: stochastic}}
"""
    with pytest.raises(ConfigError, match="topology 'mixed': no threshold decides the early exit of drawn"):
        check_calibrates(parse_topology(f"name: mixed\n{text}", source="mixed.yaml"))


@pytest.mark.parametrize("thresholds", [(), (-0.1,), (1.5,), (float("nan"),), (0.5, 0.8, 0.5)])
def test_thresholds_have_to_be_different_shares(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="--thresholds"):
        check_thresholds(thresholds)


@pytest.mark.parametrize("gate", ["off", "{policy: stochastic}"])
def test_a_topology_without_a_threshold_is_refused(gate: str) -> None:
    topology = parse_topology(f"tree: {{shape: [3, 1], models: [small]}}\nearly_exit: {gate}", source="mine.yaml")
    with pytest.raises(ConfigError, match="in_flight"):
        check_calibrates(topology)


def test_a_topology_with_a_threshold_is_let_through() -> None:
    text = "tree: {shape: [3, 1], models: [small]}\nearly_exit: {policy: threshold}"
    check_calibrates(parse_topology(text, source="mine.yaml"))
