"""POST /generate and /prefill_only: SGLang's native requests, passed to a pair as they came."""

import asyncio
from collections.abc import Mapping

from aiohttp import ClientConnectionResetError, web

from shell_router.api.bodies import read_body
from shell_router.api.fields import parse_body
from shell_router.api.problems import told_in_stream
from shell_router.api.replies import common_headers
from shell_router.api.services import REQUEST_ID, SERVICES, SETTINGS
from shell_router.api.sse import data_frame, open_stream
from shell_router.core.relay import NativeRoute, Relay, Relayed
from shell_router.errors import DeadlineExceeded, InvalidRequest, UnknownModel


async def generate(request: web.Request) -> web.StreamResponse:
    """Prefill and decode."""
    return await _forwarded(request, "generate")


async def prefill_only(request: web.Request) -> web.StreamResponse:
    """Prefill, keep the KV, decode nothing."""
    return await _forwarded(request, "prefill_only")


def pick_relay(relays: Mapping[str, Relay], header: str | None, body: bytes) -> Relay:
    """The relay of the model named by the x-model header, else by the body's `model`, else the only one."""
    name = header or _named_in(body)
    if name is not None:
        if name not in relays:
            raise UnknownModel(f"No model {name!r} takes native requests.", remedy=_known(relays))
        return relays[name]
    if len(relays) != 1:
        raise InvalidRequest("Which model is meant?", remedy=f"Name it in the x-model header. {_known(relays)}")
    return next(iter(relays.values()))


def _named_in(body: bytes) -> str | None:
    """A long body is parsed only where the word occurs in it at all."""
    return parse_body(body).text("model") if b'"model"' in body else None


def _known(relays: Mapping[str, Relay]) -> str:
    return f"Known: {', '.join(sorted(relays)) or 'none'}."


async def _forwarded(request: web.Request, route: NativeRoute) -> web.StreamResponse:
    limit_s = request.app[SETTINGS].request_timeout_s
    body = await read_body(request)
    relay = pick_relay(request.app[SERVICES].relays, request.headers.get("x-model"), body)
    try:
        async with asyncio.timeout(limit_s) as limit, relay.forward(route, body) as relayed:
            if not relayed.content_type.startswith("text/event-stream"):
                return await _whole(request, relayed)
            ends_at = limit.when()
            limit.reschedule(None)  # once its head has gone, a stream tells of its own end
            return await _streamed(request, relayed, ends_at)
    except TimeoutError:
        raise _too_late(limit_s) from None


async def _whole(request: web.Request, relayed: Relayed) -> web.Response:
    body = b"".join([chunk async for chunk in relayed.chunks])
    headers = {"Content-Type": relayed.content_type, **common_headers(request)}
    return web.Response(body=body, status=relayed.status, headers=headers)


async def _streamed(request: web.Request, relayed: Relayed, ends_at: float | None) -> web.StreamResponse:
    settings = request.app[SETTINGS]
    stream = await open_stream(
        request, settings.write_timeout_s, status=relayed.status, content_type=relayed.content_type
    )
    try:
        async with asyncio.timeout_at(ends_at):
            async for chunk in relayed.chunks:
                await stream.send(chunk)
    except (asyncio.CancelledError, ClientConnectionResetError):
        raise
    except Exception as error:
        told = _too_late(settings.request_timeout_s) if isinstance(error, TimeoutError) else error
        await stream.send(data_frame(told_in_stream(told, request[REQUEST_ID])))
    return await stream.end()


def _too_late(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"The engine did not end within {limit_s:g} s.", remedy="Ask for fewer tokens.")
