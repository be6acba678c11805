"""The routers that are compared, each as a process of its own before the pair."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from overhead.processes import free_ports, running
from overhead.setups import answering, ours_command, rust_command
from overhead.targets import RouterTarget

DEPLOYMENT = """
models:
  small:
    path: {model}
    pairs: [{{prefill: "{legs.prefill}", decode: "{legs.decode}", bootstrap_port: {legs.bootstrap_port}}}]
embedder: {{model: none}}
limits: {{engine_stall_s: {stall_s}}}
"""


@dataclass(frozen=True, slots=True)
class Legs:
    """Where a router finds the pair."""

    prefill: str
    decode: str
    bootstrap_port: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What a router is started with. Only ours has a limit for an engine's silence, `stall_s`."""

    legs: Legs
    stall_s: float
    folder: Path


def _ours(setting: Setting, port: int) -> list[str]:
    config = setting.folder / "router.yaml"
    model = setting.folder / "model"
    text = DEPLOYMENT.format(model=model, legs=setting.legs, stall_s=setting.stall_s)
    config.write_text(text, encoding="utf-8")
    return ours_command(config, port)


def _theirs(setting: Setting, port: int) -> list[str]:
    legs, metrics_port = setting.legs, free_ports(1)[0]
    return rust_command(legs.prefill, legs.decode, port, metrics_port, bootstrap_port=legs.bootstrap_port)


ROUTERS: Mapping[str, Callable[[Setting, int], list[str]]] = {"shell-router": _ours, "sglang-router": _theirs}


@asynccontextmanager
async def running_router(name: str, setting: Setting) -> AsyncIterator[str]:
    """The URL of the router of that name, which has answered a request, while the context is open."""
    port = free_ports(1)[0]
    with running(name, ROUTERS[name](setting, port), None, setting.folder) as process:
        url = f"http://127.0.0.1:{port}"
        await answering(RouterTarget(url), process)
        yield url
