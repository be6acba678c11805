"""The demo as a stranger runs it."""

import os
import re
from pathlib import Path

import pytest

from tests.fakes.command import running_command, survivors

pytestmark = pytest.mark.slow

SETTINGS = ("all-to-all", "tree", "tree-incremental", "full", "full-drafts")


def unstyled(printed: str) -> str:
    """Without a terminal's colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", printed)


async def test_the_demo_opens_the_page_adds_one_mechanism_at_a_time_draws_both_ends_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/opened\n', encoding="utf-8")
    browser.chmod(0o755)
    terminal = {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "0", "COLUMNS": "200", "DISPLAY": ":0"}
    async with running_command(
        "demo", "--rounds", "2", env={**os.environ, **terminal, "BROWSER": str(browser)}
    ) as command:
        page = unstyled(await command.line_with("Watch it while the demo runs", limit_s=180))
        assert (url := re.search(r"http://127\.0\.0\.1:\d+/ui$", page.strip()))
        asking = unstyled(await command.line_with("Asking ", limit_s=180))
        assert "2 questions in 5 settings" in asking
        started = command.started()
        code, output = await command.ended(limit_s=180)
        assert (code, survivors(started)) == (0, set()), output
    output = unstyled(output)
    assert (tmp_path / "opened").read_text(encoding="utf-8").split() == [url[0]]
    lines = output.splitlines()
    assert "embedded pair, cpu" in output
    rows = [
        next(line.split("│") for line in lines if line.startswith(f"│ {name} "))
        for name in SETTINGS
    ]
    assert rows[0][8].strip() == "1.00", "latency, relative to the baseline"
    assert all(float(row[8]) > 0 for row in rows)
    answers = [
        line
        for line in lines
        if re.match(rf"({'|'.join(SETTINGS)}): .*\((right|wrong), [0-9.]+ s\)$", line)
    ]
    assert len(answers) == len(SETTINGS)
    assert any(line.startswith("aggregator") and "█" in line for line in lines), (
        "the baseline is drawn"
    )
    axes = [line.split() for line in lines if re.match(r" +0\.00?s ", line)]
    assert len(axes) == 2 and axes[0] == axes[1], "both timelines have one scale"
    shares = {
        name: next(line for line in reversed(lines) if line.startswith(f"│ {name} "))
        for name in SETTINGS[1:]
    }
    for name, words in zip(
        SETTINGS[1:],
        ("13 agents instead of 19", "% of the prefill", "cut off", "drafted"),
        strict=True,
    ):
        assert words in shares[name] or "no effect in this run" in shares[name]
    assert lines[-1].startswith("Next: shell-router serve"), "the next command to type"
