"""Reading a request's body within its limits."""

import asyncio

from aiohttp import web

from shell_router.api.services import SETTINGS
from shell_router.errors import InvalidRequest


async def read_body(request: web.Request) -> bytes:
    """All of the body; aiohttp itself refuses one over `max_body_bytes`."""
    if request.content.is_eof():  # small bodies come with their head and need no clock
        return await request.read()
    limit_s = request.app[SETTINGS].body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        raise InvalidRequest(f"The body did not arrive within {limit_s:g} s.", remedy="Send it at once.") from None
