"""The servers of a model, in pairs or undivided: prefill-only requests, chats, priorities."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from shell_router.core.engine import ChatServing, Generation, PrefillCost, RequestClass
from shell_router.core.exact_json import NewValues, Values
from shell_router.engines.address import UNDIVIDED, PairAddress, ServerAddress
from shell_router.engines.fleet import Fleet
from shell_router.engines.prefill_only import PrefillOnly, PrefillWay
from shell_router.engines.server_client import ServerClient, Transport
from shell_router.engines.shared_prefixes import PrefixTurn
from shell_router.engines.wire import wire_error
from shell_router.errors import EngineError, EngineRejected
from shell_router.routing.dispatcher import Dispatcher, SchedulingSettings
from shell_router.routing.failures import RetrySettings

log = logging.getLogger(__name__)


_PRIORITIES: Mapping[RequestClass, int] = {"priority": 1, "default": 0, "flex": -1, "batch": -2}
"""Numbers so close that SGLang interrupts no request for another."""


class PairFleet(Fleet[PairAddress | ServerAddress]):
    """The prefill and decode servers of a model; any two of them work together.

    Undivided servers stand alone, and are both: `prefills` and `decodes` are one dispatcher.

    Attributes:
        prefill_only: The prefill-only requests of each prefill server.
        chat: See `Relay.chat`; known after `probe`.

    Args:
        transport: The parts that all clients share.
        scheduling: The choice of servers, and the queue for them.
        retries: When a failed attempt is repeated.
        room: Gives fresh bootstrap rooms.
        rid: Gives fresh request ids.
        draw: Gives uniform numbers in [0, 1).
        undivided: Whether the servers prefill and decode themselves.
    """

    def __init__(
        self,
        transport: Transport,
        scheduling: SchedulingSettings,
        retries: RetrySettings,
        room: Callable[[], int],
        rid: Callable[[], str],
        draw: Callable[[], float],
        *,
        undivided: bool = False,
    ) -> None:
        clock = transport.clock
        self.undivided = undivided
        if undivided:
            self._partners = None
            self.prefills = self.decodes = Dispatcher[ServerClient]([], scheduling, clock)
            super().__init__(transport, {UNDIVIDED: self.prefills})
        else:
            self.prefills = Dispatcher([], scheduling, clock, decodes=False)
            self._partners = self.decodes = Dispatcher([], scheduling, clock, prefills=False)
            super().__init__(transport, {"prefill": self.prefills, "decode": self.decodes})
        self.prefill_only: dict[ServerClient, PrefillOnly] = {}
        self.chat: ChatServing | None = None
        self.retries = retries
        self.draw = draw
        self.room = room
        self._rid = rid
        self._priority_signs: dict[ServerClient, int] = {}

    def clients_of(self, address: PairAddress | ServerAddress) -> tuple[ServerClient, ...]:
        """See `Fleet.clients_of`; the server that prefills comes first."""
        clients = super().clients_of(address)
        prefill = clients[0]
        if prefill not in self.prefill_only:
            self.prefill_only[prefill] = PrefillOnly(
                prefill,
                self._partners,
                address.bootstrap,
                self._rid,
                self.room,
                self.transport.clock,
            )
        return clients

    async def probe(self) -> tuple[PrefillWay, ...]:
        """Ask all servers for their abilities, and find ways of prefill-only that warm caches.

        Returns:
            The way of each prefill server.

        Raises:
            EngineRejected: No way warms a cache, or a server has another role.
            EngineError: A server does not serve.
        """
        await self._probe(self.servers)
        self.chat = await chat_of(self.servers)
        return self.prefill_ways

    async def probe_new(self, servers: Sequence[ServerClient]) -> None:
        """Probe servers that are added, which must have the chats of those that serve."""
        await self._probe(servers)
        if self.chat is None or not servers:
            return
        # servers in use may be down, and these their replacement
        chat = await chat_of(servers)
        if chat is None or self.chat.tool_parser not in (None, chat.tool_parser):
            raise EngineRejected(
                "The servers have no chats, or others than the model.",
                status=400,
                remedy="Start its engines with the --tool-call-parser of the model's others.",
            )

    async def _probe(self, servers: Sequence[ServerClient]) -> None:
        contracts = await asyncio.gather(*(server.knows_contract() for server in servers))
        for server, route in zip(servers, contracts, strict=True):
            info: NewValues = {}
            with suppress(EngineError):  # servers without this route are no SGLang
                info = await server.info()
            self._priority_signs[server] = _read_priority_sign(info)
            if server in self.prefill_only:
                only = self.prefill_only[server]
                only.overlaps_passes = info.get("disable_overlap_schedule") is False
                if info.get("grammar_backend") == "xgrammar":
                    log.warning(
                        "%s: xgrammar lets one client's grammar block the server for minutes; "
                        "start it with --grammar-backend llguidance",
                        server,
                    )
                await only.probe(route=route)

    def tier_fields(self, tier: RequestClass) -> Values:
        """Return the field of a request's class, if all servers schedule by priority."""
        signs = set(self._priority_signs.values())
        if len(signs) != 1 or 0 in signs:
            return {}
        return {"priority": signs.pop() * _PRIORITIES[tier]}

    @property
    def prefill_ways(self) -> tuple[PrefillWay, ...]:
        """How each prefill server makes prefill-only requests; `route` until `probe`."""
        return tuple(only.way for only in self.prefill_only.values())

    @property
    def prefill_cost(self) -> PrefillCost | None:
        """The measured cost of a prefill-only request to an idle server, of the dearest server."""
        costs = [only.cost for only in self.prefill_only.values() if only.cost is not None]
        return max(costs, key=lambda cost: cost.fixed_s / cost.token_s, default=None)

    async def begin_prompt(self, request: Generation, server: ServerClient) -> PrefixTurn | None:
        """Wait while another prompt on the prefill server computes this one's beginning.

        Returns None for a prompt that is too short to share it.
        """
        only = self.prefill_only[server]
        if len(request.input_ids) <= only.fewest_shared:
            return None
        turn = await only.prefixes.begin(request, only.fewest_shared)
        self.waited_for_prefix += turn.waited
        return turn

    def forget(self, servers: Iterable[ServerClient]) -> None:
        """See `Fleet.forget`."""
        for server in servers:
            self.prefill_only.pop(server, None)
            self._priority_signs.pop(server, None)

    async def version(self) -> str:
        """Return the version that the first decode server gives; raises EngineError."""
        server = self.decodes.engines[0]
        info = await server.info()
        if "version" not in info:
            raise wire_error(server.name, "server_info without a version")
        return str(info["version"])


def _read_priority_sign(info: Values) -> int:
    """Return by what SGLang multiplies a higher priority; 0 if it does not schedule by it."""
    if not info.get("enable_priority_scheduling"):
        return 0
    return -1 if info.get("schedule_low_priority_values_first") else 1


async def chat_of(servers: Sequence[ServerClient]) -> ChatServing | None:
    """Return the OpenAI routes that all of `servers` have; None if one has none, or is silent.

    SGLang's servers name their parser of tool calls, set or not; other servers do not.
    """
    try:
        infos = await asyncio.gather(*(server.info() for server in servers))
    except EngineError as error:
        log.warning(
            "chats are not forwarded, as a server does not say whether it has them: %s", error
        )
        return None
    if not all("tool_call_parser" in info for info in infos):
        return None
    parsers = {info["tool_call_parser"] for info in infos}
    return ChatServing(parsers.pop() if len(parsers) == 1 else None)
