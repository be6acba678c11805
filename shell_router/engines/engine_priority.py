"""The router's order, told to servers that schedule by a priority of their own."""

import logging

from shell_router.engines.capabilities import priority_sign
from shell_router.engines.place import Place
from shell_router.engines.server_client import ServerClient

log = logging.getLogger(__name__)


async def learn_priority(server: ServerClient) -> None:
    """Find out whether `server` schedules by priority, and which way round. Raises EngineError."""
    server.priority_sign = await priority_sign(server)
    if server.priority_sign is None:
        log.warning("the %s does not schedule by priority: its own queue keeps its own order", server)


def rank(place: Place[ServerClient]) -> int | None:
    """The priority to send, as this server counts; None where it does not schedule by it."""
    sign = place.engine.priority_sign
    return None if sign is None or place.priority is None else sign * place.priority


def ranked(opened: bytes, priority: int | None) -> bytes:
    """A body without its closing brace, with the priority in it."""
    return opened if priority is None else opened + b',"priority":%d' % priority
