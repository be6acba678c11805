"""A real mixture-of-experts model on real SGLang: recorded, placed, and started again with the
file.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from benchmarks.expert_placement.drawn import Routing, drawn
from benchmarks.expert_placement.served import OWN_MODELS, balanced, served, verdicts
from benchmarks.random_checkpoint import EXPERTS, MOE_LAYERS, TOP_K, make_moe_checkpoint
from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.environment import built_environment, engine_variables, install_plugin
from shell_router.cli import main
from shell_router.cli.experts import ExpertServer
from shell_router.experts.placement import build_record, place
from shell_router.experts.placement.algorithms import eplb
from shell_router.experts.placement.files import MAP, read_record
from shell_router.experts.placement.records import (
    compute_loads,
    measure_placement,
    placement_from_slots,
)
from shell_router.sglang_plugin.experts import PLACEMENT
from tests.fakes.placements import placement_in
from tests.sglang import balanced_ranks

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

GPUS = 4
QUESTIONS = [f"Tell me about the number {number} and the river." for number in range(6)]
NEW_TOKENS = 24

SGLANGS_EPLB = """
import json, sys, torch
from sglang.srt.eplb.eplb_algorithms import EplbAlgorithm, rebalance_experts
for counts, gpus in json.load(sys.stdin):
    experts = len(counts[0])
    slots, _, _ = rebalance_experts(torch.tensor([counts]), experts, experts // gpus, None, 1, EplbAlgorithm.deepseek)
    print(json.dumps(slots.tolist()))
"""


def engine(folder: Path, model: Path, *options: str) -> AbstractContextManager[EngineServer]:
    """One SGLang server, without disaggregation, that can record experts."""
    variables = {
        "SHELL_ROUTER_EXPERT_RECORD": str(folder / "record.npz"),
        "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(folder / "sglangs"),
    }
    return served(
        folder, model, "--expert-distribution-recorder-mode", "stat", *options, **variables
    )


async def recorded(server: EngineServer, out: Path) -> dict[str, Any]:
    """The arrays of a record of the questions, asked one after the other."""

    async def ask() -> None:
        await answers(server)

    async with ExpertServer(server.url).recorder() as recorder:
        await asyncio.to_thread(out.write_bytes, await recorder.record(ask))
    with np.load(out) as found:
        return {name: found[name] for name in ("activations", "transitions")}


async def answers(server: EngineServer) -> list[list[int]]:
    """The token ids of the greedy answers to the questions."""
    found = []
    async with aiohttp.ClientSession() as session:
        for question in QUESTIONS:
            body = {
                "text": question,
                "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0},
            }
            async with session.post(f"{server.url}/generate", json=body) as response:
                found.append((await response.json())["output_ids"])
    return found


def sglangs_own(folder: Path) -> Any:
    """The activations [layers, experts] that SGLang's recorder dumped."""
    (dumped,) = (folder / "sglangs").glob("*.pt")
    return torch.load(dumped, weights_only=False)["logical_count"].sum(dim=0).numpy()


async def test_a_model_is_recorded_placed_and_started_again_and_answers_the_same(
    tmp_path: Path,
) -> None:
    model = make_moe_checkpoint(tmp_path / "model")
    record, placed = tmp_path / "record.npz", tmp_path / "placement.json"
    with engine(tmp_path / "before", model) as server:
        before = await recorded(server, record)
        answered = await answers(server)
    assert (before["activations"] == sglangs_own(tmp_path / "before")).all()
    tokens = before["activations"].sum(axis=1) / TOP_K
    assert before["activations"].shape == (MOE_LAYERS, EXPERTS)
    assert (before["transitions"].sum(axis=(1, 2)) == tokens[1:] * TOP_K**2).all()

    assert main(["experts", "place", str(record), "--gpus", str(GPUS), "--out", str(placed)]) == 0
    rows = json.loads(placed.read_bytes())[MAP]
    assert rows != [list(range(EXPERTS))] * MOE_LAYERS
    found = read_record(record)
    ours, theirs = (
        measure_placement(found, one)
        for one in (placement_in(placed, found, GPUS), eplb(found, GPUS))
    )
    assert ours.balance <= theirs.balance and ours.traffic < theirs.traffic

    with engine(tmp_path / "after", model, "--init-expert-location", str(placed)) as server:
        after = await recorded(server, tmp_path / "again.npz")
        assert await answers(server) == answered
    assert "init_expert_location from init_by_mapping" in (tmp_path / "after" / "log").read_text(
        encoding="utf-8"
    )
    for name, counts in before.items():
        assert (after[name] == counts).all(), f"{name} are counted by expert, wherever it is"


@pytest.mark.parametrize("algorithm", ["swap", "gimbal"])
def test_sglangs_balancer_moves_experts_and_their_weights_to_the_projects_placement(
    algorithm: str, tmp_path: Path
) -> None:
    """Both ranks see the same tokens, as under tensor parallelism: each of a topic, whose experts
    follow each other.
    """
    experts, layers, draw = balanced_ranks.EXPERTS, 3, np.random.default_rng(0)
    of_topic = np.stack([draw.permutation(experts).reshape(4, 4) for _ in range(layers)])
    topics = draw.choice(4, (4, 200), p=(0.4, 0.3, 0.2, 0.1))  # [passes, tokens]
    two = np.argsort(draw.random((4, layers, 200, 4)), axis=3)[..., :2]
    choices = [
        np.take_along_axis(of_topic[layer][topics], two[:, layer], axis=2)
        for layer in range(layers)
    ]
    np.save(tmp_path / "choices.npy", np.stack(choices, axis=1))
    chosen = np.eye(experts)[np.stack(choices)].sum(axis=3)  # [layers, passes, tokens, experts]
    followed = np.einsum("lpte,lptf->lef", chosen[:-1], chosen[1:])
    record = build_record(2 * chosen.sum(axis=(1, 2)), 2 * followed)
    wanted = place(algorithm, record, 2)
    assert (wanted.gpu_of != eplb(record, 2).gpu_of).any(), "SGLang's own would be another"
    for metadata, held, rank in ranks_balanced(tmp_path, algorithm):
        assert metadata == wanted.slots.tolist()
        assert held == [row[8 * rank : 8 * rank + 8] for row in metadata]


def ranks_balanced(folder: Path, algorithm: str) -> list[tuple[Any, Any, int]]:
    """The end of both ranks of balanced_ranks.py."""
    venv = built_environment()
    assert venv is not None
    (folder / "site").mkdir()
    install_plugin(folder / "site")
    command = [venv / "bin" / "python", balanced_ranks.__file__]
    variables = {**engine_variables(folder / "site"), PLACEMENT: algorithm}
    arguments = (folder / "choices.npy", folder / "meeting")
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=400) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1][-2000:]
    return [(*json.loads(out.splitlines()[-1]), rank) for rank, (out, _) in enumerate(said)]


LAYOUT = re.compile(r"rebalance layout (\w+):((?:\n(?:physical_to|layer=).*)+)")


async def test_experts_move_to_the_projects_placement_while_the_server_answers_and_its_answers_stay(
    tmp_path: Path,
) -> None:
    """The first answers take 144 passes, so that experts move during the second."""
    model, folder = make_moe_checkpoint(tmp_path / "model", popular_first=True), tmp_path / "moving"
    variables = {PLACEMENT: "swap", "SGLANG_LOG_EXPERT_LOCATION_METADATA": "1", **OWN_MODELS}
    with served(folder, model, *balanced(200), **variables) as server:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{server.url}/shell_router/capabilities") as found,
        ):
            assert (await found.json())["expert_placement"] is True
        first = await answers(server)
        assert not verdicts(server)
        assert await answers(server) == first, "experts move meanwhile"
        (verdict,) = verdicts(server)
        assert await answers(server) == first
    assert verdict.moves and 1 <= verdict.balance[1] < verdict.balance[0]
    layouts = {
        when: placement_rows(rows)
        for when, rows in LAYOUT.findall((folder / "log").read_text("utf-8"))[:3]
    }
    assert (
        layouts["after"]
        == layouts["target"]
        != layouts["before"]
        == [list(range(EXPERTS))] * MOE_LAYERS
    )
    assert all(sorted(row) == list(range(EXPERTS)) for row in layouts["after"])


def placement_rows(layout: str) -> list[list[int]]:
    """The expert of each slot, layer by layer, as SGLang logs it."""
    rows = [line for line in layout.splitlines() if line.startswith("layer=")]
    return [
        [int(slot) for part in re.findall(r"\[([\d,]*)\]", row) for slot in part.split(",")]
        for row in rows
    ]


def sglangs_eplb(cases: Sequence[tuple[list[list[int]], int]]) -> list[Any]:
    """The map that SGLang's own EPLB makes of the activations, for the number of GPUs, in each
    case.
    """
    venv = built_environment()
    assert venv is not None
    done = subprocess.run(
        [venv / "bin" / "python", "-c", SGLANGS_EPLB],
        input=json.dumps(cases),
        env=dict(engine_variables(Path(sys.prefix))),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]


def test_our_eplb_loads_gpus_as_sglangs_own_does() -> None:
    """Not the same map where activations tie: the order among tied experts is not promised."""
    records = [drawn(Routing(layers=4, skew=skew), 500) for skew in (0.3, 1.5)]
    cases = [(record, gpus) for record in records for gpus in (2, 4, 8, 128)]
    found = sglangs_eplb(
        [(record.activations.astype(int).tolist(), gpus) for record, gpus in cases]
    )
    assert len(found) == len(cases)
    for (record, gpus), slots in zip(cases, found, strict=True):
        theirs = np.sort(compute_loads(record, placement_from_slots(np.array(slots), gpus)), axis=1)
        assert (theirs == np.sort(compute_loads(record, eplb(record, gpus)), axis=1)).all()
