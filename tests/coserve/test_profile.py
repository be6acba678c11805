"""`python -m benchmarks.coserve.pool` on real torch modules, from a pool's file to a pool that
answers.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.coserve.pool import Request
from benchmarks.coserve.pool.__main__ import main
from benchmarks.coserve.pool.pool_file import read_profiled_pool
from benchmarks.coserve.pool.torch_components import load_pool
from tests.coserve.nets import linear, wide

pytestmark = pytest.mark.slow


POOL = """# mine
folder: weights
architectures:
  linear: {module: "tests.coserve.nets:linear", components: ["type-*"], sample: [16]}
  wide: {module: "tests.coserve.nets:wide", components: ["shared"], sample: [16]}
executors:
  one: {device: cpu, memory_bytes: 3000000}  # of this machine
  two: {device: cpu, memory_bytes: 3000000}
host_bytes: 2000
profile: costs.yaml
"""
QUICK = ("--rounds", "1", "--batches", "1,2,4")
SAMPLE = [["type-0", "shared"]] * 30 + [["type-1", "shared"]] * 10 + [["type-2"]] * 10


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "weights").mkdir()
    for number in range(4):
        save_file(linear().state_dict(), tmp_path / "weights" / f"type-{number}.safetensors")
    save_file(wide().state_dict(), tmp_path / "weights" / "shared.safetensors")
    file = tmp_path / "pool.yaml"
    file.write_text(POOL, encoding="utf-8")
    return file


@pytest.fixture
def sample(pool: Path) -> Path:
    file = pool.with_name("sample.jsonl")
    file.write_text(
        "".join(json.dumps({"chain": chain}) + "\n" for chain in SAMPLE), encoding="utf-8"
    )
    return file


def test_a_pool_is_measured_once_and_then_loaded_and_asked(
    pool: Path, sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(pool), "--sample", str(sample), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "4 of 5 components are needed" in printed and "cpu: linear takes" in printed

    async def answers() -> list[torch.Tensor]:
        async with asyncio.timeout(60), load_pool(pool) as opened:
            asked = [
                Request(str(number), tuple(chain), torch.ones(16))
                for number, chain in enumerate(SAMPLE)
            ]
            return [answer.final for answer in await asyncio.gather(*map(opened.ask, asked))]

    assert [tuple(answer.shape) for answer in asyncio.run(answers())] == [(16,)] * 40 + [(4,)] * 10


def test_the_profile_says_what_was_found_and_the_pools_file_stays(pool: Path, sample: Path) -> None:
    main([str(pool), "--sample", str(sample), *QUICK])
    assert pool.read_text(encoding="utf-8") == POOL
    found = read_profiled_pool(pool).profiled
    assert found.components["shared"].usage == 0.8 and found.components["shared"].after == (
        "type-0",
        "type-1",
    )
    assert found.components["type-3"].usage == 0
    costs = found.costs["cpu"]
    assert set(costs) == {"linear", "wide"}
    assert costs["wide"].activation_bytes > 4096 * 4 > costs["linear"].activation_bytes > 16 * 4
    assert all(
        min(one.disk_load_s, one.host_load_s) > 0 and one.largest_batch <= 4
        for one in costs.values()
    )
    assert found.component_shares["one"] == found.component_shares["two"] > 0.75
    assert "the largest useful batch has the rest" in found.measured["share of cpu"]
    assert "medians of 1 rounds, batches of 1, 2, 4" in found.measured["costs of cpu"]


def test_measuring_again_keeps_what_is_not_measured(pool: Path, sample: Path) -> None:
    main([str(pool), "--sample", str(sample), *QUICK])
    profile = pool.with_name("costs.yaml")
    before = profile.read_text(encoding="utf-8")
    assert main([str(pool), "--keep-costs", "--sample", str(sample)]) == 0
    assert profile.read_text(encoding="utf-8") == before
    assert main([str(pool), *QUICK]) == 0
    assert read_profiled_pool(pool).profiled.components["shared"].usage == 0.8


def test_rules_in_the_file_take_the_place_of_a_sample(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pool.open("a", encoding="utf-8") as file:
        file.write(
            "rules:\n  - {chain: [type-0, shared], share: 3}\n  - {chain: [type-1], share: 1}\n"
        )
    assert main([str(pool), "--requests", "50", *QUICK]) == 0
    assert "requests a second with these shares in virtual time" in capsys.readouterr().out
    assert read_profiled_pool(pool).profiled.components["shared"].usage == 0.75


def test_without_rules_and_sample_the_command_says_what_it_leaves(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(pool), *QUICK]) == 0
    assert "neither rules nor --sample" in capsys.readouterr().out
    assert read_profiled_pool(pool).profiled.component_shares == {}


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        (
            ("tests.coserve.nets:linear", "tests.coserve.nets:no"),
            "architectures.linear: tests.coserve.nets:no cannot be",
        ),
        (("device: cpu", "device: abacus"), "executors.one: 'abacus' is no device"),
        (('["shared"]', '["shard"]'), "Component 'shared' is of 0 architectures"),
        (("folder: weights", "folder: nowhere"), "holds no weights"),
        (
            ("sample: [16]}\n  wide", "sample: [15]}\n  wide"),
            "linear cannot be measured on cpu: RuntimeError",
        ),
        (
            ("memory_bytes: 3000000", "memory_bytes: 300"),
            "no architecture fits on cpu. Raise the executor's memory",
        ),
    ],
)
def test_what_cannot_be_measured_is_reported_with_the_file(
    pool: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], printed: str
) -> None:
    pool.write_text(POOL.replace(*change), encoding="utf-8")
    assert main([str(pool), *QUICK]) == 2
    complaint = capsys.readouterr().err
    assert printed in complaint and "pool.yaml" in complaint


def test_an_architecture_that_does_not_fit_on_a_device_is_left_out_there(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.write_text(POOL.replace("memory_bytes: 3000000", "memory_bytes: 5000"), encoding="utf-8")
    assert main([str(pool), *QUICK]) == 0
    assert "cpu: wide is left out" in capsys.readouterr().out
    assert set(read_profiled_pool(pool).profiled.costs["cpu"]) == {"linear"}


def test_a_device_that_no_executor_is_on_is_reported_before_anything_is_written(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(pool), "--devices", "cuda:7", *QUICK]) == 2
    assert "no executor is on cuda:7. Name one of cpu." in capsys.readouterr().err
    assert not pool.with_name("costs.yaml").exists()


def test_a_bad_sample_is_reported_before_anything_is_measured(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = pool.with_name("bad.jsonl")
    bad.write_text('{"chain": ["type-9"]}\n', encoding="utf-8")
    assert main([str(pool), "--sample", str(bad), *QUICK]) == 2
    assert "bad.jsonl:1: there is no component 'type-9'" in capsys.readouterr().err
    assert not pool.with_name("costs.yaml").exists()
