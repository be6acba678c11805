"""Streams a live run to its client, in either route's frames."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from aiohttp import ClientConnectionResetError, web

from shell_router.api.live_run import LiveRun
from shell_router.api.problems import told_in_stream
from shell_router.api.services import REQUEST_ID, SETTINGS
from shell_router.api.sse import PING, EventStream, open_stream
from shell_router.core.events import Event
from shell_router.execution import Answer


class Frames(Protocol):
    """How a route writes what happens."""

    def events(self, events: Sequence[Event]) -> bytes:
        """Frames for `events`; empty where there is nothing to say."""
        ...

    def answer(self, answer: Answer) -> bytes:
        """The last frames of a run that ended well."""
        ...

    def error(self, envelope: dict[str, Any]) -> bytes:
        """The last frame of a run that failed after the head had gone."""
        ...


async def stream_run(request: web.Request, run: LiveRun, frames: Frames) -> web.StreamResponse:
    """Write the run as it happens.

    The head goes out with the run's first event, so that a request refused before anything ran still gets its
    status. What fails later is told inside the stream.
    """
    settings = request.app[SETTINGS]
    await run.begun(settings.ping_s)
    stream = await open_stream(request, settings.write_timeout_s)
    try:
        await _pump(run, frames, stream, settings.ping_s)
        last = frames.answer(run.answer())
    except (asyncio.CancelledError, ClientConnectionResetError):
        raise
    except Exception as error:
        last = frames.error(told_in_stream(error, request[REQUEST_ID]))
    await stream.send(last)
    return await stream.end()


async def _pump(run: LiveRun, frames: Frames, stream: EventStream, ping_s: float) -> None:
    """Events as they come, all that wait in one write; a comment after `ping_s` in which nothing was written."""
    now_s = asyncio.get_running_loop().time
    quiet_since_s = now_s()
    while not run.drained:
        written = frames.events(await run.take(max(0.0, quiet_since_s + ping_s - now_s())))
        if not written and now_s() - quiet_since_s >= ping_s:
            written = PING
        if written:
            await stream.send(written)
            quiet_since_s = now_s()
