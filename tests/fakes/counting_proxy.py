"""A proxy before an engine's server, which counts requests and stops where a test wants it to."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import orjson
from aiohttp import web

from shell_router.http.server import bind_sockets

HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class CountingProxy:
    """Passes everything on to `target`.

    `asked` counts, by agent, the outputs that were asked for, `limits` are their `max_new_tokens`,
    and `passed` the tokens of all of them: how many events bring them differs from run to run. What
    would bring more than `limit` tokens waits until it is released.
    """

    def __init__(self, target: str, session: aiohttp.ClientSession) -> None:
        self._target = target
        self._session = session
        self._released = asyncio.Event()
        self.url = ""
        self.asked: Counter[str] = Counter()
        self.limits: list[int] = []
        self.passed = 0
        self.stopped = asyncio.Event()
        self.release()

    def stop_after(self, limit: int) -> None:
        """Begin to count, and let `limit` tokens pass."""
        self.asked.clear()
        self.limits.clear()
        self.passed, self.limit = 0, limit
        self.stopped.clear()
        self._released.clear()

    def release(self) -> None:
        """Let all tokens pass."""
        self.limit = 2**62
        self._released.set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Any route."""
        body = await request.read()
        if request.path == "/generate":
            asked = orjson.loads(body)
            self.asked[str(asked["rid"]).rpartition(".")[2]] += 1
            self.limits.append(asked.get("sampling_params", {}).get("max_new_tokens"))
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP
        }
        url = self._target + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in HOP_BY_HOP
            }
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            if answer.content_type != "text/event-stream":
                await response.write(await answer.read())
                return response
            while True:
                event = await answer.content.readuntil(b"\n\n")
                if not event:
                    return response
                await self._pass(_tokens_in(event))
                await response.write(event)

    async def _pass(self, tokens: int) -> None:
        if self.passed + tokens > self.limit:
            self.stopped.set()
            await self._released.wait()
        self.passed += tokens


def _tokens_in(event: bytes) -> int:
    """The new tokens of a streamed event; the last of a stream is no JSON."""
    data = event.removeprefix(b"data: ").strip()
    return len(orjson.loads(data).get("output_ids", ())) if data.startswith(b"{") else 0


@asynccontextmanager
async def counting_proxy(target: str) -> AsyncIterator[CountingProxy]:
    """A proxy while the context is open. A caller that leaves ends its request at the target,
    too."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        proxy = CountingProxy(target, session)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", proxy.serve)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        with bind_sockets() as sockets:
            await web.SockSite(runner, sockets[0]).start()
            proxy.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
            try:
                yield proxy
            finally:
                await runner.cleanup()
