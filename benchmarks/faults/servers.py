"""The SGLang pair, and the routers in front of it."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.router_overhead.load import AnswerError
from benchmarks.router_overhead.setups import (
    SMALL_BODY,
    DirectTarget,
    RouterTarget,
    answering,
    free_ports,
    list_peers,
    ours_command,
    peer_command,
    running,
)
from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.pair import CpuPair, make_pair, until_ready

CONTEXT, PREFILL_CONTEXT, SHORT_DECODE_CONTEXT = 32768, 16384, 8192
OPTIONS = ("--chunked-prefill-size", "512")
"""A long prompt then leaves time to break something while it prefills, and can be aborted between
two chunks.
"""
START_S, ANSWER_S, WORK_S, IDLE_S, SERVED_S = 180.0, 10.0, 20.0, 10.0, 20.0
POLL_S = 0.02

logger = logging.getLogger(__name__)


class Engines:
    """One SGLang pair. Its prefill server takes shorter prompts than its decode server, by
    default."""

    def __init__(self, pair: CpuPair, session: aiohttp.ClientSession) -> None:
        self.prefill, self.decode = pair.prefill, pair.decode
        self.bootstrap_port = pair.bootstrap_port
        self._session = session
        self._decode_context = CONTEXT
        self._stalled: EngineServer | None = None

    def start(self) -> None:
        """Start what does not run and return when both serve. It blocks, so nothing else may be
        under way.
        """
        contexts = {self.prefill: PREFILL_CONTEXT, self.decode: self._decode_context}
        away = [server for server in contexts if not server.started]
        for server in away:
            server.start("--context-length", str(contexts[server]))
        until_ready(*away, limit_s=START_S)

    def stop(self) -> None:
        """Kill both."""
        self.prefill.kill()
        self.decode.kill()

    def stall(self, server: EngineServer) -> None:
        """Make a server do nothing until `resume`."""
        server.signal(signal.SIGSTOP)
        self._stalled = server

    def resume(self) -> None:
        """Let a stalled server go on."""
        if self._stalled is not None:
            self._stalled.signal(signal.SIGCONT)
        self._stalled = None

    async def make_whole(self, decode_context: int) -> None:
        """Return when the pair holds nothing, serves, and decode has that context; RuntimeError
        where it cannot.
        """
        if decode_context != self._decode_context:
            self.decode.kill()
            self._decode_context = decode_context
        self.start()
        if not await self._is_whole():
            logger.warning("the pair does not serve although all was aborted: it is started anew")
            self.stop()
            self.start()
            if not await self._is_whole():
                raise RuntimeError(
                    f"The pair does not serve. Read {self.decode.log} and {self.prefill.log}."
                )

    async def _is_whole(self) -> bool:
        try:
            async with asyncio.timeout(IDLE_S):
                await self.clear()
                while await self.held():  # noqa: ASYNC110 - servers tell only when asked
                    await asyncio.sleep(POLL_S)
            async with asyncio.timeout(SERVED_S):
                await self._serve_one()
        except (TimeoutError, AnswerError):
            return False
        return True

    async def _serve_one(self) -> None:
        """One request without a router."""
        poster = await DirectTarget(self.prefill.url, self.decode.url, self.bootstrap_port).open()
        try:
            await poster.post(SMALL_BODY)
        finally:
            poster.close()

    async def clear(self) -> None:
        """End every request of the servers that run."""
        for server in (self.prefill, self.decode):
            if server.started:
                await self.abort_all(server)

    async def abort_all(self, server: EngineServer) -> None:
        """End every request of this server."""
        async with self._session.post(
            f"{server.url}/abort_request", json={"abort_all": True}
        ) as answer:
            answer.raise_for_status()

    async def prefilling(self) -> None:
        """Return when the prefill server works on a request; TimeoutError."""
        async with asyncio.timeout(WORK_S):
            while not await self._held_by(self.prefill):  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL_S)

    async def held(self) -> int:
        """Requests in whatever queue of the servers that can be asked, neither killed nor stalled.

        Looked at twice, since SGLang counts a request nowhere for a step of its scheduler.
        """
        asked = [
            one for one in (self.prefill, self.decode) if one.started and one is not self._stalled
        ]
        looks = [sum([await self._held_by(server) for server in asked]) for _ in range(2)]
        return max(looks)

    async def _held_by(self, server: EngineServer) -> int:
        async with self._session.get(f"{server.url}/v1/loads") as answer:
            return sum(_requests(rank) for rank in (await answer.json())["loads"])


def _requests(rank: dict[str, Any]) -> int:
    """Requests of one rank.

    One that is prefilled chunk by chunk is in no queue and shows by its tokens alone. Tokens on
    decode do not tell: SGLang keeps those of an aborted transfer for up to 30 s more, lest a late
    write hit another request's.
    """
    pair = rank["disaggregation"]
    counted = (
        rank["num_running_reqs"] + rank["num_waiting_reqs"] + pair["prefill_inflight_queue_reqs"]
    )
    return int(counted or (pair["mode"] == "prefill" and rank["num_used_tokens"] > 0))


@asynccontextmanager
async def run_engines(venv: Path, folder: Path) -> AsyncIterator[Engines]:
    """A pair that serves while the context is open; its model and logs go to `folder`."""
    model = make_checkpoint(folder / "model", context_length=CONTEXT)
    pair = make_pair(model, venv, folder, options=OPTIONS)
    connector = aiohttp.TCPConnector(
        force_close=True
    )  # SGLang closes idle connections, and killed servers all
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_S)
    ) as session:
        engines = Engines(pair, session)
        try:
            engines.start()
            yield engines
        finally:
            engines.stop()


DEPLOYMENT = """
models:
  small:
    path: {model}
    pairs:
      - prefill: "{legs.prefill}"
        decode: "{legs.decode}"
        bootstrap_port: {legs.bootstrap_port}
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


def _theirs(program: Sequence[str], setting: Setting, port: int) -> list[str]:
    legs, metrics_port = setting.legs, free_ports(1)[0]
    return peer_command(
        program, legs.prefill, legs.decode, port, metrics_port, bootstrap_port=legs.bootstrap_port
    )


Command = Callable[[Setting, int], list[str]]


@cache
def list_routers() -> dict[str, Command]:
    """What starts each router that can be had, by name."""
    peers = {name: partial(_theirs, program) for name, program in list_peers().items()}
    return {"shell-router": _ours, **peers}


@asynccontextmanager
async def connect_router(name: str, setting: Setting) -> AsyncIterator[str]:
    """The URL of the router of that name, which has answered a request, while the context is
    open."""
    port = free_ports(1)[0]
    with running(name, list_routers()[name](setting, port), None, setting.folder) as process:
        url = f"http://127.0.0.1:{port}"
        await answering(RouterTarget(url), process)
        yield url
