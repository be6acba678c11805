"""Which prefill and which decode server take an attempt. Any two servers of one model may work together."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from shell_router.core.placement import Placed
from shell_router.engines.adapters.lease import Lease, no_lease
from shell_router.engines.adapters.on_servers import Adapters
from shell_router.engines.adapters.settings import AdapterSettings
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
    """The places of one attempt, and its adapter on both servers; `close` it in the end.

    `bootstrap` gives the fields by which decode finds prefill.
    """

    prefill: Place[ServerClient]
    decode: Place[ServerClient]
    bootstrap: Bootstrap
    prefill_lease: Lease = field(default_factory=no_lease)
    decode_lease: Lease = field(default_factory=no_lease)

    @property
    def placed(self) -> tuple[Placed, Placed]:
        """Where it went, and why."""
        return (
            replace(self.prefill.placed, adapter_s=self.prefill_lease.waited_s),
            replace(self.decode.placed, adapter_s=self.decode_lease.waited_s),
        )

    def prefilled(self) -> None:
        """The prefill server has done its part."""
        self.prefill_lease.close()
        self.prefill.close()
        self.decode.prefilled()

    def close(self) -> None:
        """The attempt is over, however it ended."""
        for held in (self.prefill_lease, self.decode_lease, self.prefill, self.decode):
            held.close()


class Pairing:
    """All servers of a model. One that several addresses name is one server."""

    def __init__(
        self,
        addresses: Sequence[PairAddress],
        transport: Transport,
        room: Callable[[], int],
        scheduling: SchedulingSettings,
        adapters: AdapterSettings,
    ) -> None:
        prefills: dict[Server, Bootstrap] = {
            at.prefill: Bootstrap(at.bootstrap_host, at.bootstrap_port, room) for at in addresses
        }
        clients = {server: ServerClient(server, transport) for server in prefills}
        decodes = dict.fromkeys(at.decode for at in addresses)
        self.limits = transport.limits
        self.bootstraps = {clients[server]: bootstrap for server, bootstrap in prefills.items()}
        prefill_servers, decode_servers = [*clients.values()], [ServerClient(one, transport) for one in decodes]
        servers = (*prefill_servers, *decode_servers)
        self.adapters = Adapters(servers, adapters, transport.tasks, transport.clock)
        self.prefills = _dispatcher(prefill_servers, scheduling, transport, self.adapters)
        self.decodes = _dispatcher(decode_servers, scheduling, transport, self.adapters)

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """Prefill servers, then decode servers."""
        return self.prefills.engines + self.decodes.engines

    async def pick(self, wanted: Wanted, avoid: Collection[ServerClient] = ()) -> Pair:
        """Places for one attempt, which is made as soon as it has them and its adapter; see `Dispatcher.place`.

        The place on decode comes first, as in SGLang's disaggregation: whoever waits for one on prefill keeps no decode
        from its work, and nobody who has that waits for anything more but an adapter (`Adapters.of_pair`).
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

    async def with_adapter(self, pair: Pair, adapter: str | None) -> Pair:
        """The same places, and the adapter loaded on both servers. Raises what `Adapters.of_pair` does."""
        if adapter is None:
            return pair
        leases = await self.adapters.of_pair(pair.prefill.engine, pair.decode.engine, adapter)
        return Pair(pair.prefill, pair.decode, pair.bootstrap, *leases)

    async def adapter_missing(self, pair: Pair, suspects: Collection[ServerClient]) -> None:
        """A server of the pair says that it does not have the attempt's adapter: the next attempt finds it loaded."""
        for place, lease in ((pair.prefill, pair.prefill_lease), (pair.decode, pair.decode_lease)):
            if place.engine in suspects:
                await self.adapters.missing(place.engine, lease)

    async def decode_for(self, wanted: Wanted, avoid: Collection[ServerClient] = ()) -> Place[ServerClient]:
        """A place on decode for a request that is prefilled elsewhere."""
        return await self.decodes.place(replace(wanted, affinity=None, ids=None, prefills=False), avoid)


def _dispatcher(
    servers: Sequence[ServerClient], scheduling: SchedulingSettings, transport: Transport, adapters: Adapters
) -> Dispatcher[ServerClient]:
    named = [(server, f"{server.server.role}-{index}", server.breaker) for index, server in enumerate(servers)]
    return Dispatcher(named, scheduling, transport.clock, adapters.will_have)


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
        """Places for the next attempt, and its adapter there; an attempt that gets none of its adapter is one, too.

        Raises EngineUnavailable, what the attempt before failed of, AdapterFailed, or UnknownModel for the adapter.
        """
        while True:
            try:
                pair = await self._pairing.pick(self._wanted, self._avoid)
            except EngineUnavailable as refusal:
                raise self._last or refusal from None
            if self.made:
                self._on_retry()
            try:
                return await self._pairing.with_adapter(pair, self._wanted.adapter)
            except BaseException as error:
                pair.close()
                if not isinstance(error, EngineError):
                    raise
                failure = error
            await self.failed(failure, self._pairing.adapters.failing(pair.prefill.engine, pair.decode.engine))

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
