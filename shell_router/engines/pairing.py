"""Which prefill and which decode server take an attempt. Any two servers of one model may work together."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from shell_router.core.placement import Placed
from shell_router.engines.address import Bootstrap, PairAddress, Server
from shell_router.engines.dispatch import Dispatcher
from shell_router.engines.place import Place, Wanted
from shell_router.engines.retries import RetrySettings
from shell_router.engines.server_client import ServerClient, Transport
from shell_router.errors import EngineError, EngineUnavailable
from shell_router.scheduling.settings import SchedulingSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """The places of one attempt; `bootstrap` gives the fields by which decode finds prefill. `close` it in the end."""

    prefill: Place[ServerClient]
    decode: Place[ServerClient]
    bootstrap: Bootstrap

    @property
    def placed(self) -> tuple[Placed, Placed]:
        """Where it went, and why."""
        return self.prefill.placed, self.decode.placed

    def prefilled(self) -> None:
        """The prefill server has done its part."""
        self.prefill.close()
        self.decode.prefilled()

    def close(self) -> None:
        """The attempt is over, however it ended."""
        self.prefill.close()
        self.decode.close()


class Pairing:
    """All servers of a model. One that several addresses name is one server."""

    def __init__(
        self,
        addresses: Sequence[PairAddress],
        transport: Transport,
        room: Callable[[], int],
        scheduling: SchedulingSettings,
    ) -> None:
        prefills: dict[Server, Bootstrap] = {
            at.prefill: Bootstrap(at.bootstrap_host, at.bootstrap_port, room) for at in addresses
        }
        clients = {server: ServerClient(server, transport) for server in prefills}
        decodes = dict.fromkeys(at.decode for at in addresses)
        self.limits = transport.limits
        self.bootstraps = {clients[server]: bootstrap for server, bootstrap in prefills.items()}
        self.prefills = _dispatcher(list(clients.values()), scheduling, transport)
        self.decodes = _dispatcher([ServerClient(server, transport) for server in decodes], scheduling, transport)

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """Prefill servers, then decode servers."""
        return self.prefills.engines + self.decodes.engines

    async def pick(self, wanted: Wanted, avoid: Collection[ServerClient] = ()) -> Pair:
        """Places for one attempt, which is made as soon as it has them; see `Dispatcher.place`.

        The place on decode comes first, as in SGLang's disaggregation: whoever waits for one on prefill keeps no decode
        from its work, and nobody who has that waits for anything more.
        """
        self.prefills.require_serving()
        self.decodes.require_serving()
        decode = await self.decode_for(wanted, avoid)
        try:
            prefill = await self.prefills.place(replace(wanted, most_output=0), avoid)
        except BaseException:
            decode.close()
            raise
        return Pair(prefill, decode, self.bootstraps[prefill.engine])

    async def decode_for(self, wanted: Wanted, avoid: Collection[ServerClient] = ()) -> Place[ServerClient]:
        """A place on decode for a request that is prefilled elsewhere."""
        return await self.decodes.place(replace(wanted, affinity=None, ids=None, prefills=False), avoid)


def _dispatcher(
    servers: Sequence[ServerClient], scheduling: SchedulingSettings, transport: Transport
) -> Dispatcher[ServerClient]:
    named = [(server, f"{server.server.role}-{index}", server.breaker) for index, server in enumerate(servers)]
    return Dispatcher(named, scheduling, transport.clock)


class Attempts:
    """The attempts of one request, each on other servers than those before where there are others.

    `draw` is uniform in [0, 1); `on_retry` is told of each attempt after the first.
    """

    def __init__(
        self,
        pairing: Pairing,
        wanted: Wanted,
        settings: RetrySettings,
        draw: Callable[[], float],
        on_retry: Callable[[], None],
    ) -> None:
        self.made = 0
        self._pairing = pairing
        self._wanted = wanted
        self._settings = settings
        self._draw = draw
        self._on_retry = on_retry
        self._avoid: set[ServerClient] = set()
        self._last: EngineError | None = None

    async def pick(self) -> Pair:
        """Places for the next attempt. Raises EngineUnavailable, or what the attempt before failed of."""
        try:
            pair = await self._pairing.pick(self._wanted, self._avoid)
        except EngineUnavailable as refusal:
            raise self._last or refusal from None
        if self.made:
            self._on_retry()
        return pair

    async def failed(self, error: EngineError, suspects: Collection[ServerClient]) -> None:
        """Return when the next attempt is due; raises `error` where there is none."""
        self.made += 1
        wait_s = self._settings.wait_s(error, self.made, self._draw())
        if wait_s is None:
            raise error
        self._last = error
        self._avoid.update(suspects)
        log.warning("attempt %d failed, and another is due in %.0f ms: %s", self.made, 1e3 * wait_s, error)
        await asyncio.sleep(wait_s)
