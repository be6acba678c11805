"""benchmarks/neutral: what it reads of others' result files, its traces, and its table."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.neutral.clients import Aiperf, Ask, InferencePerf, Measured
from benchmarks.neutral.environments import Program, UnavailableError, install
from benchmarks.neutral.table import Cell, build_rows
from benchmarks.neutral.traces import OWN, load_trace, write_own
from shell_router.topology import parse_topology

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def ask(sessions: int) -> Ask:
    return Ask("http://engine", MODEL, Path("model"), sessions, 1, 0, root="layer-1-0")


def test_inference_perfs_sessions_end_with_their_root_and_count_from_their_begin(
    tmp_path: Path,
) -> None:
    session = {"success": True, "error": None, "total_output_tokens": 208}
    failed = {"success": False, "error": {"error_type": "request_failed"}}

    def request(event: str, first_s: float, end_s: float, error: Any = None) -> dict[str, Any]:
        info = {
            "graph_event_id": event,
            "response_metrics": {"output_token_times": [first_s, end_s]},
        }
        return {"end_time": end_s, "info": info, "error": error}

    write(
        tmp_path / "per_session_lifecycle_metrics.json",
        [
            {**session, "start_time": 1002.0, "end_time": 1012.0, "duration_sec": 10.0},
            {**session, "start_time": 1000.0, "end_time": 1006.0, "duration_sec": 6.0},
            {**session, **failed, "start_time": 1003.0, "end_time": 1004.0, "duration_sec": 1.0},
        ],
    )
    write(
        tmp_path / "per_request_lifecycle_metrics.json",
        [
            request("event_000_layer-0-0", 11.0, 13.0),
            request("event_003_layer-1-0", 14.0, 16.0),
            request("event_003_layer-1-0", 17.0, 22.0),
            request("event_003_layer-1-0", 13.5, 14.0, {"error_type": "HTTP 500"}),
        ],
    )
    measured = InferencePerf().read(ask(3), tmp_path)
    assert measured == Measured(
        [6.0, 10.0], [4.0, 5.0], 416, 12.0, 1, "{'error_type': 'request_failed'}"
    )


def test_each_of_aiperfs_chats_is_a_session(tmp_path: Path) -> None:
    metrics = {
        "request_latency": {"value": 1500.0, "unit": "ms"},
        "time_to_first_token": {"value": 500.0, "unit": "ms"},
        "output_sequence_length": {"value": 32, "unit": "tokens"},
    }
    lines = [
        {
            "metadata": {"request_start_ns": 0, "request_end_ns": 1_500_000_000},
            "metrics": metrics,
        },
        {
            "metadata": {"request_start_ns": 0, "request_end_ns": 2_000_000_000},
            "metrics": {},
            "error": {"code": 500},
        },
    ]
    file = tmp_path / "profile_export.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    measured = Aiperf().read(ask(2), tmp_path)
    assert measured == Measured([1.5], [0.5], 32, 2.0, 1, "{'code': 500}")


@pytest.mark.parametrize("name", OWN)
def test_a_trace_and_its_topology_have_the_same_calls(name: str, tmp_path: Path) -> None:
    write_own(tmp_path / "own")
    (tmp_path / "whole").mkdir()
    trace = load_trace(tmp_path / "own" / f"{name}.json", tmp_path / "whole", MODEL)
    document = yaml.safe_dump({"name": name, "agents": trace.agents})
    topology = parse_topology(document, source=name, models={MODEL})
    agents = list(topology.agents.values())
    assert [
        (
            agent.sampling["max_new_tokens"],
            [int(each.removeprefix("call-")) for each in agent.precursors],
        )
        for agent in agents
    ] == [
        (call.tokens, [[other.name for other in OWN[name]].index(each) for each in call.reads])
        for call in OWN[name]
    ]
    assert topology.root == agents[-1]


def test_a_trace_whose_outputs_nobody_reads_has_no_topology(tmp_path: Path) -> None:
    write_own(tmp_path)
    file = tmp_path / "tree-3-1.json"
    trace = json.loads(file.read_text(encoding="utf-8"))
    trace["spans"].pop()
    write(file, trace)
    loaded = load_trace(file, tmp_path, MODEL)
    assert (loaded.agents, loaded.note) == (None, "no call reads the outputs of 2 calls")


def test_ratios_are_of_each_round_to_the_groups_first_row() -> None:
    base = Cell("undivided", "client", "tree", 1, "the engine itself")
    other = Cell("undivided", "client", "tree", 1, "router", one_request=True)
    rounds = [
        {base: run_of(2.0), other: run_of(1.0)},
        {base: run_of(4.0), other: run_of(3.0)},
        {base: run_of(4.0), other: Measured([], [], 0, 0.0, 1, "timeout")},
    ]
    first, second = build_rows([base, other], rounds)
    assert (first["relative p50"], first["tokens/s"], first["failed"]) == (1.0, 30 / 10, 0)
    assert (second["relative p50"], second["95 %"]) == (0.625, "0.500-0.750")
    assert (second["failed"], second["tokens/s"], second["sessions/min"]) == (1, None, 30.0)


def run_of(seconds: float) -> Measured:
    return Measured([seconds], [seconds / 2], 10, seconds, 0)


def test_a_program_for_a_python_that_is_not_here_says_so() -> None:
    with pytest.raises(UnavailableError, match=r"needs Python 2\.99"):
        install(Program("inference-perf", python=(2, 99)))


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
