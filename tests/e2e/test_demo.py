"""The demo as a stranger runs it."""

import pytest

from tests.fakes.command import running_command, survivors

pytestmark = pytest.mark.slow


async def test_the_demo_compares_two_topologies_draws_them_and_leaves_no_process() -> None:
    async with running_command("demo", "--rounds", "2") as command:
        await command.line_with("Asking 2 questions in 2 settings", limit_s=180)
        started = command.started()
        code, output = await command.ended(limit_s=180)
        assert (code, survivors(started)) == (0, set()), output
    lines = output.splitlines()
    assert "(real engines)" in output
    baseline, tree = (next(line for line in lines if line.startswith(f"│ {name} ")) for name in ("all-to-all", "full"))
    assert baseline.split("│")[8].strip() == "1.00", "latency, relative to the baseline"
    assert float(tree.split("│")[8]) > 0
    assert sum(line.endswith(" s)") and ("(right, " in line or "(wrong, " in line) for line in lines) == 2
    assert any(line.startswith("aggregator") and "█" in line for line in lines), "the tree is drawn"
    assert "0% of the prefill was hidden" in output, "all-to-all hides none"
