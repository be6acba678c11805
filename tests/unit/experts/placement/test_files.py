"""Records and placements in files, and what is said of wrong ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.expert_placement.drawn import Routing, drawn
from shell_router.errors import DataError
from shell_router.experts.placement import build_record, place
from shell_router.experts.placement.files import MAP, format_placement, read_record
from tests.fakes.placements import placement_in


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = drawn(Routing(layers=3, experts=8, top_k=2), 100)
    np.savez(
        tmp_path / "record.npz", activations=record.activations, transitions=record.transitions
    )
    found = read_record(tmp_path / "record.npz")
    assert (found.activations == record.activations).all()
    assert (found.transitions == record.transitions).all()
    assert found.model_layers == 3


def test_layers_without_experts_are_left_out_and_keep_their_place_in_the_files(
    tmp_path: Path,
) -> None:
    activations = np.zeros((4, 4), dtype=int)
    activations[[1, 3]] = [[1, 2, 3, 4], [4, 3, 2, 1]]
    transitions = np.zeros((3, 4, 4), dtype=int)
    transitions[1, 0, 3] = 7  # from layer 1 to layer 3, the next that has experts
    record = build_record(activations, transitions)
    assert (list(record.layers), record.transitions.shape, record.transitions[0, 0, 3]) == (
        [1, 3],
        (1, 4, 4),
        7,
    )
    np.savez(tmp_path / "record.npz", activations=activations, transitions=transitions)
    again = read_record(tmp_path / "record.npz")
    assert (list(again.layers), again.model_layers, again.transitions[0, 0, 3]) == ([1, 3], 4, 7)
    placement = place("swap", again, 2)
    rows = json.loads(format_placement(placement, again))[MAP]
    assert rows[0] == rows[2] == [0, 1, 2, 3]
    assert rows[1] == placement.slots[0].tolist()


def test_a_placement_is_read_as_it_was_written_and_has_just_the_key_that_sglang_knows(
    tmp_path: Path,
) -> None:
    record = drawn(Routing(layers=3, experts=8, top_k=2), 100)
    placement = place("swap", record, 4)
    file = tmp_path / "placement.json"
    file.write_text(format_placement(placement, record), encoding="utf-8")
    assert list(json.loads(file.read_text(encoding="utf-8"))) == [MAP]
    assert (placement_in(file, record, 4).gpu_of == placement.gpu_of).all()


def test_a_record_may_have_activations_only(tmp_path: Path) -> None:
    np.savez(tmp_path / "record.npz", activations=np.ones((2, 4), dtype=int))
    assert not read_record(tmp_path / "record.npz").has_transitions


def _archive(**arrays: Any) -> Any:
    def write(file: Path) -> None:
        with file.open("wb") as opened:
            np.savez(opened, **arrays)

    return write


def _array(file: Path) -> None:
    with file.open("wb") as opened:
        np.save(opened, np.ones(3))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: None, "No such file"),
        (lambda file: file.mkdir(), "directory"),
        (lambda file: file.write_bytes(b""), "is no record of experts"),
        (lambda file: file.write_bytes(b"PK\x03\x04 cut off"), "is no record of experts"),
        (lambda file: file.write_text('{"logical_count": []}'), "is no record of experts"),
        (_array, "is no archive of arrays"),
        (_archive(counts=np.ones((2, 4))), "has no array 'activations'"),
        (_archive(activations=np.ones(4)), "activations must be"),
        (_archive(activations=np.zeros((2, 4))), "no activation was counted"),
        (_archive(activations=-np.ones((2, 4))), "no activation was counted|must be counts"),
        (_archive(activations=np.full((2, 4), np.nan)), "must be counts"),
        (_archive(activations=np.full((2, 4), "many")), "is no record of experts"),
        (
            _archive(activations=np.ones((2, 4)), transitions=np.ones((2, 4, 4))),
            r"transitions must be \[1, 4, 4\]",
        ),
        (
            _archive(activations=np.ones((2, 4)), transitions=-np.ones((1, 4, 4))),
            "transitions must be counts",
        ),
    ],
)
def test_a_wrong_record_is_refused_with_the_remedy(
    tmp_path: Path, write: Any, message: str
) -> None:
    file = tmp_path / "record.npz"
    write(file)
    with pytest.raises(DataError, match=message) as refused:
        read_record(file)
    assert "shell-router experts record" in str(refused.value)
    assert str(file) in str(refused.value)
