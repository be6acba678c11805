"""What a server says about itself: its capabilities and its load. All functions raise EngineError."""

import asyncio
import logging
from collections.abc import Sequence
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


async def plugin_is_known(server: ServerClient) -> bool:
    """Whether what the plugin adds, if `server` has one, means what this router takes it to mean.

    Raises EngineRejected where its role is another than it is named for.
    """
    limit_s = server.limits.connect_s
    try:
        answer = await server.get("shell_router/capabilities", limit_s=limit_s)
    except EngineRejected as refusal:
        if refusal.status != NOT_FOUND:
            raise
        answer = await server.get("model_info", limit_s=limit_s)
    found = _object(server, answer)
    mode, contract = found.get("disaggregation_mode"), found.get("contract")
    if mode not in (None, server.server.role):
        raise EngineRejected(
            f"The {server} says that its disaggregation mode is {mode}.",
            status=501,
            remedy="Correct the pair's URLs, or start it with --disaggregation-mode.",
        )
    log.info("%s: contract of the SGLang plugin: %s", server, contract)
    if contract not in (None, CONTRACT):
        log.warning("%s: this router knows contract %d, so the plugin's route is left alone", server, CONTRACT)
        return False
    return True


async def server_info(server: ServerClient) -> dict[str, Any]:
    """The object at `/server_info`."""
    return _object(server, await server.get("server_info", limit_s=server.limits.connect_s))


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


async def state_of(server: ServerClient) -> EngineReport:
    """What `server` reports by `/v1/loads`, over its data-parallel ranks: it is as full as its fullest rank.

    SGLang has `num_total_tokens` (KV in use, and tokens that wait) from 0.5.19 on; where it is missing, the tokens in
    use stand for it.
    """
    body = await server.get("v1/loads", limit_s=server.limits.connect_s)
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


def _object(server: ServerClient, answer: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        raise broken_wire(server.name, f"{answer[:200]!r}") from error
    if not isinstance(found, dict):
        raise broken_wire(server.name, f"{answer[:200]!r}")
    return found
