"""A real receiver of OTLP, Arize Phoenix, in a virtual environment that is kept in the user's cache
folder.
"""

import asyncio
import fcntl
import os
import subprocess
import sys
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from launch.sglang_cpu.pair import free_ports
from shell_router.telemetry.otlp import SpanExport
from tests.fakes.api_server import api, chat

pytestmark = pytest.mark.slow

PHOENIX = "arize-phoenix==20.26.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shell-router"
START_S, INGEST_S = 180, 60


def installed() -> Path:
    """The environment's folder; built once, in a few minutes."""
    folder = CACHE / f"phoenix-{PHOENIX.rpartition('=')[2]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, with_pip=True)
            own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            subprocess.run(
                [folder / "bin" / "python", "-m", "pip", "install", "-q", PHOENIX],
                check=True,
                env=own,
            )
            (folder / "complete").touch()
    return folder


@asynccontextmanager
async def phoenix(folder: Path) -> AsyncIterator[str]:
    """Its URL, while it runs with its data in `folder`."""
    port, grpc_port = free_ports(2)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    environment = await asyncio.to_thread(installed)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            environment / "bin" / "phoenix", "serve", env=own, cwd=folder, stdout=log, stderr=log
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)


async def fetched(
    session: aiohttp.ClientSession, url: str, limit_s: float, least: int = 0
) -> list[dict[str, Any]]:
    """What it lists there, once it answers and lists at least that much."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                async with session.get(url) as response:
                    if response.ok and len(found := (await response.json())["data"]) >= least:
                        return list(found)
            except aiohttp.ClientConnectorError:
                pass
            await asyncio.sleep(0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="takes a lock as Linux does")
async def test_phoenix_shows_a_run_as_workflow_agents_and_model_calls(tmp_path: Path) -> None:
    exported: list[tuple[str, int]] = []
    loop = asyncio.get_running_loop()
    has_exported = asyncio.Event()

    def note(outcome: str, count: int) -> None:
        exported.append((outcome, count))
        loop.call_soon_threadsafe(has_exported.set)

    async with phoenix(tmp_path) as url, aiohttp.ClientSession() as session:
        await fetched(session, f"{url}/v1/projects", START_S)
        export = SpanExport(f"{url}/v1/traces", note, linger_s=0)
        async with api(spans=export) as served:
            status, _ = await served.post("/v1/chat/completions", chat())
        await asyncio.wait_for(has_exported.wait(), START_S)
        await asyncio.to_thread(export.close)
        assert status == 200
        ((outcome, count),) = exported
        spans = await fetched(
            session, f"{url}/v1/projects/default/spans?limit=100", INGEST_S, count
        )
    assert outcome == "exported"
    ids = {span["context"]["span_id"]: span["name"] for span in spans}
    parents = {(span["name"], ids.get(span["parent_id"])) for span in spans}
    assert parents >= {
        ("invoke_workflow duo", None),
        ("invoke_agent left", "invoke_workflow duo"),
        ("invoke_agent root", "invoke_workflow duo"),
        ("prefill large", "invoke_agent root"),
        ("chat large", "invoke_agent root"),
        ("chat small", "invoke_agent left"),
    }
    (run,) = (span for span in spans if span["name"] == "invoke_workflow duo")
    assert (run["span_kind"], run["status_code"]) == ("CHAIN", "OK")
    (answer,) = (span for span in spans if span["name"] == "chat large")
    assert answer["span_kind"] == "LLM"
    assert answer["attributes"]["llm.token_count.completion"] > 0
    assert {span["span_kind"] for span in spans if span["name"].startswith("invoke_agent")} == {
        "AGENT"
    }
