"""The README's examples, run as they are written."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command import ROOT, running_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are curl commands"),
]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with running_command(
        "serve", "--config", "configs/embedded.yaml", "--port", "0"
    ) as command:
        yield (await command.line_with("Serving on", limit_s=180)).split()[-1]


def _example(name: str, page: str = "README.md") -> str:
    """The block of the page that stands under the comment `command: name`."""
    text = Path(ROOT / page).read_text(encoding="utf-8")
    found = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found.group(1)


async def _run(script: str, url: str) -> str:
    assert "http://127.0.0.1:8000" in script
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script.replace("http://127.0.0.1:8000", url)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    return output.decode()


def _objects(stream: str) -> list[dict[str, Any]]:
    data = [
        line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")
    ]
    return [json.loads(line) for line in data if line != "[DONE]"]


async def test_the_curl_examples_work(url: str) -> None:
    answer = await _run(_example("curl"), url)
    assert answer.rstrip().endswith("data: [DONE]")
    chunks = _objects(answer)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices), (
        "a busy router joins pieces, but has all"
    )
    assert choices[-1]["finish_reason"] in ("stop", "length")
    agents = await _run(_example("agent-request", "docs/how-to/connect-clients.md"), url)
    assert '"error"' not in agents
    assert '"writer"' in agents
    assert '"planner"' in agents
