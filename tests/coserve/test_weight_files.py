import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from benchmarks.coserve.pool.torch_components import read_weights

pytestmark = pytest.mark.slow


WEIGHTS = {
    "halves": torch.randn(3, 5).to(torch.bfloat16),
    "many": torch.randn(40, 7),
    "one": torch.tensor(1.5, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "whole": torch.arange(9),
    "yes": torch.tensor([True, False, True]),
}


def assert_equal(found: dict[str, torch.Tensor]) -> None:
    assert {name: one.dtype for name, one in found.items()} == {
        name: one.dtype for name, one in WEIGHTS.items()
    }
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_weights_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(WEIGHTS, file, metadata={"format": "pt"})
    assert_equal(dict(read_weights(file)))


def test_tensors_may_lie_anywhere_in_a_file(tmp_path: Path) -> None:
    file, at, header, data = tmp_path / "weights.safetensors", 0, {}, b""
    kinds = {
        "yes": "BOOL",
        "halves": "BF16",
        "one": "F64",
        "many": "F32",
        "none": "F32",
        "whole": "I64",
    }
    for name, kind in kinds.items():  # three bytes first: all others begin at odd places
        raw = bytes(WEIGHTS[name].reshape(-1).view(torch.uint8).tolist())
        shape, data_offsets = list(WEIGHTS[name].shape), [at, at := at + len(raw)]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": data_offsets}
        data += raw
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data)
    assert_equal(dict(read_weights(file)))


def test_weights_lie_in_one_block_that_nothing_else_holds(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"one": torch.ones(1000), "other": torch.zeros(1000)}, file)
    found = read_weights(file)
    assert found["one"].untyped_storage().data_ptr() == found["other"].untyped_storage().data_ptr()
    assert found["one"].untyped_storage().nbytes() == 8000
    file.write_bytes(b"")
    assert found["one"].sum() == 1000


def test_what_is_cut_off_or_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(WEIGHTS, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(SafetensorError):
        read_weights(file)
    head = json.dumps({"one": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(4))
    with pytest.raises(TypeError, match="U16"):
        read_weights(file)
