"""Traces as their readers get them: the list, the terminal, and Perfetto's file."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shell_router.api import ApiSettings
from shell_router.cli import main
from shell_router.errors import EngineUnreachable
from shell_router.lab.traces import to_perfetto
from shell_router.telemetry import TraceStore
from tests.fakes.api_server import api, chat
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

Entry = dict[str, Any]


def broken_script() -> ScriptedMoa:
    return ScriptedMoa({"small": Script("", error=EngineUnreachable("gone"))})


async def test_the_latest_requests_are_listed_by_model_status_and_time() -> None:
    now = [100.0]
    async with api(broken_script(), wall=lambda: now[0]) as served:
        for at_s, model in ((100.0, "duo"), (200.0, "medium"), (300.0, "small")):
            now[0] = at_s
            await served.post("/v1/chat/completions", chat(model=model))
        _, body = await served.get("/v1/traces")
        every = body["data"]
        listed = {
            query: [one["model"] for one in (await served.get(f"/v1/traces?{query}"))[1]["data"]]
            for query in (
                "model=duo",
                "status=failed",
                "status=finished",
                "since=200",
                "limit=1",
                "limit=0",
            )
        }
    assert body["object"] == "list"
    assert [(one["model"], one["created"], one["status"], one["agents"]) for one in every] == [
        ("small", 300, "failed", 1),
        ("medium", 200, "finished", 1),
        ("duo", 100, "finished", 3),
    ]
    assert all(one["duration_ms"] >= 0 and one["id"] for one in every)
    assert listed == {
        "model=duo": ["duo"],
        "status=failed": ["small"],
        "status=finished": ["medium", "duo"],
        "since=200": ["small", "medium"],
        "limit=1": ["small"],
        "limit=0": [],
    }


@pytest.mark.parametrize(
    "query", ["status=done", "limit=many", "limit=1001", "since=-1", "since=nan", "modle=duo"]
)
async def test_a_filter_that_cannot_be_meant_is_refused_by_name(query: str) -> None:
    async with api() as served:
        status, body = await served.get(f"/v1/traces?{query}")
    assert (status, body["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_tenant_sees_only_its_own_requests() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1", "you": "sk-2"})) as served:
        await served.post("/v1/chat/completions", chat(), Authorization="Bearer sk-1")
        counts = [
            len((await served.get("/v1/traces", Authorization=f"Bearer {key}"))[1]["data"])
            for key in ("sk-1", "sk-2")
        ]
    assert counts == [1, 0]


async def test_the_command_lists_draws_and_writes_for_perfetto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    async with api() as served:
        async with served.stream(chat()) as response:
            await response.read()
            trace_id = response.headers["x-trace-id"]
        codes = [
            await asyncio.to_thread(main, ["trace", *arguments, "--url", served.url])
            for arguments in (
                [],
                [trace_id],
                [trace_id, "--perfetto", str(file)],
                ["--model", "nothing"],
                ["unknown"],
            )
        ]
    assert codes == [0, 0, 0, 0, 2]
    printed = capsys.readouterr()
    assert trace_id in printed.out
    assert "duo: finished" in printed.out
    assert "keeps no such request" in printed.out
    assert "No trace 'unknown' is held" in printed.err
    assert f"Open {file} at https://ui.perfetto.dev" in printed.out
    check_perfetto(
        json.loads(file.read_text(encoding="utf-8")),
        tracks={"run", "left", "right", "root"},
        arrows=2,
    )


async def test_the_command_writes_calls_whose_readers_hold_their_precursors_outputs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "calls.json"
    async with api(traces=TraceStore(contents=True)) as served:
        bodies = [
            (await served.post("/v1/chat/completions", chat(question)))[1] for question in "ab"
        ]
        first = bodies[0]["id"].removeprefix("chatcmpl-")
        for arguments, requests in (([first], 1), ([], 2)):
            command = ["trace", *arguments, "--otel", str(file), "--url", served.url]
            assert await asyncio.to_thread(main, command) == 0
            spans = json.loads(file.read_text(encoding="utf-8"))["spans"]
            assert [span["span_id"] for span in spans].count("root") == requests
            assert len(spans) == 3 * requests
    for root in (span for span in spans if span["span_id"] == "root"):
        of_run = {span["span_id"]: span for span in spans if span["trace_id"] == root["trace_id"]}
        messages = json.loads(root["attributes"]["gen_ai.input.messages"])
        read = [message["content"] for message in messages if message["role"] == "assistant"]
        leaves = [of_run[agent] for agent in ("left", "right")]
        assert read == [leaf["attributes"]["gen_ai.output.text"] for leaf in leaves]
        assert all(leaf["end_time"] <= root["start_time"] for leaf in leaves)
        assert messages[0]["role"] == "user"
        answers = [body["choices"][0]["message"]["content"] for body in bodies]
        assert root["attributes"]["gen_ai.output.text"] in answers
        assert root["attributes"]["gen_ai.usage.output_tokens"] > 0
        assert root["attributes"]["gen_ai.usage.input_tokens"] > 0


async def test_what_a_program_reads_of_another_request_is_written_with_that_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "calls.json"
    moa = ScriptedMoa()
    async with api(moa, traces=TraceStore(contents=True)) as served:
        small = moa.engines["small"]
        writes = small.answer
        small.answer = lambda _: Script("half", error=EngineUnreachable("gone"))
        for agent, prompt, expected in (
            ("writer", [{"text": "Write."}], 502),
            ("writer", [{"text": "Write."}], 200),
            ("reader", [{"text": "Read: "}, {"output_of": "writer"}], 200),
        ):
            body = {"program": "p", "agent": agent, "model": "small", "prompt": prompt}
            status, answer = await served.post("/v1/agent/requests", body)
            assert status == expected, answer
            small.answer = writes
        _, listed = await served.get("/v1/traces")
        last = listed["data"][0]["id"]
        url = ["--url", served.url, "--otel", str(file)]
        assert await asyncio.to_thread(main, ["trace", last, *url]) == 2
        assert "Leave the id out" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["trace", *url]) == 0
    spans = {
        span["span_id"]: span for span in json.loads(file.read_text(encoding="utf-8"))["spans"]
    }
    writer, reader = (spans[agent]["attributes"] for agent in ("writer", "reader"))
    assert json.loads(reader["gen_ai.input.messages"]) == [
        {"role": "user", "content": "Read: "},
        {"role": "assistant", "content": writer["gen_ai.output.text"]},
    ]
    assert {span["trace_id"] for span in spans.values()} == {"p"}


async def test_a_trace_without_contents_is_not_written_for_replayers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with api() as served:
        await served.post("/v1/chat/completions", chat())
        command = ["trace", "--otel", str(tmp_path / "calls.json"), "--url", served.url]
        assert await asyncio.to_thread(main, command) == 2
    assert "Set traces.contents: on" in capsys.readouterr().err


async def test_a_run_that_goes_on_is_drawn_up_to_now(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--perfetto", "run.json"]) == 2
    assert "x-trace-id" in capsys.readouterr().err
    open_span = {"name": "decode", "start_s": 1.0, "end_s": None}
    closed = {"name": "queue", "start_s": 0.0, "end_s": 2.5}
    record = {"model": "small", "state": "running", "precursors": [], "spans": [open_span]}
    other = {**record, "spans": [closed]}
    trace = {
        "id": "t",
        "target": "duo",
        "state": "running",
        "started_at": 5.0,
        "duration_s": None,
        "exits": [],
    }
    written = to_perfetto({**trace, "agents": {"a": record, "b": other}})
    (decode,) = (one for one in written["traceEvents"] if one["name"] == "decode")
    assert (decode["ts"], decode["dur"]) == (6_000_000, 1_500_000)


def test_a_skipped_agent_gets_an_arrow_from_the_output_that_it_forwards() -> None:
    decode, queue = (
        {"name": "decode", "start_s": 0.5, "end_s": 1.0},
        {"name": "queue", "start_s": 0.0, "end_s": 1.5},
    )
    writer = {
        "model": "small",
        "state": "finished",
        "started_s": 0.0,
        "precursors": [],
        "spans": [decode],
    }
    root = {
        "model": "large",
        "state": "skipped",
        "started_s": 0.0,
        "ended_s": 1.5,
        "source": "a",
        "spans": [queue],
    }
    agents = {"a": writer, "b": writer, "root": {**root, "precursors": ["a", "b"]}}
    trace = {
        "id": "t",
        "target": "duo",
        "state": "finished",
        "started_at": 5.0,
        "duration_s": 1.5,
        "exits": [],
    }
    written = to_perfetto({**trace, "agents": agents})
    check_perfetto(written, tracks={"run", "a", "b", "root"}, arrows=1)
    assert [one["name"] for one in written["traceEvents"] if one["ph"] == "s"] == ["output of a"]


def check_perfetto(written: Entry, *, tracks: set[str], arrows: int) -> None:
    """What Perfetto needs: named tracks, slices that nest in theirs, and arrows from a slice to a
    slice.
    """
    entries = written["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in entries if one["name"] == "thread_name"}
    assert {name.partition(" (")[0] for name in names.values()} == tracks
    slices: dict[int, list[Entry]] = defaultdict(list)
    for one in entries:
        if one["ph"] == "X":
            assert one["dur"] >= 0
            slices[one["tid"]].append(one)
    assert set(slices) == set(names)
    for track in slices.values():
        ends: list[int] = []
        for one in sorted(track, key=lambda one: (one["ts"], -one["dur"])):
            while ends and ends[-1] <= one["ts"]:
                ends.pop()
            assert not ends or one["ts"] + one["dur"] <= ends[-1], (
                f"{one} overlaps the slice before it"
            )
            ends.append(one["ts"] + one["dur"])
    begins = {one["id"]: one for one in entries if one["ph"] == "s"}
    ends_of = {one["id"]: one for one in entries if one["ph"] == "f"}
    assert len(begins) == arrows
    assert begins.keys() == ends_of.keys()
    for number, begin in begins.items():
        end = ends_of[number]
        assert (begin["cat"], begin["name"]) == (end["cat"], end["name"])
        assert end["bp"] == "e"
        assert begin["ts"] <= end["ts"]
        for point in (begin, end):
            assert any(
                one["ts"] <= point["ts"] <= one["ts"] + one["dur"] for one in slices[point["tid"]]
            ), point
