"""Whole simulations: the unchanged executor on simulated engines."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from shell_router.cli import main
from shell_router.core.budget import Price
from shell_router.errors import ConfigError, DataError
from shell_router.lab.simulation.replay import load_replay
from shell_router.lab.simulation.run import Simulated, replay, simulate
from shell_router.lab.simulation.settings import (
    Drafted,
    Length,
    Program,
    SimulatedModel,
    Simulation,
    Step,
    Workload,
    load,
)
from shell_router.lab.simulation.summary import summarize
from shell_router.lab.traces import build_call
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.engine_selection import SelectionSettings
from shell_router.routing.queue import ORDERS, QueueSettings
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
)
from shell_router.topology import Topology, load_topology, parse_topology
from shell_router.topology.graph import FanOut

ROOT = Path(__file__).parents[4]
SHIPPED = ROOT / "configs/simulations/six-h200.yaml"
COMMAND = "import sys; from shell_router.cli import main; sys.exit(main())"
LIMIT_S = 4.6
MODELS = ("small", "medium", "large")
COSTS = {
    model: PairCosts(PrefillCosts(0.01, 1e-4), DecodeCosts(0.01 * 2**size), TransferCosts(0.005))
    for size, model in enumerate(MODELS)
}


def topology(name: str) -> Topology:
    return load_topology(ROOT / f"topologies/evaluation/{name}.yaml", models=MODELS)


def simulation(**workload: Any) -> Simulation:
    outputs = dict.fromkeys(MODELS, Length(low=20, high=60))
    asked = Workload(
        **{"requests": 5, "outputs": outputs, "question": Length(tokens=30), **workload}
    )
    return Simulation((Path(),), Path(), {model: SimulatedModel(model) for model in MODELS}, asked)


def run(
    name: str, seed: int = 0, costs: Mapping[str, PairCosts] = COSTS, **workload: Any
) -> Simulated:
    return simulate(simulation(**workload), topology(name), costs, seed)


def latencies(simulated: Simulated) -> list[float]:
    return [one.trace["duration_s"] for one in simulated.runs]


def test_a_single_agents_latency_is_what_its_costs_add_up_to() -> None:
    tiny = load_topology(ROOT / "topologies/tiny.yaml", models=MODELS)
    root = tiny.root
    alone = replace(
        tiny,
        agents={root.id: replace(root, precursors=(), sampling={"max_new_tokens": 50})},
        clusters=(),
    )
    asked = Workload(3, {model: Length(tokens=40) for model in MODELS}, Length(tokens=100))
    done = simulate(replace(simulation(), workload=asked), alone, COSTS)
    prompts = {one.trace["agents"][root.id]["prompt_tokens"] for one in done.runs}
    (prompt,) = prompts
    costs = COSTS[root.model]
    # later questions find what the template has before them
    cached = [one.trace["agents"][root.id]["cached_tokens"] for one in done.runs]
    expected = [
        costs.prefill.forward_s + (prompt - known) * 1e-4 + 0.005 + 39 * costs.decode.step_s
        for known in cached
    ]
    assert latencies(done) == pytest.approx(expected, abs=2e-6)


def test_incremental_prefill_hides_dear_prefill_and_changes_no_output() -> None:
    costs = {
        model: replace(cost, prefill=PrefillCosts(0.01, 3e-3)) for model, cost in COSTS.items()
    }
    tree, incremental = run("tree", costs=costs), run("tree-incremental", costs=costs)
    assert [one.trace["agents"]["root"]["prompt_tokens"] for one in tree.runs] == [
        one.trace["agents"]["root"]["prompt_tokens"] for one in incremental.runs
    ]
    assert sum(latencies(incremental)) < sum(latencies(tree))
    hidden, exposed = (summarize(one) for one in (incremental, tree))
    assert hidden.late is not None and exposed.late is not None
    assert hidden.late < 0.5 * exposed.late


def test_where_prefill_is_cheap_incremental_prefill_is_the_plain_tree() -> None:
    assert latencies(run("tree-incremental")) == latencies(run("tree"))


@pytest.mark.parametrize(
    "prefill", [PrefillCosts(0.01, 0.0), PrefillCosts(0.0, 1e-4), PrefillCosts(0.0, 0.0)]
)
def test_prefill_whose_time_has_a_term_of_zero_is_simulated(prefill: PrefillCosts) -> None:
    costs = {model: replace(cost, prefill=prefill) for model, cost in COSTS.items()}
    plain, incremental = (run(name, costs=costs) for name in ("tree", "tree-incremental"))
    assert not any(one.error for one in (*plain.runs, *incremental.runs))
    assert sum(latencies(incremental)) <= sum(latencies(plain))


def test_drafts_save_what_the_workload_says_where_the_topology_asks_for_them() -> None:
    drafts = {"aggregator": Drafted(3.0, cv=0.5), "root": Drafted(6.0)}
    plain, drafted = (summarize(run(name, drafts=drafts)) for name in ("tree", "tree-drafts"))
    assert latencies(run("tree", drafts=drafts)) == latencies(run("tree"))
    assert drafted.mean_s < 0.8 * plain.mean_s
    assert plain.token_bound_s == plain.bound_s
    # steps cost the same here however many tokens they verify, so that a pass per token is the
    # plain tree
    assert drafted.bound_s < 0.8 * drafted.token_bound_s
    assert drafted.token_bound_s == pytest.approx(plain.bound_s, rel=0.02)


def test_wide_passes_that_cost_much_make_drafts_a_loss() -> None:
    dear = {
        model: replace(cost, decode=replace(cost.decode, sequence_s=0.01))
        for model, cost in COSTS.items()
    }
    drafts = {"root": Drafted(1.5), "aggregator": Drafted(1.5)}
    plain, drafted = (
        summarize(run(name, costs=dear, drafts=drafts)) for name in ("tree", "tree-drafts")
    )
    assert drafted.mean_s > plain.mean_s


def test_more_tokens_a_pass_than_it_computes_are_refused() -> None:
    with pytest.raises(ConfigError, match="per_pass is 9"):
        Drafted(9.0, width=8)


def test_equal_agents_write_the_same_in_every_setting() -> None:
    def leaves(simulated: Simulated) -> list[dict[str, int]]:
        return [
            {
                name: agent["decoded_tokens"]
                for name, agent in one.trace["agents"].items()
                if not agent["precursors"]
            }
            for one in simulated.runs
        ]

    assert leaves(run("tree")) == leaves(run("all-to-all"))


def test_early_exit_cuts_agents_off_where_outputs_agree() -> None:
    agreeing, differing = (summarize(run("full-in-flight", right=right)) for right in (1.0, 0.0))
    assert agreeing.completed["large"] < differing.completed["large"] == 5


def test_an_agreed_answer_is_forwarded_without_aggregation() -> None:
    agreeing, differing = (run("full", right=right) for right in (1.0, 0.0))
    skipped = [
        [
            sum(agent["state"] == "skipped" for agent in one.trace["agents"].values())
            for one in simulated.runs
        ]
        for simulated in (agreeing, differing)
    ]
    assert min(skipped[0]) >= 3  # two aggregators and the root
    assert max(skipped[1]) == 0
    assert summarize(agreeing).mean_s < summarize(run("full-in-flight", right=1.0)).mean_s
    assert summarize(agreeing).over_bound == pytest.approx(0, abs=1e-3)


def test_no_answer_is_faster_than_its_bound() -> None:
    for name in ("all-to-all", "tree", "tree-incremental", "full"):
        assert summarize(run(name)).over_bound > 0


def test_with_one_request_at_a_time_nothing_but_decoding_and_prefill_takes_time() -> None:
    found = summarize(run("tree"))
    assert sum(found.path.values()) == pytest.approx(found.mean_s)
    assert found.path["waiting"] == pytest.approx(0, abs=1e-5)
    assert found.path["decoding on large"] > found.path["exposed prefill"] > 0


def test_a_second_layer_that_is_cut_off_entirely_is_not_reported() -> None:
    document = """
    name: cut
    agents:
      a: {model: small, sampling: {max_new_tokens: 8}}
      c: {model: large, sampling: {max_new_tokens: 64}}
      b: {model: large, precursors: [c], sampling: {max_new_tokens: 64}}
      root: {model: small, precursors: [a, b]}
    clusters:
      first: {agents: [a, b], early_exit: {policy: threshold, threshold: 0.0, min_completed: 1}}
    """
    found = summarize(
        simulate(simulation(), parse_topology(dedent(document), source="cut.yaml"), COSTS)
    )
    assert found.second_layer_s is None
    assert found.completed["large"] == 0


def test_a_simulation_ends_with_its_last_answer() -> None:
    done = run("tree", requests=1, arrivals="poisson", per_s=0.001)
    assert done.elapsed_s == pytest.approx(latencies(done)[0], abs=1e-5)


@pytest.mark.parametrize(
    ("arrivals", "at_once"),
    [({"arrivals": "one_by_one"}, 1), ({"arrivals": "closed", "clients": 3}, 3)],
)
def test_closed_loops_keep_that_number_of_requests_going(
    arrivals: dict[str, Any], at_once: int
) -> None:
    done = run("tree", requests=6, **arrivals)
    begun = [one.trace["started_at"] for one in done.runs]
    spans = [
        (at_s, at_s + one.trace["duration_s"]) for at_s, one in zip(begun, done.runs, strict=True)
    ]
    assert max(sum(begin <= at_s < end - 1e-5 for begin, end in spans) for at_s in begun) == at_once


def test_requests_arrive_at_the_rate_that_is_asked_for() -> None:
    done = run("tree", requests=200, arrivals="poisson", per_s=2.0)
    begun = [one.trace["started_at"] for one in done.runs]
    assert 200 / begun[-1] == pytest.approx(2.0, rel=0.3)
    assert len(set(begun)) == 200


def test_a_second_pair_shortens_the_queue() -> None:
    busy = simulation(requests=12, arrivals="closed", clients=12)
    loaded = {
        model: replace(costs, decode=replace(costs.decode, max_batch_size=2))
        for model, costs in COSTS.items()
    }
    two = replace(busy, models={model: SimulatedModel(model, pairs=2) for model in MODELS})
    one_pair, two_pairs = (
        summarize(simulate(one, topology("tree"), loaded)) for one in (busy, two)
    )
    assert two_pairs.p95_s < 0.7 * one_pair.p95_s
    assert len(two_pairs.engines) == 6


def test_data_parallel_engines_take_the_same_gpus_and_need_no_transfer() -> None:
    slow_link = {
        model: replace(costs, transfer=TransferCosts(0.0, 0.01)) for model, costs in COSTS.items()
    }
    apart = summarize(simulate(simulation(), topology("tree"), slow_link))
    for engines in ("data_parallel", "data_parallel_chunked"):
        models = {model: SimulatedModel(model, engines=engines) for model in MODELS}  # type: ignore[arg-type]
        found = summarize(
            simulate(replace(simulation(), models=models), topology("tree"), slow_link)
        )
        assert len(found.engines) == 2 * len(apart.engines)
        assert found.mean_s < apart.mean_s


def test_engines_that_share_a_cpu_slow_each_other_down() -> None:
    alone, shared = (
        summarize(simulate(replace(simulation(), cores=cores), topology("tree"), COSTS))
        for cores in (None, 1.0)
    )
    assert shared.mean_s > 1.3 * alone.mean_s


def test_a_request_that_fails_is_reported_and_the_others_go_on() -> None:
    asked = replace(simulation(requests=4), timeout_s=LIMIT_S)
    slow = {**COSTS, "large": replace(COSTS["large"], decode=DecodeCosts(0.04))}
    done = simulate(asked, topology("tree"), slow)
    failed = [one.error for one in done.runs if one.error]
    assert 0 < len(failed) < 4
    assert all(f"{LIMIT_S} s" in error for error in failed)
    assert summarize(done).failed == len(failed)
    with pytest.raises(DataError, match="answered no request"):
        summarize(simulate(replace(asked, timeout_s=0.1), topology("tree"), slow))


def test_equal_seeds_repeat_and_others_do_not() -> None:
    assert run("full").runs == run("full").runs
    assert latencies(run("full", seed=1)) != latencies(run("full"))


def test_nothing_of_it_needs_the_clock_or_the_loop_of_the_caller() -> None:
    async def inside() -> list[float]:
        return await asyncio.to_thread(lambda: latencies(run("tree")))

    assert asyncio.run(inside()) == latencies(run("tree"))


def test_a_model_without_engines_or_outputs_is_named() -> None:
    without = replace(simulation(), models={"small": SimulatedModel("small")})
    with pytest.raises(ConfigError, match=r"'tree' needs large, medium\. Add them to models"):
        simulate(without, topology("tree"), COSTS)
    silent = replace(simulation(), workload=Workload(1, {"small": Length(tokens=1)}))
    with pytest.raises(ConfigError, match=r"Add them to workload\.outputs"):
        simulate(silent, topology("tree"), COSTS)


def written(done: Simulated) -> dict[str, list[int]]:
    """Per agent its tokens, in every run."""
    return {
        name: [run.trace["agents"][name]["completion_tokens"] for run in done.runs]
        for name in done.topology.agents
    }


def test_an_agent_may_have_a_length_of_its_own() -> None:
    outputs = {**dict.fromkeys(MODELS, Length(tokens=40)), "root": Length(tokens=75)}
    found = written(simulate(simulation(outputs=outputs), topology("tree"), COSTS))
    assert set(found.pop("root")) == {75}
    assert {tokens for each in found.values() for tokens in each} == {40}


def test_runaways_write_until_their_limit_and_all_others_what_they_would() -> None:
    length = Length(mean=40, cv=0.5)
    plain, some, every = (
        written(simulate(simulation(outputs=dict.fromkeys(MODELS, one)), topology("tree"), COSTS))
        for one in (length, replace(length, runaways=0.3), replace(length, runaways=1.0))
    )
    limit = topology("tree").root.sampling["max_new_tokens"]
    assert {tokens for each in every.values() for tokens in each} == {limit}
    pairs = [pair for name in plain for pair in zip(plain[name], some[name], strict=True)]
    assert 0.1 < sum(tokens == limit != before for before, tokens in pairs) / len(pairs) < 0.5
    assert all(tokens in (before, limit) for before, tokens in pairs)


# --- programs of several requests

STEPS = (Step(40, 500, tool_s=2.0), Step(30, 200, tool_s=0.5))
PRICE = Price(1.0, 8.0, cached=0.25)


def loop(fan_out: FanOut, *, programs: tuple[Program, ...], requests: int = 2) -> Simulated:
    asked = simulation(programs=programs, requests=requests)
    priced = {name: replace(model, price=PRICE) for name, model in asked.models.items()}
    tree = replace(topology("tree"), fan_out=fan_out)
    return simulate(replace(asked, models=priced), tree, COSTS)


def test_a_program_sends_each_result_after_the_tools_time_to_a_root_that_keeps_its_prompt() -> None:
    done = loop("turn", programs=(Program(STEPS, answer_tokens=70), Program()))
    *first, last = done.runs
    assert [run.program for run in done.runs] == [0, 0, 0, 1]
    roots = [run.usage["root"] for run in first]
    assert [root.completion_tokens for root in roots] == [40, 30, 70]
    begun = [run.trace["started_at"] for run in first]
    ended = [at_s + run.trace["duration_s"] for at_s, run in zip(begun, first, strict=True)]
    assert begun[1] - ended[0] == pytest.approx(2.0)
    assert begun[2] - ended[1] == pytest.approx(0.5)
    for step, (before, after) in zip(STEPS, pairwise(roots), strict=True):
        new = after.prompt_tokens - before.prompt_tokens
        assert new == pytest.approx(step.call_tokens + step.result_tokens, abs=25)  # roles, too
        assert before.prompt_tokens <= after.cached_tokens
    assert last.trace["started_at"] == pytest.approx(ended[-1])


def test_a_program_costs_what_all_its_requests_take_and_less_where_outputs_are_kept() -> None:
    programs = (Program(STEPS),)
    turn, request = (loop(way, programs=programs) for way in ("turn", "request"))
    kept, again = summarize(turn).program, summarize(request).program
    assert (kept.agent_runs, again.agent_runs) == (15, 39)
    assert kept.requests == again.requests == 3
    elapsed_s = [summarize(done).elapsed_s for done in (turn, request)]
    assert [2 * kept.mean_s, 2 * again.mean_s] == pytest.approx(elapsed_s)
    for mean in (kept, again):
        cost = PRICE.cost(mean.prompt_tokens, mean.cached_tokens, mean.completion_tokens)
        assert mean.cost == pytest.approx(cost)
    assert again.cost > 2 * kept.cost
    assert kept.root_cached is not None and again.root_cached is not None
    assert kept.root_cached > again.root_cached
    first, same = (done.runs[0].usage["root"] for done in (turn, request))
    assert first == same


def test_a_call_that_is_longer_than_outputs_may_be_fails_its_program() -> None:
    longer = Program((STEPS[0], Step(1000, 1)))
    done = loop("turn", programs=(longer, Program(STEPS[:1])), requests=2)
    assert [bool(run.error) for run in done.runs] == [False, True, False, False]
    assert "Raise max_new_tokens" in done.error
    found = summarize(done)
    assert (found.requests, found.failed, found.program.answered) == (4, 2, 1)
    with pytest.raises(DataError, match=r"Raise max_new_tokens"):
        summarize(loop("turn", programs=(longer,), requests=1))


def test_a_files_programs_take_turns_and_clients_replace_its_arrivals(tmp_path: Path) -> None:
    file = SHIPPED.with_name("tool-loops.yaml")
    workload = load(file, clients=16).simulation.workload
    assert (workload.arrivals, workload.clients) == ("closed", 16)
    assert [workload.choose_program(number) for number in range(5)] == [
        *workload.programs,
        workload.programs[0],
    ]
    wrong = tmp_path / "wrong.yaml"
    text = file.read_text(encoding="utf-8").replace("result_tokens: 900", "result_tokens: 0", 1)
    wrong.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"steps\[0\]\.result_tokens"):
        load(wrong)


# --- the command


def printed(tmp_path: Path, hash_seed: str) -> tuple[str, bytes]:
    file = tmp_path / f"{hash_seed}.json"
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "simulate", small(tmp_path), "--json", file],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "COLUMNS": "160"},
    )
    return done.stdout, file.read_bytes()


def small(tmp_path: Path) -> Path:
    """The shipped simulation with fewer requests."""
    text = (
        SHIPPED.read_text(encoding="utf-8")
        .replace("requests: 200", "requests: 3")
        .replace("../../", f"{ROOT}/")
    )
    file = tmp_path / "simulation.yaml"
    file.write_text(text.replace("../engines", str(ROOT / "configs/engines")), encoding="utf-8")
    return file


@pytest.mark.parametrize("file", sorted(SHIPPED.parent.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_simulation_answers_its_first_questions(file: Path) -> None:
    loaded = load(file)
    workload = replace(loaded.simulation.workload, requests=2)
    for topology in loaded.topologies.values():
        simulated = simulate(replace(loaded.simulation, workload=workload), topology, loaded.costs)
        assert simulated.error == ""


def test_the_command_prints_and_writes_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    first, second = printed(tmp_path, "1"), printed(tmp_path, "2")
    assert first == second
    assert list(json.loads(first[1])) == [
        "all-to-all",
        "tree",
        "tree-incremental",
        "full-paper",
        "full",
        "full-in-flight",
        "tree-drafts",
        "full-drafts",
    ]
    assert "is bound by decoding on large" in first[0]


def test_simulations_are_compared_by_the_names_of_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = small(tmp_path), tmp_path / "other.yaml"
    other.write_text(
        one.read_text(encoding="utf-8").replace("mean: 400", "mean: 200"), encoding="utf-8"
    )
    written = tmp_path / "both.json"
    assert (
        main(["simulate", str(one), str(other), "--topology", "tree", "--json", str(written)]) == 0
    )
    both = json.loads(written.read_bytes())
    assert list(both) == ["simulation tree", "other tree"]
    assert both["other tree"]["mean_s"] < both["simulation tree"]["mean_s"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--topology", "star"], "has no topology 'star'. Choose one of: all-to-all, tree"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json cannot be written."),
    ],
)
def test_invalid_options_are_reported(
    tmp_path: Path, options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(small(tmp_path)), *options]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            ("requests: 3", "requests: 0"),
            "workload.requests must be a whole number at least 1, not 0",
        ),
        (("profile: qwen3-vl-4b", "profile: gpt"), "models.small has the profile 'gpt'"),
        (
            ("small: {mean: 400, cv: 0.5}", "small: {mean: 400, tokens: 3}"),
            "a length is tokens, low and high, or mean",
        ),
        (
            ("small: {mean: 400, cv: 0.5}", "small: {low: 9, high: 3}"),
            "low and high must satisfy 1 <= low <= high",
        ),
        (
            ("small: {mean: 400, cv: 0.5}", "small: {mean: .inf}"),
            "mean must be a finite number",
        ),
        (
            ("small: {mean: 400, cv: 0.5}", "small: {tokens: 5, cv: 0.5}"),
            "cv and runaways go with mean",
        ),
        (
            ("request_s: 0.0069", "request_s: -1.0"),
            "embedder.request_s must be a number at least 0, not -1",
        ),
        (
            ("right: 0.8", "right: 1.8"),
            "workload.right must be a number at least 0 and at most 1, not 1.8",
        ),
        (("right: 0.8", "rihgt: 0.8"), "Unknown key 'rihgt' in workload. Did you mean 'right'?"),
        (("one_by_one", "sometimes"), "not 'sometimes'"),
        (("tree.yaml", "bush.yaml"), "bush.yaml"),
    ],
)
def test_a_file_that_cannot_be_simulated_is_refused_with_the_reason(
    tmp_path: Path, change: tuple[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = small(tmp_path)
    text = file.read_text(encoding="utf-8")
    assert change[0] in text
    file.write_text(text.replace(change[0], change[1], 1), encoding="utf-8")
    assert main(["simulate", str(file)]) == 2
    assert complaint in capsys.readouterr().err


def scheduled(scheduling: SchedulingSettings, **workload: Any) -> Simulated:
    """Two pairs of every model, asked more than they can do at once."""
    asked = simulation(**{"requests": 12, "arrivals": "closed", "clients": 6, **workload})
    models = {name: replace(model, pairs=2) for name, model in asked.models.items()}
    return simulate(replace(asked, models=models, scheduling=scheduling), topology("tree"), COSTS)


def placements(done: Simulated) -> list[dict[str, Any]]:
    return [
        placed
        for one in done.runs
        for agent in one.trace["agents"].values()
        for placed in agent["engines"]
    ]


def test_the_routers_own_policies_choose_among_simulated_pairs() -> None:
    for policy, whys in (
        ("least_running", {"fewest_requests"}),
        ("round_robin", {"turn"}),
        ("gimbal", {"user_affinity", "home_busy", "turn", "no_metrics"}),
        ("scored", {"wait", "affinity", "tie", "prefix"}),
    ):
        found = placements(scheduled(SchedulingSettings(SelectionSettings(policy))))
        if (
            policy != "gimbal"
        ):  # which keeps a user's requests together, and here all are one user's
            assert {one["engine"] for one in found} == {"pair-0", "pair-1"}
        assert {one["policy"] for one in found} == {policy}
        assert {one["why"] for one in found} <= whys | {"growing_prompt"}
        assert {one["why"] for one in found} & whys


def test_simulated_pairs_tell_their_state_as_servers_do() -> None:
    found = placements(scheduled(SchedulingSettings(SelectionSettings("gimbal"), poll_s=0.01)))
    assert "user_affinity" in {one["why"] for one in found}


@pytest.mark.parametrize("order", ORDERS)
def test_requests_wait_for_simulated_pairs_and_all_are_answered(order: str) -> None:
    done = scheduled(SchedulingSettings(queue=QueueSettings(order, max_running=1, wait_s=1e6)))
    assert not any(one.error for one in done.runs)
    assert any(one["waited_s"] > 0 for one in placements(done))
    assert {use.batch for use in done.engines} == {1.0}, "no pair ever decodes two at once"


def test_the_outputs_of_agents_are_expected_by_what_they_wrote_before() -> None:
    """The shortest total needs it; without expectations all totals would be alike."""
    first_come, shortest = (
        scheduled(
            SchedulingSettings(queue=QueueSettings(order, max_running=1, wait_s=1e6, age_s=1e6))
        )
        for order in ("fcfs", "shortest_total")
    )
    assert latencies(first_come) != latencies(shortest)


BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def record(
    trace: str, at_s: float, agent: str, reads: Mapping[str, str], prompt: int, output: int
) -> dict[str, Any]:
    """The span of a call; `reads` are the outputs in its prompt, by the agents' names."""
    messages = [{"role": "user", "content": "What is it?"}]
    for text in reads.values():
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And now?"},
        ]
    times = (BEGAN + timedelta(seconds=at_s), BEGAN + timedelta(seconds=at_s + 1))
    text = f"{agent} wrote"
    return build_call(trace, agent, messages, text, (prompt, output), times, "small")


def write_spans(folder: Path, *spans: dict[str, Any]) -> Path:
    file = folder / "calls.json"
    file.write_text(json.dumps({"trace_id": "all", "spans": spans}), encoding="utf-8")
    return file


def trio(trace: str, at_s: float) -> list[dict[str, Any]]:
    """Two calls, one of which is slow, and their reader."""
    read = {"a": "a wrote", "b": "b wrote"}
    return [
        record(trace, at_s, "a", {}, 40, 30),
        record(trace, at_s, "b", {}, 40, 90),
        record(trace, at_s + 2, "reader", read, 200, 20),
    ]


def test_recorded_graphs_run_with_their_lengths_readers_and_arrivals(tmp_path: Path) -> None:
    spans = [*trio("one", 5.0), *trio("two", 7.5), record("alone", 5.5, "c", {}, 64, 12)]
    graphs = load_replay(write_spans(tmp_path, *spans), MODELS)
    done = replay(simulation(), graphs, COSTS)
    assert {name: len(simulated.answered) for name, simulated in done.items()} == {
        "one": 2,
        "alone": 1,
    }
    first, second = (one.trace for one in done["one"].runs)
    assert second["started_at"] - first["started_at"] == pytest.approx(2.5)
    for agents in (first["agents"], second["agents"]):
        written = [agent["completion_tokens"] for agent in agents.values()]
        assert written == [30, 90, 20]
        read = [agent["prompt_tokens"] for agent in agents.values()]
        assert read == pytest.approx([40, 40, 200], abs=3)
        assert agents["call-02"]["precursors"] == ["call-00", "call-01"]
        decode = next(span for span in agents["call-02"]["spans"] if span["name"] == "decode")
        assert decode["start_s"] > agents["call-01"]["ended_s"]
    assert done["alone"].runs[0].trace["agents"]["call-00"]["completion_tokens"] == 12


def test_equal_outputs_are_read_of_different_calls(tmp_path: Path) -> None:
    spans = trio("one", 0.0)
    spans[1]["attributes"]["gen_ai.output.text"] = "a wrote"
    spans[2] = record("one", 2.0, "reader", {"a": "a wrote", "b": "a wrote"}, 200, 20)
    (graph,) = load_replay(write_spans(tmp_path, *spans), MODELS)
    assert graph.topology.root.precursors == ("call-00", "call-01")


def test_times_of_other_zones_are_put_in_their_order(tmp_path: Path) -> None:
    spans = trio("one", 0.0)
    zone = timezone(timedelta(hours=-9))
    began = datetime.fromisoformat(spans[2]["start_time"]).astimezone(zone)
    spans[2]["start_time"] = began.isoformat()  # as a text it is before its precursors
    (graph,) = load_replay(write_spans(tmp_path, *spans), MODELS)
    assert graph.topology.root.precursors == ("call-00", "call-01")


@pytest.mark.parametrize(
    "wrong",
    [
        {"start_time": "yesterday"},
        {"start_time": 5},
        {"attributes": None},
        {"attributes": {"gen_ai.input.messages": "no JSON"}},
        {"attributes": {"gen_ai.input.messages": '["no message"]'}},
        {"attributes": {"gen_ai.input.messages": "[{}]", "gen_ai.usage.output_tokens": "ten"}},
    ],
)
def test_a_span_that_cannot_be_read_is_a_wrong_file(wrong: dict[str, Any], tmp_path: Path) -> None:
    span = {**record("one", 0.0, "a", {}, 40, 30), **wrong}
    with pytest.raises(ConfigError):
        load_replay(write_spans(tmp_path, span), MODELS)


def test_the_command_replays_a_file_and_refuses_what_is_no_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_spans(tmp_path, *trio("one", 0.0))
    assert main(["simulate", str(SHIPPED), "--replay", str(file)]) == 0
    assert "one" in capsys.readouterr().out
    write_spans(tmp_path, *trio("one", 0.0)[:2])
    assert main(["simulate", str(SHIPPED), "--replay", str(file)]) == 2
    assert "no call reads the outputs of 1 calls" in capsys.readouterr().err
    file.write_text("{}", encoding="utf-8")
    assert main(["simulate", str(SHIPPED), "--replay", str(file)]) == 2
    assert "holds no calls" in capsys.readouterr().err
    assert main(["simulate", str(SHIPPED), "--replay", str(file), "--topology", "full"]) == 2
    assert "Leave --topology" in capsys.readouterr().err
