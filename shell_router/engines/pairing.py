"""Which prefill and which decode server take an attempt. Any two servers of one model may work together."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shell_router.engines.address import Bootstrap, PairAddress, Server
from shell_router.engines.choice import ServerChoice
from shell_router.engines.retries import RetrySettings
from shell_router.engines.server_client import ServerClient, Transport
from shell_router.errors import EngineError, EngineUnavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """The servers of one attempt; `bootstrap` gives the fields by which decode finds prefill."""

    prefill: ServerClient
    decode: ServerClient
    bootstrap: Bootstrap


class Pairing:
    """All servers of a model. One that several addresses name is one server."""

    def __init__(self, addresses: Sequence[PairAddress], transport: Transport, room: Callable[[], int]) -> None:
        prefills: dict[Server, Bootstrap] = {
            at.prefill: Bootstrap(at.bootstrap_host, at.bootstrap_port, room) for at in addresses
        }
        clients = {server: ServerClient(server, transport) for server in prefills}
        decodes = dict.fromkeys(at.decode for at in addresses)
        self.limits = transport.limits
        self.bootstraps = {clients[server]: bootstrap for server, bootstrap in prefills.items()}
        self.prefills = ServerChoice(list(clients.values()), transport.clock)
        self.decodes = ServerChoice([ServerClient(server, transport) for server in decodes], transport.clock)

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """Prefill servers, then decode servers."""
        return self.prefills.servers + self.decodes.servers

    def pick(self, affinity: str | None = None, avoid: Collection[ServerClient] = ()) -> Pair:
        """Servers for one attempt that is made now; see `ServerChoice.best`."""
        prefill, decode = self.prefills.best(affinity, avoid), self.decodes.best(avoid=avoid)
        self.prefills.take(prefill, affinity)
        self.decodes.take(decode)
        return Pair(prefill, decode, self.bootstraps[prefill])

    def with_prefill(self, prefill: ServerClient) -> Pair:
        """This prefill server, which was taken already, and whichever decode server serves best."""
        decode = self.decodes.best()
        self.decodes.take(decode)
        return Pair(prefill, decode, self.bootstraps[prefill])


class Attempts:
    """The attempts of one request, each on other servers than those before where there are others.

    `draw` is uniform in [0, 1); `on_retry` is told of each attempt after the first.
    """

    def __init__(
        self,
        pairing: Pairing,
        affinity: str | None,
        settings: RetrySettings,
        draw: Callable[[], float],
        on_retry: Callable[[], None],
    ) -> None:
        self.made = 0
        self._pairing = pairing
        self._affinity = affinity
        self._settings = settings
        self._draw = draw
        self._on_retry = on_retry
        self._avoid: set[ServerClient] = set()
        self._last: EngineError | None = None

    def pick(self) -> Pair:
        """Servers for the next attempt. Raises EngineUnavailable, or what the attempt before failed of."""
        try:
            pair = self._pairing.pick(self._affinity, self._avoid)
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
