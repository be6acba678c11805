"""Rows from records by hand."""

import pytest

from shell_router.core.statistics import estimate_paired_difference, wilson
from shell_router.lab.evaluation.report import build_rows
from tests.fakes.evaluations import agent, failed, judged, record

BASE = [record("base", 0, True, 4.0), record("base", 1, False, 2.0), record("base", 2, True, 1.0)]


def test_a_row_per_setting_in_the_order_asked_for_without_those_never_asked() -> None:
    rows = build_rows([record("b", 0), record("a", 0)], ["a", "b", "c"], "c")
    assert [row.setting for row in rows] == ["a", "b"]
    assert (rows[0].difference, rows[0].latency_ratio) == (None, None)


def test_accuracy_and_its_difference_to_the_baseline() -> None:
    base, fast = build_rows(
        [*BASE, *(record("fast", question, True) for question in range(3))],
        ["base", "fast"],
        "base",
    )
    assert base.accuracy == wilson(2 / 3, 3)
    assert base.difference is None
    assert fast.difference is not None
    assert fast.difference.value == pytest.approx(1 / 3)


def test_the_latency_ratio_is_the_median_of_each_questions_own() -> None:
    fast = [
        record("fast", 0, latency_s=2.0),
        record("fast", 1, latency_s=0.5),
        record("fast", 2, latency_s=3.0),
    ]
    base, row = build_rows([*BASE, *fast], ["base", "fast"], "base")
    assert (base.latency_ratio, row.latency_ratio) == (1.0, 0.5)  # of 0.5, 0.25 and 3
    assert (row.latency_p50_s, row.latency_p95_s) == (2.0, pytest.approx(2.9))


def test_a_failed_request_is_wrong_is_counted_and_has_no_latency() -> None:
    _, row = build_rows(
        [*BASE, record("fast", 0, latency_s=2.0), failed("fast", 1), failed("fast", 2)],
        ["base", "fast"],
        "base",
    )
    assert (row.answers, row.failed) == (3, 2)
    assert row.accuracy.value == pytest.approx(1 / 3)
    assert row.difference is not None and row.difference.value == pytest.approx(-1 / 3)
    assert (row.latency_p50_s, row.latency_ratio, row.prompt_tokens) == (2.0, 0.5, 100)


def test_a_failed_request_of_the_baseline_gives_no_ratio() -> None:
    _, row = build_rows([failed("base", 0), record("fast", 0)], ["base", "fast"], "base")
    assert row.latency_ratio is None
    assert row.difference is not None and row.difference.value == 1.0


def test_a_setting_that_only_failed_still_has_its_row() -> None:
    [row] = build_rows([failed("fast", 0)], ["fast"], "fast")
    assert (row.failed, row.latency_p50_s, row.cached_share, row.models, row.exits) == (
        1,
        None,
        None,
        {},
        None,
    )


def test_several_seeds_are_paired_one_by_one_and_count_as_one_question() -> None:
    records = [
        record(name, 0, right, seed=seed)
        for name, right in (("base", False), ("fast", True))
        for seed in (0, 1)
    ]
    _, row = build_rows(records, ["base", "fast"], "base")
    assert (row.questions, row.answers) == (1, 2)
    assert row.accuracy == wilson(1.0, 1)
    assert row.difference == estimate_paired_difference([1.0])


def test_tokens_are_means_and_the_cached_share_is_of_agents_that_finished() -> None:
    agents = (agent(), agent("large", "early_exit"))
    [row] = build_rows(
        [record("a", 0, agents=agents), record("a", 1, completion_tokens=20, agents=agents)],
        ["a"],
        "a",
    )
    assert (row.prompt_tokens, row.completion_tokens, row.cached_share) == (100, 15, 0.8)


def test_an_agent_cut_off_is_started_and_not_completed_and_one_never_sent_is_neither() -> None:
    whole = (agent(), agent(), agent("large"))
    cut = (agent(), agent(state="early_exit"), agent("large", "unneeded", 0, started=False))
    [row] = build_rows([record("a", 0, agents=whole), record("a", 1, agents=cut)], ["a"], "a")
    small, large = row.models["small"], row.models["large"]
    assert (small.agents, small.started, small.completed, small.activation_rate) == (
        2,
        2.0,
        1.5,
        0.75,
    )
    assert (large.agents, large.started, large.completed, large.activation_rate) == (
        1,
        0.5,
        0.5,
        0.5,
    )
    assert row.agents_cut == 1.0


def test_exits_are_shares_of_judged_clusters_and_of_answers() -> None:
    several = (judged("left", False, 0.1), judged("left", True, 0.1), judged("right", False, 0.1))
    [row] = build_rows(
        [record("a", 0, exits=several), record("a", 1, exits=several[2:]), record("a", 2)],
        ["a"],
        "a",
    )
    assert row.exits is not None
    assert (row.exits.clusters_judged, row.exits.clusters_exited) == (3, pytest.approx(1 / 3))
    assert row.exits.questions_with_exit == pytest.approx(1 / 3)


def test_an_exit_costs_the_longest_deciding_judgement_of_each_layer() -> None:
    leaves = (judged("left", True, 0.1), judged("right", True, 0.3), judged("middle", False, 9.0))
    [row] = build_rows(
        [record("a", 0, latency_s=2.0, exits=(*leaves, judged("top", True, 0.1, layer=1)))],
        ["a"],
        "a",
    )
    assert row.exits is not None
    assert (row.exits.exposed_s, row.exits.exposed_share) == (
        pytest.approx(0.4),
        pytest.approx(0.2),
    )


def test_an_agent_that_votes_counts_to_no_model() -> None:
    [row] = build_rows([record("a", 0, agents=(agent(), agent("vote", "skipped")))], ["a"], "a")
    assert list(row.models) == ["small"]
