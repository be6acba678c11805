"""Starts what is compared: a scripted pair, and two routers in front of it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from overhead.load_client import AnswerError, connect
from overhead.measured import Watched
from overhead.processes import Cores, Process, free_ports, running
from overhead.small import SMALL_BODY
from overhead.targets import BOOTSTRAP_PORT, DirectTarget, RouterTarget, Target
from shell_router.engines.embedded.checkpoint import make_checkpoint

START_S = 60.0
TREE = """
name: {name}
tree: {{shape: [9, 3, 1], models: [small, medium, large]}}
defaults: {{sampling: {{temperature: 0, max_new_tokens: {new_tokens}}}}}
early_exit: off
prefill: {{incremental: {incremental}}}
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """One thing that is measured."""

    name: str
    target: Target
    watched: Watched


@dataclass(frozen=True, slots=True)
class Setups:
    """Everything that runs. `ours` and `rust` are base URLs."""

    all: tuple[Setup, ...]
    engine_urls: tuple[str, str]
    ours: str
    rust: str
    watched_ours: Watched
    watched_rust: Watched

    async def script(self, **settings: float) -> None:
        """Change how the scripted engine behaves from now on."""
        for url in self.engine_urls:
            connection = await connect(url)
            await connection.post("/script", json.dumps(settings).encode())
            connection.close()


@asynccontextmanager
async def running_setups(cores: Cores, folder: Path, new_tokens: int) -> AsyncIterator[Setups]:
    """All processes, ready, while the context is open. Their files and logs go to `folder`."""
    prefill_port, decode_port, ours_port, rust_port, metrics_port = free_ports(5)
    prefill, decode, ours, rust = (
        f"http://127.0.0.1:{port}" for port in (prefill_port, decode_port, ours_port, rust_port)
    )
    config = _write_deployment(folder, prefill, decode, new_tokens)
    commands = {
        "engine": _engine_command(prefill_port, decode_port),
        "shell-router": ours_command(config, ours_port),
        "sglang-router": rust_command(prefill, decode, rust_port, metrics_port),
    }
    async with AsyncExitStack() as stack:
        found = {
            name: stack.enter_context(
                running(name, command, cores.engine if name == "engine" else cores.router, folder)
            )
            for name, command in commands.items()
        }
        await answering(DirectTarget(prefill, decode), found["engine"])
        await answering(RouterTarget(ours), found["shell-router"])
        await answering(RouterTarget(rust), found["sglang-router"])
        watched_ours = Watched(found["shell-router"], found["engine"])
        watched_rust = Watched(found["sglang-router"], found["engine"])
        setups = (
            Setup("direct", DirectTarget(prefill, decode), Watched(None, found["engine"])),
            Setup("shell-router", RouterTarget(ours), watched_ours),
            Setup("sglang-router as shipped", RouterTarget(rust), watched_rust),
            Setup("sglang-router, quick ACKs", RouterTarget(rust, quick_acks=True), watched_rust),
        )
        yield Setups(setups, (prefill, decode), ours, rust, watched_ours, watched_rust)


def _write_deployment(folder: Path, prefill: str, decode: str, new_tokens: int) -> Path:
    """A config with three models of one tokenizer, all served by the one pair, and two trees."""
    model = make_checkpoint(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)
    for name, incremental in (("plain", "false"), ("incremental", "true")):
        tree = TREE.format(name=name, new_tokens=new_tokens, incremental=incremental)
        (folder / f"{name}.yaml").write_text(tree, encoding="utf-8")
    pair = f"{{path: {model}, context_length: 32768, pairs: [{{prefill: '{prefill}', decode: '{decode}'}}]}}"
    models = "".join(f"  {alias}: {pair}\n" for alias in ("small", "medium", "large"))
    config = folder / "router.yaml"
    text = f"models:\n{models}topologies: [plain.yaml, incremental.yaml]\nembedder: {{model: none}}\n"
    config.write_text(text, encoding="utf-8")
    return config


def _engine_command(prefill_port: int, decode_port: int) -> list[str]:
    module = "shell_router.engines.scripted_server"
    ports = ["--prefill-port", str(prefill_port), "--decode-port", str(decode_port)]
    return [sys.executable, "-m", module, *ports, "--script", '{"stamped": true, "cache_prompts": 64}']


def ours_command(config: Path, port: int) -> list[str]:
    """This router, serving the deployment `config`."""
    start = "import sys; from shell_router.cli import main; sys.exit(main())"
    return [sys.executable, "-c", start, "serve", "--config", str(config), "--port", str(port)]


def rust_command(
    prefill: str, decode: str, port: int, metrics_port: int, *, bootstrap_port: int = BOOTSTRAP_PORT
) -> list[str]:
    """As shipped, but for two waits of its start and its log of every request."""
    legs = ["--pd-disaggregation", "--prefill", prefill, str(bootstrap_port), "--decode", decode]
    legs += ["--policy", "round_robin"]
    at = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
    quiet = ["--prometheus-port", str(metrics_port), "--log-level", "error", "--worker-startup-check-interval", "1"]
    return [sys.executable, "-m", "sglang_router.launch_router", *legs, *at, *quiet]


async def answering(target: Target, process: Process) -> None:
    """Return once a request is answered; raises RuntimeError with the process's last words."""
    async with asyncio.timeout(START_S):
        while not await _answers(target):
            process.require_running()
            await asyncio.sleep(0.1)


async def _answers(target: Target) -> bool:
    try:
        poster = await target.open()
    except OSError:
        return False
    try:
        await poster.post(SMALL_BODY)
    except AnswerError:
        return False
    finally:
        poster.close()
    return True
