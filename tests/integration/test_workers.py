"""`serve --workers`: several processes on one port, with one Redis."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks.scripted.server import ScriptedServer, ScriptedSettings
from shell_router.cli import main
from tests.fakes.command import RunningCommand, running_command, survivors
from tests.fakes.redis_server import RedisServer, own_redis

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LIMIT_S = 120.0
MODEL = Path(__file__).parents[2] / "models" / "small"
CONFIG = """
listen: {{port: 0}}
models: {{small: {{path: {model}, servers: [{server}]}}}}
embedder: {{model: hash}}
cache: {{backend: redis, url: "{redis}"}}
"""


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    yield from own_redis()


async def read_urls(command: RunningCommand) -> tuple[str, str]:
    """The shared URL, and the one of the worker that has started by now."""
    line = await command.line_with("a worker serves", limit_s=LIMIT_S)
    shared = line.split(" serves ")[1].split(",")[0]
    return shared, f"http://127.0.0.1:{line.split()[-1]}"


async def ask(client: aiohttp.ClientSession, url: str, agent: str) -> str:
    read = [] if agent == "first" else [{"output_of": "first"}]
    prompt = [{"text": "Hi. "}, *read]
    body = {"program": "p", "agent": agent, "model": "small", "prompt": prompt}
    async with client.post(f"{url}/v1/agent/requests", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return str((await reply.json())["text"])


async def test_workers_share_a_port_and_one_that_dies_is_started_again(
    redis: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / "router.yaml"
    async with ScriptedServer(ScriptedSettings("null", vocabulary=30)) as server:
        file.write_text(CONFIG.format(model=MODEL, server=server.url, redis=redis.url))
        async with (
            running_command("serve", "--config", file, "--workers", "2") as command,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client,
        ):
            shared, first = await read_urls(command)
            again, second = await read_urls(command)
            assert again == shared
            # an agent of one worker is read at the other
            assert await ask(client, first, "first")
            assert await ask(client, second, "second")
            assert await ask(client, shared, "third")
            workers = command.started()
            async with client.get(f"{first}/v1/models") as reply:
                assert reply.status == 200
            os.kill(min(workers), signal.SIGKILL)
            assert await ask(client, shared, "fourth")
            shared_again, _ = await read_urls(command)
            assert shared_again == shared
            workers = command.started()
            command.signal(signal.SIGTERM)
            code, _ = await command.ended(limit_s=LIMIT_S)
            assert code == 0
            assert not survivors(workers)


async def test_a_signal_to_all_processes_lets_running_requests_end(
    redis: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / "router.yaml"
    settings = ScriptedSettings("null", vocabulary=30, token_s=0.2)
    async with ScriptedServer(settings) as server:
        file.write_text(CONFIG.format(model=MODEL, server=server.url, redis=redis.url))
        async with (
            running_command("serve", "--config", file, "--workers", "2") as command,
            aiohttp.ClientSession() as client,
        ):
            await read_urls(command)
            shared, _ = await read_urls(command)
            body = {"model": "small", "prompt": "Hi.", "max_tokens": 20, "stream": True}
            async with client.post(f"{shared}/v1/completions", json=body) as reply:
                await reply.content.readuntil(b"data: ")
                for pid in command.started():
                    os.kill(pid, signal.SIGTERM)
                command.signal(signal.SIGTERM)
                assert (await reply.read()).rstrip().endswith(b"data: [DONE]")
            code, _ = await command.ended(limit_s=LIMIT_S)
            assert code == 0


async def test_a_worker_without_its_port_ends_the_command(
    redis: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / "router.yaml"
    async with ScriptedServer(ScriptedSettings("null", vocabulary=30)) as server:
        file.write_text(CONFIG.format(model=MODEL, server=server.url, redis=redis.url))
        port = int(server.url.rpartition(":")[2]) - 2
        arguments = ("serve", "--config", file, "--port", str(port), "--workers", "2")
        async with running_command(*arguments) as command:
            code, output = await command.ended(limit_s=LIMIT_S)
            # another program may have one of the two ports before it, which ends it likewise
            assert (code, "cannot listen on" in output) == (2, True), output


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("models: {{small: {{path: {model}}}}}", "Each worker would start engines"),
        ("cache: {{}}", "cannot share cache.backend: memory"),
        ("batches: {{folder: kept}}", "cannot share batches.folder"),
    ],
)
def test_what_workers_cannot_share_is_refused(
    part: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = part.partition(":")[0]
    lines = [line for line in CONFIG.splitlines() if not line.startswith(f"{name}:")]
    file = tmp_path / "router.yaml"
    text = "\n".join([*lines, part])
    file.write_text(text.format(model=MODEL, server="http://127.0.0.1:1", redis="redis://nowhere"))
    assert main(["serve", "--config", str(file), "--workers", "2"]) == 2
    assert said in capsys.readouterr().err
