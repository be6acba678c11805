"""Several simulated pairs of one model, behind one engine."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from shell_router.core.generation import Finish, Generation, Prefilled, Tokens
from shell_router.engines.breaker import Breaker
from shell_router.engines.dispatch import Dispatcher
from shell_router.engines.monitor import Monitor
from shell_router.engines.place import Wanted
from shell_router.engines.simulated import SimulatedPair
from shell_router.scheduling.engine_state import Reported
from shell_router.scheduling.settings import SchedulingSettings


class Fleet:
    """See `Engine`. The router's own dispatcher chooses the pair, under the loop's clock; no pair ever fails."""

    def __init__(self, alias: str, pairs: Sequence[SimulatedPair], scheduling: SchedulingSettings) -> None:
        self.alias = alias
        self.pairs = pairs
        named = [(pair, f"pair-{index}", Breaker()) for index, pair in enumerate(pairs)]
        self.dispatcher = Dispatcher(named, scheduling, asyncio.get_running_loop().time)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """While the context is open, the pairs tell their state to who chooses; one alone need not."""
        if len(self.pairs) == 1:
            yield
            return
        async with Monitor(self.dispatcher, _reported, self.dispatcher.settings.poll_s):
            yield

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        place = await self.dispatcher.place(Wanted.of(request, update=True))
        request.on_placed(place.placed)
        try:
            return await place.engine.prefill(request)
        finally:
            place.close()

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        place = await self.dispatcher.place(Wanted.of(request))
        request.on_placed(place.placed)
        try:
            async with aclosing(place.engine.generate(request)) as stream:
                async for item in stream:
                    if isinstance(item, Tokens):
                        place.wrote(len(item.ids))
                    else:
                        place.completed()
                    yield item
        finally:
            place.close()


async def _reported(pair: SimulatedPair) -> Reported:
    return pair.reported()
