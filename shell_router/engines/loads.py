"""What servers say of their own load and health."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from shell_router.engines.server_client import ServerClient
from shell_router.engines.wire import broken_wire
from shell_router.errors import EngineError
from shell_router.scheduling.engine_state import Reported


@dataclass(frozen=True, slots=True)
class Load:
    """Requests on one or several servers, summed over their data-parallel ranks."""

    running: int
    waiting: int


async def load_of(servers: Sequence[ServerClient]) -> Load:
    """The requests that these servers report by `/v1/loads`. Raises EngineError."""
    found = await asyncio.gather(*map(_reported, servers))
    return Load(sum(load.running for load in found), sum(load.waiting for load in found))


async def _reported(server: ServerClient) -> Load:
    state = await state_of(server, server.limits.stall_s)
    return Load(state.running, state.waiting)


async def state_of(server: ServerClient, limit_s: float) -> Reported:
    """What `server` says of itself by `/v1/loads`, over its data-parallel ranks. Raises EngineError.

    A server is as full as its fullest rank. SGLang tells `num_total_tokens` (KV in use, and tokens that wait) from
    0.5.19 on; where it is missing, the tokens in use stand for it.
    """
    body = await server.get("v1/loads", limit_s=limit_s)
    try:
        ranks = orjson.loads(body)["loads"]
        return Reported(
            max((float(rank["token_usage"]) for rank in ranks), default=0.0),
            sum(int(rank.get("num_total_tokens", rank["num_used_tokens"])) for rank in ranks),
            sum(rank["num_running_reqs"] for rank in ranks),
            sum(rank["num_waiting_reqs"] for rank in ranks),
            max((rank["cache_hit_rate"] for rank in ranks if rank.get("cache_hit_rate") is not None), default=None),
        )
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise broken_wire(str(server), f"{body[:200]!r}") from error


async def require_healthy(server: ServerClient, limit_s: float) -> None:
    """Return when `server` says that it is healthy; raises EngineError."""
    await server.get("health", limit_s=limit_s)


async def any_healthy(servers: Sequence[ServerClient], limit_s: float) -> bool:
    """Whether at least one of `servers` says that it is healthy."""
    return any(await asyncio.gather(*(_is_healthy(server, limit_s) for server in servers)))


async def _is_healthy(server: ServerClient, limit_s: float) -> bool:
    try:
        await require_healthy(server, limit_s)
    except EngineError:
        return False
    return True
