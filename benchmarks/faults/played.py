"""Faults of played servers: one of OpenAI's API, and a decode server that sends without end."""

import asyncio
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from benchmarks.faults.client import COMPLETE, CUT_OFF, LIMIT_S, NOTHING
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.router_overhead.setups import (
    Process,
    free_ports,
    ours_command,
    running,
    running_engine,
    spread,
)
from tests.fakes.openai_server import Answer, OpenAIServer, event, text_of

Row = dict[str, Any]
START_S, HELD_S = 90.0, 2.0
QUESTION = [{"role": "user", "content": "How many pens does Tom have?"}]


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat's reply: what it was, in seconds after the question, and all of its bytes as text."""

    received: str
    after_s: float
    text: str


class Router:
    """This router as a process, and a client of it."""

    def __init__(self, process: Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self._session = session

    async def ask(self, model: str, **fields: Any) -> Reply:
        """Stream a chat; a client that has not all of it after LIMIT_S leaves."""
        began_s = monotonic()
        body = {"model": model, "messages": QUESTION, "stream": True, **fields}
        try:
            async with (
                asyncio.timeout(LIMIT_S),
                self._session.post("/v1/chat/completions", json=body) as answer,
            ):
                text = await answer.text()
        except TimeoutError:
            return Reply(NOTHING, inf, "")
        after_s = monotonic() - began_s
        codes = re.findall(r'"code":"(\w+)"', text)
        if answer.status != web.HTTPOk.status_code:
            received = f"{answer.status} {codes[0]}"
        elif codes:
            received = f"event {codes[0]}"
        else:
            received = COMPLETE if "data: [DONE]" in text else CUT_OFF
        return Reply(received, after_s, f"{dict(answer.headers)} {text}")

    async def longest_gap_s(self, model: str, ended: asyncio.Event) -> float:
        """Stream a long chat until `ended`; return the longest time between two of its pieces."""
        body = {
            "model": model,
            "messages": QUESTION,
            "stream": True,
            "max_tokens": 20_000,
            "ignore_eos": True,
        }
        at_s = []
        async with self._session.post("/v1/chat/completions", json=body) as answer:
            async for _ in answer.content.iter_any():
                at_s.append(monotonic())
                if ended.is_set():
                    break
        return max(later - earlier for earlier, later in pairwise(at_s))

    async def text(self, path: str) -> str:
        """Return the reply to a GET."""
        async with self._session.get(path) as answer:
            return await answer.text()

    async def everything_said(self) -> str:
        """Return its log, metrics and traces."""
        traces = orjson.loads(await self.text("/v1/traces"))["data"]
        shown = [await self.text(f"/v1/traces/{trace['id']}") for trace in traces]
        log = self.process.log.read_text(encoding="utf-8")
        return "\n".join([log, await self.text("/metrics"), *shown])

    def memory_mb(self, name: str = "VmHWM") -> float:
        """Return its peak of resident memory, or what `name` is of its status."""
        status = Path(f"/proc/{self.process.child.pid}/status").read_text(encoding="utf-8")
        kilobytes = re.search(rf"{name}:\s+(\d+)", status)
        assert kilobytes is not None
        return int(kilobytes[1]) / 1000


@asynccontextmanager
async def running_router(deployment: str, folder: Path) -> AsyncIterator[Router]:
    """A router that is ready, while the context is open."""
    config = folder / "router.yaml"
    config.write_text(deployment, encoding="utf-8")
    (port,) = free_ports(1)
    with running("router", ours_command(config, port), None, folder) as process:
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
            asyncio.timeout(None) as limit,
        ):
            limit.reschedule(asyncio.get_running_loop().time() + START_S)
            router = Router(process, session)
            while True:
                process.require_running()
                with suppress(aiohttp.ClientError):
                    await router.text("/ready")
                    break
                await asyncio.sleep(0.1)
            limit.reschedule(None)
            yield router


# --- a server of OpenAI's API

KEY = "sk-played-0123456789abcdef"
SILENCE_S = 2.0
REMOTE = """
models:
  remote: {{openai: {{url: "{url}", key: {key}, silence_s: {silence_s}}}}}
embedder: {{model: none}}
"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _refusal(status: int, kind: str = "application/json", **headers: str) -> Answer:
    quoted = orjson.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}})
    return Answer([quoted], status=status, content_type=kind, headers=headers)


def _call(arguments: str, **function: str) -> bytes:
    named = {"index": 0, "id": "c1", "function": {"arguments": arguments, **function}}
    return event({"tool_calls": [named]})


async def _wait_forever(_: int) -> None:
    await asyncio.Event().wait()


_CALLS = [_call("", name="add"), _call('{"a": 1'), _call(', "b": 2}')]
_WRONG = {"prompt_tokens": -1, "completion_tokens": "many"}
_ERROR = event(error={"message": f"overheated, {KEY}", "code": 500})
REMOTE_FAULTS: Mapping[str, Answer] = {
    "429, Retry-After: 1": _refusal(429, **{"Retry-After": "1"}),
    "429, Retry-After: 60": _refusal(429, **{"Retry-After": "60"}),
    "401 that quotes the key": _refusal(401),
    "HTML": _refusal(200, "text/html"),
    "half a stream": Answer(text_of("well")[:2], "broken"),
    "an error event": Answer([event({"content": "a"}), _ERROR]),
    "no [DONE]": Answer(text_of("well")[:-1]),
    "wrong usage": Answer(text_of("well", usage=_WRONG)),
    "tool calls in pieces": Answer([*_CALLS, *text_of(reason="tool_calls")]),
    "silence": Answer(text_of("well"), before=_wait_forever),
    "silence in mid-stream": Answer([event({"content": "a"})], "never"),
}


class _CountingServer(OpenAIServer):
    """Counts the chats that it has not ended."""

    open = 0

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        try:
            return await super()._chat(request)
        finally:
            self.open -= 1


async def measure_remote(names: Sequence[str], folder: Path) -> list[Row]:
    """Return a row per fault. The server is mended for the next chat; each has a fresh router."""
    rows = []
    for name in names:
        async with _CountingServer([REMOTE_FAULTS[name]]).running() as server:
            text = REMOTE.format(url=server.url, key=KEY, silence_s=SILENCE_S)
            async with running_router(text, folder) as router:
                reply = await router.ask("remote", tools=[TOOL])
                await asyncio.sleep(HELD_S)
                held = server.open + await _held(router)
                asked = len(server.bodies)
                server.answers = [Answer(text_of("well"))]
                after = await router.ask("remote")
                said = reply.text + after.text + await router.everything_said()
        rows.append(
            {
                "fault": name,
                "client_got": reply.received,
                "after_s": reply.after_s,
                "asked": asked,
                "held": held,
                "next": after.received,
                "key_found": KEY[:9] in said,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


async def _held(router: Router) -> int:
    """Return the requests that the router's metrics count as running or waiting."""
    metrics = await router.text("/metrics")
    counts = re.findall(r"^shell_router_(?:engine|queue)_requests\{.*\} (.+)$", metrics, re.M)
    return int(sum(map(float, counts)))


# --- a server that sends without end

MOST_BYTES = 2**29
TOKEN_S = 0.01
PAIR = """
models:
  endless:
    path: {model}
    context_length: 32768
    pairs: [{{prefill: "{prefill}", decode: "{endless}"}}]
  other:
    path: {model}
    context_length: 32768
    pairs: [{{prefill: "{prefill}", decode: "{decode}"}}]
embedder: {{model: none}}
"""
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n"
ENDLESS: Mapping[str, tuple[bytes, bytes]] = {
    "none": (b"", b""),
    "body without a line feed": (HEAD + b"\r\n", b"x" * 2**16),
    "data line without end": (HEAD + b'\r\ndata: {"text": "', b"x" * 2**16),
    "endless head": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x" * 2**16),
    "endless header lines": (b"HTTP/1.1 200 OK\r\n", b"X-More: and more\r\n" * 2**12),
    "endless 1xx answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2**12),
}


async def measure_endless(names: Sequence[str], folder: Path) -> list[Row]:
    """Return a row per fault, each with a fresh router. The other request's row is `none`'s."""
    model = make_checkpoint(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)
    rows = []
    async with running_engine(spread(), folder, token_s=TOKEN_S) as (pair, _):
        for name in names:
            armed = Event()
            with pouring_decode(pair.decode_url, armed, *ENDLESS[name]) as endless:
                text = PAIR.format(
                    model=model, prefill=pair.prefill_url, decode=pair.decode_url, endless=endless
                )
                async with running_router(text, folder) as router:
                    rows.append({"fault": name, **await _pour(router, armed, name)})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


async def _pour(router: Router, armed: Event, name: str) -> Row:
    ended = asyncio.Event()
    other = asyncio.create_task(router.longest_gap_s("other", ended))
    await asyncio.sleep(1)
    before_mb = router.memory_mb()
    reply = Reply("-", 0.0, "")
    if name == "none":
        await asyncio.sleep(3)
    else:
        armed.set()
        reply = await router.ask("endless")
        await asyncio.sleep(1)
    ended.set()
    return {
        "client_got": reply.received,
        "after_s": reply.after_s,
        "more_memory_mb": router.memory_mb() - before_mb,
        "longest_gap_ms": 1000 * await other,
    }


@contextmanager
def pouring_decode(url: str, armed: Event, head: bytes, more: bytes) -> Iterator[str]:
    """A decode server's URL, which pours MOST_BYTES into each generation once it is `armed`."""
    host, _, port = url.removeprefix("http://").partition(":")

    def carry(client: socket.socket) -> None:
        with (
            suppress(OSError),
            client,
            socket.create_connection((host, int(port))) as server,
        ):
            Thread(target=copy, args=(server, client), daemon=True).start()
            while data := client.recv(2**16):
                if armed.is_set() and data.startswith(b"POST /generate"):
                    client.sendall(head)
                    for _ in range(MOST_BYTES // len(more)):
                        client.sendall(more)
                    client.recv(1)
                    return
                server.sendall(data)

    def copy(server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(2**16):
                client.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                Thread(target=carry, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
