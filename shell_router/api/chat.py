"""POST /v1/chat/completions: a topology, or a single model, answers."""

from aiohttp import web

from shell_router.api.bodies import read_body
from shell_router.api.chat_body import ignored_fields
from shell_router.api.chat_run import Chats
from shell_router.api.fields import parse_body
from shell_router.api.live_run import LiveRun
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import TENANT, TRACE
from shell_router.api.streaming import stream_run

CHATS = web.AppKey("CHATS", Chats)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Check everything that can be checked, then run."""
    body = parse_body(await read_body(request))
    run = request.app[CHATS].begin(body, request[TENANT])
    request[TRACE] = run.trace
    note_ignored(request, ignored_fields(body))
    if not run.streams:
        return json_reply(request, await run.reply())
    frames = run.frames()
    async with LiveRun(run.answer, frames.wants) as live:
        return await stream_run(request, live, frames)
