import json
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.errors import ConfigError
from shell_router.swapping.weights import obstacle_to_swap, read_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(
        tmp_path / "model", hidden=32, layers=2, heads=4, kv_heads=2, vocab_size=512
    )


def test_headers_tell_every_tensors_type_and_sizes(folder: Path) -> None:
    found = read_tensors(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        names = file.keys()
        assert {name: one.sizes for name, one in found.items()} == {
            name: tuple(file.get_slice(name).get_shape()) for name in names
        }
    assert {one.dtype for one in found.values()} == {"F32"}


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_file_that_is_cut_off_anywhere_is_reported(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"model\.safetensors is no"):
        read_tensors(folder)


@pytest.mark.parametrize(
    "content", [b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]", b"\x0f" + b"\0" * 7 + b'{"a": {"b": 1}}']
)
def test_a_file_of_something_else_is_reported(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is no"):
        read_tensors(folder)


def test_a_folder_without_weights_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        read_tensors(tmp_path)


def test_checkpoints_of_one_shape_take_turns_and_others_say_why_not(folder: Path) -> None:
    other = make_checkpoint(
        folder.with_name("other"), hidden=32, layers=2, heads=4, kv_heads=2, vocab_size=512, seed=1
    )
    assert obstacle_to_swap(folder, other) == ""
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps({**config, "_name_or_path": "x", "use_cache": "no"})
    )
    assert obstacle_to_swap(folder, other) == ""
    larger = make_checkpoint(
        folder.with_name("larger"), hidden=64, layers=2, heads=4, kv_heads=2, vocab_size=512
    )
    assert "tensors" in obstacle_to_swap(folder, larger)
    assert "no .safetensors" in obstacle_to_swap(folder, folder.parent)


@pytest.mark.parametrize(
    ("file", "name", "value", "words"),
    [
        ("config.json", "rope_theta", 5.0, "5.0 instead of "),
        ("generation_config.json", "eos_token_id", 7, "7 instead of "),
        ("tokenizer.json", "x", 1, "1 instead of 'nothing'"),
    ],
)
def test_what_a_server_reads_only_at_its_start_must_be_the_same(
    folder: Path, file: str, name: str, value: float, words: str
) -> None:
    other = make_checkpoint(
        folder.with_name("other"), hidden=32, layers=2, heads=4, kv_heads=2, vocab_size=512, seed=1
    )
    (other / file).write_text(json.dumps({**json.loads((other / file).read_text()), name: value}))
    assert obstacle_to_swap(folder, other).startswith(f"its {file} differs in {name}: {words}")
    (other / file).unlink()
    assert file in obstacle_to_swap(folder, other)
