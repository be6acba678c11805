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
    lines, code, left = await _demo("--json", "--rounds", "2")
    assert (code, left) == (0, set()), "\n".join(lines)
    report = json.loads(lines[-1])
    assert report["simulated"] is False
    baseline, tree = report["rows"]
    _check_baseline(baseline)
    _check_tree(tree)
    assert baseline["right"] + tree["right"] > 0, "the models solve problems of their test set"
    assert sum(line.endswith(" s)") and ("(right, " in line or "(wrong, " in line) for line in lines) == 4
    assert any(line.startswith("aggregator") and "█" in line for line in lines), "the tree is drawn"


def _check_baseline(row: dict[str, Any]) -> None:
    assert (row["topology"], row["agents"], row["questions"]) == ("all-to-all", 19, 2)
    assert row["latency_ratio"] == 1.0
    assert row["agents_cut_off"] == 0
    assert row["completion_tokens"] > 19 * 2 * 10
    assert row["hidden_prefill_share"] == 0.0


def _check_tree(row: dict[str, Any]) -> None:
    assert (row["topology"], row["agents"], row["questions"]) == ("full", 13, 2)
    assert 0 < row["first_token_s"] <= row["end_to_end_s"]
    assert row["agents_cut_off"] <= 24
    assert 0 <= row["hidden_prefill_share"] <= 1
    assert row["cached_share"] > 0.3
