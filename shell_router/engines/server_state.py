"""What a server says about itself: its capabilities, its load, its health. All functions raise EngineError."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shell_router.core.engine import ChatServing
from shell_router.engines.server_client import ServerClient
from shell_router.engines.wire import broken_wire
from shell_router.errors import EngineError, EngineRejected
from shell_router.routing.engine_selection import EngineReport

log = logging.getLogger(__name__)

CONTRACT = 1
"""The SGLang plugin's contract that this router knows (`sglang_plugin.routes.CONTRACT`)."""
NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A server's role and version. `contract` is the SGLang plugin's, None where there is no plugin."""

    disaggregation_mode: str | None = None
    sglang_version: str = "of unknown version"
    contract: int | None = None

    @property
    def known(self) -> bool:
        """Whether what the plugin adds, if there is one, means what this router takes it to mean."""
        return self.contract in (None, CONTRACT)

    def __str__(self) -> str:
        if self.contract is None:
            return "without the SGLang plugin"
        return f"SGLang {self.sglang_version}, plugin with contract {self.contract}"


async def capabilities_of(server: ServerClient) -> Capabilities:
    """What `server` offers. Raises EngineRejected where its role is another than it is named for."""
    limit_s = server.limits.connect_s
    try:
        answer = await server.get("shell_router/capabilities", limit_s=limit_s)
    except EngineRejected as refusal:
        if refusal.status != NOT_FOUND:
            raise
        answer = await server.get("model_info", limit_s=limit_s)
    given = _object(server, answer)
    found = Capabilities(**{name: given[name] for name in Capabilities.__slots__ if name in given})
    if found.disaggregation_mode not in (None, server.server.role):
        raise EngineRejected(
            f"The {server} says that its disaggregation mode is {found.disaggregation_mode}.",
            status=501,
            remedy="Correct the pair's URLs, or start it with --disaggregation-mode.",
        )
    log.info("%s: %s", server, found)
    if not found.known:
        log.warning("%s: this router knows contract %d, so the plugin's route is left alone", server, CONTRACT)
    return found


async def server_info(server: ServerClient) -> dict[str, Any]:
    """The object at `/server_info`."""
    return _object(server, await server.get("server_info", limit_s=server.limits.connect_s))


async def version_of(server: ServerClient) -> str:
    """The version that `server` names itself by."""
    found = await server_info(server)
    if "version" not in found:
        raise broken_wire(server.name, "server_info without a version")
    return str(found["version"])


async def chat_of(servers: Sequence[ServerClient]) -> ChatServing | None:
    """What all of `servers` have of SGLang's OpenAI routes; None where one has none, or does not answer.

    SGLang's servers name their parser of tool calls, set or not; other servers do not.
    """
    try:
        found = await asyncio.gather(*map(server_info, servers))
    except EngineError as error:
        log.warning("chats are not forwarded, as a server does not say whether it has them: %s", error)
        return None
    if not all("tool_call_parser" in one for one in found):
        return None
    parsers = {one["tool_call_parser"] for one in found}
    return ChatServing(parsers.pop() if len(parsers) == 1 else None)


async def state_of(server: ServerClient, limit_s: float) -> EngineReport:
    """What `server` reports by `/v1/loads`, over its data-parallel ranks: it is as full as its fullest rank.

    SGLang has `num_total_tokens` (KV in use, and tokens that wait) from 0.5.19 on; where it is missing, the tokens in
    use stand for it.
    """
    body = await server.get("v1/loads", limit_s=limit_s)
    usage, tokens, running, waiting, hit_rate = 0.0, 0, 0, 0, None
    try:
        for rank in orjson.loads(body)["loads"]:
            usage = max(usage, float(rank["token_usage"]))
            tokens += int(rank.get("num_total_tokens", rank["num_used_tokens"]))
            running += rank["num_running_reqs"]
            waiting += rank["num_waiting_reqs"]
            if (rate := rank.get("cache_hit_rate")) is not None:
                hit_rate = rate if hit_rate is None else max(hit_rate, rate)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise broken_wire(server.name, f"{body[:200]!r}") from error
    return EngineReport(usage, tokens, running, waiting, hit_rate)


async def require_healthy(server: ServerClient, limit_s: float) -> None:
    """Return when `server` says that it is healthy."""
    await server.get("health", limit_s=limit_s)


async def any_healthy(servers: Sequence[ServerClient], limit_s: float) -> bool:
    """Whether at least one of `servers` says that it is healthy."""
    found = await asyncio.gather(*(require_healthy(one, limit_s) for one in servers), return_exceptions=True)
    for one in found:
        if one is not None and not isinstance(one, EngineError):
            raise one
    return any(one is None for one in found)


def _object(server: ServerClient, answer: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        raise broken_wire(server.name, f"{answer[:200]!r}") from error
    if not isinstance(found, dict):
        raise broken_wire(server.name, f"{answer[:200]!r}")
    return found
