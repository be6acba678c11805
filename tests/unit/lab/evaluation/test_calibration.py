from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shell_router.core.statistics import Interval
from shell_router.early_exit.settings import EarlyExit
from shell_router.errors import ConfigError
from shell_router.lab.evaluation.calibration import (
    CalibratedExit,
    Tried,
    choose,
    compute_loss,
    describe_outcome,
    replace_exit,
    write_variants,
)
from shell_router.lab.evaluation.records import Record
from shell_router.lab.evaluation.report import Row, build_rows
from shell_router.topology import load_topology

ROWS = build_rows(
    [Record(0, 0, name, right=True, stated="1", latency_s=1.0) for name in ("base", "other")],
    ["base", "other"],
    "base",
)


def losing(points: float, latency: float = 1.0, reach: float = 1.0) -> Row:
    middle = -points / 100
    interval = Interval(middle, middle - reach / 100, middle + reach / 100)
    return replace(ROWS[1], difference=interval, latency_ratio=latency)


def chosen(bound: float, *rows: tuple[float, Row]) -> CalibratedExit | None:
    return choose([({"threshold": threshold}, row) for threshold, row in rows], bound)


def test_the_fastest_early_exit_within_the_bound_is_chosen() -> None:
    choice = chosen(0.5, (0.5, losing(2.0, 0.4)), (0.6, losing(0.4, 0.7)), (0.7, losing(0.1, 0.8)))
    assert choice is not None
    assert (choice.settings, choice.latency) == ({"threshold": 0.6}, 0.7)
    assert choice.loss.value == pytest.approx(0.4)


def test_one_below_a_threshold_that_loses_too_much_is_not_believed() -> None:
    choice = chosen(0.5, (0.5, losing(0.0, 0.3)), (0.6, losing(0.6, 0.4)), (0.7, losing(0.2, 0.5)))
    assert choice is not None
    assert choice.settings == {"threshold": 0.7}


def test_the_search_of_one_policy_ends_no_others() -> None:
    rash, calm = ({"policy": policy, "threshold": 0.7} for policy in ("threshold", "in_flight"))
    rows = [
        (rash, losing(2.0, 0.1)),
        (calm, losing(0.0, 0.6)),
        (calm | {"threshold": 0.6}, losing(0.1, 0.5)),
    ]
    choice = choose(rows, 0.5)
    assert choice is not None
    assert choice.settings == {"policy": "in_flight", "threshold": 0.6}


def test_nothing_is_chosen_where_the_most_cautious_loses_too_much() -> None:
    assert chosen(0.5, (0.5, losing(0.0)), (0.9, losing(0.6))) is None


def test_a_gain_is_no_loss() -> None:
    choice = chosen(0.0, (0.5, losing(-3.0)))
    assert choice is not None
    assert choice.loss.value == pytest.approx(-3.0)


def test_the_loss_turns_the_difference_and_its_ends_around() -> None:
    row = replace(ROWS[1], difference=Interval(-0.01, -0.03, 0.005))
    loss = compute_loss(row)
    assert (loss.value, loss.low, loss.high) == pytest.approx((1.0, -0.5, 3.0))


def test_every_threshold_is_tried_with_the_keys_that_its_policy_reads() -> None:
    assert Tried((0.5, 0.9)).settings() == [
        {"policy": "in_flight", "scope": "cluster", "threshold": 0.5},
        {"policy": "in_flight", "scope": "cluster", "threshold": 0.9},
    ]
    policies = "threshold", "monotone", "in_flight"
    assert Tried((0.5,), policies, ("layer",), (0.6, 0.7)).settings() == [
        {"policy": "threshold", "scope": "layer", "tau": 0.6, "threshold": 0.5},
        {"policy": "threshold", "scope": "layer", "tau": 0.7, "threshold": 0.5},
        {"policy": "monotone", "scope": "layer", "threshold": 0.5},
        {"policy": "in_flight", "scope": "layer", "threshold": 0.5},
    ]


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (
            {"thresholds": (0.5, 0.8, 0.5)},
            "--thresholds must name at least one value, and each once",
        ),
        ({"policies": ("in_flght",)}, "policy must be "),
        ({"scopes": ("tree",)}, "scope must be"),
        ({"taus": (0.7, 0.0)}, "tau must be"),
        ({"policies": ("quorum",)}, "quorum has no threshold"),
        ({"policies": ("paper",)}, "paper has no threshold"),
        ({"scopes": ()}, "--scopes must name"),
        ({"thresholds": (1.5,)}, "threshold must be "),
        ({"thresholds": (float("nan"),)}, "threshold must be "),
    ],
)
def test_what_no_early_exit_can_have_is_refused(said: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Tried(**{"thresholds": (0.8,)} | said)


EXIT = {"policy": "threshold", "scope": "cluster", "tau": 0.7, "threshold": 0.5}
DOCUMENT = {
    "name": "mine",
    "tree": {"shape": [3, 1], "models": ["small"]},
    "early_exit": {
        "policy": "in_flight",
        "threshold": 0.8,
        "min_completed": 1,
        "skip_aggregation": True,
    },
}


def test_another_early_exit_keeps_the_keys_that_go_with_it() -> None:
    in_flight = {"policy": "in_flight", "scope": "cluster", "threshold": 0.5}
    assert replace_exit(DOCUMENT, "x", EXIT)["early_exit"] == {**EXIT, "min_completed": 1}
    assert replace_exit(DOCUMENT, "x", in_flight)["early_exit"] == {
        **DOCUMENT["early_exit"],
        **in_flight,
    }  # type: ignore[dict-item]
    assert replace_exit(DOCUMENT, "x", None) == {**DOCUMENT, "name": "x", "early_exit": False}
    assert DOCUMENT["name"] == "mine"


def test_early_exit_is_changed_where_there_is_one_and_else_for_all() -> None:
    cluster = {"agents": ["a", "b"], "early_exit": {"policy": "threshold", "threshold": 0.9}}
    document = {
        "agents": {},
        "clusters": {"one": cluster, "two": {"agents": ["c"], "early_exit": "off"}},
    }
    made = replace_exit(document, "mine", EXIT)
    assert made["clusters"]["one"]["early_exit"] == EXIT
    assert made["clusters"]["two"]["early_exit"] == "off"
    assert "early_exit" not in made
    assert replace_exit(document, "mine", None)["clusters"]["one"]["early_exit"] is False
    assert replace_exit({"tree": {}}, "mine", EXIT)["early_exit"] == EXIT


def test_the_files_written_are_topologies_that_differ_in_their_early_exit_alone(
    tmp_path: Path,
) -> None:
    mine, folder = tmp_path / "mine.yaml", tmp_path / "variants"
    mine.write_text("tree: {shape: [3, 1], models: [small]}\nearly_exit: {min_completed: 1}")
    folder.mkdir()
    variants = write_variants(mine, Tried((0.5, 0.50000001)), folder)
    loaded = {name: load_topology(folder / f"{name}.yaml") for name in variants}
    gates = [topology.clusters[0].early_exit for topology in loaded.values()]
    assert len(set(gates)) == 3
    assert gates[:2] == [None, EarlyExit("in_flight", threshold=0.5, min_completed=1)]
    assert all(
        topology.agents == loaded["mine-without-exit"].agents for topology in loaded.values()
    )


def test_the_outcome_is_a_line_for_the_file_with_what_it_costs_and_saves() -> None:
    settings = {"policy": "in_flight", "threshold": 0.6}
    sure = " ".join(
        describe_outcome(CalibratedExit(settings, Interval(0.1, -0.3, 0.4), 0.7), 0.5, 1000)
    )
    assert "early_exit: {policy: in_flight, threshold: 0.6}" in sure
    assert (
        "takes 0.70 of the latency and loses 0.10 points (95 %: -0.30 to 0.40) on 1000 questions"
        in sure
    )
    assert "whole interval is within the bound" in sure
    unsure = " ".join(
        describe_outcome(CalibratedExit(settings, Interval(0.1, -0.3, 1.4), 1.02), 0.5, 200)
    )
    assert "cannot rule out a loss of 1.40 points" in unsure
    assert "saves no time" in unsure
