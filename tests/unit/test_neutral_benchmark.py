"""benchmarks/neutral: what it reads of others' result files, its traces, and its table."""

import argparse
import json
import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.neutral.__main__ import (
    install_clients,
    load_traces,
    measure_rounds,
    parse_options,
)
from benchmarks.neutral.clients import Aiperf, Ask, Client, InferencePerf, Measured
from benchmarks.neutral.environments import Installed, Program, UnavailableError, install
from benchmarks.neutral.servers import sum_counter
from benchmarks.neutral.table import Cell, Round, build_rows
from benchmarks.neutral.traces import ANOTHER, MERGE, OWN, load_trace, write_own
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
        "output_sequence_length": {"value": 29, "unit": "tokens"},  # tokenized again
        "usage_completion_tokens": {"value": 32, "unit": "tokens"},
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


class Shell(Client):
    """Runs a script as its client, whose results are not what was expected."""

    program = Program("sh")
    replays = False

    def __init__(self, script: str) -> None:
        self._script = script

    def options(self, ask: Ask, folder: Path) -> Sequence[str]:
        return ["-c", self._script]

    def read(self, ask: Ask, results: Path) -> Measured:
        unread: Any = None
        return Measured([unread["duration_sec"]], [], 0, 0.0, 0)


def test_what_a_client_started_ends_with_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        script = f"exec 3>{pipe}; sleep 60 & exit 3"
        Shell(script).run(Installed(Path("/bin/sh"), ""), ask(2), tmp_path / "run")
        assert select.select([reader], [], [], 30)[0], "the worker still has the pipe"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'first'; echo '│ All 2 requests failed. │'; exit 1", "first All 2 requests failed."),
        ("exit 1", "it failed without a word"),
        ("exit 0", "TypeError: 'NoneType' object is not subscriptable"),
    ],
)
def test_a_run_that_fails_says_why(script: str, reason: str, tmp_path: Path) -> None:
    measured = Shell(script).run(Installed(Path("/bin/sh"), ""), ask(2), tmp_path / "run")
    assert measured == Measured([], [], 0, 0.0, 2, reason)


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


def test_a_topologys_texts_after_the_first_are_as_long_as_marked_messages(tmp_path: Path) -> None:
    write_own(tmp_path / "own")
    trace = load_trace(tmp_path / "own" / "tree-3-1.json", tmp_path, MODEL)
    assert trace.agents is not None
    prompt = trace.agents["call-03"]["prompt"]
    mark = "[SESS:0123456789abcdef] "
    assert prompt["prefix"] == "{question}"
    assert list(prompt["slots"].values()) == [
        "\n\n{output}",
        f"\n\n{mark}{ANOTHER}\n\n{{output}}",
        f"\n\n{mark}{ANOTHER}\n\n{{output}}",
    ]
    assert prompt["suffix"] == f"\n\n{mark}{MERGE}"


@pytest.mark.parametrize(
    ("messages", "note"),
    [
        ([{"role": "user", "content": None}], "a message is not one text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a message is not one text"),
        ([{"role": "user", "parts": []}], "a message is not one text"),
        ([{"role": "system", "content": "Be brief."}], "a call has no user message"),
    ],
)
def test_a_trace_of_other_messages_has_no_topology(
    messages: Any, note: str, tmp_path: Path
) -> None:
    write_own(tmp_path)
    file = tmp_path / "tree-3-1.json"
    trace = json.loads(file.read_text(encoding="utf-8"))
    trace["spans"][0]["attributes"]["gen_ai.input.messages"] = json.dumps(messages)
    write(file, trace)
    loaded = load_trace(file, tmp_path, MODEL)
    assert (loaded.agents, loaded.note) == (None, note)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"spans": []}, "no span has gen_ai.input.messages"),
        ({"spans": [{"attributes": {}}]}, "no span has gen_ai.input.messages"),
        ({}, "KeyError: 'spans'"),
        ([], "TypeError: "),
    ],
)
def test_a_file_without_calls_is_refused_by_name(
    document: Any, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "empty.json"
    write(file, document)
    options = argparse.Namespace(own="", traces=[file])
    with pytest.raises(SystemExit, match=rf"empty\.json is no trace: .*{reason}"):
        load_traces(options, tmp_path, MODEL, {})


@pytest.mark.parametrize(
    "arguments", [("--own", "tree-3-1,foo"), ("--engines", "foo"), ("--engines", "")]
)
def test_names_that_are_none_are_refused(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert f"{arguments[0]} {'foo' if arguments[1] else ''}: choose from" in capsys.readouterr().err


def test_others_traces_need_none_of_ours() -> None:
    assert parse_options(["--own", "", "--traces", "folder"]).traces == [Path("folder")]


def test_a_client_that_is_none_is_named() -> None:
    notes: dict[str, str] = {}
    assert install_clients("foo", notes) == []
    assert notes == {"client foo": "is none of inference-perf, aiperf"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "KeyboardInterrupt"), (RuntimeError("not idle"), "not idle")],
)
def test_rounds_before_an_error_are_kept(error: BaseException, reason: str) -> None:
    whole: Round = {Cell("undivided", "client", "tree", 1, "router"): run_of(1.0)}

    def measure(number: int) -> Round:
        if number == 2:
            raise error
        return whole

    notes: dict[str, str] = {}
    assert measure_rounds(measure, 7, notes) == [whole, whole]
    assert notes == {"the other rounds": reason}


def test_ratios_are_of_each_round_to_the_groups_first_row() -> None:
    base = Cell("undivided", "client", "tree", 1, "the engine itself")
    other = Cell("undivided", "client", "tree", 1, "router", one_request=True)
    rounds: list[Round] = [
        {base: run_of(2.0), other: run_of(1.0)},
        {base: run_of(4.0), other: run_of(3.0)},
        {base: run_of(4.0), other: Measured([], [], 0, 0.0, 1, "timeout")},
    ]
    first, second = build_rows([base, other], rounds)
    assert (first["relative p50"], first["tokens/s"], first["failed"]) == (1.0, 30 / 10, 0)
    assert (second["rounds"], second["relative p50"], second["95 %"]) == (2, 0.625, None)
    assert (second["failed"], second["tokens/s"], second["sessions/min"]) == (1, None, 30.0)


@pytest.mark.parametrize(("count", "interval"), [(5, None), (6, "1.000-1.000")])
def test_an_interval_needs_six_rounds(count: int, interval: str | None) -> None:
    cell = Cell("undivided", "client", "tree", 1, "the engine itself")
    (row,) = build_rows([cell], [{cell: run_of(2.0)}] * count)
    assert (row["rounds"], row["95 %"]) == (count, interval)


def run_of(seconds: float) -> Measured:
    return Measured([seconds], [seconds / 2], 10, seconds, 0)


def test_a_program_for_a_python_that_is_not_here_says_so() -> None:
    with pytest.raises(UnavailableError, match=r"needs Python 2\.99"):
        install(Program("inference-perf", python=(2, 99)))


def write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


def test_counters_are_summed_over_their_labels_and_others_are_left_out() -> None:
    metrics = "\n".join(
        (
            "# TYPE sglang:prompt_tokens_total counter",
            'sglang:prompt_tokens_total{model="a",tp="0"} 30.0',
            'sglang:prompt_tokens_total{model="a",tp="1"} 1.2e2',
            'sglang:prompt_tokens_total_other{model="a"} 7',
        )
    )
    assert sum_counter(metrics, "sglang:prompt_tokens_total") == 150
