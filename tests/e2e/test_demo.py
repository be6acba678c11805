"""The demo as a stranger runs it."""

import json
from typing import Any

import pytest

from tests.fakes.command import running_command, survivors

pytestmark = pytest.mark.slow


async def _demo(*arguments: str) -> tuple[list[str], int, set[int]]:
    async with running_command("demo", *arguments) as command:
        await command.line_with("Serving on", limit_s=180)
        started = command.started()
        code, output = await command.ended(limit_s=180)
        return output.splitlines(), code, survivors(started)


async def test_the_demo_ends_with_one_row_per_topology_and_leaves_no_process() -> None:
    lines, code, left = await _demo("--json", "--rounds", "1", "--new-tokens", "16")
    assert (code, left) == (0, set()), "\n".join(lines)
    report = json.loads(lines[-1])
    assert report["simulated"] is False
    baseline, tree = report["rows"]
    _check_baseline(baseline)
    _check_tree(tree)
    assert any(line.startswith("aggregator") and "▒" in line for line in lines), "prefilled while others wrote"


def _check_baseline(row: dict[str, Any]) -> None:
    assert (row["topology"], row["agents"], row["questions"]) == ("all-to-all-9-9-1", 19, 1)
    assert row["latency_ratio"] == 1.0
    assert row["agents_cut_off"] == 0
    assert row["completion_tokens"] == 19 * 16
    assert row["hidden_prefill_share"] == 0.0


def _check_tree(row: dict[str, Any]) -> None:
    assert (row["topology"], row["agents"], row["questions"]) == ("tree-9-3-1", 13, 1)
    assert 0 < row["first_token_s"] <= row["end_to_end_s"]
    assert row["completion_tokens"] <= 13 * 16
    assert row["agents_cut_off"] <= 12
    assert row["hidden_prefill_share"] > 0
    assert row["cached_share"] > 0.3
