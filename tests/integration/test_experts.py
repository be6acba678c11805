"""`shell-router experts`: recorded by an engine, placed, compared and watched."""

import json
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.routing.drawn import Routing, drawn
from shell_router.cli import expert_work, main, parser
from shell_router.cli.experts import ALGORITHMS as NAMES
from shell_router.errors import ConfigError, DataError, EngineRejected, EngineStalled, EngineUnreachable
from shell_router.placement import ALGORITHMS, ExpertRecord, PlacementSettings, measures
from shell_router.placement.baselines import contiguous, eplb
from shell_router.placement.files import MAP, read_placement, read_record, write_record
from tests.fakes.command import running_command
from tests.fakes.expert_engine import ExpertEngine
from tests.fakes.served import served

ROUTING = Routing(layers=4, experts=16, top_k=4, topics=4, topical=2)


@pytest.fixture
def record() -> ExpertRecord:
    return drawn(ROUTING, 400)


@pytest.fixture
def recorded(record: ExpertRecord, tmp_path: Path) -> Path:
    write_record(tmp_path / "record.npz", record)
    return tmp_path / "record.npz"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"question": f"Why is {n} odd?"}) + "\n" for n in (1, 3, 5)), encoding="utf-8")
    return file


@pytest.fixture
def bad_prompts(tmp_path: Path) -> Path:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "Why?"}\n{"prompt": "no"}\n', encoding="utf-8")
    return file


def recording(*options: object) -> Coroutine[Any, Any, None]:
    return expert_work.record(parser().parse_args(["experts", "record", *map(str, options)]))


def watching(*options: object) -> Coroutine[Any, Any, None]:
    chosen = parser().parse_args(["experts", "watch", *map(str, options)])
    return expert_work.watch(chosen, PlacementSettings(chosen.gpus))


def test_the_command_offers_every_algorithm_there_is() -> None:
    assert tuple(ALGORITHMS) == NAMES


async def test_a_record_of_prompts_is_placed_so_that_sglang_can_load_it(
    record: ExpertRecord, prompts: Path, tmp_path: Path
) -> None:
    """The three commands as their users run them."""
    engine, out, placed = ExpertEngine(record), tmp_path / "out.npz", tmp_path / "placement.json"
    async with (
        served(engine) as url,
        running_command("experts", "record", url, "--prompts", prompts, "--out", out, "--new-tokens", "5") as command,
    ):
        code, told = await command.ended(limit_s=60)
    assert code == 0, told
    assert "4 layers of 16 experts" in told and "with transitions" in told
    assert engine.calls == ["start", "stop", "dump"]
    assert {asked["text"] for asked in engine.asked} == {"Why is 1 odd?", "Why is 3 odd?", "Why is 5 odd?"}
    assert engine.asked[0]["sampling_params"] == {"max_new_tokens": 5, "temperature": 0}
    assert main(["experts", "place", str(out), "--gpus", "4", "--out", str(placed)]) == 0
    found = read_placement(placed, record, 4)
    assert list(json.loads(placed.read_bytes())) == [MAP]
    ours, theirs = measures(record, found), measures(record, eplb(record, PlacementSettings(4)))
    assert ours.balance <= theirs.balance and ours.traffic < theirs.traffic


async def test_a_prefill_server_prefills_and_a_decode_server_is_not_asked(
    record: ExpertRecord, prompts: Path, tmp_path: Path
) -> None:
    prefill, decode = ExpertEngine(record, mode="prefill"), ExpertEngine(record, mode="decode")
    async with served(prefill) as url:
        await recording(url, "--prompts", prompts, "--out", tmp_path / "out.npz")
    assert len(prefill.asked) == 3
    async with served(decode) as url:
        with pytest.raises(ConfigError, match="--seconds"):
            await recording(url, "--prompts", prompts, "--out", tmp_path / "out.npz")
        assert decode.calls == []
        await recording(url, "--seconds", "0.01", "--out", tmp_path / "out.npz")
    assert decode.asked == []


async def test_an_engine_that_cannot_record_is_named_with_what_it_needs(
    record: ExpertRecord, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.npz"
    engine = ExpertEngine(record, records=False)
    async with served(engine) as url:
        with pytest.raises(ConfigError, match="--expert-distribution-recorder-mode stat"):
            await recording(url, "--prompts", prompts, "--out", out)
        with pytest.raises(ConfigError, match="no plugin of the router"):
            await recording(f"{url}/elsewhere", "--prompts", prompts, "--out", out)
    with pytest.raises(EngineUnreachable, match="No answer from an engine"):
        await recording("http://127.0.0.1:9", "--prompts", prompts, "--out", out)
    assert engine.calls == [] and not out.exists()


async def test_a_prompt_that_is_refused_ends_the_recording_with_the_engines_words(
    record: ExpertRecord, prompts: Path, tmp_path: Path
) -> None:
    engine = ExpertEngine(record, refuses="3")
    async with served(engine) as url:
        with pytest.raises(EngineRejected, match="no 3"):
            await recording(url, "--prompts", prompts, "--out", tmp_path / "out.npz")
    assert engine.calls == ["start", "stop"]


async def test_an_engine_that_does_not_answer_is_given_up(prompts: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        options = ("--prompts", prompts, "--out", tmp_path / "out.npz", "--timeout-s", "0.05")
        with pytest.raises(EngineStalled, match="--timeout-s"):
            await recording(f"http://127.0.0.1:{never_accepts.getsockname()[1]}", *options)


async def test_a_bad_line_among_the_prompts_is_told_before_anything_is_asked(
    record: ExpertRecord, bad_prompts: Path, tmp_path: Path
) -> None:
    engine = ExpertEngine(record)
    async with served(engine) as url:
        with pytest.raises(DataError, match=":2: question must be text"):
            await recording(url, "--prompts", bad_prompts, "--out", tmp_path / "out.npz")
    assert engine.calls == []


async def test_watch_writes_a_placement_once_and_then_says_that_no_restart_is_worth_it(
    record: ExpertRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, out = ExpertEngine(record), tmp_path / "placement.json"
    async with served(engine) as url:
        await watching(url, "--gpus", 4, "--out", out, "--every-s", "0.01", "--rounds", "2")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"worth a restart with {out}, balance ")
    assert second.startswith("not worth a restart, a gain below 5%")
    trivial = measures(record, contiguous(record, PlacementSettings(4)))
    assert measures(record, read_placement(out, record, 4)).balance < trivial.balance
    assert read_record(out.with_suffix(".npz")).has_transitions


async def test_watch_places_anew_when_the_routing_has_changed(
    record: ExpertRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, out = ExpertEngine(record), tmp_path / "placement.json"
    async with served(engine) as url:
        await watching(url, "--gpus", 4, "--out", out, "--every-s", "0.01", "--rounds", "1")
        before = out.read_text(encoding="utf-8")
        engine.record = drawn(Routing(layers=4, experts=16, top_k=4, skew=2.0, seed=1), 400)
        await watching(url, "--gpus", 4, "--out", out, "--every-s", "0.01", "--rounds", "1")
    assert capsys.readouterr().out.splitlines()[1].startswith("worth a restart")
    assert out.read_text(encoding="utf-8") != before


async def test_watch_goes_on_after_a_round_in_which_nobody_asked_anything(
    record: ExpertRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ExpertEngine(record)
    idle = np.zeros_like(record.activations)
    engine.record = ExpertRecord(idle, record.transitions, record.layers, record.model_layers)
    async with served(engine) as url:
        await watching(url, "--gpus", 4, "--out", tmp_path / "p.json", "--every-s", "0.01", "--rounds", "2")
    assert capsys.readouterr().out.count("not placed: ") == 2
    assert not (tmp_path / "p.json").exists()


def test_report_compares_files_and_algorithms_on_one_record(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placed, figures = tmp_path / "placed.json", tmp_path / "figures.json"
    assert main(["experts", "place", str(recorded), "--gpus", "2", "--algorithm", "gimbal", "--out", str(placed)]) == 0
    options = ("--gpus", "2", "--algorithms", "eplb,swap,gimbal", "--json", str(figures))
    assert main(["experts", "report", str(recorded), str(placed), *options]) == 0
    found = json.loads(figures.read_bytes())["placements"]
    assert list(found) == [str(placed), "eplb", "swap", "gimbal"]
    assert found[str(placed)]["traffic"] == found["gimbal"]["traffic"]
    assert found["swap"]["traffic"] <= found["eplb"]["traffic"]
    assert "worst layer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["place", "RECORD", "--gpus", "3", "--out", "OUT"], "16 experts do not divide over 3 GPUs"),
        (["place", "RECORD", "--gpus", "4", "--out", "/nowhere/p.json"], "cannot be written"),
        (["place", "RECORD", "--gpus", "4", "--out", "OUT", "--slack", "-1"], "slack must be a number from 0 on"),
        (["place", "RECORD", "--gpus", "4", "--out", "OUT", "--one-partition"], "gimbal, milp"),
        (["place", "MISSING", "--gpus", "4", "--out", "OUT"], "Record one with `shell-router experts record`"),
        (["report", "RECORD", "--gpus", "4", "--algorithms", "magic"], "There is no algorithm 'magic'"),
        (["report", "RECORD", "MISSING", "--gpus", "4"], "Make one with `shell-router experts place`"),
        (["watch", "URL", "--gpus", "4", "--out", "OUT", "--every-s", "0"], "must be above 0"),
        (["watch", "URL", "--gpus", "4", "--out", "OUT", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    recorded: Path, tmp_path: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"RECORD": str(recorded), "OUT": str(tmp_path / "p.json"), "MISSING": str(tmp_path / "missing")}
    assert main(["experts", *(named.get(one, one) for one in arguments)]) == 2
    assert told in capsys.readouterr().err
