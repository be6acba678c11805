"""The stand-ins of SGLang's kernels on a CPU keep the kernels' contracts."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.sglang_cpu.environment import HERE
from launch.sglang_cpu.stand_in import sgl_kernel
from launch.sglang_cpu.stand_in.cpu_kernels import (
    attend_from_new_tokens,
    decode,
    load_anew,
    multiply,
    verify,
)
from launch.sglang_cpu.stand_in.sgl_kernel.speculative import reconstruct_indices_from_tree_mask

ROWS, BEGINS, ENDS = torch.tensor([2, 0]), torch.tensor([1, 3]), torch.tensor([3, 6])


def test_the_interpreter_keeps_a_server_on_the_cores_that_its_flag_names(tmp_path: Path) -> None:
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    where = subprocess.run(
        [HERE / "environment.sh", "--path"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    python = Path(where.stdout.strip()) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    (python.parents[1] / "complete").touch()
    core = min(os.sched_getaffinity(0))
    script = "import os, sys; print(*os.sched_getaffinity(0), *sys.argv[1:])"
    command = (
        sys.executable,
        HERE / "interpreter.py",
        "-c",
        script,
        "--port",
        "1",
        "--cores",
        str(core),
        "--tp-size",
        "1",
    )
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(core), "--port", "1", "--tp-size", "1"]


def test_slots_are_written_where_they_are_read() -> None:
    slots_of = torch.zeros(3, 8, dtype=torch.int32)
    slots = torch.tensor([10, 11, 20, 21, 22])
    sgl_kernel.assign_req_to_token_pool_cpu(ROWS, slots_of, BEGINS, ENDS, slots, 8)
    assert slots_of.tolist() == [[0, 0, 0, 20, 21, 22, 0, 0], [0] * 8, [0, 10, 11, 0, 0, 0, 0, 0]]
    read = torch.zeros(5, dtype=torch.int64)
    sgl_kernel.assign_extend_cache_locs_cpu(ROWS, slots_of, BEGINS, ENDS, read, 8)
    assert read.tolist() == slots.tolist()


def test_slots_are_copied_in_every_buffer_as_they_were_before() -> None:
    buffers = [torch.arange(12.0).view(4, 3), torch.arange(4, dtype=torch.int64)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    strides = torch.tensor([buffer[0].nbytes for buffer in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        addresses, strides, torch.tensor([0, 1]), torch.tensor([1, 2])
    )
    assert buffers[0].tolist() == [[3, 4, 5], [6, 7, 8], [6, 7, 8], [9, 10, 11]]
    assert buffers[1].tolist() == [1, 2, 2, 3]


def test_what_no_path_calls_says_that_it_is_a_stand_in() -> None:
    with pytest.raises(NotImplementedError, match="verify_tree_greedy_cpu"):
        sgl_kernel.verify_tree_greedy_cpu()
    assert not hasattr(sgl_kernel, "verify_tree_greedy")


@dataclass(frozen=True)
class Tree:
    positions: list[int]
    places: list[int]
    children: list[int]
    siblings: list[int]


def read(*parents: int, length: int) -> Tree:
    """Of one row: the first token, then one for each of `parents`; -1 hangs nowhere."""
    width = 1 + len(parents)
    mask = torch.eye(width, dtype=torch.bool)
    for token, parent in enumerate(parents, 1):
        if parent >= 0:
            mask[token] |= mask[parent]
    out = [torch.full((width,), 99), *(torch.full((1, width), 99) for _ in range(3))]
    reconstruct_indices_from_tree_mask(mask.flatten(), torch.tensor([length]), *out, 1, width)
    return Tree(*(one.flatten().tolist() for one in out))


def test_a_chain_is_read_out_of_its_mask_and_what_hangs_nowhere_is_linked_to_nothing() -> None:
    assert read(0, 1, -1, length=7) == Tree([7, 8, 9, 7], [0, 1, 2, 3], [1, 2, -1, -1], [-1] * 4)


def test_siblings_have_one_parent() -> None:
    assert read(0, 0, 1, 1, length=0) == Tree(
        [0, 1, 1, 2, 2], [0, 1, 2, 3, 4], [1, 3, -1, -1, -1], [-1, 2, -1, 4, -1]
    )


def test_rows_are_read_apart() -> None:
    masks = torch.stack([torch.ones(3, 3).tril(), torch.eye(3)]).bool().flatten()
    positions, *trees = torch.zeros(6), *(torch.zeros(2, 3) for _ in range(3))
    reconstruct_indices_from_tree_mask(masks, torch.tensor([5, 9]), positions, *trees, 2, 3)
    assert positions.tolist() == [5, 6, 7, 9, 9, 9]
    assert [tree.tolist() for tree in trees] == [
        [[0, 1, 2], [3, 4, 5]],
        [[1, 2, -1], [-1, -1, -1]],
        [[-1, -1, -1], [-1, -1, -1]],
    ]


def test_a_pass_that_verifies_drafts_attends_as_their_tokens_do_one_by_one() -> None:
    """Two requests with 3 and 5 cached tokens, and drafts of 4; two heads of size 8 serve four of
    queries.
    """
    torch.manual_seed(0)
    query, keys, values = torch.randn(8, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    slots = torch.randperm(20)[:18].view(2, 9)
    lengths = torch.tensor([3, 5])

    def extend(
        backend: Any, query: Any, key: Any, value: Any, layer: Any, batch: Any, save: bool
    ) -> Any:
        """SGLang's `forward_extend`, which reads these lengths."""
        of_batch = (batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens)
        named = {"causal": True, "sliding_window_size": None, "enable_gqa": True, "scaling": None}
        rows = torch.arange(2)
        return attend_from_new_tokens(
            extend,
            backend,
            query,
            torch.empty_like(query),
            keys,
            values,
            slots,
            rows,
            *of_batch,
            **named,
        )

    batch = SimpleNamespace(
        seq_lens=lengths,
        spec_info=SimpleNamespace(draft_token_num=4),
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
    )
    found = verify(extend, None, query, None, None, None, batch)
    assert batch.seq_lens is lengths
    for row, length in enumerate(lengths.tolist()):
        for place in range(4):
            one = query[4 * row + place]
            seen = slots[row, : length + place + 1]
            key, value = (cache[seen].repeat_interleave(2, 1) for cache in (keys, values))
            weights = torch.einsum("hd,thd->ht", one, key) / 8**0.5
            right = torch.einsum("ht,thd->hd", weights.softmax(-1), value)
            assert torch.allclose(found[4 * row + place], right, atol=1e-5)
            decoded = decode(
                *(
                    None,
                    None,
                    one[None],
                    torch.empty(1, 4, 8),
                    keys,
                    values,
                    slots,
                    torch.tensor([row]),
                ),
                torch.tensor([length + place + 1]),
                **{
                    "causal": False,
                    "sliding_window_size": None,
                    "enable_gqa": True,
                    "scaling": None,
                },
            )
            assert torch.allclose(decoded[0], right, atol=1e-5)


def test_other_passes_attend_as_before() -> None:
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    assert verify(lambda *arguments: arguments, "backend", 1, 2, 3, 4, batch) == (
        "backend",
        1,
        2,
        3,
        4,
        batch,
        True,
    )


def test_reordered_weights_give_the_same_products_also_after_they_are_loaded_anew() -> None:
    layer = torch.nn.Linear(24, 40).requires_grad_(False)
    rows = torch.randn(3, 24)
    for _ in range(2):
        products = multiply(no_other_kernel, None, layer, rows, layer.bias)
        assert torch.allclose(products, layer(rows), atol=1e-5)
        load_anew(layer.weight.data.copy_, torch.randn(40, 24))  # as SGLang's loaders


def no_other_kernel(*_: Any) -> Any:
    raise AssertionError("weights in float32 are reordered")


def test_weights_of_other_types_are_multiplied_as_before() -> None:
    layer = torch.nn.Linear(24, 40).bfloat16()
    assert (
        multiply(lambda *arguments: arguments, "method", layer, torch.ones(2), None)[0] == "method"
    )
