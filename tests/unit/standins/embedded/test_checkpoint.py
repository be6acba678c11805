"""Made-up checkpoints: deterministic, varied, and readable."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.errors import ConfigError


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    assert contents(make_checkpoint(tmp_path / "a", seed=3)) == contents(
        make_checkpoint(tmp_path / "b", seed=3)
    )


def test_another_seed_changes_the_weights_and_keeps_the_tokenizer(tmp_path: Path) -> None:
    first, second = (
        contents(make_checkpoint(tmp_path / "a")),
        contents(make_checkpoint(tmp_path / "b", seed=1)),
    )
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


def test_another_tokenizer_variant_cuts_the_same_text_differently(tmp_path: Path) -> None:
    text = "The ancient bridge answers every bright question because the apple explains the cloud."
    first, second = (
        tokenizer_of(make_checkpoint(tmp_path / str(v), tokenizer_variant=v)) for v in (0, 1)
    )
    assert [first.decode(first.encode(text).ids), second.decode(second.encode(text).ids)] == [
        text,
        text,
    ]
    assert first.encode(text).tokens != second.encode(text).tokens
    assert first.get_vocab() != second.get_vocab()


def test_chat_marks_are_single_tokens_and_the_turn_end_is_eos(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    tokenizer = tokenizer_of(folder)
    assert [
        len(tokenizer.encode(mark).ids) for mark in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    ] == [1, 1, 1]
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_shapes_follow_the_arguments(tmp_path: Path, architecture: Any) -> None:
    folder = make_checkpoint(
        tmp_path, architecture=architecture, hidden=96, layers=3, heads=6, kv_heads=3
    )
    with safe_open(folder / "model.safetensors", "np") as weights:
        assert weights.get_tensor("model.layers.2.self_attn.k_proj.weight").shape == (48, 96)
        names = set(weights.keys())
        assert ("model.layers.0.self_attn.q_norm.weight" in names) is (architecture == "qwen3")


@pytest.mark.parametrize(
    "sizes", [{"hidden": 65}, {"heads": 4, "kv_heads": 3}, {"architecture": "gpt"}]
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_checkpoint(tmp_path, **sizes)
