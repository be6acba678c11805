"""`shell-router experts`: recorded by an engine, placed and compared."""

import json
import socket
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from benchmarks.expert_placement.drawn import Routing, drawn
from shell_router.cli import main
from shell_router.cli.experts import Algorithm, ExpertServer, record_experts
from shell_router.errors import ConfigError, EngineStalled, EngineUnreachable
from shell_router.experts.placement import ALGORITHMS, ExpertRecord
from shell_router.experts.placement.algorithms import eplb
from shell_router.experts.placement.files import MAP
from shell_router.experts.placement.records import measure_placement
from tests.fakes.command import running_command
from tests.fakes.http_engines import ExpertEngine, served
from tests.fakes.placements import placement_in

ROUTING = Routing(layers=4, experts=16, top_k=4, topics=4, topical=2)


@pytest.fixture
def record() -> ExpertRecord:
    return drawn(ROUTING, 400)


@pytest.fixture
def recorded(record: ExpertRecord, tmp_path: Path) -> Path:
    np.savez(
        tmp_path / "record.npz", activations=record.activations, transitions=record.transitions
    )
    return tmp_path / "record.npz"


def test_the_command_offers_every_algorithm_there_is() -> None:
    assert tuple(ALGORITHMS) == get_args(Algorithm)


async def test_a_record_is_placed_so_that_sglang_can_load_it(
    record: ExpertRecord, tmp_path: Path
) -> None:
    """Both commands as their users run them."""
    engine, out, placed = ExpertEngine(record), tmp_path / "out.npz", tmp_path / "placement.json"
    async with (
        served(engine) as url,
        running_command("experts", "record", url, "--seconds", "0.01", "--out", out) as command,
    ):
        code, printed = await command.ended(limit_s=60)
    assert code == 0, printed
    assert "4 layers of 16 experts" in printed and "with transitions" in printed
    assert engine.calls == ["start", "stop", "dump"]
    assert main(["experts", "place", str(out), "--gpus", "4", "--out", str(placed)]) == 0
    found = placement_in(placed, record, 4)
    assert list(json.loads(placed.read_bytes())) == [MAP]
    ours, theirs = measure_placement(record, found), measure_placement(record, eplb(record, 4))
    assert ours.balance <= theirs.balance and ours.traffic < theirs.traffic


async def test_an_engine_that_cannot_record_is_named_with_what_it_needs(
    record: ExpertRecord, tmp_path: Path
) -> None:
    out = tmp_path / "out.npz"
    engine = ExpertEngine(record, records=False)
    async with served(engine) as url:
        with pytest.raises(ConfigError, match="--expert-distribution-recorder-mode stat"):
            await record_experts(ExpertServer(url), out, 0.01)
        with pytest.raises(ConfigError, match="no plugin of the router"):
            await record_experts(ExpertServer(f"{url}/elsewhere"), out, 0.01)
    with pytest.raises(EngineUnreachable, match="No answer from an engine"):
        await record_experts(ExpertServer("http://127.0.0.1:9"), out, 0.01)
    assert engine.calls == [] and not out.exists()


async def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        server = ExpertServer(f"http://127.0.0.1:{never_accepts.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(EngineStalled, match="--timeout-s"):
            await record_experts(server, tmp_path / "out.npz", 0.01)


def test_place_compares_its_algorithm_with_the_others_on_the_record(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = tmp_path / "placed.json"
    assert (
        main(
            [
                "experts",
                "place",
                str(recorded),
                "--gpus",
                "2",
                "--algorithm",
                "gimbal",
                "--out",
                str(placed),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "worst layer" in printed
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert rows == ["gimbal", "swap", "eplb", "contiguous"]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (
            ["place", "RECORD", "--gpus", "3", "--out", "OUT"],
            "16 experts do not divide over 3 GPUs",
        ),
        (["place", "RECORD", "--gpus", "4", "--out", "/nowhere/p.json"], "cannot be written"),
        (
            ["place", "MISSING", "--gpus", "4", "--out", "OUT"],
            "Record one with `shell-router experts record`",
        ),
        (
            ["record", "URL", "--seconds", "1", "--out", "OUT", "--api-key-env", "NO_SUCH_KEY"],
            "NO_SUCH_KEY is empty",
        ),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    recorded: Path,
    tmp_path: Path,
    arguments: list[str],
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = {
        "RECORD": str(recorded),
        "OUT": str(tmp_path / "p.json"),
        "MISSING": str(tmp_path / "missing"),
    }
    assert main(["experts", *(named.get(one, one) for one in arguments)]) == 2
    assert printed in capsys.readouterr().err
