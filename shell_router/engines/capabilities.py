"""What a server says about itself, asked once before it is used."""

import logging
from dataclasses import dataclass

import orjson

from shell_router.engines.server_client import ServerClient
from shell_router.engines.wire import broken_wire
from shell_router.errors import EngineRejected

log = logging.getLogger(__name__)

CONTRACT = 1
"""The SGLang plugin's contract that this router knows (`sglang_plugin.routes.CONTRACT`)."""
NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server tells. `contract` is the SGLang plugin's, None where there is no plugin."""

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


async def version_of(server: ServerClient) -> str:
    """The version that `server` names itself by, as `/server_info` has it. Raises EngineError."""
    answer = await server.get("server_info", limit_s=server.limits.connect_s)
    try:
        return str(orjson.loads(answer)["version"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise broken_wire(str(server), f"{answer[:200]!r}") from error


async def priority_sign(server: ServerClient) -> int | None:
    """1 where `server` schedules requests with lower priorities first, -1 with higher ones, None with none.

    Raises EngineError.
    """
    answer = await server.get("server_info", limit_s=server.limits.connect_s)
    try:
        found = orjson.loads(answer)
        if not found.get("enable_priority_scheduling"):
            return None
        return 1 if found.get("schedule_low_priority_values_first") else -1
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise broken_wire(str(server), f"{answer[:200]!r}") from error


async def takes_adapters(server: ServerClient) -> bool:
    """Whether `server` says that adapters can be loaded there; one that says nothing of it may. Raises EngineError."""
    answer = await server.get("server_info", limit_s=server.limits.connect_s)
    try:
        return bool(orjson.loads(answer).get("enable_lora", True))
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise broken_wire(str(server), f"{answer[:200]!r}") from error


async def introduced(server: ServerClient) -> Capabilities:
    """What `server` offers. Raises EngineRejected where its role is another than it is named for, and EngineError."""
    found = await _asked(server)
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


async def _asked(server: ServerClient) -> Capabilities:
    limit_s = server.limits.connect_s
    try:
        answer = await server.get("shell_router/capabilities", limit_s=limit_s)
    except EngineRejected as refusal:
        if refusal.status != NOT_FOUND:
            raise
        answer = await server.get("model_info", limit_s=limit_s)
    try:
        found = orjson.loads(answer)
        known = {name: found[name] for name in Capabilities.__slots__ if name in found}
        return Capabilities(**known)
    except (orjson.JSONDecodeError, TypeError) as error:
        raise broken_wire(str(server), f"{answer[:200]!r}") from error
