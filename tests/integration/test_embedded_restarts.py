"""`shell-router serve` with an embedded pair: a dead engine comes back without the router's being
started again.
"""

import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.command import RunningCommand, running_command

SMALL = Path(__file__).parents[2] / "models" / "small"
DEPLOYMENT = f"""
listen: {{port: 0}}
models:
  small: {{path: {SMALL}}}
embedder: {{model: hash}}
"""
QUESTION = {
    "model": "small",
    "messages": [{"role": "user", "content": "Why?"}],
    "max_tokens": 8,
    "ignore_eos": True,
}


def process_of(command: RunningCommand, engine: str) -> int:
    """The process of the embedded engine of that name, which is its name in `ps` too."""
    (pid,) = (
        pid
        for pid in command.started()
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8") == f"{engine}\n"
    )
    return pid


async def answered(url: str) -> int:
    """How many tokens the model answers with."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=QUESTION) as answer,
    ):
        answer.raise_for_status()
        tokens: int = (await answer.json())["usage"]["completion_tokens"]
        return tokens


async def restarts(url: str) -> dict[str, str]:
    """What `/metrics` says, by engine."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return dict(
        re.findall(
            r'^shell_router_engine_restarts_total\{engine="(.+)"\} (.+)$', text, re.MULTILINE
        )
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
async def test_a_router_serves_again_once_a_dead_embedded_engine_is_back_and_counts_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(DEPLOYMENT, encoding="utf-8")
    async with running_command("serve", "--config", file) as command:
        url = (await command.line_with("Serving on", limit_s=120)).split()[-1]
        assert await answered(url) == 8
        assert await restarts(url) == {"small/prefill": "0.0", "small/decode": "0.0"}
        for engine in ("small/decode", "small/prefill"):
            os.kill(process_of(command, engine), signal.SIGKILL)
            await command.line_with(f"{engine} is ready again", limit_s=60)
            assert await answered(url) == 8
        assert await restarts(url) == {"small/prefill": "1.0", "small/decode": "1.0"}
        command.signal(signal.SIGTERM)
        code, output = await command.ended(limit_s=60)
        assert code == 0, output
