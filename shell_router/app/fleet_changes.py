"""Changes of models' servers that operators make while requests run."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shell_router.app.models import with_prefill_of
from shell_router.app.wings import StartedEngine
from shell_router.core.engine import ServedModel
from shell_router.engines.address import Address
from shell_router.engines.fleet import Fleet
from shell_router.engines.server_client import ServerClient
from shell_router.errors import ConfigError, require
from shell_router.routing.dispatcher import TrackedEngine

Urls = dict[str, str]


class FleetChanges:
    """Lists, adds and drains servers; see `api.services.FleetChanges`.

    Args:
        engines: The engines by model.
        served: The models by name, updated with each change.
    """

    def __init__(
        self, engines: Mapping[str, StartedEngine], served: dict[str, ServedModel]
    ) -> None:
        self._engines = engines
        self._served = served
        self._change = asyncio.Lock()
        self._drained: dict[tuple[str, tuple[str, ...]], list[TrackedEngine[ServerClient]]] = {}

    def roles(self, alias: str) -> Sequence[str]:
        """Return the roles of a model's servers, such as prefill and decode."""
        return tuple(self._fleet(alias).dispatchers)

    def listed(self) -> Iterator[Urls]:
        """Yield the servers' URLs by role, and their model, per address."""
        for alias, engine in self._engines.items():
            if engine.fleet is not None and engine.read_address is not None:
                for address in engine.fleet.addresses:
                    yield {"model": alias, **_urls_by_role(address)}

    async def add(self, alias: str, fields: Mapping[str, Any]) -> Urls:
        """Send requests to servers, too, once they are found good; return their URLs by role.

        Raises:
            InvalidField: A field is wrong.
            ConfigError: The model's servers do not change, or the address does not fit them.
            EngineError: The servers do not serve.
        """
        fleet = self._fleet(alias)
        read_address = self._engines[alias].read_address
        assert read_address is not None
        async with self._change:
            address = read_address(fields)
            await fleet.add(address)
            self._served[alias] = with_prefill_of(self._served[alias], fleet)
        return _urls_by_role(address)

    async def drain(self, alias: str, urls: Mapping[str, str], limit_s: float) -> int:
        """Send no more requests to the servers with these URLs, and wait for the running ones.

        For servers that were drained before it waits again.

        Returns:
            The requests that still run there after `limit_s`; they go on.
        """
        fleet = self._fleet(alias)
        key = alias, tuple(urls.values())
        async with self._change:
            address = next((at for at in fleet.addresses if _urls_by_role(at) == urls), None)
            require(
                address is not None or key in self._drained,
                f"Model {alias!r} has no such engines.",
                "GET /v1/engines lists all.",
            )
            if address is not None:
                require(
                    len(fleet.addresses) > 1,
                    f"They are the last engines of model {alias!r}.",
                    "First add others.",
                )
                self._drained[key] = fleet.drain(address)
                self._served[alias] = with_prefill_of(self._served[alias], fleet)
        drained = self._drained[key]
        running = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while running := max(  # noqa: ASYNC110
                    (at.running for at in drained), default=0
                ):
                    await asyncio.sleep(0.05)
                fleet.forget(at.engine for at in drained)
                drained.clear()
        return running

    def _fleet(self, alias: str) -> Fleet[Any]:
        engine = self._engines.get(alias)
        if engine is not None and engine.read_address is not None and engine.fleet is not None:
            return engine.fleet
        raise ConfigError(
            f"No model {alias!r} has engines that can be added or drained.",
            remedy="GET /v1/engines lists all.",
        )


def _urls_by_role(address: Address) -> Urls:
    return {server.role: server.public_url for server in address.servers}
