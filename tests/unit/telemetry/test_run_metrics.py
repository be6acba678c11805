"""One run's events as counts."""

from typing import get_args

import pytest

from agent_cache import CacheStats
from shell_router.api.frames import KINDS
from shell_router.core.engine import Placement
from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentPlaced,
    AgentPreempted,
    AgentStarted,
    AgentStopped,
    AgentThought,
    AgentTokens,
    AggregationSkipped,
    Degraded,
    Event,
    ExitScored,
    ModelChosen,
    PrefillIncrement,
    PromptReady,
    StepChosen,
)
from shell_router.telemetry import Metrics, RunMetrics, Trace

EVENTS = (
    StepChosen(0.8, 0.7, "start", "first", "root", 2, "otherwise"),
    ModelChosen(
        1.0, 0.9, ("a", "b"), "small", "chimera", "better", {"small": 0.9}, {"small": 0.1}, ()
    ),
    AgentStarted(1.0, "a", "small"),
    AgentStarted(1.0, "b", "small"),
    AgentStarted(1.0, "root", "large"),
    AgentStarted(1.0, "reader", "medium"),
    PromptReady(1.1, "a", 10),
    AgentPlaced(1.1, "a", (Placement("prefill-0", "scored", "wait"),)),
    AgentPreempted(1.2, "a", 3),
    AgentThought(1.2, "b", (1, 2, 3), "xyz"),
    AgentTokens(1.3, "b", (4,), "w"),
    AgentFinished(1.4, "a", "stop", 10, 5, 9, 0.5),
    ExitScored(1.5, 1.4, "leaves", ("a",), 0.5, 0.6, 0.7, 0.8, 0.1, True, ("b",)),
    AgentStopped(1.5, "b", "early_exit"),
    PrefillIncrement(1.6, "root", 1.55, None, 20, 12, 16),
    Degraded(1.7, "root", "increment", "the engine is gone"),
    AgentTokens(1.8, "root", (1,), "x"),
    AgentTokens(1.9, "root", (2,), "y"),
    AgentErred(2.0, "root", "broken", False),
    AggregationSkipped(2.0, "reader", "a", "xyz", 0.5),
)


def counted(metrics: Metrics, target: str, answering: str, *events: Event) -> RunMetrics:
    """One run that began at 1.0, its events counted as the API does."""
    trace = Trace(
        "t", tenant="me", target=target, root=answering, started_s=1.0, wall_s=5e8, precursors={}
    )
    run = RunMetrics(metrics, trace, {answering})
    for event in events:
        trace.add(event)
        run.observe(event)
    return run


def observed() -> Metrics:
    metrics = Metrics(CacheStats(degraded=True, withdrawn=2, skipped=3))
    counted(metrics, "duo", "root", *EVENTS).close(2.0, "failed")
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"shell_router_{name}", labels)


def test_what_a_run_went_without_is_counted() -> None:
    assert value(observed(), "degraded_total", target="duo", what="increment") == 1


def test_every_kind_of_event_is_counted_and_reported() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event)) == set(KINDS)


def test_a_step_is_counted_by_the_rule_that_chose_it() -> None:
    assert (
        value(observed(), "steps_chosen_total", target="duo", after="start", rule="2", step="first")
        == 1
    )


def test_an_answer_that_was_held_back_begins_when_it_is_sent() -> None:
    metrics = Metrics()
    held = StepChosen(3.0, 2.9, "first", "end", "first", 1, "always", "x")
    counted(metrics, "steps", "last", AgentTokens(1.5, "first", (1,), "x"), held)
    assert value(metrics, "first_token_seconds_sum", target="steps") == 2.0


def test_a_choice_is_counted_by_model_policy_and_reason() -> None:
    metrics = observed()
    assert value(metrics, "model_choices_total", model="small", policy="chimera", why="better") == 1
    assert value(metrics, "model_choice_seconds_sum") == pytest.approx(0.1)


def test_tokens_that_a_preempted_request_decodes_again_are_counted() -> None:
    metrics = observed()
    assert value(metrics, "batch_preemptions_total", model="small") == 1
    assert value(metrics, "wasted_tokens_total", model="small", why="preempted") == 3


def test_agents_are_counted_by_model_and_end() -> None:
    metrics = observed()
    assert value(metrics, "agents_started_total", model="small") == 2
    assert value(metrics, "agents_finished_total", model="small", reason="stop") == 1
    assert value(metrics, "agents_stopped_total", model="small", why="early_exit") == 1
    assert value(metrics, "agents_failed_total", model="large", dropped="false") == 1
    assert value(metrics, "aggregations_skipped_total", model="medium") == 1


def test_an_answer_that_is_forwarded_begins_then() -> None:
    metrics = Metrics()
    counted(metrics, "duo", "root", AggregationSkipped(1.5, "root", "a", "xyz", None))
    assert value(metrics, "first_token_seconds_sum", target="duo") == 0.5


def test_tokens_of_agents_cut_off_are_wasted_and_others_are_not() -> None:
    metrics = observed()
    assert value(metrics, "wasted_tokens_total", model="small", why="early_exit") == 4
    assert value(metrics, "completion_tokens_total", model="small") == 5


def test_an_increment_tells_what_it_computed_and_what_it_should_have_found() -> None:
    metrics = observed()
    assert value(metrics, "prefill_increments_total", model="large") == 1
    assert value(metrics, "prefill_new_tokens_total", model="large") == 8
    assert value(metrics, "prefill_cached_tokens_total", model="large") == 12
    assert value(metrics, "retokenized_tokens_total", model="large") == 4


def test_the_first_token_is_the_roots_and_counts_once() -> None:
    metrics = observed()
    assert value(metrics, "first_token_seconds_count", target="duo") == 1
    assert abs((value(metrics, "first_token_seconds_sum", target="duo") or 0) - 0.8) < 1e-9


def test_runs_gates_and_the_caches_state_are_there() -> None:
    metrics = observed()
    assert value(metrics, "run_seconds_sum", target="duo", outcome="failed") == 1.0
    assert value(metrics, "gate_decisions_total", target="duo", exited="true") == 1
    assert value(metrics, "gate_probability_sum", target="duo") == 0.8
    assert value(metrics, "cache_degraded") == 1
    assert value(metrics, "cache_faults_total", what="withdrawn") == 2
    assert value(metrics, "cache_faults_total", what="skipped") == 3


def test_the_time_per_token_leaves_out_those_that_came_first() -> None:
    metrics = Metrics()
    counted(
        metrics,
        "duo",
        "a",
        AgentStarted(1.0, "a", "small"),
        AgentTokens(2.0, "a", (1, 2, 3), "x"),
        AgentTokens(2.5, "a", (4, 5), "x"),
        AgentFinished(3.0, "a", "stop", 5, 5, 0, None),
    )
    assert value(metrics, "output_token_seconds_sum", model="small") == 0.5
    assert value(metrics, "output_token_seconds_count", model="small") == 1
