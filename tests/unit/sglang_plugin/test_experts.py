"""What the plugin counts of a recorder's choices, without SGLang; tests/sglang has it inside the
real one.
"""

import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shell_router.experts.placement import build_record, measure_placement, place
from shell_router.experts.placement.records import placement_from_slots
from shell_router.sglang_plugin.experts import (
    ALGORITHMS,
    PLACEMENT,
    RECORD_FILE,
    ExpertCounter,
    RoutingCounts,
    can_place,
    can_record,
    map_to_logical,
    place_experts,
    record_file,
)

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 6, 2, 40


@dataclass(eq=False)
class Recorder:
    """What the hooks read of SGLang's recorder. Its layer is set as SGLang's models do."""

    file: Path
    expert_of_slot: torch.Tensor = field(
        default_factory=lambda: torch.arange(EXPERTS).repeat(LAYERS, 1)
    )
    recording: bool = True
    _disable_all: bool = False
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._current_layer_idx = SimpleNamespace(value=0)
        self._expert_location_metadata = SimpleNamespace(
            num_layers=LAYERS,
            num_logical_experts=EXPERTS,
            physical_to_logical_map=self.expert_of_slot,
        )
        self.hooks = ExpertCounter(self.file)
        self.hooks.make_counts(None, self)

    def choose(self, layer: int, slots: torch.Tensor) -> None:
        self._current_layer_idx.value = layer
        self.hooks.count(on_select_experts, self, topk_ids=slots)

    def start(self) -> None:
        self.hooks.clear(None, self)

    def dump(self, mode: str = "file") -> Any:
        return self.hooks.write(lambda _, output_mode: output_mode, self, mode)


def on_select_experts(recorder: Recorder, topk_ids: torch.Tensor) -> None:
    recorder.seen.append(len(topk_ids))


@dataclass(frozen=True)
class ServerArguments:
    expert_distribution_recorder_mode: str | None = "stat"
    enable_two_batch_overlap: bool = False
    enable_eplb: bool = True
    ep_num_redundant_experts: int = 0
    elastic_ep_backend: str | None = None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "record.npz"


def chosen(seed: int) -> list[torch.Tensor]:
    """Per layer the experts [tokens, top-k] of each token, none twice."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP_K).indices for _ in range(LAYERS)]


def by_hand(layers: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    activations, transitions = np.zeros((LAYERS, EXPERTS)), np.zeros((LAYERS - 1, EXPERTS, EXPERTS))
    for layer, experts in enumerate(layers):
        for token, of in enumerate(experts.tolist()):
            for expert in of:
                activations[layer, expert] += 1
                for earlier in layers[layer - 1][token].tolist() if layer else ():
                    transitions[layer - 1, earlier, expert] += 1
    return activations, transitions


def test_every_choice_counts_and_every_pair_of_a_tokens_choices_in_two_layers(file: Path) -> None:
    recorder = Recorder(file)
    totals = [np.zeros(1), np.zeros(1)]
    for seed in (
        1,
        2,
    ):  # two passes: the last layer of one is not followed by the first of the next
        for layer, experts in enumerate(chosen(seed)):
            recorder.choose(layer, experts)
        totals = [total + part for total, part in zip(totals, by_hand(chosen(seed)), strict=True)]
    assert recorder.seen == [TOKENS] * 6
    assert recorder.dump() == "file"
    with np.load(file) as found:
        assert (found["activations"] == totals[0]).all()
        assert (found["transitions"] == totals[1]).all()
        assert found["activations"].dtype == found["transitions"].dtype == np.int64


def test_slots_are_counted_as_the_experts_in_them(file: Path) -> None:
    places = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(n)) for n in range(LAYERS)]
    )
    recorder = Recorder(file, places)
    for layer, experts in enumerate(chosen(1)):
        recorder.choose(layer, torch.argsort(places[layer])[experts].int())
    recorder.dump()
    with np.load(file) as found:
        assert (found["transitions"] == by_hand(chosen(1))[1]).all()


def test_padding_and_shared_experts_are_not_counted_as_chosen() -> None:
    found = map_to_logical(torch.tensor([[0, -1], [5, 6]]), torch.tensor([3, 2, 1, 0, 5, 4]))
    assert found.tolist() == [[3, -1], [4, -1]]
    counts = RoutingCounts(2, EXPERTS, "cpu")
    counts.add(0, found)
    counts.add(1, torch.tensor([[1, -1], [-1, -1]]))
    assert counts.activations.tolist() == [[0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert counts.transitions.nonzero().tolist() == [[0, 3, 1]]


def test_layers_without_experts_between_are_stepped_over_and_other_tokens_not_linked() -> None:
    counts = RoutingCounts(4, EXPERTS, "cpu")
    counts.add(0, torch.tensor([[1]]))
    counts.add(2, torch.tensor([[2]]))
    assert counts.transitions.nonzero().tolist() == [[0, 1, 2]]
    counts.add(3, torch.tensor([[2], [3]]))
    assert counts.transitions.sum() == 1


def test_nothing_is_counted_without_a_recording_nor_in_a_region_that_is_switched_off(
    file: Path,
) -> None:
    recorder = Recorder(file, recording=False)
    recorder.choose(0, torch.tensor([[1, 2]]))
    assert recorder.seen == []  # SGLang would ask CUDA
    recorder.recording, recorder._disable_all = True, True
    recorder.choose(0, torch.tensor([[1, 2]]))
    assert recorder.seen == [1]
    recorder.dump()
    with np.load(file) as found:
        assert not found["activations"].any()


def test_a_start_and_a_dump_begin_anew_and_a_start_leaves_no_old_file(file: Path) -> None:
    recorder = Recorder(file)
    recorder.choose(0, torch.tensor([[1, 2]]))
    recorder.start()
    recorder.choose(1, torch.tensor([[3, 4]]))
    recorder.dump()
    with np.load(file) as found:
        assert found["activations"].sum() == 2 and not found["transitions"].any()
    recorder.dump()
    with np.load(file) as found:
        assert not found["activations"].any()
    recorder.start()
    assert not file.exists()


def test_a_dump_for_sglangs_own_balancer_writes_nothing_and_keeps_the_counts(file: Path) -> None:
    recorder = Recorder(file)
    recorder.choose(0, torch.tensor([[1, 2]]))
    assert recorder.dump("object") == "object"
    assert not file.exists()
    recorder.dump()
    with np.load(file) as found:
        assert found["activations"].sum() == 2


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (ServerArguments(None), "only with --expert-distribution-recorder-mode stat"),
        (ServerArguments(enable_two_batch_overlap=True), "--enable-two-batch-overlap"),
    ],
)
def test_a_server_that_cannot_record_says_why(
    server: ServerArguments, said: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert not can_record(server, file)
    assert said in caplog.text


def test_a_server_records_only_where_it_is_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    assert record_file({RECORD_FILE: "/records/one.npz"}) == Path("/records/one.npz")
    assert record_file({}) is None
    assert can_record(ServerArguments(), Path("one.npz"))
    assert not can_record(ServerArguments(None), None)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (ServerArguments(enable_eplb=False), "--enable-eplb"),
        (ServerArguments(ep_num_redundant_experts=8), "--ep-num-redundant-experts 0"),
        (ServerArguments(elastic_ep_backend="nixl"), "no --elastic-ep-backend"),
        (ServerArguments(enable_two_batch_overlap=True), "no --enable-two-batch-overlap"),
    ],
)
def test_a_server_whose_experts_cannot_be_placed_says_why(
    server: ServerArguments, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert not can_place(server, None)
        assert caplog.text == ""
        assert not can_place(server, "swap")
    assert f"{PLACEMENT} is set, but experts are placed only with {said}." in caplog.text
    assert can_place(ServerArguments(), "swap")


GPUS = 2
IN_ORDER = np.tile(np.arange(EXPERTS), (LAYERS, 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_experts_move_to_where_the_projects_algorithm_places_them(algorithm: str) -> None:
    activations, transitions = by_hand(chosen(1))
    activations[:, :3] *= 10  # all of one GPU's
    activations[1] = 0  # a layer without experts
    found = place_experts(algorithm, activations, transitions, IN_ORDER, GPUS)
    record = build_record(activations, transitions)
    assert (found[[0, 2]] == place(algorithm, record, GPUS).slots).all()
    assert (found[1] == IN_ORDER[1]).all() and (np.arange(EXPERTS) == IN_ORDER).all()
    new, now = (
        measure_placement(record, placement_from_slots(slots[[0, 2]], GPUS))
        for slots in (found, IN_ORDER)
    )
    assert new.balance < now.balance


@pytest.mark.parametrize("times", [0, 1])
def test_experts_stay_where_nothing_was_counted_and_where_moving_gains_too_little(
    times: int,
) -> None:
    even = np.full((LAYERS, EXPERTS), times)
    for algorithm in ALGORITHMS:
        assert (
            place_experts(algorithm, even, np.zeros((LAYERS - 1, EXPERTS, EXPERTS)), IN_ORDER, GPUS)
            == IN_ORDER
        ).all()


def test_a_placement_that_cannot_be_leaves_experts_where_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    activations, transitions = by_hand(chosen(1))
    assert (place_experts("swap", activations, transitions, IN_ORDER, 4) == IN_ORDER).all()
    assert "Experts stay where they are: 6 experts do not divide over 4 GPUs" in caplog.text


def test_without_a_file_a_dump_writes_none_and_transitions_are_kept(tmp_path: Path) -> None:
    counter, recorder = ExpertCounter(None), Recorder(tmp_path / "none.npz")
    counter.make_counts(None, recorder)
    counter.clear(None, recorder)
    for layer, experts in enumerate(chosen(1)):
        recorder._current_layer_idx.value = layer
        counter.count(on_select_experts, recorder, topk_ids=experts)
    assert counter.write(lambda _, mode: mode, recorder, "file") == "file"
    assert (counter.transitions(recorder).numpy() == by_hand(chosen(1))[1]).all()
    assert not [*tmp_path.iterdir()]


OF_TWO_RANKS = """
import sys
from pathlib import Path
import torch
from tests.unit.sglang_plugin.test_experts import Recorder, chosen

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
recorder = Recorder(folder / f"of-{rank}.npz")
for layer, experts in enumerate(chosen(rank)):
    recorder.choose(layer, experts)
recorder.dump()
torch.distributed.destroy_process_group()
"""


def test_a_dump_holds_the_counts_of_all_ranks_and_the_first_writes_it(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    ranks = [
        subprocess.Popen([sys.executable, "-c", OF_TWO_RANKS, tmp_path, str(rank)], env=variables)
        for rank in (0, 1)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert not (tmp_path / "of-1.npz").exists()
    with np.load(tmp_path / "of-0.npz") as found:
        for number, name in enumerate(("activations", "transitions")):
            assert (found[name] == by_hand(chosen(0))[number] + by_hand(chosen(1))[number]).all()
