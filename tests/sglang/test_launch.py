"""One file and one command give an answer from real SGLang, and nothing is left. Runs first: see
conftest.py.
"""

import os
import signal
from pathlib import Path

import aiohttp
import pytest
import yaml

from launch.sglang_cpu.pair import free_ports
from tests.fakes.command import running_command, survivors

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

CONFIG = "configs/sglang-cpu.yaml"
QUESTION = {
    "model": "tree-9-3-1",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 12,
    "stream": True,
    "include_agents": True,
}
ENGINES_AND_THEIR_CHILDREN = 6


async def answer(url: str) -> str:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session,
        session.post(f"{url}/v1/chat/completions", json=QUESTION) as response,
    ):
        return await response.text()


def whole(events: str) -> bool:
    """Whether all 13 agents came to an end and so did the stream."""
    ended = sum(events.count(f"event: agent.{end}\n") for end in ("finished", "skipped", "stopped"))
    return ended == 13 and events.rstrip().endswith("data: [DONE]")


async def test_one_file_gives_a_streamed_tree_outlives_its_prefill_and_leaves_nothing() -> None:
    async with running_command("launch", "--config", CONFIG, "--port", "0") as command:
        url = (await command.line_with("Serving on", limit_s=400)).split()[-1]
        assert whole(await answer(url))
        os.kill(command.engine("prefill"), signal.SIGKILL)
        await command.line_with("small/prefill: ready after", limit_s=400)
        assert whole(await answer(url)), "decode took the new prefill for the old one"
        started = command.started()
        assert len(started) >= ENGINES_AND_THEIR_CHILDREN
        command.signal(signal.SIGTERM)
        code, output = await command.ended(limit_s=120)
        assert (code, survivors(started)) == (0, set()), output


def with_one_server(folder: Path) -> Path:
    """Write the deployment with an undivided server that drafts in place of the pair."""
    configs = Path(CONFIG).absolute().parent
    config = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
    model = config["models"]["small"]  # the others are the same object
    del model["pairs"], config["launch"]["decode_flags"]
    (port,) = free_ports(1)
    model["servers"] = [{"server": f"http://127.0.0.1:{port}", "launch": {}}]
    model["path"] = str(configs / model["path"])
    config["topologies"] = [str(configs / path) for path in config["topologies"]]
    config["launch"] |= {"python": str(configs / config["launch"]["python"]), "drafts": True}
    file = folder / "one-server.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


async def test_one_undivided_server_gives_a_streamed_tree_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    file = with_one_server(tmp_path)
    async with running_command("launch", "--config", file, "--port", "0") as command:
        url = (await command.line_with("Serving on", limit_s=400)).split()[-1]
        assert whole(await answer(url))
        started = command.started()
        command.signal(signal.SIGTERM)
        code, output = await command.ended(limit_s=120)
        assert (code, survivors(started)) == (0, set()), output
